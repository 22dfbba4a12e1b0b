"""Secure sums: the server learns the sum of clients' vectors modulo 2^bits and who is in it, and nothing else.

The protocol is that of Bonawitz et al. (2017), with self-masks, signed keys and the consistency check. Each pair of
clients agrees on a mask that one adds and the other subtracts; each client adds one of its own besides. Shares of the
secrets behind the masks let the server take off what is left when clients drop out.

It holds against a server that lies about keys, about who dropped out and about who is in the sum, together with
`colluders` clients: they learn the sum over the honest clients of one list of at least `least`, no more. Nor does it
help to bring clients different letters: a vector is masked with everybody its client had a letter from, at least
`least` with itself, and that many always include one who signed the list and so masked with everybody on it.

It does not hold against a server that makes up clients (identities must be known beforehand by another way), nor does
it hide who took part, nor say whether a vector is honest: a client can spoil a sum, and anybody can stop one. What the
sum itself gives away is for the noise inside the vectors to hide.

Every client works with every other. Beyond some hundred clients one would mask with a few neighbours (Bell et al.
2020); that is not done here.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from numpy.typing import NDArray

from polyeps.errors import InputError
from polyeps.secagg.client import Agent, Kept
from polyeps.secagg.messages import Step, Terms
from polyeps.secagg.server import Server, Sum
from polyeps.secagg.shamir import Entropy

# What becomes of a client's message on its way to the server; None: it is lost, and the client with it.
Carry = Callable[[Step, str, bytes], bytes | None]


def plain_sum(rows: NDArray[np.uint64], bits: int) -> NDArray[np.uint64]:
    """The sum of rows modulo 2^bits, by somebody who sees them all.

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
    entropy: Entropy = os.urandom,
) -> Sum:
    """The same sum by the protocol, all clients in this process: row i is that of client ids[i].

    `dropouts` says whose message of a step is lost; such a client is not heard of again. Identities are made for the
    occasion.

    >>> secure_sum(np.array([[1, 200], [2, 100]], np.uint64), bits=8, threshold=2, run="doc", round=1)
    Sum(total=array([ 3, 44], dtype=uint64), survivors=('0', '1'))
    """
    names = [str(place) for place in range(len(rows))] if ids is None else list(ids)
    if rows.ndim != 2 or len(set(names)) != len(rows):
        raise InputError(f"{len(set(names))} different names are given for rows of shape {rows.shape}; give one a row")
    lost = dropouts or {}
    terms, agents = seat(names, entropy, run, round, bits, rows.shape[1], threshold, honest, colluders)
    vectors = dict(zip(names, rows, strict=True))
    return exchange(terms, agents, vectors, lambda step, name, sent: None if name in lost.get(step, ()) else sent)


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
) -> tuple[Terms, dict[str, Agent]]:
    """Clients with identities made for the occasion, and the terms that list them."""
    identities = {name: Ed25519PrivateKey.from_private_bytes(entropy(32)) for name in names}
    public = {name: key.public_key().public_bytes_raw() for name, key in identities.items()}
    terms = Terms(run, round, public, bits, length, threshold, honest, colluders)
    return terms, {name: Agent(terms, name, key, entropy) for name, key in identities.items()}


def exchange(terms: Terms, agents: Mapping[str, Agent], vectors: Mapping[str, NDArray[np.uint64]], carry: Carry) -> Sum:
    """All steps between clients and a server. What a client keeps goes to bytes and back between any two."""
    server = Server(terms)
    kept: dict[str, bytes] = {}
    asked = dict.fromkeys(agents, b"")
    for step in Step:
        for name, message in asked.items():
            before = Kept.decode(kept[name]) if name in kept else None
            after, answer = take_step(agents[name], step, before, message, vectors[name])
            kept[name] = after.encode()
            arrived = carry(step, name, answer)
            if arrived is not None:
                server.receive(name, arrived)
        if step is not Step.UNMASK:
            asked = server.advance()
    return server.finish()


def take_step(
    agent: Agent, step: Step, kept: Kept | None, message: bytes, vector: NDArray[np.uint64]
) -> tuple[Kept, bytes]:
    """A client's answer to a step, by the step's number: for whoever carries messages and does not read them."""
    if step is Step.ADVERTISE:
        return agent.advertise(kept)
    if kept is None:
        raise InputError(f"client {agent.name!r} is asked to {step.name.lower()} before it advertised; begin there")
    if step is Step.MASK:
        return agent.mask(kept, message, vector)
    later = {Step.SHARE: agent.share, Step.CONFIRM: agent.confirm, Step.UNMASK: agent.unmask}
    return later[step](kept, message)
