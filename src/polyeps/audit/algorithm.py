"""Audits any algorithm under two neighbouring data sets, by its clients' replies or by the models of its rounds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from polyeps.audit.lower_bounds import Samples, bound_from_scores
from polyeps.audit.results import CONFIDENCE, AuditResult, Evidence
from polyeps.audit.trial_clients import ask_trials, charged, check_answered, seeded, trial_clients, trial_ledger
from polyeps.core import Algorithm, Payload, Records, State
from polyeps.errors import InputError
from polyeps.ledger import Ledger
from polyeps.participation import Participation
from polyeps.server import Round, serve
from polyeps.transport.memory import InMemory

Score = Callable[[Samples], Samples]  # of each trial's numbers (n, k): larger where the first data set is likelier


def audit_algorithm(
    algorithm: Algorithm,
    model: Tensor,
    records: Records,
    neighbour: Records,
    *,
    noise_multiplier: float,
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
    name: str = "own algorithm",
) -> AuditResult:
    """Try to refute the price of an algorithm on two neighbouring data sets.

    Where clients add their own noise, `records` and `neighbour` are those of one client; every trial is a client that
    does an action (by default the first) `rounds` times with `model` and the other tensors `sent`, and the audit sees
    all replies. Where noise is on sums over clients (`Algorithm.dues`), they are the records of all clients of a
    federation; every trial is a run in which each client is drawn with probability `rate`, and the audit sees the
    models after each round.

    `score` orders the trials; by default it is the projection that best separates a third of them. The certified ε is
    what the ledger charged a client. It is refuted if the lower bound, which holds with `confidence`, is above it.
    """
    if trials < 100:
        raise InputError(f"trials must be at least 100, not {trials}: fewer show nothing")
    trial = _Trials(algorithm, model, rounds, trials, noise_multiplier, delta, rate, groups or {})
    look: Callable[[Records, int], tuple[Samples, float]] = trial.models
    if algorithm.round_price is None:
        asked = (action or next(iter(algorithm.actions)), {"model": model, **(sent or {})})
        look = partial(trial.replies, asked)
    one, paid = look(records, 2 * seed)
    other, _ = look(neighbour, 2 * seed + 1)
    third = 0 if score is not None else trials // 3
    scored = score if score is not None else _separating(one[:third], other[:third])
    present, absent = (scored(seen[third:]).astype(np.float32) for seen in (one, other))
    found = bound_from_scores(present, absent, delta, confidence)
    return AuditResult(name, "sound", "worst-case pair", Evidence(paid, paid, found, delta, trials))


def _separating(one: Samples, other: Samples) -> Score:
    """Return the projection on the difference of two samples' means, each number divided by its variance."""
    spread = one.var(0) + other.var(0)
    apart = one.mean(0) - other.mean(0)
    direction = apart / np.where(spread > 0, spread, np.where(apart != 0, 1e-12, 1.0))
    return lambda seen: seen @ direction


@dataclass(frozen=True)
class _Trials:
    algorithm: Algorithm
    model: Tensor
    rounds: int
    trials: int
    noise_multiplier: float
    delta: float
    rate: float
    groups: Mapping[str, str]

    def replies(self, asked: tuple[str, Payload], records: Records, seed: int) -> tuple[Samples, float]:
        """Return all replies of the trials' clients, (trials, numbers), and the ε each was charged."""
        found = ask_trials(
            self.algorithm,
            records,
            [asked] * self.rounds,
            trials=self.trials,
            noise_multiplier=self.noise_multiplier,
            delta=self.delta,
            streams=seeded(seed),
        )
        return _numbers([reply[name] for reply in found.replies for name in sorted(reply)]), found.charged

    def models(self, records: Records, seed: int) -> tuple[Samples, float]:
        """Return the models after every round of each trial, (trials, numbers), and the ε a client was charged in one.

        The first run has a ledger; the clients of the others pay nothing, which is quicker.
        """
        ids = tuple(str(number) for number in range(records.clients))
        seen = torch.empty(self.trials, self.rounds, len(self.model))
        with trial_ledger(self.algorithm, ids, self.delta) as ledger:
            self._run(ids, records, ledger, seed * self.trials, seen[0])
            paid = charged(ledger, ids[0], self.delta)
        for number in range(1, self.trials):
            self._run(ids, records, None, seed * self.trials + number, seen[number])
        return _numbers([seen]), paid

    def _run(self, ids: tuple[str, ...], records: Records, ledger: Ledger | None, seed: int, seen: Tensor) -> None:
        def look(round: Round, state: State) -> None:
            check_answered(round)
            seen[state.round - 1] = state.model

        clients = trial_clients(ids, records, self.noise_multiplier, seeded(seed), ledger, self.groups)
        serve(
            self.algorithm,
            InMemory(clients, self.algorithm, ("epsilon", "examples", "group")),
            State(self.model),
            rounds=self.rounds,
            participation=Participation("poisson" if self.rate < 1 else "full", self.rate),
            seed=seed,
            observe=look,
        )


def _numbers(tensors: list[Tensor]) -> Samples:
    together = torch.cat([tensor.flatten(1).double() for tensor in tensors], 1)
    return np.asarray(np.nan_to_num(together.numpy(), nan=1e30, posinf=1e30, neginf=-1e30), np.float64)
