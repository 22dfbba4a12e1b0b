"""Inverting a price: the noise scale that spends a budget, for thousands of budgets at once.

A budget's scale depends on nothing but that budget, its price, how often it is used and how it is judged: neither on
other budgets nor on what was calibrated before. A budget is first lowered to the next step of a fixed ladder, so that
many budgets share a search; each step is searched from the same fixed scales (docs/decisions/0003). What is returned is
always a scale whose ε was computed, so nothing rests on interpolation: it only chooses where to look next.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
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

PriceFunction = Callable[[float], DpEvent]  # scale ↦ what one use costs
ProgressCallback = Callable[[int, int], None]  # budgets served, budgets in all
# fixed: composed exactly. adaptive: by the Rényi filter that a ledger of this budget keeps.
_Schedule = Literal["fixed", "adaptive"]

_PROBES = (0.7390851332151607, 2.718281828459045, 23.140692632779267)  # scales that tell prices apart
_LOWERED = 0.7  # of the tolerance: by how much a budget may be lowered to the ladder; the rest is for the search
_APART = 4  # fixed scales from which every search starts, for each factor of two
_FIRST, _LAST = -7 * _APART, 23 * _APART  # of them: about 0.01 and 10⁷, beyond which a search is given up


@dataclass(frozen=True)
class Calibration:
    """Row i answers budget i: the scale to use, and the ε certified for it, at or below the budget."""

    scale: NDArray[np.float64]
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
    """The smallest scales found whose `uses`-fold price stays within each budget and spends all but `tolerance` of it.

    Hints are kept in `directory`; without one nothing is read from or written to disk. Without an accountant every
    scale is judged by the one that a ledger would take for it: which that is may depend on the scale. With an adaptive
    schedule it is judged by the Rényi filter of the budget, as a ledger with that schedule does.

    >>> from polyeps.accounting.events import Gaussian
    >>> answer = calibrate([Budget(1.0, 1e-5), Budget(4.0, 1e-5)], Gaussian, uses=100)
    >>> bool(all(0.99 <= answer.certified / [1.0, 4.0])), bool(all(answer.certified <= [1.0, 4.0]))
    (True, True)
    """
    uses = check_uses(uses, least=1)
    scale, certified = np.empty(len(budgets)), np.empty(len(budgets))
    alike: dict[tuple[float, float | None], list[int]] = {}
    for row, budget in enumerate(budgets):
        order = rdp.filter_order(budget) if schedule == "adaptive" and budget.delta else None
        alike.setdefault((budget.delta, order), []).append(row)
    served = 0
    for (delta, order), rows in alike.items():

        def judge(at: float, delta: float = delta, order: float | None = order) -> float:
            history = history_of(price(at), uses)
            if order is not None:
                return rdp.filter_epsilon(history, order, delta, adjacency)
            return known_epsilon(history, delta, adjacency, accountant or best_accountant(history))

        ladder = _Ladder(judge, tolerance, "raise the budget" if delta else "give a delta above 0")
        subject = {
            "price": [canonical_json(price(probe)) for probe in _PROBES],
            "uses": uses,
            "delta": delta,
            "adjacency": adjacency,
            "accountant": accountant or "best" if order is None else f"filter of order {order}",
            "tolerance": tolerance,
        }
        hints = cache.load_hints(directory, subject) if directory else {}
        sharing: dict[int, list[int]] = {}
        for row in rows:
            sharing.setdefault(ladder.step(budgets[row].epsilon), []).append(row)
        found: dict[int, float] = {}
        for step, sharers in sharing.items():
            try:
                at, cost = ladder.checked(step, hints.get(step)) or ladder.search(step)
            except _OutOfReachError as problem:
                raise InputError(f"epsilon {budgets[sharers[0]].epsilon:g} {problem}") from None
            found[step], scale[sharers], certified[sharers] = at, at, cost
            served += len(sharers)
            if progress:
                progress(served, len(budgets))
        if directory and any(hints.get(step) != at for step, at in found.items()):
            cache.save_hints(directory, subject, hints | found)
    return Calibration(scale, certified)


def calibrate_each(
    budgets: Sequence[Budget],
    price: Callable[[float, int], DpEvent],
    uses: int,
    *,
    adjacency: Adjacency = "zero-out",
    schedule: _Schedule = "fixed",
    directory: Path | None = None,
    progress: ProgressCallback | None = None,
) -> Calibration:
    """Calibrate clients whose prices (scale, row) may differ, each as if it were alone."""
    alike: dict[tuple[DpEvent | str, ...], list[int]] = {}
    for row in range(len(budgets)):
        alike.setdefault(tuple(_key(price(probe, row)) for probe in _PROBES[:2]), []).append(row)
    scale, certified = np.empty(len(budgets)), np.empty(len(budgets))
    served = 0
    for rows in alike.values():

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
            progress=partial(_report, progress, served, len(budgets)) if progress else None,
        )
        scale[rows], certified[rows] = answer.scale, answer.certified
        served += len(rows)
    return Calibration(scale, certified)


def _key(event: DpEvent) -> DpEvent | str:
    """What equal events have in common: themselves, unless they hold a list."""
    try:
        hash(event)
    except TypeError:
        return canonical_json(event)
    return event


def _report(progress: ProgressCallback, earlier: int, total: int, served: int, _: int) -> None:
    progress(earlier + served, total)


class _OutOfReachError(Exception):
    """No scale of any use costs this ε."""


class _Ladder:
    """Steps of ε, each a fixed share below the next, and the search for the scale of one of them.

    Every search sees only what it computed itself and fixed scales, so that it ends at the same scale in any company.
    """

    def __init__(self, judge: Callable[[float], float], tolerance: float, remedy: str) -> None:
        self.judge, self.tolerance, self.remedy = judge, tolerance, remedy  # the remedy where no noise is enough
        self.fixed: dict[int, float] = {}  # ε of the fixed scales
        self.width = -math.log1p(-_LOWERED * tolerance)

    def step(self, epsilon: float) -> int:
        """The highest step at or below an ε."""
        step = math.ceil(math.log(epsilon) / self.width) + 1
        while self.level(step) > epsilon:
            step -= 1
        return step

    def level(self, step: int) -> float:
        return math.exp(step * self.width)

    def least(self, step: int) -> float:
        """The ε below which a scale has too much noise for a step."""
        return self.level(step) * (1 - (1 - _LOWERED) * self.tolerance)

    def checked(self, step: int, scale: float | None) -> tuple[float, float] | None:
        """A scale that was kept and what it costs, computed now, if that is within the step; else nothing."""
        if scale is None or not _scale(_FIRST - 1) <= scale <= _scale(_LAST):
            return None
        value = self.judge(scale)
        return (scale, value) if self.least(step) <= value <= self.level(step) else None

    def search(self, step: int) -> tuple[float, float]:
        """The scale for a step, and what it costs."""
        level, least = self.level(step), self.least(step)
        first = self._bracket(level)
        table = {_scale(place): self._at(place) for place in range(first - 1, first + 3) if _FIRST <= place <= _LAST}
        above, below = _scale(first), _scale(first + 1)  # their ε are above the step, and at or below it
        for _ in range(6):
            guess = _between(table, above, below, (least + level) / 2)
            table[guess] = value = self.judge(guess)
            if least <= value <= level:
                return guess, value
            above, below = (guess, below) if value > level else (above, guess)
        # The curve is steeper than interpolation can follow: halve the bracket, keeping the sound side.
        while table[below] < least and below - above > 1e-12 * below:
            middle = math.sqrt(above * below)
            table[middle] = self.judge(middle)
            above, below = (middle, below) if table[middle] > level else (above, middle)
        return below, table[below]

    def _bracket(self, level: float) -> int:
        """The fixed scale whose ε is above a level while that of the next is not."""
        low, high = -_APART, 0
        while self._at(high) > level:
            if high == _LAST:
                raise _OutOfReachError(f"cannot be reached however large the noise; {self.remedy}")
            low, high = high, min(high + 2 * max(_APART, high), _LAST)
        while self._at(low) <= level:
            if low <= _FIRST:
                raise _OutOfReachError("is more than this price can cost; lower the budget")
            low, high = low - _APART, low
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._at(middle) > level else (low, middle)
        return low

    def _at(self, place: int) -> float:
        if place not in self.fixed:
            self.fixed[place] = self.judge(_scale(place))
        return self.fixed[place]


def _scale(place: int) -> float:
    return float(2.0 ** (place / _APART))


def _between(table: dict[float, float], above: float, below: float, aim: float) -> float:
    """Where ε should equal `aim`, by the cubic through the nearest entries, log against log; else half-way."""
    entries = [(math.log(value / aim), math.log(scale)) for scale, value in table.items() if 0 < value < math.inf]
    nearest = sorted(entries, key=lambda entry: abs(entry[0]))[:4]
    guess = math.sqrt(above * below)
    if len(nearest) > 1 and len({x for x, _ in nearest}) == len(nearest):
        weights = (math.prod(other / (other - x) for other, _ in nearest if other != x) for x, _ in nearest)
        curve = sum(weight * y for weight, (_, y) in zip(weights, nearest, strict=True))
        guess = math.exp(min(max(curve, math.log(above)), math.log(below)))
    return guess if above < guess < below else math.sqrt(above * below)
