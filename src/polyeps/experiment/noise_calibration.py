"""Calibrate each client's noise multiplier to its budget and the number of rounds it can expect."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyeps.accounting import cache
from polyeps.accounting.affordability import known_epsilon
from polyeps.accounting.calibration import ProgressCallback, calibrate_each
from polyeps.accounting.histories import history_of
from polyeps.core import Algorithm, Budget
from polyeps.errors import InputError
from polyeps.experiment import config
from polyeps.experiment.population import Population
from polyeps.ledger.account import BudgetTerms, ClientAccount, Schedule
from polyeps.server import Participation


def expected_rounds(experiment: config.Experiment, participation: Participation, clients: int) -> int:
    """How many rounds a client joins on average, rounded up: what its noise is calibrated for."""
    if participation.kind == "epoch":
        return math.ceil(experiment.rounds / participation.batches(clients))
    return math.ceil(experiment.rounds * participation.share - 1e-9)


def claimed_scales(
    settings: config.Training, claimed: Sequence[Budget], population: Population, algorithm: Algorithm, rounds: int
) -> NDArray[np.float64]:
    """The noise a paper takes for a claimed budget.

    For local training the closed form of paper 000's code, σ = 10·(B/N)·√(T·log10(1/δ))/ε. With that code's batches
    of fixed size the sound cost is not the ε it claims: below it where ε is small, above it where ε is large.
    """
    if _is_pure(algorithm):
        return _pure_scales(claimed, rounds)
    steps = rounds * settings.local_steps
    return np.array(
        [
            10 * settings.batch / size * math.sqrt(steps * math.log10(1 / budget.delta)) / budget.epsilon
            for size, budget in zip(population.partition.sizes.tolist(), claimed, strict=True)
        ]
    )


def real_costs(
    scale: NDArray[np.float64], claimed: Sequence[Budget], algorithm: Algorithm, rounds: int, ids: Sequence[str]
) -> tuple[Budget, ...]:
    """The budgets some noise really takes: ledgers are opened with them, so that a run can be as the paper's was."""
    price = priced(algorithm)
    costs = [
        known_epsilon(history_of(price(float(sigma), row), rounds), budget.delta, algorithm.adjacency, "pld")
        for row, (sigma, budget) in enumerate(zip(scale, claimed, strict=True))
    ]
    if math.inf in costs:
        row = costs.index(math.inf)
        who = f"client {ids[row]!r}: the published noise for ε = {claimed[row].epsilon:g}"
        raise InputError(f"{who} is too small for anything to be certified; run more rounds, or the sound form")
    return tuple(Budget(cost, budget.delta) for cost, budget in zip(costs, claimed, strict=True))


def _pure_scales(budgets: Sequence[Budget], uses: int) -> NDArray[np.float64]:
    """Where costs simply add, every use may cost ε/uses; a few last digits less, so that float sums stay within ε."""
    return uses / np.array([budget.epsilon for budget in budgets]) * (1 + 2.0**-48)


def _is_pure(algorithm: Algorithm) -> bool:
    return any(action.pure for action in algorithm.actions.values())


def priced(algorithm: Algorithm) -> Callable[[float, int], Any]:
    """What a round costs: its dues, or else one of the priced actions, which all cost the same."""
    dues = algorithm.dues
    if dues is not None:
        return lambda scale, _: dues(scale)
    return next(action.price for action in algorithm.actions.values() if action.price is not None)


def sound_scales(
    experiment: config.Experiment,
    budgets: Sequence[Budget | None],
    population: Population,
    algorithm: Algorithm,
    uses: int,
    progress: ProgressCallback | None,
    schedule: Schedule = "fixed",
) -> NDArray[np.float64]:
    """Every client's noise: what spends its budget over the rounds it can expect, or one scale for all.

    It is calibrated for ledgers with this schedule. Who is promised nothing has none.
    """
    rows = [row for row, budget in enumerate(budgets) if budget is not None]
    scale = np.zeros(len(budgets))
    promised = [budget for budget in budgets if budget is not None]
    scale[rows] = _own_scales(experiment, promised, population, algorithm, uses, rows, progress, schedule)
    return scale


def _own_scales(
    experiment: config.Experiment,
    budgets: Sequence[Budget],
    population: Population,
    algorithm: Algorithm,
    uses: int,
    rows: Sequence[int],
    progress: ProgressCallback | None,
    schedule: Schedule,
) -> NDArray[np.float64]:
    """The noise of some clients of the population, who have these budgets."""
    price, ids = priced(algorithm), [population.ids[row] for row in rows]
    common = experiment.budgets.scale
    if common is None and _is_pure(algorithm) and (uses == 1 or not any(budget.delta for budget in budgets)):
        return _pure_scales(budgets, uses)
    if common is None:
        try:
            return calibrate_each(
                budgets,
                lambda scale, place: price(scale, rows[place]),
                uses,
                adjacency=algorithm.adjacency,
                schedule=schedule,
                directory=cache.default_directory(),
                progress=progress,
            ).noise_multiplier
        except InputError as problem:
            strictest = min(budgets)
            client = ids[list(budgets).index(strictest)]
            raise InputError(
                f"client {client!r} cannot afford the plan with ε = {strictest.epsilon:g}, δ = {strictest.delta:g}: "
                f"{problem}" + ("" if strictest.delta else "; Gaussian noise needs a delta above 0")
            ) from None
    for row, client, budget in zip(rows, ids, budgets, strict=True):
        account = ClientAccount(BudgetTerms(budget, algorithm.unit, algorithm.adjacency, schedule))
        once = account.with_charge(price(common, row), 1, algorithm.unit)
        if not account.affords(once):
            raise InputError(
                f"client {client!r} cannot afford a single round: with budgets.scale = {common:g} one costs "
                f"ε = {account.spent(once):.4g}, and its budget is {budget.epsilon:g}; raise the scale, or leave it "
                "out so that every client gets its own"
            )
    return np.full(len(budgets), common)
