"""Clients in this process: all answer as one batched computation, or one by one and as bytes, as over a network."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from polyeps.client import answer, profiles
from polyeps.clients import Clients
from polyeps.core import Algorithm, Field, Profile, Replies, SumTerms, Task, Total
from polyeps.errors import InputError, SumAborted, TaskRefused
from polyeps.secagg.messages import Step, enough
from polyeps.secagg.protocol import secure_sum
from polyeps.server import Transport
from polyeps.transport import codec

log = logging.getLogger(__name__)


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


@dataclass
class Securely(InMemory):
    """Sums are made by the real protocol, all in this process: the same bits as the plain sum, slowly.

    Clients drop out for good, at the steps that `dropouts` names. Masks hide integers only.
    """

    dropouts: Mapping[Step, set[str]] = field(default_factory=dict)

    def total(self, task: Task, terms: SumTerms) -> Total:
        replies, bits = self(replace(task, summed=True)), terms.bits
        codec.check_integers(replies.payload)
        if bits is None:
            raise InputError(f"a secure sum of {task.action!r} needs to know modulo which power of two; give bits")
        threshold = enough(len(replies.ids), terms.least)
        if len(replies.ids) < threshold:
            return replace(codec.add(replies, terms), payload={})
        shapes = {name: tensor.shape[1:] for name, tensor in replies.payload.items()}
        rows = torch.cat([tensor.flatten(1) for tensor in replies.payload.values()], 1).to(torch.int64)
        vectors = rows.cpu().numpy().astype(np.uint64)
        try:
            opened = secure_sum(vectors, bits, threshold, task.run, task.round, self.dropouts, replies.ids)
        except SumAborted:
            return replace(codec.add(replies, terms), payload={})
        payload = codec.unflattened(opened.total, shapes)
        return Total(opened.survivors, payload, replies.received, codec.sent(replies, bits))


@dataclass
class AsBytes(InMemory):
    """Every client answers for itself, and only bytes pass between it and the server."""

    def __call__(self, task: Task) -> Replies:
        sent = codec.encode(task.payload)
        return codec.stack([self._one(client, task, sent) for client in task.to], task.gives)

    def _one(self, client: str, task: Task, sent: bytes) -> Replies:
        """Return the answer of one client; a failure counts as malformed, and does not affect others."""
        asked = replace(task, to=(client,), payload=codec.decode(sent))
        try:
            own = answer(self.clients.alone(client), self.algorithm, asked)
            if not own.ids:
                return own
            content = codec.encode(codec.row(own.payload, 0))
        except TaskRefused:
            raise  # what one refuses, all do
        except Exception:
            log.exception("client %r failed at %r", client, task.action)
            return Replies((), {}, (), malformed=(client,))
        payload = {name: tensor[None] for name, tensor in codec.decode(content).items()}
        return replace(own, payload=payload, received=len(sent), sent=len(content))
