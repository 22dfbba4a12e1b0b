"""Random streams, one per client: seeded in simulation, the operating system's entropy when deployed.

A client's stream is independent of the other clients, so its draws do not depend on the cohort, on chunk sizes or on
numbering. Batches and noise come from two separate streams of a client.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Sequence

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext, algorithms, modes
from numpy.typing import NDArray
from torch import Tensor

from polyeps.core import Streams
from polyeps.engine import philox
from polyeps.errors import InputError

# Words turned into normals at a time, so that intermediate values fit into the cache. Results for a seed depend on it,
# since the words of a tile are split into radii and angles.
TILE = 1 << 16
_ZEROS = memoryview(bytes(8 * TILE))  # encrypted, they are the keystream
SERVER_SECRET_BYTES = 32
FLOATS_LEAK = (
    "noise in floating point is for simulation only: its low digits leak; choose a release on integers "
    '(noise = "discrete-gaussian" for secure sums, value = "grid-pm" or "duchi" for FedSel)'
)


class SeededStreams:
    """Streams for simulation: a fast function of (seed, client, round) alone.

    Batches come from Philox, which is the same on any device; noise on the CPU from AES in counter mode, the fastest
    where processors compute it. Whoever knows the seed knows both, so they give no protection. Normals are made by Box
    and Muller's method in float32 from 32-bit uniforms, so they end at 6.7 standard deviations.

    >>> SeededStreams(7, ["a", "b"], 0).uniforms(2)[1] == SeededStreams(7, ["b"], 0).uniforms(2)[0]
    array([ True,  True])
    """

    def __init__(self, seed: int, ids: Sequence[int | str], round: int, *, exact: bool = False) -> None:
        self.exact = exact  # to compute as a deployed client would, repeatably: for tests and audits
        self.keys = [_key(seed, client, round) for client in ids]
        if len(set(self.keys)) != len(self.keys):
            raise InputError("two clients of the cohort have the same id; give each client its own")
        self._uniforms_drawn = 0
        self._noise: list[CipherContext | None] = [None] * len(self.keys)

    @property
    def clients(self) -> int:
        return len(self.keys)

    def select(self, rows: Sequence[int]) -> SeededStreams:
        chosen = SeededStreams.__new__(SeededStreams)
        chosen.exact = self.exact
        chosen.keys = [self.keys[i] for i in rows]
        chosen._uniforms_drawn = self._uniforms_drawn
        chosen._noise = [self._noise[i] for i in rows]
        return chosen

    def for_release(self, name: str) -> SeededStreams:
        """Return separate streams for one of several releases of the round."""
        chosen = self.select([])
        chosen.keys = [_key(key, name, 0) for key in self.keys]
        chosen._noise = [None] * len(chosen.keys)
        return chosen

    def uniforms(self, count: int) -> NDArray[np.float64]:
        drawn: NDArray[np.float64] = self.uniforms_on(count, torch.device("cpu")).numpy()
        return drawn

    def uniforms_on(self, count: int, device: torch.device) -> Tensor:
        """Return the same uniforms, made on a device."""
        first, self._uniforms_drawn = self._uniforms_drawn, self._uniforms_drawn + count
        return philox.uniforms(self.keys_on(device), first, count)

    def keys_on(self, device: torch.device) -> Tensor:
        """Return the streams' keys as Philox takes them, (n,) int64."""
        return torch.tensor([key & (2**63 - 1) for key in self.keys], dtype=torch.int64, device=device)

    def normals(self, out: Tensor, rows: Sequence[int]) -> None:
        if self.exact:
            raise InputError(FLOATS_LEAK)
        _, steps, d = out.shape
        half = (d + 1) // 2
        place = out.numpy()
        if steps * half > TILE:
            words = np.empty(min(half, TILE), np.uint64)
            for row in rows:
                for step in range(steps):
                    for first in range(0, half, TILE):
                        last = min(first + TILE, half)
                        some = words[: last - first]
                        self._fill(row, some)
                        _box_muller(some, place[row, step, first:last], place[row, step, half + first : half + last])
            return
        together = max(1, TILE // (steps * half))
        words = np.empty((min(together, len(rows)), steps, half), np.uint64)
        for begin in range(0, len(rows), together):
            chosen = list(rows[begin : begin + together])
            for i, row in enumerate(chosen):
                self._fill(row, words[i])
            neighbours = chosen[-1] - chosen[0] == len(chosen) - 1
            block = place[chosen[0] : chosen[-1] + 1] if neighbours else np.empty((len(chosen), steps, d), np.float32)
            _box_muller(words[: len(chosen)], block[..., :half], block[..., half:])
            if not neighbours:
                place[chosen] = block

    def _fill(self, row: int, words: NDArray[np.uint64]) -> None:
        """Fill contiguous words with the next ones of a row's noise stream."""
        keystream = self._noise[row]
        if keystream is None:  # made on first use: a cohort on a device needs none
            keystream = self._noise[row] = _aes_counter(self.keys[row])
        keystream.update_into(_ZEROS[: words.nbytes], words.reshape(-1).view(np.uint8).data)


class SystemStreams:
    """Streams for deployment: ChaCha20 keystreams under keys from the operating system that are not stored.

    They give uniforms, for batches, and no normals: floating-point noise leaks in its low digits (Mironov 2012). A
    deployed client releases integers with integer noise (`mechanisms.grid_sums`, `mechanisms.random_words`).
    """

    exact = True

    def __init__(self, clients: int) -> None:
        self._keystreams = [Keystream() for _ in range(clients)]

    @property
    def clients(self) -> int:
        return len(self._keystreams)

    def select(self, rows: Sequence[int]) -> SystemStreams:
        chosen = SystemStreams(0)
        chosen._keystreams = [self._keystreams[i] for i in rows]
        return chosen

    def uniforms(self, count: int) -> NDArray[np.float64]:
        words = [stream.words(count) for stream in self._keystreams]
        # in (0, 1], from the upper 53 bits of each word
        upper = np.stack(words) >> np.uint64(11) if words else np.empty((0, count), np.uint64)
        return (upper + np.uint64(1)).astype(np.float64) * 2.0**-53

    def normals(self, out: Tensor, rows: Sequence[int]) -> None:  # noqa: ARG002
        raise InputError(FLOATS_LEAK)


def normals_for(streams: Streams, values: Tensor, release: str) -> Tensor:
    """Return standard normals of the shape of values (n, k), on their device.

    Seeded streams start again whenever a round's streams are created, so two releases of one round would have the same
    noise; `release` names the release. Other streams never repeat. Seeded noise for a device is drawn there.
    """
    if streams.exact:
        raise InputError(FLOATS_LEAK)
    drawn = torch.zeros_like(values, dtype=torch.float32)
    if isinstance(streams, SeededStreams):
        streams = streams.for_release(release)
        if values.is_cuda:
            first = torch.zeros(1, dtype=torch.int64, device=values.device)
            philox.fill_normals(drawn, streams.keys_on(values.device), first)
            return drawn
    held = drawn.cpu()[:, None]
    streams.normals(held, range(len(held)))
    return held[:, 0].to(values)


def _box_muller(words: NDArray[np.uint64], cosines: NDArray[np.float32], sines: NDArray[np.float32]) -> None:
    """Fill cosines (..., h) and sines (..., h or h - 1) with normals, two from each word (..., h)."""
    bits = words.view(np.int32)
    half = words.shape[-1]
    radius = np.empty(words.shape, np.float32)
    angle = np.empty_like(radius)
    # u in (0, 1] has full relative precision near 0, which gives the tails.
    np.copyto(radius, bits[..., :half])
    np.square(radius, out=radius)
    np.multiply(radius, np.float32(2.0**-62), out=radius)
    np.add(radius, np.float32(2.0**-64), out=radius)
    np.log(radius, out=radius)  # 2 ln u
    np.negative(radius, out=radius)
    np.sqrt(radius, out=radius)
    np.copyto(angle, bits[..., half:])
    np.multiply(angle, np.float32(math.pi * 2.0**-31), out=angle)
    cosine = np.cos(angle)
    np.multiply(cosine, radius, out=cosines)
    np.sin(angle, out=angle)
    kept = sines.shape[-1]
    np.multiply(angle[..., :kept], radius[..., :kept], out=sines)


def _aes_counter(key: int) -> CipherContext:
    """Return the keystream of AES-128 in counter mode for a stream's key."""
    own = hashlib.blake2b(b"noise", key=key.to_bytes(16, "little"), digest_size=16).digest()
    return Cipher(algorithms.AES(own), modes.CTR(bytes(16))).encryptor()


class SecretStreams(SystemStreams):
    """Streams of a deployed server: the same again for whoever holds its secret, so that a restart repeats a round.

    The secret is 32 bytes of the system's entropy, which the server keeps; without it, they are as good as fresh ones.
    """

    def __init__(self, secret: bytes, ids: Sequence[str], round: int) -> None:
        if len(secret) != SERVER_SECRET_BYTES:
            raise InputError(
                f"a server's secret has {SERVER_SECRET_BYTES} bytes, not {len(secret)}; draw it with os.urandom"
            )
        self.keys = [derived_key(secret, f"{round}/{client}") for client in ids]
        self._keystreams = [Keystream(derived_key(key, "uniforms")) for key in self.keys]

    def select(self, rows: Sequence[int]) -> SecretStreams:
        chosen = SecretStreams.__new__(SecretStreams)
        chosen.keys = [self.keys[i] for i in rows]
        chosen._keystreams = [self._keystreams[i] for i in rows]
        return chosen


def derived_key(key: bytes, purpose: str) -> bytes:
    """Return the key of one purpose, which says nothing about that of another."""
    return hashlib.blake2b(purpose.encode(), key=key, digest_size=SERVER_SECRET_BYTES).digest()


class Keystream:
    """The ChaCha20 keystream under a key, by default a fresh one."""

    def __init__(self, key: bytes | None = None) -> None:
        # Any nonce will do: the key is used once.
        key = os.urandom(SERVER_SECRET_BYTES) if key is None else key
        self._encryptor = Cipher(algorithms.ChaCha20(key, bytes(16)), mode=None).encryptor()

    def words(self, count: int) -> NDArray[np.uint64]:
        """Return the next 64-bit words."""
        return np.frombuffer(self._encryptor.update(bytes(8 * count)), np.uint64)


def _key(seed: int, client: int | str, round: int) -> int:
    digest = hashlib.blake2b(f"{int(seed)}/{int(round)}/{client}".encode(), digest_size=16).digest()
    return int.from_bytes(digest, "little")
