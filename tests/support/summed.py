"""Federations whose updates are prescribed and whose releases are summed unseen: no training, no ledger."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from polyeps.algorithms._averaging import Federation
from polyeps.client import answer
from polyeps.clients import Clients
from polyeps.core import (
    ENTER,
    PROGRESS,
    Algorithm,
    Payload,
    PerClient,
    Profile,
    Records,
    Replies,
    State,
    SumTerms,
    Task,
    Total,
    Work,
)
from polyeps.engine.noise import SeededStreams
from polyeps.models import Model, mlp
from polyeps.participation import Participation
from polyeps.server import serve
from polyeps.training import Trainer, Training
from polyeps.transport.memory import InMemory

MODEL = mlp(features=9, hidden=(7,), classes=4)  # 7 x 9 and 4 x 7 matrices with their biases
Updates = Callable[[int, Tensor], Tensor]  # of (number of the client, model)


def drawn(clients: int, size: int = MODEL.size, seed: int = 0) -> Updates:
    """Updates that share a direction, differ by client and react to the model."""
    generator = torch.Generator().manual_seed(seed)
    shared, own = torch.randn(size, generator=generator), torch.randn(clients, size, generator=generator)
    return lambda row, model: shared + own[row] - 0.1 * model


def federation(clients: int, updates: Updates, *, scale: float, clip: float = 1.0, model: Model = MODEL) -> Federation:
    """What builders are given, everybody drawn with certainty and under the same noise."""

    def run(starts: Tensor, *_: Any, settings: PerClient, rate_factor: float = 1.0, **__: Any) -> Tensor:
        return rate_factor * torch.stack([updates(int(number), starts) for number in settings["number"]])

    group = "all"
    return Federation(
        rate=1.0,
        rounds=3,
        sizes={group: clients},
        noise_for=lambda _: {group: scale},
        clip=clip,
        noise=partial(SeededStreams, 77, [group]),
        training=Training(model, cast(Trainer, run), price=None),
        learning_rate=0.1,
    )


def cohort(algorithm: Algorithm, clients: int, scale: float) -> Clients:
    """The clients, who pay nothing here."""
    ids = tuple(map(str, range(clients)))
    return Clients(
        ids=ids,
        data=Records(torch.zeros(clients, 9), torch.zeros(clients, dtype=torch.int64), torch.arange(clients + 1)),
        noise_multiplier=np.full(clients, scale),
        streams=partial(SeededStreams, 5),
        repeatable=True,
        ledger=None,
        settings={"number": np.arange(clients)},
        guaranteed=np.zeros(clients, dtype=bool),
        memory={name: torch.zeros(clients, *shape) for name, shape in algorithm.keeps.items()},
    )


@dataclass
class Watched(InMemory):
    """Keeps what was asked and what the sums were; clients may be lost on the way to one action."""

    lost: dict[str, set[str]] = field(default_factory=dict)
    tasks: list[Task] = field(default_factory=list)
    totals: list[Total] = field(default_factory=list)

    def __call__(self, task: Task) -> Replies:
        return super().__call__(replace(task, to=tuple(c for c in task.to if c not in self.lost.get(task.action, ()))))

    def total(self, task: Task, terms: SumTerms) -> Total:
        self.tasks.append(task)
        self.totals.append(super().total(task, terms))
        return self.totals[-1]


def run(
    algorithm: Algorithm, clients: int, scale: float, rounds: int = 1, lost: dict[str, set[str]] | None = None
) -> tuple[State, Watched]:
    """Rounds from a model of zeros, by the server's own loop."""
    watched = Watched(cohort(algorithm, clients, scale), algorithm, (), lost or {})
    state = serve(
        algorithm, watched, State(torch.zeros(MODEL.size)), rounds=rounds, participation=Participation(), seed=3
    )
    return state, watched


def entered(algorithm: Algorithm, clients: int, scale: float) -> Clients:
    """Clients who have paid for round 0."""
    people = cohort(algorithm, clients, scale)
    answer(people, algorithm, Task(ENTER, people.ids, {}))
    return people


def work(scale: float, payload: Payload) -> Work:
    """One client of the cohort, in the first round."""
    nothing = Records(torch.zeros(0), torch.zeros(0), torch.zeros(2, dtype=torch.int64))
    memory = {PROGRESS: torch.tensor([[1.0, 0.0]])}
    return Work(payload, nothing, np.full(1, scale), SeededStreams(1, ["x"], 0), memory=memory)


def alone_with(algorithm: Algorithm, roster: int = 0) -> State:
    """A state in whose round so many were drawn."""
    faces = tuple(Profile(str(place)) for place in range(roster))
    return State(torch.zeros(MODEL.size), enrolled=faces, roster=faces)
