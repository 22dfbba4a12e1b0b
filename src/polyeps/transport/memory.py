"""Clients in this process: a whole cohort answers as one, or one by one and as bytes, as a network would."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from polyeps.client import Cohort, answer, profiles
from polyeps.core import Algorithm, Field, Profile, Replies, Task, Total
from polyeps.server import Transport
from polyeps.transport import codec


@dataclass
class InMemory(Transport):
    """All clients answer as one batched computation."""

    cohort: Cohort
    algorithm: Algorithm
    tells: Iterable[Field] = ("epsilon", "examples")

    def profiles(self) -> tuple[Profile, ...]:
        return profiles(self.cohort, self.algorithm, self.tells)

    def __call__(self, task: Task) -> Replies:
        replies = answer(self.cohort, self.algorithm, task)
        if not replies.ids:
            return replies
        return replace(replies, received=codec.size(task.payload), sent=codec.size(codec.row(replies.payload, 0)))

    def total(self, task: Task, least: int = 1) -> Total:
        return codec.add(self(task), least)


@dataclass
class AsBytes(InMemory):
    """Every client answers for itself, and only bytes pass between it and the server."""

    def __call__(self, task: Task) -> Replies:
        sent = codec.encode(task.payload)
        answers = []
        for client in task.to:
            own = answer(
                self.cohort.alone(client), self.algorithm, replace(task, to=(client,), payload=codec.decode(sent))
            )
            if own.ids:
                content = codec.encode(codec.row(own.payload, 0))
                payload = {name: tensor[None] for name, tensor in codec.decode(content).items()}
                own = replace(own, payload=payload, received=len(sent), sent=len(content))
            answers.append(own)
        return codec.stack(answers)
