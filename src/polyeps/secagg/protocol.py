"""Secure sums: the server learns the sum of clients' vectors modulo 2^bits and who is in it, and nothing else.

The protocol is that of Bonawitz et al. (2017), with self-masks, signed keys and the consistency check. Each pair of
clients agrees on a mask that one adds and the other subtracts; each client adds one of its own besides. Shares of the
secrets behind the masks let the server take off what is left when clients drop out.

It holds against a server that lies about keys, about dropouts and about the clients in the sum, together with
`colluders` clients: they learn the sum over the honest clients of one list of at least `least`, no more. Different
letters to different clients do not help either: a vector is masked with all clients that sent its client a letter, at
least `least` with itself, and that many always include one that signed the list and so masked with all clients on it.

It does not hold against a server that makes up clients (identities must be known beforehand by another way). It does
not hide who took part, nor show whether a vector is honest: one client can spoil a sum, and one client or the server
can stop it. The noise inside the vectors must hide what the sum itself reveals.

Every client works with every other. Beyond some hundred clients one would mask with a few neighbours (Bell et al.
2020); that is not implemented.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from polyeps.errors import InputError
from polyeps.secagg.client import SumClient, SumState
from polyeps.secagg.messages import Step


def take_step(
    client: SumClient, step: Step, kept: SumState | None, message: bytes, vector: NDArray[np.uint64]
) -> tuple[SumState, bytes]:
    """Return a client's state and answer after a step: for transports, which do not read the messages."""
    if step is Step.ADVERTISE:
        return client.advertise(kept)
    if kept is None:
        raise InputError(f"client {client.name!r} is asked to {step.name.lower()} before it advertised; begin there")
    if step is Step.MASK:
        return client.mask(kept, message, vector)
    later = {Step.SHARE: client.share, Step.CONFIRM: client.confirm, Step.UNMASK: client.unmask}
    return later[step](kept, message)
