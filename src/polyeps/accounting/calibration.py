"""Inverting a price: the noise scale that spends exactly a budget, for thousands of budgets at once.

One table of (scale, certified ε) serves all budgets that share a price. A budget's answer is always a scale at
which ε was computed, so nothing rests on interpolation: it only chooses where to look next.
"""

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from dp_accounting.dp_event import DpEvent
from numpy.typing import NDArray
from scipy.interpolate import PchipInterpolator

from polyeps.accounting import Accountant, cache
from polyeps.accounting.afford import best_accountant, known_epsilon, remember
from polyeps.accounting.events import canonical, history_of
from polyeps.core import Adjacency, Budget
from polyeps.errors import InputError

Price = Callable[[float], DpEvent]  # scale ↦ what one use costs
Progress = Callable[[int, int], None]  # budgets served, budgets in all

_SMALLEST, _LARGEST = 1e-2, 1e7  # scales beyond which a search is given up
_PROBES = (0.7390851332151607, 2.718281828459045, 23.140692632779267)  # scales that tell prices apart


@dataclass(frozen=True)
class Calibration:
    """Row i answers budget i: the scale to use, and the ε certified for it, at or below the budget."""

    scale: NDArray[np.float64]
    certified: NDArray[np.float64]


def calibrate(
    budgets: Sequence[Budget],
    price: Price,
    uses: int,
    *,
    adjacency: Adjacency = "zero-out",
    accountant: Accountant | None = "pld",
    tolerance: float = 0.01,
    directory: Path | None = None,
    progress: Progress | None = None,
) -> Calibration:
    """The smallest scales found whose `uses`-fold price stays within each budget and spends all but `tolerance` of it.

    Tables are kept in `directory`; without one nothing is read from or written to disk. Without an accountant every
    scale is judged by the one that a ledger would take for it: which that is may depend on the scale.

    >>> from polyeps.accounting.events import Gaussian
    >>> answer = calibrate([Budget(1.0, 1e-5), Budget(4.0, 1e-5)], Gaussian, uses=100)
    >>> bool(all(0.99 <= answer.certified / [1.0, 4.0])), bool(all(answer.certified <= [1.0, 4.0]))
    (True, True)
    """
    if uses < 1:
        raise InputError(f"a price must be used at least once to be calibrated, not {uses} times")
    scale, certified = np.empty(len(budgets)), np.empty(len(budgets))
    served = 0
    for delta in sorted({budget.delta for budget in budgets}):
        rows = np.array([row for row, budget in enumerate(budgets) if budget.delta == delta])
        wanted = np.array([budgets[row].epsilon for row in rows])

        def judge(at: float, delta: float = delta) -> float:
            history = history_of(price(at), uses)
            return known_epsilon(history, delta, adjacency, accountant or best_accountant(history))

        subject = _subject(price, uses, delta, adjacency, accountant) | _asked(wanted, tolerance)
        table = cache.load(directory, subject, judge) if directory else {}
        before = len(table)
        search = _Search(judge, table, tolerance, "raise the budget" if delta else "give a delta above 0")
        search.serve(wanted, partial(_report, progress, served, len(budgets)))
        if directory and len(table) > before:
            cache.save(directory, subject, table)
        scale[rows], certified[rows] = search.answers(wanted)
        for used in np.unique(scale[rows]):  # so that a ledger need not compute again what a table on disk knew
            history = history_of(price(float(used)), uses)
            remember(history, delta, adjacency, accountant or best_accountant(history), table[float(used)])
        served += len(rows)
    return Calibration(scale, certified)


def calibrate_each(
    budgets: Sequence[Budget],
    price: Callable[[float, int], DpEvent],
    uses: int,
    *,
    adjacency: Adjacency = "zero-out",
    directory: Path | None = None,
    progress: Progress | None = None,
) -> Calibration:
    """Calibrate clients whose prices (scale, row) may differ; equal prices share one table."""
    alike: dict[str, list[int]] = {}
    for row in range(len(budgets)):
        alike.setdefault(canonical(price(_PROBES[0], row)), []).append(row)
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
            directory=directory,
            progress=partial(_report, progress, served, len(budgets)) if progress else None,
        )
        scale[rows], certified[rows] = answer.scale, answer.certified
        served += len(rows)
    return Calibration(scale, certified)


def _report(progress: Progress | None, earlier: int, total: int, served: int, _: int = 0) -> None:
    if progress:
        progress(earlier + served, total)


