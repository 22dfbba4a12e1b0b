"""Calibrate each client's sampling rate to its budget, under one noise multiplier for all.

The rates are exact: each is the largest, up to a percent of ε, whose price the ledger will find within the budget. The
noise multiplier only sets how large batches are on average, and is searched with rates interpolated from a few prices.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyeps.accounting import best_accountant, cache
from polyeps.accounting.affordability import known_epsilon
from polyeps.accounting.calibration import ProgressCallback, calibrate_each
from polyeps.accounting.events import canonical_json
from polyeps.accounting.histories import history_of
from polyeps.core import Budget
from polyeps.errors import InputError
from polyeps.experiment.noise_calibration import Cost

_POINTS, _DECADES = 7, 3  # rates at which prices are computed, from 1 down to so many decades below the mean rate
_LEAST, _MOST = 0.2, 1e5  # noise multipliers
_CLOSE = 0.02  # share by which the mean batch may differ from the one asked for


def rates_by_budget(
    budgets: Sequence[Budget | None],
    cost: Cost,
    sizes: NDArray[np.int64],
    batch: float,
    uses: int,
    common: float | None,
    progress: ProgressCallback | None,
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return every client's noise multiplier, the same for all, and its sampling rate.

    Without a `common` noise multiplier it is the one under which clients' batches hold `batch` records on average.
    Clients without a guarantee get no noise and batches of that size. A client whose budget pays for all its records in
    every batch has rate 1, and keeps the rest of its budget.
    """
    given = {row: budget for row, budget in enumerate(budgets) if budget is not None}
    if any(not budget.delta for budget in given.values()):
        raise InputError("Gaussian noise needs a budgets.delta above 0, such as 1e-6")
    rates = batch / sizes.astype(np.float64)
    noise = np.zeros(len(budgets))
    if not given:
        return noise, rates
    priced = _Priced(cost, given, uses)
    rows = list(given)
    sigma = common or _common_noise(priced, sizes[rows], batch)
    noise[rows] = sigma
    # A client that pays for rate 1 cannot spend more; the search below needs a price above the budget.
    whole = np.array([priced.epsilon(sigma, 1.0, row) <= given[row].epsilon for row in rows])
    rates[rows] = 1.0
    rest = [row for row, all_of_it in zip(rows, whole, strict=True) if not all_of_it]
    try:
        found = calibrate_each(
            [given[row] for row in rest],
            lambda inverse, place: priced.event(sigma, min(1.0, 1 / inverse), rest[place]),
            uses,
            adjacency=cost.adjacency,
            directory=cache.default_directory(),
            progress=progress,
        )
    except InputError as problem:
        raise InputError(
            f"no sampling rate keeps every client's budget under noise multiplier {sigma:g}: {problem}"
        ) from None
    rates[rest] = np.minimum(1.0, 1 / found.noise_multiplier)
    return noise, rates


class _Priced:
    """What clients pay for their steps, by noise multiplier and sampling rate."""

    def __init__(self, cost: Cost, budgets: dict[int, Budget], uses: int) -> None:
        self.cost, self.budgets, self.uses = cost, budgets, uses
        self.alike: dict[tuple[float, str], list[int]] = {}  # clients with the same δ and price
        for row, budget in budgets.items():
            self.alike.setdefault((budget.delta, canonical_json(self.event(1.0, 0.5, row))), []).append(row)

    def event(self, sigma: float, rate: float, row: int) -> Any:
        """Return the price of one round for a client."""
        return self.cost.price(sigma, {**self.cost.of(row), "rate": rate})

    def epsilon(self, sigma: float, rate: float, row: int) -> float:
        """Return what all rounds cost a client."""
        history = history_of(self.event(sigma, rate, row), self.uses)
        return known_epsilon(history, self.budgets[row].delta, self.cost.adjacency, best_accountant(history))

    def rates(self, sigma: float, grid: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return about the rate of each client, interpolated between a few prices, log against log."""
        found = {}
        for rows in self.alike.values():
            costs = np.array([self.epsilon(sigma, rate, rows[0]) for rate in grid])
            wanted = np.log([self.budgets[row].epsilon for row in rows])
            finite = np.isfinite(costs) & (costs > 0)
            logs = np.interp(wanted, np.log(costs[finite]), np.log(grid[finite])) if finite.any() else [-math.inf]
            found.update(dict(zip(rows, np.broadcast_to(np.exp(logs), len(rows)).tolist(), strict=True)))
        return np.array([found[row] for row in self.budgets])


def _common_noise(priced: _Priced, sizes: NDArray[np.int64], batch: float) -> float:
    """Return the noise multiplier under which the mean batch is about the one asked for, or the least there is."""
    grid = np.geomspace(batch / float(sizes.mean()) * 10.0**-_DECADES, 1.0, _POINTS)

    def mean_batch(sigma: float) -> float:
        return float((priced.rates(sigma, grid) * sizes).mean())

    low, high = _LEAST, 1.0
    if mean_batch(low) >= batch:
        return low
    while mean_batch(high) < (1 - _CLOSE) * batch:
        if high >= _MOST:
            raise InputError(
                f"no noise multiplier up to {_MOST:g} pays for batches of {batch:g} records; lower training.batch"
            )
        low, high = high, high * 2
    while high / low > 1 + _CLOSE / 2:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if mean_batch(middle) < batch else (low, middle)
    return float(f"{high:.3g}")  # few digits: it is public, and everybody can state it
