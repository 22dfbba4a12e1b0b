"""Random 64-bit words, one stream per client, from which integer noise is drawn.

`core.Streams` gives floating-point uniforms and normals; a sampler that compares integers needs the bits themselves.
Seeded in simulation, keyed by the operating system's entropy when deployed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from polyeps.core import Streams
from polyeps.engine.noise import Keystream, SecretStreams, SeededStreams, derived_key

WordArray = NDArray[np.uint64]


class WordStreams(Protocol):
    """n independent streams of words; row i is client i's."""

    @property
    def clients(self) -> int: ...

    def fill(self, out: WordArray, rows: Sequence[int]) -> None:
        """Fill out[j] with the next words of client rows[j]."""


class SeededWords:
    """Words for simulation: a function of (seed, client, round, release) alone; they give no protection.

    Two releases of one round need different names, or they would have the same noise.
    """

    def __init__(self, streams: SeededStreams, release: str) -> None:
        self._generators = [np.random.Philox(key=_key(key, release)) for key in streams.keys]
        self.clients = streams.clients

    def fill(self, out: WordArray, rows: Sequence[int]) -> None:
        for mine, row in zip(out, rows, strict=True):
            mine[:] = self._generators[row].random_raw(len(mine))


class SystemWords:
    """Words for deployment: keystreams under given keys, or under fresh ones of the operating system."""

    def __init__(self, clients: int, keys: Sequence[bytes] | None = None) -> None:
        self._keystreams = [Keystream(None if keys is None else keys[row]) for row in range(clients)]
        self.clients = clients

    def fill(self, out: WordArray, rows: Sequence[int]) -> None:
        for mine, row in zip(out, rows, strict=True):
            mine[:] = self._keystreams[row].words(len(mine))


def words_of(streams: Streams, release: str) -> WordStreams:
    """Return words as secret as the streams: seeded if those are, else from the operating system.

    >>> words_of(SeededStreams(7, ["a", "b"], round=3), "update").clients
    2
    """
    if isinstance(streams, SeededStreams):
        return SeededWords(streams, release)
    if isinstance(streams, SecretStreams):
        return SystemWords(streams.clients, [derived_key(key, f"words/{release}") for key in streams.keys])
    return SystemWords(streams.clients)


def _key(stream: int, release: str) -> int:
    return int.from_bytes(hashlib.blake2b(f"{stream}/words/{release}".encode(), digest_size=16).digest(), "little")
