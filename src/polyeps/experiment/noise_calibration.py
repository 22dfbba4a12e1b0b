"""Calibrate each client's noise multiplier to its budget and the number of rounds it can expect."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import ROUND_DOWN, Context
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyeps.accounting import cache
from polyeps.accounting.affordability import known_epsilon
from polyeps.accounting.calibration import ProgressCallback, calibrate_each
from polyeps.accounting.events import PureDpEvent
from polyeps.accounting.histories import history_of
from polyeps.clients import rows_alike
from polyeps.core import Adjacency, Algorithm, Budget, PerClient, Unit
from polyeps.errors import InputError
from polyeps.experiment import config
from polyeps.ledger.account import BudgetTerms, ClientAccount
from polyeps.participation import Participation


def expected_rounds(experiment: config.Experiment, participation: Participation, clients: int) -> int:
    """Return the number of rounds a client joins on average, rounded up: its noise is calibrated for it."""
    if participation.kind == "epoch":
        return math.ceil(experiment.rounds / participation.batches(clients))
    return math.ceil(experiment.rounds * participation.share - 1e-9)


_Rows = NDArray[np.int64]
_THREE_DIGITS = Context(prec=3, rounding=ROUND_DOWN)


@dataclass(frozen=True, eq=False)
class Cost:
    """The price of one round for every client, and what it protects."""

    price: Callable[[float, Mapping[str, float]], Any]  # (noise multiplier, settings) -> DpEvent
    ids: Sequence[str]
    settings: PerClient
    unit: Unit
    adjacency: Adjacency
    # (noise multiplier, rounds, δ, settings) -> the ε that the paper states, if it states one
    claimed: Callable[[float, int, float, Mapping[str, float]], float | None] = lambda *_: None
    person: str = ""  # what a person is called, where the unit is one

    def terms(self, budget: Budget, plan: Any = None) -> BudgetTerms:
        """Return the terms of an account that pays this price for one run."""
        return BudgetTerms(budget, self.unit, self.adjacency, "fixed", plan=plan, person=self.person)

    def terms_of_all(self, budgets: Sequence[Budget | None], noise: NDArray[np.float64]) -> dict[str, BudgetTerms]:
        """Return the terms of the clients with a budget, each with its own price as the plan."""
        found: list[BudgetTerms | None] = [None] * len(budgets)
        for rows in self.alike(noise=noise):
            known: dict[float, BudgetTerms] = {}  # by δ
            for row in rows.tolist():
                if (budget := budgets[row]) is not None:
                    if budget.delta not in known:
                        known[budget.delta] = self.terms(budget, self.event(noise[row], row))
                    found[row] = known[budget.delta].with_budget(budget)
        return {client: terms for client, terms in zip(self.ids, found, strict=True) if terms is not None}

    def alike(self, rows: Sequence[int] | None = None, noise: NDArray[np.float64] | None = None) -> list[_Rows]:
        """Return the places, in `rows`, of clients with one price each: equal in settings and, if given, in noise."""
        chosen = np.arange(len(self.ids)) if rows is None else np.asarray(rows, dtype=np.int64)
        columns = [*self.settings.values(), *([] if noise is None else [noise])]
        return rows_alike([np.asarray(column)[chosen] for column in columns], len(chosen))

    def event(self, noise_multiplier: float, row: int) -> Any:
        """Return the price for one client."""
        return self.price(float(noise_multiplier), self.of(row))

    def claim(self, noise_multiplier: float, rounds: int, delta: float, row: int) -> float | None:
        """Return the ε that the paper states for one client after some rounds, if it states one."""
        return self.claimed(float(noise_multiplier), rounds, delta, self.of(row))

    def of(self, row: int) -> dict[str, float]:
        """Return the settings of one client."""
        return {name: float(own[row]) for name, own in self.settings.items()}

    def is_pure(self, budgets: Sequence[Budget], rounds: int, *, rows: Sequence[int], sound: bool) -> bool:
        """Return whether one round costs a pure ε; if `sound`, no more than the inverse of the noise multiplier."""
        noise = float(_pure_noise(budgets[:1], rounds)[0])
        event = self.event(noise, rows[0])
        return isinstance(event, PureDpEvent) and not (sound and event.epsilon * noise > 1 + 1e-9)


def cost_of(algorithm: Algorithm, ids: Sequence[str], settings: PerClient) -> Cost:
    """Return the cost of a round: its price, or else that of one of the priced actions, which all cost the same."""
    round_price = algorithm.round_price
    if round_price is not None:
        price: Any = lambda noise, _: round_price(noise)  # noqa: E731
    else:
        price = next((action.price for action in algorithm.actions.values() if action.price is not None), None)
        if price is None:
            raise InputError(
                f"{', '.join(algorithm.actions) or 'it'} has no price, so clients cannot keep to their budgets; give "
                'the action a price, or the algorithm an Entry with budgets = ("none",)'
            )
    return Cost(price, ids, settings, algorithm.unit, algorithm.adjacency, algorithm.claim, algorithm.person)


def claimed_noise(claimed: Sequence[Budget], cost: Cost, rounds: int) -> NDArray[np.float64]:
    """Return the noise multipliers with which the paper states that budgets are kept.

    The stated ε falls as one over the noise. The sound cost is not the stated one: it may be below or above.
    """
    if cost.is_pure(claimed, rounds, rows=range(len(claimed)), sound=False):
        return _pure_noise(claimed, rounds)
    stated = (cost.claim(1.0, rounds, budget.delta, row) for row, budget in enumerate(claimed))
    known = (math.inf if one is None else one for one in stated)
    return np.array([one / budget.epsilon for one, budget in zip(known, claimed, strict=True)])


def real_costs(noise: NDArray[np.float64], claimed: Sequence[Budget], cost: Cost, rounds: int) -> tuple[Budget, ...]:
    """Return the budgets that some noise really costs: ledgers are opened with them, so that the paper's run fits."""
    costs = [
        known_epsilon(history_of(cost.event(sigma, row), rounds), budget.delta, cost.adjacency, "pld")
        for row, (sigma, budget) in enumerate(zip(noise, claimed, strict=True))
    ]
    if math.inf in costs:
        row = costs.index(math.inf)
        named = f"client {cost.ids[row]!r}: the published noise for ε = {claimed[row].epsilon:g}"
        raise InputError(f"{named} is too small for anything to be certified; run more rounds, or the sound form")
    return tuple(Budget(epsilon, budget.delta) for epsilon, budget in zip(costs, claimed, strict=True))


