"""Clients in this process, which answer as one batched computation."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from polyeps.client import answer, profiles
from polyeps.clients import Clients
from polyeps.core import Algorithm, Field, Profile, Replies, SumTerms, Task, Total
from polyeps.server import Transport
from polyeps.transport import codec


@dataclass
class InMemory(Transport):
    """All clients answer as one batched computation."""

    clients: Clients
    algorithm: Algorithm
    discloses: Iterable[Field] = ("epsilon", "examples")

    def profiles(self) -> tuple[Profile, ...]:
        return profiles(self.clients, self.algorithm, self.discloses)

    def __call__(self, task: Task) -> Replies:
        replies = answer(self.clients, self.algorithm, task)
        if not replies.ids:
            return replies
        return replace(replies, received=codec.size(task.payload), sent=codec.size(codec.row(replies.payload, 0)))

    def total(self, task: Task, terms: SumTerms) -> Total:
        return codec.add(self(replace(task, summed=True)), terms)
