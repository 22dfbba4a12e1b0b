"""Before any data is touched: what noise each client needs, how long its budget lasts, and what it will have spent."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binom

from polyeps.accounting.affordability import affordable, fits, known_epsilon
from polyeps.accounting.calibration import calibrate
from polyeps.accounting.histories import history_of
from polyeps.core import Budget
from polyeps.errors import InputError
from polyeps.methods import dp_sgd


@dataclass(frozen=True)
class Schedule:
    """What the server proposes to all clients."""

    batch: int
    local_steps: int
    rounds: int
    participation: float

    def __post_init__(self) -> None:
        for name in ("batch", "local_steps", "rounds"):
            if getattr(self, name) < 1:
                raise InputError(f"{name.replace('_', '-')} must be at least 1, not {getattr(self, name)}")
        if not 0 < self.participation <= 1:
            raise InputError(f"participation must be above 0 and at most 1, not {self.participation}")

    @property
    def expected_rounds(self) -> int:
        """How many rounds a client joins on average, rounded up: what its noise is calibrated for."""
        return math.ceil(self.rounds * self.participation - 1e-9)


@dataclass(frozen=True)
class ClientPlan:
    """One client's prospects. `limit` says what ends its part: its budget, or the number of rounds."""

    client: str
    epsilon: float
    delta: float
    records: int
    sigma: float
    rounds_affordable: int  # at most the rounds there are
    rounds_expected: int
    spent: float  # after the rounds it is expected to join
    leaves_early: float  # probability that chance picks it more often than it can afford
    limit: Literal["budget", "rounds"]


def plan(
    clients: Sequence[tuple[str, Budget, int]],
    schedule: Schedule,
    *,
    sigma: float | None = None,
    directory: Path | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[ClientPlan]:
    """Plan DP-SGD with Poisson batches for clients (name, budget, records).

    Without `sigma` every client gets the noise that spends its budget over the rounds it is expected to join; with
    it all clients use the same noise and those with small budgets leave early.
    """
    for client, _, records in clients:
        if schedule.batch > records:
            raise InputError(f"client {client!r} has {records} records, fewer than a batch of {schedule.batch}")
    scales = _scales(clients, schedule, sigma, directory, progress)
    prospects: dict[tuple[Budget, int, float], tuple[int, float]] = {}
    plans = []
    for number, ((client, budget, records), scale) in enumerate(zip(clients, scales, strict=True)):
        if progress:
            progress(number, len(clients))
        if (budget, records, scale) not in prospects:
            prospects[budget, records, scale] = _prospect(budget, records, scale, schedule)
        rounds, spent = prospects[budget, records, scale]
        plans.append(
            ClientPlan(
                client=client,
                epsilon=budget.epsilon,
                delta=budget.delta,
                records=records,
                sigma=float(scale),
                rounds_affordable=rounds,
                rounds_expected=schedule.expected_rounds,
                spent=spent,
                leaves_early=float(binom.sf(rounds, schedule.rounds, schedule.participation)),
                limit="rounds" if rounds >= schedule.rounds else "budget",
            )
        )
    return plans


def _scales(
    clients: Sequence[tuple[str, Budget, int]],
    schedule: Schedule,
    sigma: float | None,
    directory: Path | None,
    progress: Callable[[int, int], None] | None,
) -> NDArray[np.float64]:
    scales = np.empty(len(clients))
    if sigma is not None:
        if not (math.isfinite(sigma) and sigma > 0):
            raise InputError(f"sigma must be a finite number above 0, not {sigma}")
        scales[:] = sigma
        return scales
    steps = schedule.local_steps * schedule.expected_rounds
    sizes = np.array([records for _, _, records in clients])
    for records in np.unique(sizes):
        rows = np.flatnonzero(sizes == records)
        method = dp_sgd(records=int(records), batch=schedule.batch, steps=steps)
        answer = calibrate(
            [clients[int(row)][1] for row in rows], method.price, steps, directory=directory, progress=progress
        )
        scales[rows] = answer.noise_multiplier
    return scales


def _prospect(budget: Budget, records: int, scale: float, schedule: Schedule) -> tuple[int, float]:
    """How many rounds a client can afford, and its ε after those it is expected to join."""
    price = dp_sgd(records=records, batch=schedule.batch, steps=1).price(scale)

    def within(rounds: int) -> bool:
        if rounds == 0:
            return True
        return fits(history_of(price, rounds * schedule.local_steps), budget, "zero-out", "pld")

    expected = schedule.expected_rounds
    rounds = affordable(within, schedule.rounds)
    joined = min(rounds, expected)
    if joined == 0:
        return 0, 0.0
    return rounds, known_epsilon(history_of(price, joined * schedule.local_steps), budget.delta, "zero-out", "pld")
