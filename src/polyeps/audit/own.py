"""Audit an algorithm of one's own: what its clients reply, or what its rounds make of a model, under two data sets."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from polyeps.audit.montecarlo import Floats, bound
from polyeps.audit.rows import CONFIDENCE, Row, Shown
from polyeps.audit.trial_clients import PLENTY, ask_trials, charged, check_answered, seeded
from polyeps.clients import Clients
from polyeps.core import Algorithm, Budget, Payload, Records, State
from polyeps.engine.noise import SeededStreams
from polyeps.errors import InputError
from polyeps.ledger import Ledger
from polyeps.ledger.account import BudgetTerms
from polyeps.participation import Participation
from polyeps.server import Round, serve
from polyeps.transport.memory import InMemory

Score = Callable[[Floats], Floats]  # of what was seen of each trial (n, k): larger where the first data set is likelier


def audit_algorithm(
    algorithm: Algorithm,
    model: Tensor,
    records: Records,
    neighbour: Records,
    *,
    scale: float,
    delta: float = 1e-5,
    rounds: int = 1,
    trials: int = 20_000,
    sent: Payload | None = None,
    action: str | None = None,
    rate: float = 1.0,
    groups: Mapping[str, str] | None = None,
    score: Score | None = None,
    seed: int = 0,
    confidence: float = CONFIDENCE,
    what: str = "own algorithm",
) -> Row:
    """Try to refute what clients pay for an algorithm, on two neighbouring data sets that you choose.

    Where clients add their own noise, `records` and `neighbour` are those of one client; every trial is a client that
    is asked to do an action (the first, unless named) `rounds` times with `model` and what else is `sent`, and all
    replies are looked at. Where noise is on sums over clients (`Algorithm.round_price`), they are the records of all
    clients of a federation, every trial is a run in which each is drawn with probability `rate`, and the models after
    each round are looked at.

    What is seen is scored by `score`; by default along the direction that separates a third of the trials best. The
    row's certified ε is what the ledger charged a client. It is refuted if the bound, true with `confidence`, is above.
    """
    if trials < 100:
        raise InputError(f"trials must be at least 100, not {trials}: fewer show nothing")
    if algorithm.round_price is None:
        name = action or next(iter(algorithm.actions))
        tasks: list[tuple[str, Payload]] = [(name, {"model": model, **(sent or {})})] * rounds
        look = partial(_replies, algorithm, tasks, trials, scale, delta)
    else:
        look = partial(_runs, algorithm, model, rounds, rate, groups or {}, trials, scale, delta)
    one, paid = look(records, 2 * seed)
    other, _ = look(neighbour, 2 * seed + 1)
    third = 0 if score is not None else trials // 3
    scored = score if score is not None else separating(one[:third], other[:third])
    present, absent = (scored(seen[third:]).astype(np.float32) for seen in (one, other))
    found = bound(present, absent, delta, confidence)
    return Row(what, "sound", "worst-case pair", Shown(paid, paid, found.epsilon, delta, trials))


def separating(one: Floats, other: Floats) -> Score:
    """Return the score along the difference of two samples' means, each number by how little it varies."""
    spread = one.var(0) + other.var(0)
    apart = one.mean(0) - other.mean(0)
    direction = apart / np.where(spread > 0, spread, np.where(apart != 0, 1e-12, 1.0))
    return lambda seen: seen @ direction


def _replies(
    algorithm: Algorithm,
    tasks: list[tuple[str, Payload]],
    trials: int,
    scale: float,
    delta: float,
    records: Records,
    seed: int,
) -> tuple[Floats, float]:
    """All that trials' clients reply, (trials, numbers), and what each paid."""
    found = ask_trials(algorithm, records, tasks, trials=trials, scale=scale, delta=delta, streams=seeded(seed))
    return _numbers([reply[name] for reply in found.replies for name in sorted(reply)]), found.charged


def _runs(
    algorithm: Algorithm,
    model: Tensor,
    rounds: int,
    rate: float,
    groups: Mapping[str, str],
    trials: int,
    scale: float,
    delta: float,
    records: Records,
    seed: int,
) -> tuple[Floats, float]:
    """The models after every round of each trial, (trials, numbers), and what a client paid in one of them.

    The first run has a ledger; the others have clients that pay nothing, and are quicker.
    """
    ids = tuple(str(number) for number in range(records.clients))
    participation = Participation("poisson" if rate < 1 else "full", rate)
    seen = torch.empty(trials, rounds, len(model))

    def run(number: int, ledger: Ledger | None) -> None:
        cohort = Clients(
            ids=ids,
            data=records,
            noise_multiplier=np.full(len(ids), scale),
            streams=partial(SeededStreams, seed * trials + number),
            repeatable=True,
            ledger=ledger,
            groups=tuple(groups[client] for client in ids) if groups else None,
            guaranteed=np.full(len(ids), ledger is not None),
        )
        transport = InMemory(cohort, algorithm, ("epsilon", "examples", "group"))

        def look(round: Round, state: State) -> None:
            check_answered(round)
            seen[number, state.round - 1] = state.model

        lots = seed * trials + number
        serve(algorithm, transport, State(model), rounds=rounds, participation=participation, seed=lots, observe=look)

    terms = BudgetTerms(Budget(PLENTY, delta), algorithm.unit, algorithm.adjacency)
    with tempfile.TemporaryDirectory() as folder:
        ledger = Ledger.create(Path(folder) / "ledger.db", dict.fromkeys(ids, terms))
        run(0, ledger)
        paid = charged(ledger, ids[0], delta)
        ledger.close()
    for number in range(1, trials):
        run(number, None)
    return _numbers([seen]), paid


def _numbers(tensors: list[Tensor]) -> Floats:
    together = torch.cat([tensor.flatten(1).double() for tensor in tensors], 1)
    return np.asarray(np.nan_to_num(together.numpy(), nan=1e30, posinf=1e30, neginf=-1e30), np.float64)
