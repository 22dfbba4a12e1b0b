"""Many trials of the code that clients run: each is a client of one cohort, which answers through `client.answer`.

A trial's client has its own random streams, its own account and the same records as all others. What it is charged is
read from the ledger afterwards: an audit compares what was paid for with what replies show.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from polyeps.accounting import best_accountant
from polyeps.accounting.affordability import known_epsilon
from polyeps.client import answer
from polyeps.clients import Clients
from polyeps.core import Algorithm, Budget, Payload, Records, Streams, Task
from polyeps.engine.noise import SeededStreams, SystemStreams
from polyeps.errors import InputError
from polyeps.ledger import Ledger
from polyeps.ledger.account import BudgetTerms
from polyeps.server import Round

PLENTY = 1e3  # the ε of a trial's account: no trial is to decline
StreamsOf = Callable[[Sequence[str], int], Streams]


@dataclass(frozen=True)
class Answers:
    """The replies of all trials to each task, and the ε that a trial was charged for all of them."""

    replies: list[Payload]  # (trials, ...) each
    charged: float


def seeded(seed: int) -> StreamsOf:
    """The streams of simulations."""
    return partial(SeededStreams, seed)


def deployed(ids: Sequence[str], _: int) -> Streams:
    """The streams of deployed clients."""
    return SystemStreams(len(ids))


def charged(ledger: Ledger, client: str, delta: float) -> float:
    """Return the ε of all that a client was charged, by the exact accountant, whatever rule its ledger spends by."""
    account = ledger.account(client)
    if not account.history:
        return 0.0
    return known_epsilon(account.history, delta, account.terms.adjacency, best_accountant(account.history))


def check_answered(round: Round) -> None:
    """Refuse a round in which clients did not do what was asked: an attack on nothing would refute nothing."""
    if round.invited and len(round.traffic) < len(round.invited):
        missing = len(round.invited) - len(round.traffic)
        raise InputError(f"{missing} of {len(round.invited)} clients drawn for a round of the audit did not answer")


def ask_trials(
    algorithm: Algorithm,
    records: Records,
    tasks: Sequence[tuple[str, Payload]],
    *,
    trials: int,
    scale: float,
    delta: float,
    streams: StreamsOf,
) -> Answers:
    """Have `trials` clients with the records of one client do tasks (action and payload), a round each."""
    if records.clients != 1:
        raise InputError(f"records must be those of 1 client, who is tried many times, not of {records.clients}")
    if algorithm.round_price is not None:
        raise InputError("clients of this algorithm add no noise of their own; audit its rounds instead")
    ids = tuple(f"trial {number}" for number in range(trials))
    terms = BudgetTerms(Budget(PLENTY, delta), algorithm.unit, algorithm.adjacency)
    with tempfile.TemporaryDirectory() as folder:
        ledger = Ledger.create(Path(folder) / "ledger.db", dict.fromkeys(ids, terms))
        cohort = Clients(
            ids=ids,
            data=records.select([0] * trials),
            noise_multiplier=np.full(trials, scale),
            streams=streams,
            repeatable=streams is not deployed,
            ledger=ledger,
        )
        replies = []
        for number, (action, payload) in enumerate(tasks):
            found = answer(cohort, algorithm, Task(action, ids, payload, run="audit", round=number))
            if found.ids != ids:
                raise InputError(f"{trials - len(found.ids)} of {trials} clients declined {action!r} in the audit")
            replies.append(found.payload)
        paid = charged(ledger, ids[0], delta)
        ledger.close()
    return Answers(replies, paid)
