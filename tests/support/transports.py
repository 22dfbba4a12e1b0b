"""Transports and clients for tests: one client at a time, only bytes in between, or the real secure sum."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray

from polyeps.client import answer
from polyeps.clients import Clients
from polyeps.core import Replies, SumTerms, Task, Total
from polyeps.errors import InputError, SumAborted, TaskRefused
from polyeps.secagg.messages import Step, enough
from polyeps.transport import codec
from polyeps.transport.memory import InMemory
from support.secure_rounds import secure_sum

log = logging.getLogger(__name__)


def some_of(clients: Clients, rows: slice | NDArray[np.int64]) -> Clients:
    """Some of the clients, on the same ledger; of a slice, also on the same memory."""
    return replace(
        clients,
        ids=tuple(np.array(clients.ids, dtype=object)[rows]),
        data=clients.data.select(rows),
        noise_multiplier=clients.noise_multiplier[rows],
        settings=clients.settings_of(rows),
        groups=None if clients.groups is None else tuple(np.array(clients.groups, dtype=object)[rows]),
        guaranteed=clients.guaranteed[rows],
        declared=None if clients.declared is None else clients.declared[rows],
        memory={name: kept[rows] for name, kept in clients.memory.items()},
        changed={},
        keeper=None,
    )


def alone(clients: Clients, client: str) -> Clients:
    """One client by itself, on the same data, memory and ledger."""
    (place,) = clients.places([client]).tolist()
    return some_of(clients, slice(place, place + 1))


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
            own = answer(alone(self.clients, client), self.algorithm, asked)
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