def _pure_noise(budgets: Sequence[Budget], uses: int) -> NDArray[np.float64]:
    """Return the noise for costs that simply add: ε/uses each, less a few last digits so that sums stay within ε."""
    return uses / np.array([budget.epsilon for budget in budgets]) * (1 + 2.0**-48)


def _rounded_down(budget: Budget) -> Budget:
    """Return a budget with the first three digits of its ε, at least 99 % of it, so that a million have few prices.

    >>> _rounded_down(Budget(0.3, 0.0)).epsilon, _rounded_down(Budget(1.23456, 0.0)).epsilon
    (0.3, 1.23)
    """
    epsilon = float(_THREE_DIGITS.create_decimal(repr(budget.epsilon)))
    return budget if epsilon == budget.epsilon else Budget(epsilon, budget.delta)


def sound_noise(
    experiment: config.Experiment,
    budgets: Sequence[Budget | None],
    cost: Cost,
    uses: int,
    progress: ProgressCallback | None,
) -> NDArray[np.float64]:
    """Return every client's noise multiplier: calibrated to its budget and expected rounds, or one for all.

    It is calibrated for ledgers with a fixed schedule. Clients without a guarantee get no noise.
    """
    given = {row: budget for row, budget in enumerate(budgets) if budget is not None}
    rows, known = list(given), list(given.values())
    noise, common = np.zeros(len(budgets)), experiment.budgets.noise_multiplier
    additive = uses == 1 or not any(budget.delta for budget in known)
    if common is None and additive and cost.is_pure(known, uses, rows=rows, sound=True):
        noise[rows] = _pure_noise([_rounded_down(budget) for budget in known], uses)
    elif common is None:
        try:
            noise[rows] = calibrate_each(
                known,
                lambda multiplier, place: cost.event(multiplier, rows[place]),
                uses,
                alike=cost.alike(rows),
                adjacency=cost.adjacency,
                directory=cache.default_directory(),
                progress=progress,
            ).noise_multiplier
        except InputError as problem:
            row, strictest = min(given.items(), key=lambda one: one[1])
            reason = problem if strictest.delta else "Gaussian noise needs a budgets.delta above 0, such as 1e-6"
            raise InputError(
                f"client {cost.ids[row]!r} cannot afford the plan with ε = {strictest.epsilon:g}, "
                f"δ = {strictest.delta:g}: {reason}"
            ) from None
    else:
        noise[rows] = common
        for row, budget in given.items():
            account = ClientAccount.opened(cost.terms(budget))
            once = account.with_charge(cost.event(common, row), 1)
            if not account.affords(once):
                raise InputError(
                    f"client {cost.ids[row]!r} cannot afford a single round: with budgets.noise_multiplier = "
                    f"{common:g} one costs ε = {account.spent(once):.4g}, and its budget is {budget.epsilon:g}; raise "
                    "it, or leave it out so that every client gets its own"
                )
    return noise
