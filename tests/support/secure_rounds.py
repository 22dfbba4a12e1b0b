"""Secure sums in one process: as a whole, or one step at a time, so that a test can change what is sent in between."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from numpy.typing import NDArray

from polyeps.errors import InputError
from polyeps.secagg import masks
from polyeps.secagg.client import SumClient, SumState
from polyeps.secagg.messages import Step, SumSetup, open_signed, stamp
from polyeps.secagg.server import Server, Sum
from polyeps.secagg.shamir import Entropy

# (step, client, message) -> the message as it arrives at the server; None: it is lost, and the client drops out.
Carry = Callable[[Step, str, bytes], bytes | None]


def plain_sum(rows: NDArray[np.uint64], bits: int) -> NDArray[np.uint64]:
    """Return the sum of rows modulo 2^bits, without any protocol.

    >>> plain_sum(np.array([[1, 200], [2, 100]], np.uint64), bits=8)
    array([ 3, 44], dtype=uint64)
    """
    total: NDArray[np.uint64] = rows.sum(0, dtype=np.uint64) & np.uint64(2**bits - 1)
    return total


def secure_sum(
    rows: NDArray[np.uint64],
    bits: int,
    threshold: int,
    run: str,
    round: int,
    dropouts: Mapping[Step, set[str]] | None = None,
    ids: Sequence[str] | None = None,
    *,
    honest: int = 1,
    colluders: int = 0,
    neighbours: int = 0,
    entropy: Entropy = os.urandom,
) -> Sum:
    """Return the same sum by the protocol, all clients in this process: row i is that of client ids[i].

    `dropouts` names the clients whose message of a step is lost; they drop out for good. Identities are made for the
    occasion.

    >>> secure_sum(np.array([[1, 200], [2, 100]], np.uint64), bits=8, threshold=2, run="doc", round=1)
    Sum(total=array([ 3, 44], dtype=uint64), survivors=('0', '1'))
    """
    names = [str(place) for place in range(len(rows))] if ids is None else list(ids)
    if rows.ndim != 2 or len(set(names)) != len(rows):
        raise InputError(f"{len(set(names))} different names are given for rows of shape {rows.shape}; give one a row")
    lost = dropouts or {}
    setup, clients = seat(names, entropy, run, round, bits, rows.shape[1], threshold, honest, colluders, neighbours)
    vectors = dict(zip(names, rows, strict=True))
    return exchange(setup, clients, vectors, lambda step, name, sent: None if name in lost.get(step, ()) else sent)


def seat(
    names: Sequence[str],
    entropy: Entropy,
    run: str,
    round: int,
    bits: int,
    length: int,
    threshold: int,
    honest: int = 1,
    colluders: int = 0,
    neighbours: int = 0,
) -> tuple[SumSetup, dict[str, SumClient]]:
    """Return clients with identities made for the occasion, and the setup that lists them."""
    identities = {name: Ed25519PrivateKey.from_private_bytes(entropy(32)) for name in names}
    public = {name: key.public_key().public_bytes_raw() for name, key in identities.items()}
    setup = SumSetup(run, round, public, bits, length, threshold, honest, colluders, neighbours)
    return setup, {name: SumClient(setup, name, key, entropy) for name, key in identities.items()}


def exchange(
    setup: SumSetup, clients: Mapping[str, SumClient], vectors: Mapping[str, NDArray[np.uint64]], carry: Carry
) -> Sum:
    """Run all steps between clients and a server. A client's state goes to bytes and back between any two."""
    server = Server(setup)
    kept: dict[str, bytes] = {}
    asked = dict.fromkeys(clients, b"")
    for step in Step:
        for name, message in asked.items():
            before = SumState.decode(kept[name]) if name in kept else None
            after, answer = clients[name].take(step, before, message, vectors[name])
            kept[name] = after.encode()
            arrived = carry(step, name, answer)
            if arrived is not None:
                server.receive(name, arrived)
        if step is not Step.UNMASK:
            asked = server.advance()
    return server.finish()


def seeded(seed: int) -> Entropy:
    """Bytes that are the same in every run of a test."""
    return np.random.default_rng(seed).bytes


class Walk:
    """Some clients and a server that stand before a step: nothing of it is answered yet."""

    def __init__(
        self,
        before: Step,
        names: Sequence[str] = "abcd",
        vector: NDArray[np.uint64] | None = None,  # the same for everybody; zeros, if not given
        bits: int = 16,
        threshold: int = 3,
        run: str = "run",
        round: int = 1,
        seed: int = 0,
        colluders: int = 0,
        neighbours: int = 0,
        late: str = "",  # whose masked vector does not arrive
    ) -> None:
        self.vector = np.zeros(3, np.uint64) if vector is None else vector
        length = len(self.vector)
        sizes = (bits, length, threshold, 1, colluders, neighbours)
        self.setup, self.clients = seat(list(names), seeded(seed), run, round, *sizes)
        self.server = Server(self.setup)
        self.asked = dict.fromkeys(self.clients, b"")  # what the server sent each client for the present step
        self.past: dict[str, list[SumState]] = {name: [] for name in names}  # what each kept after each step
        self.down: dict[Step, dict[str, bytes]] = {}  # all the server sent
        self.up: dict[Step, dict[str, bytes]] = {}  # all it was sent
        self.late = late
        for step in Step:
            if step == before:
                break
            self.answer_all(step)
            self.asked = self.down[Step(step + 1)] = self.server.advance()

    def answer(self, name: str, step: Step, content: bytes | None = None) -> bytes:
        """A client's answer to what the server sent, or to something else."""
        kept = self.past[name][-1] if self.past[name] else None
        message = self.asked[name] if content is None else content
        after, sent = self.clients[name].take(step, kept, message, self.vector)
        self.past[name].append(after)
        return sent

    def answer_all(self, step: Step) -> None:
        """Everybody who is asked answers, and the server takes it, but from those who are late."""
        self.up[step] = {name: self.answer(name, step) for name in self.asked}
        for name, content in self.up[step].items():
            if not (step is Step.MASK and name in self.late):
                self.server.receive(name, content)

    def lie(self, step: Step, to: str, body: bytes) -> bytes:
        """A client's answer to a message a lying server made up."""
        return self.answer(to, step, stamp(self.setup, step, to, body))

    def masked(self, name: str) -> masks.Words:
        """What the server sees of a client's vector."""
        return masks.from_bytes(open_signed(self.setup, Step.MASK, name, self.up[Step.MASK][name]), self.setup.bits)
