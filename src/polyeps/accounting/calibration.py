"""Calibration: the noise multiplier that spends a budget, for thousands of budgets at once.

A budget's noise multiplier depends only on that budget, its price, the number of uses and the accountant: neither on
other budgets nor on earlier calibrations. A budget is first lowered to the next step of a fixed ladder, so that many
budgets share a search; each step is searched from the same fixed multipliers (docs/decisions/0003). The ε of every
returned multiplier was computed; interpolation only chooses the next candidate.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from dp_accounting.dp_event import DpEvent
from numpy.typing import NDArray

from polyeps.accounting import Accountant, best_accountant, cache, rdp
from polyeps.accounting.affordability import known_epsilon
from polyeps.accounting.events import canonical_json, check_uses
from polyeps.accounting.histories import history_of
from polyeps.core import Adjacency, Budget
from polyeps.errors import InputError

PriceFunction = Callable[[float], DpEvent]  # noise multiplier ↦ price of one use
ProgressCallback = Callable[[int, int], None]  # budgets done, budgets in all
# fixed: composed exactly. adaptive: by the Rényi filter that a ledger of this budget keeps.
_Schedule = Literal["fixed", "adaptive"]

_PROBES = (0.7390851332151607, 2.718281828459045, 23.140692632779267)  # multipliers at which prices are compared
_LOWERED = 0.7  # share of the tolerance by which a budget may be lowered to the ladder; the rest is for the search
_PER_OCTAVE = 4  # fixed multipliers from which every search starts, for each factor of two
_FIRST, _LAST = -7 * _PER_OCTAVE, 23 * _PER_OCTAVE  # about 0.01 and 10⁷; no search goes beyond


@dataclass(frozen=True)
class Calibration:
    """For budget i in row i: the noise multiplier, and the ε certified for it, at or below the budget."""

    noise_multiplier: NDArray[np.float64]
    certified: NDArray[np.float64]


def calibrate(
    budgets: Sequence[Budget],
    price: PriceFunction,
    uses: int,
    *,
    adjacency: Adjacency = "zero-out",
    accountant: Accountant | None = "pld",
    schedule: _Schedule = "fixed",
    tolerance: float = 0.01,
    directory: Path | None = None,
    progress: ProgressCallback | None = None,
) -> Calibration:
    """Find noise multipliers whose `uses`-fold price is within each budget and spends all but `tolerance` of it.

    Hints are stored in `directory`; without one nothing is read from or written to disk. With `accountant=None` every
    candidate is priced by the accountant that a ledger would choose for it. With an adaptive schedule it is priced by
    the Rényi filter of the budget, as in a ledger with that schedule.

    >>> from polyeps.accounting.events import Gaussian
    >>> answer = calibrate([Budget(1.0, 1e-5), Budget(4.0, 1e-5)], Gaussian, uses=100)
    >>> bool(all(0.99 <= answer.certified / [1.0, 4.0])), bool(all(answer.certified <= [1.0, 4.0]))
    (True, True)
    """
    uses = check_uses(uses, least=1)
    multiplier, certified = np.empty(len(budgets)), np.empty(len(budgets))
    alike: dict[tuple[float, float | None], list[int]] = {}
    for row, budget in enumerate(budgets):
        order = rdp.filter_order(budget) if schedule == "adaptive" and budget.delta else None
        alike.setdefault((budget.delta, order), []).append(row)
    done = 0
    for (delta, order), rows in alike.items():

        def epsilon_at(at: float, delta: float = delta, order: float | None = order) -> float:
            history = history_of(price(at), uses)
            if order is not None:
                return rdp.filter_epsilon(history, order, delta, adjacency)
            return known_epsilon(history, delta, adjacency, accountant or best_accountant(history))

        ladder = _Ladder(epsilon_at, tolerance, "raise the budget" if delta else "give a delta above 0")
        subject = {
            "price": [canonical_json(price(probe)) for probe in _PROBES],
            "uses": uses,
            "delta": delta,
            "adjacency": adjacency,
            "accountant": accountant or "best" if order is None else f"filter of order {order}",
            "tolerance": tolerance,
        }
        hints = cache.load_hints(directory, subject) if directory else {}
        places, steps = np.array(rows), ladder.steps(np.array([budgets[row].epsilon for row in rows]))
        ordered = np.argsort(steps, kind="stable")
        parts = np.split(ordered, np.flatnonzero(np.diff(steps[ordered])) + 1)
        sharing = {int(steps[some[0]]): places[some] for some in parts}
        found: dict[int, float] = {}
        for step, sharers in sharing.items():
            try:
                at, cost = ladder.checked(step, hints.get(step)) or ladder.search(step)
            except _OutOfReachError as problem:
                raise InputError(f"epsilon {budgets[int(sharers[0])].epsilon:g} {problem}") from None
            found[step], multiplier[sharers], certified[sharers] = at, at, cost
            done += len(sharers)
            if progress:
                progress(done, len(budgets))
        if directory and any(hints.get(step) != at for step, at in found.items()):
            cache.save_hints(directory, subject, hints | found)
    return Calibration(multiplier, certified)


def calibrate_each(
    budgets: Sequence[Budget],
    price: Callable[[float, int], DpEvent],
    uses: int,
    *,
    alike: Iterable[NDArray[np.int64]] | None = None,
    adjacency: Adjacency = "zero-out",
    schedule: _Schedule = "fixed",
    directory: Path | None = None,
    progress: ProgressCallback | None = None,
) -> Calibration:
    """Calibrate clients whose prices (noise multiplier, row) may differ, each as if it were alone.

    `alike` groups all rows by what their prices depend on, where that is known: a price is then computed once a group.
    """
    priced: dict[tuple[str, ...], list[int]] = {}
    for group in ([row] for row in range(len(budgets))) if alike is None else (some.tolist() for some in alike):
        key = tuple(canonical_json(price(probe, group[0])) for probe in _PROBES[:2])
        priced.setdefault(key, []).extend(group)
    multiplier, certified = np.empty(len(budgets)), np.empty(len(budgets))
    done = 0
    for rows in priced.values():

        def alone(at: float, row: int = rows[0]) -> DpEvent:
            return price(at, row)

        answer = calibrate(
            [budgets[row] for row in rows],
            alone,
            uses,
            adjacency=adjacency,
            accountant=None,
            schedule=schedule,
            directory=directory,
            progress=progress and going_on(progress, done, len(budgets)),
        )
        multiplier[rows], certified[rows] = answer.noise_multiplier, answer.certified
        done += len(rows)
    return Calibration(multiplier, certified)


def going_on(progress: ProgressCallback, earlier: int, total: int) -> ProgressCallback:
    """Return a callback for a part of some work, after an earlier part."""
    return lambda done, _: progress(earlier + done, total)


class _OutOfReachError(Exception):
    """No noise multiplier in the range that is searched costs this ε."""


class _Ladder:
    """Steps of ε, each a fixed share below the next, and the search for the noise multiplier of one of them.

    A search uses only fixed multipliers and its own results, so it ends the same whatever else is calibrated.
    """

    def __init__(self, epsilon_at: Callable[[float], float], tolerance: float, remedy: str) -> None:
        self.epsilon_at, self.tolerance, self.remedy = epsilon_at, tolerance, remedy  # remedy: if no noise is enough
        self.fixed: dict[int, float] = {}  # ε of the fixed multipliers
        self.width = -math.log1p(-_LOWERED * tolerance)

    def steps(self, epsilons: NDArray[np.float64]) -> NDArray[np.int64]:
        """Return the highest step at or below each ε."""
        first, last = (math.ceil(math.log(epsilon) / self.width) for epsilon in (epsilons.min(), epsilons.max()))
        levels = [self.level(step) for step in range(first - 2, last + 2)]
        return first - 3 + np.searchsorted(levels, epsilons, side="right")

    def level(self, step: int) -> float:
        return math.exp(step * self.width)

    def least(self, step: int) -> float:
        """Return the ε below which a multiplier adds too much noise for a step."""
        return self.level(step) * (1 - (1 - _LOWERED) * self.tolerance)

    def checked(self, step: int, multiplier: float | None) -> tuple[float, float] | None:
        """Return a stored multiplier and its ε, computed now, if that ε is within the step; else None."""
        if multiplier is None or not _multiplier(_FIRST - 1) <= multiplier <= _multiplier(_LAST):
            return None
        value = self.epsilon_at(multiplier)
        return (multiplier, value) if self.least(step) <= value <= self.level(step) else None

    def search(self, step: int) -> tuple[float, float]:
        """Return the multiplier for a step, and its ε."""
        level, least = self.level(step), self.least(step)
        first = self._bracket(level)
        table = {
            _multiplier(place): self._at(place) for place in range(first - 1, first + 3) if _FIRST <= place <= _LAST
        }
        above, below = _multiplier(first), _multiplier(first + 1)  # their ε are above the step, and at or below it
        for _ in range(6):
            guess = _between(table, above, below, (least + level) / 2)
            table[guess] = value = self.epsilon_at(guess)
            if least <= value <= level:
                return guess, value
            above, below = (guess, below) if value > level else (above, guess)
        # The curve is steeper than interpolation can follow: halve the bracket, keeping the sound side.
        while table[below] < least and below - above > 1e-12 * below:
            middle = math.sqrt(above * below)
            table[middle] = self.epsilon_at(middle)
            above, below = (middle, below) if table[middle] > level else (above, middle)
        return below, table[below]

    def _bracket(self, level: float) -> int:
        """Return the place of the fixed multiplier whose ε is above a level while that of the next is not."""
        low, high = -_PER_OCTAVE, 0
        while self._at(high) > level:
            if high == _LAST:
                raise _OutOfReachError(f"cannot be reached however large the noise; {self.remedy}")
            low, high = high, min(high + 2 * max(_PER_OCTAVE, high), _LAST)
        while self._at(low) <= level:
            if low <= _FIRST:
                raise _OutOfReachError("is more than this price can cost; lower the budget")
            low, high = low - _PER_OCTAVE, low
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._at(middle) > level else (low, middle)
        return low

    def _at(self, place: int) -> float:
        if place not in self.fixed:
            self.fixed[place] = self.epsilon_at(_multiplier(place))
        return self.fixed[place]


def _multiplier(place: int) -> float:
    return float(2.0 ** (place / _PER_OCTAVE))


def _between(table: dict[float, float], above: float, below: float, aim: float) -> float:
    """Guess where ε equals `aim`: by the cubic through the nearest entries, log against log; else half-way."""
    entries = [
        (math.log(value / aim), math.log(multiplier)) for multiplier, value in table.items() if 0 < value < math.inf
    ]
    nearest = sorted(entries, key=lambda entry: abs(entry[0]))[:4]
    guess = math.sqrt(above * below)
    if len(nearest) > 1 and len({x for x, _ in nearest}) == len(nearest):
        weights = (math.prod(other / (other - x) for other, _ in nearest if other != x) for x, _ in nearest)
        curve = sum(weight * y for weight, (_, y) in zip(weights, nearest, strict=True))
        guess = math.exp(min(max(curve, math.log(above)), math.log(below)))
    return guess if above < guess < below else math.sqrt(above * below)
