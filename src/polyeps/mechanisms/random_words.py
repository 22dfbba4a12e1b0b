"""Random 64-bit words, one stream per client, from which integer noise is drawn.

`core.Streams` gives floating-point uniforms and normals; a sampler that compares integers needs the bits themselves.
Seeded in simulation, keyed by the operating system's entropy when deployed.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray

from polyeps.core import Streams
from polyeps.engine.noise import SeededStreams

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
    """Words for deployment: AES-256 in counter mode under keys from the operating system that are not stored."""

    def __init__(self, clients: int) -> None:
        # The counter may start anywhere: each key is used once.
        self._encryptors = [
            Cipher(algorithms.AES(os.urandom(32)), modes.CTR(bytes(16))).encryptor() for _ in range(clients)
        ]
        self.clients = clients

    def fill(self, out: WordArray, rows: Sequence[int]) -> None:
        for mine, row in zip(out, rows, strict=True):
            mine[:] = np.frombuffer(self._encryptors[row].update(bytes(mine.nbytes)), np.uint64)


def words_of(streams: Streams, release: str) -> WordStreams:
    """Return words as secret as the streams: seeded if those are, else from the operating system.

    >>> words_of(SeededStreams(7, ["a", "b"], round=3), "update").clients
    2
    """
    if isinstance(streams, SeededStreams):
        return SeededWords(streams, release)
    return SystemWords(streams.clients)


def _key(stream: int, release: str) -> int:
    return int.from_bytes(hashlib.blake2b(f"{stream}/words/{release}".encode(), digest_size=16).digest(), "little")
