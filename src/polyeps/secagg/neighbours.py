"""With whom a client works where pairs are too many: a few neighbours on a public graph (Bell et al. 2020).

The n clients stand on a circle, in the order of their names, and each works with those that are certain numbers of
places away, on either side: k neighbours. Bell et al. let clients draw neighbours, and bound the probability that too
many of them are bad. Here the graph is fixed and public, so a server may know it when it chooses whom it corrupts and
whom it calls dropped out. What protects clients is a property of the graph, computed here: it has no small ends that
could be cut off. Let λ be the largest absolute eigenvalue of the graph beside k, C the most colluders, t the shares
among a client and its neighbours that restore its secrets, and d = t − 1 − C. `holds` checks what the proof needs
(docs/reference/soundness.md, "Secure sums among neighbours"), for whatever clients collude or are called dropped out.
"""

from __future__ import annotations

import hashlib
import math
from functools import lru_cache

import numpy as np

FEWEST = 256  # clients of a sum; with fewer, everybody works with everybody
_STEP = 8  # neighbours by which a search goes on
_SPREAD = 4  # standard deviations of the answers in a neighbourhood that may be missing by chance


@lru_cache(maxsize=16)
def offsets(clients: int, neighbours: int) -> tuple[int, ...]:
    """Return how many places away neighbours are, on one side: fixed numbers without a pattern.

    >>> offsets(20, 6)
    (2, 3, 7)
    """
    free = range(1, (clients + 1) // 2)
    mixed = sorted(free, key=lambda place: hashlib.sha256(f"{clients} {place}".encode()).digest())
    return tuple(sorted(mixed[: neighbours // 2]))


@lru_cache(maxsize=64)
def eigenvalue(clients: int, neighbours: int) -> float:
    """Return the largest absolute eigenvalue of the graph, beside the number of neighbours itself.

    The eigenvalues of a graph on a circle are the Fourier transform of its first row.
    """
    row = np.zeros(clients)
    for offset in offsets(clients, neighbours):
        row[[offset, -offset]] = 1
    return float(np.abs(np.fft.rfft(row)[1:]).max()) * (1 + 1e-9)


def shares_of(clients: int, neighbours: int, threshold: int) -> int:
    """Return how many shares of a client and its neighbours restore its secrets: as many as are likely to be left.

    Of all clients, `threshold` are left in the end; of any neighbourhood nearly as large a share, if they drop out by
    chance.
    """
    size, left = neighbours + 1, threshold / clients
    spread = math.sqrt(size * left * (1 - left) * (clients - size) / max(1, clients - 1))
    return max(1, math.floor(size * left - _SPREAD * spread))


def holds(clients: int, neighbours: int, shares: int, colluders: int) -> bool:
    """Return whether the graph is enough: a sum that comes out is over all honest clients that signed its list."""
    if neighbours % 2 or not 2 <= neighbours <= clients - 2 or not 1 <= shares <= neighbours + 1:
        return False
    inside, largest = shares - 1 - colluders, eigenvalue(clients, neighbours)
    if inside <= largest:
        return False
    # A part whose masks can all be taken off has at least this share of all clients among those that help with it,
    part = (inside - largest) / (neighbours - largest)
    # and all clients without a neighbour among these are, over the others, at most this many.
    odds = (largest / neighbours) ** 2 * (1 - part) / part
    apart = clients * odds / (1 + odds)
    return apart < inside + 1  # fewer than the neighbours that a signer has on its list, and itself


@lru_cache(maxsize=64)
def fewest(clients: int, threshold: int, colluders: int) -> int:
    """Return the fewest neighbours that are enough; 0 where everybody works with everybody.

    >>> fewest(100, 90, 0), fewest(1000, 900, 0), fewest(1000, 900, 50), fewest(1000, 501, 0)
    (0, 64, 160, 200)
    """
    if clients < FEWEST:
        return 0
    for neighbours in range(_STEP, clients // 2, _STEP):
        if holds(clients, neighbours, shares_of(clients, neighbours, threshold), colluders):
            return neighbours
    return 0
