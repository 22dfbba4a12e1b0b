"""Guarantees and prospects of clients, before any record is read: asked of the job itself.

What a certificate says for some rounds is what a client's ledger says after it has joined as many.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import dp_accounting
import numpy as np
from scipy.stats import binom

from polyeps.accounting import best_accountant, cache
from polyeps.accounting.affordability import affordable
from polyeps.accounting.calibration import ProgressCallback, calibrate_each
from polyeps.accounting.certificate import Certificate, certify
from polyeps.accounting.histories import history_of
from polyeps.algorithms.fedavg import fedavg
from polyeps.core import Budget
from polyeps.errors import InputError
from polyeps.experiment.job import Job, Rounds
from polyeps.experiment.noise_calibration import cost_of
from polyeps.ledger.account import BudgetTerms, ClientAccount
from polyeps.models import binary_logistic
from polyeps.participation import Participation
from polyeps.training import dp_sgd


@dataclass(frozen=True)
class ClientPlan:
    """One client's prospects. `limit` is what ends its part: its budget, or the number of rounds."""

    client: str
    epsilon: float
    delta: float
    records: int  # or persons, where these are the unit
    sigma: float
    rounds_affordable: int  # at most the rounds there are
    rounds_expected: int
    spent: float  # after the rounds it is expected to join
    leaves_early: float  # probability that it is drawn more often than it can afford
    limit: Literal["budget", "rounds"]
    # Where work is planned by budget: the schedule, and how many times less noise it has than the one not planned.
    batch: float | None = None  # expected
    local_steps: int | None = None
    gain: float | None = None


def plan_client(client: str, terms: BudgetTerms, records: int, sigma: float, rounds: Rounds) -> ClientPlan:
    """Return how many rounds a client's budget lasts, and what it will have spent."""
    most = rounds.expected if rounds.fixed else rounds.planned
    lasts = _lasting(terms, most)
    return ClientPlan(
        client=client,
        epsilon=terms.budget.epsilon,
        delta=terms.budget.delta,
        records=records,
        sigma=sigma,
        rounds_affordable=lasts,
        rounds_expected=rounds.expected,
        spent=ClientAccount.opened(terms).spent(history_of(terms.plan, min(lasts, rounds.expected))),
        leaves_early=float(lasts < most if rounds.fixed else binom.sf(lasts, most, rounds.share)),
        limit="rounds" if lasts >= most else "budget",
    )


def _lasting(terms: BudgetTerms, most: int) -> int:
    """Return how many rounds a budget lasts, at most `most`."""

    def within(joined: int) -> bool:
        return ClientAccount.opened(terms).affords(history_of(terms.plan, joined))

    return most if within(most) else affordable(within, most)


def plan(job: Job, progress: ProgressCallback | None = None) -> list[ClientPlan]:
    """Return the prospects of the clients of a job that have a guarantee."""
    sizes, alike, plans = job.population.sizes.tolist(), dict[BudgetTerms, ClientPlan](), list[ClientPlan]()
    for row, client in enumerate(job.population.ids):
        if progress:
            progress(row, len(sizes))
        if (terms := job.terms.get(client)) is None:
            continue
        if terms not in alike:
            alike[terms] = plan_client(client, terms, sizes[row], float(job.noise_multiplier[row]), job.rounds)
        plans.append(replace(alike[terms], client=client, records=sizes[row], sigma=float(job.noise_multiplier[row])))
    return plans if job.gains is None else _with_work(job, plans)


def _with_work(job: Job, plans: Sequence[ClientPlan]) -> list[ClientPlan]:
    """Return plans with the work that was planned by budget."""
    assert job.gains is not None
    gains, places = job.gains(), {client: row for row, client in enumerate(job.population.ids)}
    rates, steps = job.settings["rate"].tolist(), job.settings["steps"].tolist()
    return [
        replace(one, batch=rates[row] * one.records, local_steps=int(steps[row]), gain=gains[row])
        for one in plans
        for row in [places[one.client]]
    ]


def plan_dp_sgd(
    clients: Sequence[tuple[str, Budget, int]],
    *,
    batch: int,
    local_steps: int,
    rounds: int,
    participation: float = 1.0,
    sigma: float | None = None,
    progress: ProgressCallback | None = None,
) -> tuple[Rounds, list[ClientPlan]]:
    """Plan DP-SGD with Poisson batches for clients (name, budget, records), without an experiment.

    Without `sigma` every client gets the noise that spends its budget over the rounds it is expected to join; with
    it all clients use the same noise and those with small budgets leave early.
    """
    for name, value in (("batch", batch), ("local-steps", local_steps), ("rounds", rounds)):
        if value < 1:
            raise InputError(f"{name} must be at least 1, not {value}")
    for client, _, records in clients:
        if batch > records:
            raise InputError(f"client {client!r} has {records} records, fewer than a batch of {batch}")
    if sigma is not None and not (math.isfinite(sigma) and sigma > 0):
        raise InputError(f"sigma must be a finite number above 0, not {sigma}")
    drawn = Participation("uniform", participation)
    found = Rounds(rounds, participation, math.ceil(rounds * drawn.share - 1e-9))
    local = fedavg(dp_sgd(binary_logistic(1), steps=local_steps, clip=1.0, learning_rate=1.0, batch=batch))
    names, budgets, held = zip(*clients, strict=True) if clients else ((), (), ())
    cost = cost_of(local, names, {"records": np.array(held)})
    noise = np.full(len(clients), sigma)
    if sigma is None:
        noise = calibrate_each(
            budgets, cost.event, found.expected, directory=cache.default_directory(), progress=progress
        ).noise_multiplier
    plans = []
    for row, (client, budget, records) in enumerate(clients):
        terms = cost.terms(budget, cost.event(noise[row], row))
        plans.append(plan_client(client, terms, records, float(noise[row]), found))
    return found, plans


def certificates(job: Job, joined: int | None = None) -> dict[str, Certificate]:
    """Return each client's certificate for the rounds it joins, as far as its budget lasts.

    By default these are the rounds that its noise is calibrated for.
    """
    wanted = job.rounds.expected if joined is None else joined
    if wanted > job.rounds.planned:
        raise InputError(f"--joined is {wanted}, but there are {job.rounds.planned} rounds; lower it")
    alike, found = dict[Any, Certificate](), dict[str, Certificate]()
    cost = cost_of(job.algorithm, job.population.ids, job.settings) if job.terms else None
    for row, client in enumerate(job.population.ids):
        terms, sigma = job.terms.get(client), float(job.noise_multiplier[row])
        key = (terms, sigma)
        if key not in alike:
            event = dp_accounting.NonPrivateDpEvent() if terms is None else terms.plan
            delta = 0.0 if terms is None else terms.budget.delta
            uses = wanted if terms is None else _lasting(terms, wanted)
            everything = dp_accounting.SelfComposedDpEvent(event, uses)
            alike[key] = certify(
                job.algorithm,
                everything,
                delta,
                method=job.method.title,
                claimed=None if terms is None or cost is None else cost.claim(sigma, uses, delta, row),
                form=job.method.form,
                accountant=best_accountant(history_of(everything)),
                details={"rounds": uses, "sigma": sigma},
            )
        found[client] = alike[key]
    return found
