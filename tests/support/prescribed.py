"""Federations without training: a transport whose clients answer with updates that a function prescribes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from reference.federated import Vector
from torch import Tensor

from polyeps.core import Algorithm, Payload, Profile, Replies, State, Task
from polyeps.models import Model, logistic
from polyeps.participation import Participation
from polyeps.server import Round, Transport, serve
from polyeps.training import Training, sgd
from polyeps.transport import codec

MODEL = logistic(features=7, classes=3)  # 24 parameters in two tensors
TRAINING: Training = sgd(MODEL, rate=0.5, steps=1, learning_rate=0.1)  # never run here
Updates = Callable[[str, int, Vector], Vector]


def drawn(seed: int = 0, size: int = MODEL.size, spread: float = 0.5) -> Updates:
    """Updates that share a direction, differ by client and round, and react to the model."""
    shared = np.random.default_rng([seed, 99]).normal(size=size)

    def updates(client: str, number: int, model: Vector) -> Vector:
        own = np.random.default_rng([seed, int(client), number]).normal(size=size)
        return shared + spread * own - 0.1 * model

    return updates


def coordinates(payload: Payload, update: Vector, spans: Sequence[tuple[int, int]]) -> Vector:
    """What a private client uploads, from the tensors it received, number by number."""
    flat, centre = payload["basis"].double().numpy(), payload["centre"].double().numpy()
    centre = centre if len(centre) else np.zeros(len(update))
    place, found = 0, []
    for (a, b), rank in zip(spans, payload["ranks"].tolist(), strict=True):
        for _ in range(rank):
            found.append(float(np.dot(flat[place : place + b - a], update[a:b] - centre[a:b])))
            place += b - a
    assert place == len(flat)
    return np.array(found)


@dataclass
class Prescribed(Transport):
    """Clients "0", "1", … with these budgets (None: not disclosed), who answer as `updates` says."""

    epsilons: Sequence[float | None]
    updates: Updates
    per_tensor: bool = True
    model: Model = MODEL
    silent: Callable[[str, int], bool] = lambda *_: False  # who does not answer in which round
    tasks: list[Task] = field(default_factory=list)
    traffic: list[Round] = field(default_factory=list)

    def profiles(self) -> tuple[Profile, ...]:
        return tuple(Profile(str(place), epsilon=epsilon) for place, epsilon in enumerate(self.epsilons))

    def __call__(self, task: Task) -> Replies:
        self.tasks.append(task)
        ids = tuple(client for client in task.to if not self.silent(client, task.round))
        if not ids:
            return Replies((), {}, ())
        model = task.payload["model"].double().numpy()
        rows = [self.updates(client, task.round, model) for client in ids]
        name = "update"
        if task.action == "project":
            spans = (
                [(part.start, part.stop) for part in self.model.slices.values()]
                if self.per_tensor
                else [(0, len(model))]
            )
            rows, name = [coordinates(task.payload, row, spans) for row in rows], "coordinates"
        payload = {name: torch.from_numpy(np.stack(rows)).float()}
        sent = codec.size(codec.row(payload, 0))
        return Replies(ids, payload, (True,) * len(ids), codec.size(task.payload), sent)

    def run(
        self, algorithm: Algorithm, rounds: int = 4, *, share: float | None = None, start: Tensor | None = None
    ) -> State:
        """The whole run, by the server's own loop."""
        return serve(
            algorithm,
            self,
            State(torch.zeros(self.model.size) if start is None else start),
            rounds=rounds,
            participation=Participation() if share is None else Participation("uniform", share),
            seed=3,
            observe=lambda round, _: self.traffic.append(round),
        )

    @property
    def cohorts(self) -> list[list[str]]:
        """Who answered in each round, in the order of enrolment."""
        return [sorted(round.traffic, key=int) for round in self.traffic]
