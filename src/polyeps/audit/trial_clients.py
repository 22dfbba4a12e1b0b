"""Clients for trials: each answers through `client.answer` with its own random streams, its own account and equal data.

Charges are read from the ledger, so that an audit compares the price that was paid with the evidence in the replies.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
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

_BUDGET = 1e3  # the ε of every account: no client of a trial is to decline
StreamsOf = Callable[[Sequence[str], int], Streams]


@dataclass(frozen=True)
class Answers:
    """The replies of all trials to each task, and the ε that a trial was charged for all of them."""

    replies: list[Payload]  # (trials, ...) each
    charged: float


def seeded(seed: int) -> StreamsOf:
    """Return the streams of simulated clients."""
    return partial(SeededStreams, seed)


def deployed(ids: Sequence[str], _: int) -> Streams:
    """Return the streams of deployed clients."""
    return SystemStreams(len(ids))


@contextmanager
def trial_ledger(algorithm: Algorithm, ids: Sequence[str], delta: float) -> Iterator[Ledger]:
    """Give clients accounts that can afford all trials."""
    terms = BudgetTerms(Budget(_BUDGET, delta), algorithm.unit, algorithm.adjacency, person=algorithm.person)
    with (
        tempfile.TemporaryDirectory() as folder,
        closing(Ledger.create(Path(folder) / "ledger.db", dict.fromkeys(ids, terms))) as ledger,
    ):
        yield ledger


def trial_clients(
    ids: tuple[str, ...],
    records: Records,
    noise_multiplier: float,
    streams: StreamsOf,
    ledger: Ledger | None,
    groups: Mapping[str, str] | None = None,
) -> Clients:
    """Return clients with equal noise multipliers; without a ledger they pay nothing."""
    return Clients(
        ids=ids,
        data=records,
        noise_multiplier=np.full(len(ids), noise_multiplier),
        streams=streams,
        repeatable=streams is not deployed,
        ledger=ledger,
        groups=tuple(groups[client] for client in ids) if groups else None,
        guaranteed=np.full(len(ids), ledger is not None),
    )


def charged(ledger: Ledger, client: str, delta: float) -> float:
    """Return the ε of all charges to a client, by the exact accountant, whatever schedule its ledger follows."""
    account = ledger.account(client)
    if not account.history:
        return 0.0
    return known_epsilon(account.history, delta, account.terms.adjacency, best_accountant(account.history))


def check_answered(round: Round) -> None:
    """Refuse a round in which clients did not answer: it would be no evidence."""
    if round.invited and len(round.traffic) < len(round.invited):
        missing = len(round.invited) - len(round.traffic)
        raise InputError(f"{missing} of {len(round.invited)} clients drawn for a round of the audit did not answer")


def ask_trials(
    algorithm: Algorithm,
    records: Records,
    tasks: Sequence[tuple[str, Payload]],
    *,
    trials: int,
    noise_multiplier: float,
    delta: float,
    streams: StreamsOf,
) -> Answers:
    """Have `trials` clients with the records of one client do tasks (action and payload), one per round."""
    if records.clients != 1:
        raise InputError(f"records must be those of 1 client, who is tried many times, not of {records.clients}")
    if algorithm.round_price is not None:
        raise InputError("clients of this algorithm add no noise of their own; audit its rounds instead")
    ids = tuple(f"trial {number}" for number in range(trials))
    with trial_ledger(algorithm, ids, delta) as ledger:
        clients = trial_clients(ids, records.select([0] * trials), noise_multiplier, streams, ledger)
        replies = []
        for number, (action, payload) in enumerate(tasks):
            found = answer(clients, algorithm, Task(action, ids, payload, run="audit", round=number))
            if found.ids != ids:
                raise InputError(f"{trials - len(found.ids)} of {trials} clients declined {action!r} in the audit")
            replies.append(found.payload)
        return Answers(replies, charged(ledger, ids[0], delta))
