"""Whether a history fits into a budget, answered from earlier results where possible.

More uses never cost less, so an ε computed for one history also bounds every smaller history of the same steps. A
cohort whose noise was calibrated for a plan is therefore charged round after round without further accounting.
"""

from collections.abc import Callable

from dp_accounting.dp_event import DpEvent

from polyeps.accounting import Accountant, history_epsilon
from polyeps.accounting.histories import History
from polyeps.core import Adjacency, Budget

_Key = tuple[frozenset[DpEvent], float, Adjacency, Accountant]
# For each set of steps: how often each was used, and the ε of that. Counts are in the order in which the set was first
# seen: texts would not do, since equal steps may be written differently (2.0, np.float64(2.0)).
_known: dict[_Key, dict[tuple[int, ...], float]] = {}
_ordered: dict[frozenset[DpEvent], tuple[DpEvent, ...]] = {}


def known_epsilon(history: History, delta: float, adjacency: Adjacency, accountant: Accountant) -> float:
    """Return the ε of a history, computed once and remembered."""
    known, counts = _look_up(history, delta, adjacency, accountant)
    if counts not in known:
        known[counts] = history_epsilon(history, delta, adjacency, accountant)
    return known[counts]


def fits(history: History, budget: Budget, adjacency: Adjacency, accountant: Accountant) -> bool:
    """Return whether a history stays within a budget."""
    known, counts = _look_up(history, budget.delta, adjacency, accountant)
    for other, value in known.items():
        if value <= budget.epsilon and all(a <= b for a, b in zip(counts, other, strict=True)):
            return True
        if value > budget.epsilon and all(a >= b for a, b in zip(counts, other, strict=True)):
            return False
    return known_epsilon(history, budget.delta, adjacency, accountant) <= budget.epsilon


def known_to_fit(history: History, added: History, budget: Budget, adjacency: Adjacency, accountant: Accountant) -> int:
    """Return how often steps can be added to a history within a budget, as far as earlier results show."""
    known, held = _look_up(
        {step: history.get(step, 0) for step in {**history, **added}}, budget.delta, adjacency, accountant
    )
    each = [added.get(step, 0) for step in _ordered[frozenset({**history, **added})]]
    if not any(each):
        return 0
    enough = [counts for counts, value in known.items() if value <= budget.epsilon]
    rooms = [[most - have for most, have in zip(counts, held, strict=True)] for counts in enough]
    fitting = [
        min(left // more for left, more in zip(room, each, strict=True) if more) for room in rooms if min(room) >= 0
    ]
    return max(fitting, default=0)


def affordable(within: Callable[[int], bool], most: int | None = None) -> int:
    """Return the largest whole number k ≥ 0, at most `most`, for which `within(k)` holds.

    >>> affordable(lambda k: k * k <= 50)
    7
    """
    if not within(0):
        return 0
    low, step = 0, 1
    while (most is None or low + step <= most) and within(low + step):
        low, step = low + step, step * 2
    high = low + step if most is None else min(low + step, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if within(middle) else (low, middle)
    return low


def _look_up(
    history: History, delta: float, adjacency: Adjacency, accountant: Accountant
) -> tuple[dict[tuple[int, ...], float], tuple[int, ...]]:
    steps = frozenset(history)
    key = (steps, delta, adjacency, accountant)
    return _known.setdefault(key, {}), tuple(history[step] for step in _ordered.setdefault(steps, tuple(history)))