def _subject(
    price: Price, uses: int, delta: float, adjacency: Adjacency, accountant: Accountant | None
) -> dict[str, Any]:
    return {
        "price": [canonical(price(probe)) for probe in _PROBES],
        "uses": uses,
        "delta": delta,
        "adjacency": adjacency,
        "accountant": accountant or "best",
    }


def _asked(wanted: NDArray[np.float64], tolerance: float) -> dict[str, Any]:
    """What a table was made for. Where the search looks depends on it, so a table made for other budgets, which would
    serve as well, would give other answers: the same run must not differ by what was calibrated before it."""
    distinct = np.unique(wanted)
    return {"budgets": hashlib.sha256(distinct.tobytes()).hexdigest(), "tolerance": tolerance}


class _Search:
    """A growing table of scales and their ε, steered to where budgets are."""

    def __init__(
        self, judge: Callable[[float], float], table: dict[float, float], tolerance: float, remedy: str
    ) -> None:
        self.judge, self.table, self.tolerance = judge, table, tolerance
        self.remedy = remedy  # where no noise is enough

    def serve(self, wanted: NDArray[np.float64], progress: Callable[[int], None]) -> None:
        """Add entries until every wanted ε has one just below it.

        A few passes are enough unless a price jumps; then the entry below the jump has to do.
        """
        self._bracket(float(wanted.min()), float(wanted.max()))
        targets = np.unique(wanted)
        for _ in range(4):
            targets = targets[self.answers(targets)[1] < (1 - self.tolerance) * targets]
            progress(len(wanted) - len(targets))
            # One entry just below the lowest target serves all targets up to 1/(1 − tolerance) above it.
            reach = 0.0
            for target in targets:
                if target > reach:
                    reach = self._approach(float(target)) / (1 - self.tolerance)

    def answers(self, wanted: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """For each wanted ε the entry with the largest ε not above it."""
        entries = sorted((value, scale) for scale, value in self.table.items() if math.isfinite(value))
        values = np.array([value for value, _ in entries])
        scales = np.array([scale for _, scale in entries])
        place = np.searchsorted(values, wanted, side="right") - 1
        found = place >= 0
        return np.where(found, scales[place], np.nan), np.where(found, values[place], 0.0)

    def _bracket(self, lowest: float, highest: float) -> None:
        at = 1.0
        while self._value(at) > lowest * (1 - self.tolerance / 2):
            at *= 2
            if at > _LARGEST:
                raise InputError(f"epsilon {lowest:g} cannot be reached however large the noise; {self.remedy}")
        at = 1.0
        while self._value(at) < highest:
            at /= 2 ** (1 if at > 0.25 else 0.25)
            if at < _SMALLEST:
                raise InputError(f"epsilon {highest:g} is more than this price can cost; lower the budget")

    def _approach(self, target: float) -> float:
        """Add an entry within tolerance below the target; return its ε."""
        for aim in (0.2, 0.2, 0.5, 0.5, 0.5, 0.5):
            value = self._value(self._guess(target * (1 - aim * self.tolerance)))
            if (1 - self.tolerance) * target <= value <= target:
                return value
        # The curve is steeper than interpolation can follow: halve the bracket, keeping the sound side.
        low, high = self._around(target)
        while (1 - self.tolerance) * target > self.table[high] and high - low > 1e-12 * high:
            middle = math.sqrt(low * high)
            low, high = (middle, high) if self._value(middle) > target else (low, middle)
        return self.table[high]

    def _guess(self, aim: float) -> float:
        """Where ε should equal `aim`, from a monotone curve through the entries, log against log.

        Beyond the least ε above 0 a curve says nothing: then, between the entries around it.
        """
        entries = sorted((math.log(v), math.log(s)) for s, v in self.table.items() if 0 < v < math.inf)
        if len(entries) < 2 or math.log(aim) < entries[0][0]:
            return math.sqrt(math.prod(self._around(aim)))
        x, y = np.array(entries).T
        keep = np.append(True, np.diff(x) > 1e-12)
        x, y = x[keep], y[keep]
        nearest = slice(max(0, int(np.searchsorted(x, math.log(aim))) - 4), int(np.searchsorted(x, math.log(aim))) + 4)
        return math.exp(float(PchipInterpolator(x[nearest], y[nearest])(math.log(aim))))

    def _around(self, target: float) -> tuple[float, float]:
        """The nearest scales with ε above the target, and at or below it."""
        above = max(scale for scale, value in self.table.items() if value > target)
        return above, min(scale for scale, value in self.table.items() if value <= target)

    def _value(self, scale: float) -> float:
        if scale not in self.table:
            self.table[scale] = self.judge(scale)
        return self.table[scale]
