"""Random numbers inside a model, such as dropout's: a function of the client's key, the step and the record alone.

Counter-based (Philox), so a record's draws depend neither on the other rows of a batch, nor on how clients are grouped,
nor on the device. Where a row is a person, every record of the person draws for itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from polyeps.core import Streams
from polyeps.engine.philox import normal_pair, philox

_KIND = 2  # third counter; 0 and 1 are those of the noise and of the batches
_PLACES = (1 << 32) - 1  # third counter of the keys of a person's records


def client_keys(streams: Streams) -> Tensor:
    """Return a key for each client, (n,) int64, from its own stream."""
    return torch.from_numpy(np.floor(streams.uniforms(1)[:, 0] * (2.0**53 - 1)).astype(np.int64))


@dataclass
class RowDraws:
    """The random numbers of T rows in one forward pass: each call gives new ones."""

    keys: Tensor  # (T,) int64: of the row's client
    records: Tensor  # (T,) int64: number of the record, or of the person, among its client's
    step: Tensor  # (1,) int64
    held: Tensor | None = None  # (T,) int64: number of records, where a row is all those of a person
    calls: int = field(default=0)

    @classmethod
    def fixed(cls, rows: int, device: torch.device) -> RowDraws:
        """Return the draws of rows that belong to no training: the same every time."""
        zero = torch.zeros(rows, dtype=torch.int64, device=device)
        return cls(zero, torch.arange(rows, device=device), zero.new_zeros(1))

    def again(self) -> RowDraws:
        """Return the same draws from their beginning."""
        return RowDraws(self.keys, self.records, self.step, self.held)

    def of_rows(self, rows: Tensor | list[int]) -> RowDraws:
        """Return the draws of some rows, from their beginning."""
        held = None if self.held is None else self.held[rows]
        return RowDraws(self.keys[rows], self.records[rows], self.step, held)

    def of_row(self, row: int) -> RowDraws:
        """Return the draws of a single row, from their beginning."""
        return self.of_rows([row])

    def widened(self, times: int) -> RowDraws:
        """Return the draws of `times` records of each row, a person.

        The first record draws what a person with one record would; every other one has a key of its own, made of the
        client's key, the person and the record's place. Padding is a copy of the first record and draws the same.
        """
        place = torch.arange(times, device=self.keys.device)[None, :]
        keys, records = (each[:, None].expand(-1, times) for each in (self.keys, self.records))
        low, high, _, _ = philox((place, place * 0, place * 0 + _PLACES, records), keys)
        first = place == 0
        if self.held is not None:
            first = first | (place >= self.held[:, None])
        return RowDraws(torch.where(first, keys, low | high << 32).flatten(), records.flatten(), self.step)

    def words(self, shape: tuple[int, ...]) -> Tensor:
        """Return 32-bit words, (T, *shape) int64."""
        count = torch.Size(shape).numel()
        block = torch.arange(-(-count // 4), device=self.keys.device)[None, :]
        kind = torch.full_like(block, _KIND + self.calls)
        self.calls += 1
        words = philox((block, block * 0 + self.step, kind, self.records[:, None]), self.keys[:, None])
        return torch.stack(words, dim=2).flatten(1)[:, :count].reshape(len(self.keys), *shape)

    def uniforms(self, shape: tuple[int, ...]) -> Tensor:
        """Return uniforms in [0, 1), (T, *shape) float32."""
        return (self.words(shape) >> 8).float() * 2.0**-24

    def normals(self, shape: tuple[int, ...]) -> Tensor:
        """Return standard normals, (T, *shape) float32."""
        return normal_pair(self.words(shape), self.words(shape))[0]

    def kept(self, shape: tuple[int, ...], chance: float | Tensor) -> Tensor:
        """Return a mask (T, *shape), true with a chance."""
        return self.words(shape) < chance * 2.0**32


@dataclass
class MiddlingDraws(RowDraws):
    """Draws that are all alike, to see whether a module mixes rows: dropout keeps everything, noise is zero."""

    def uniforms(self, shape: tuple[int, ...]) -> Tensor:
        return torch.full((len(self.keys), *shape), 0.5, device=self.keys.device)

    def normals(self, shape: tuple[int, ...]) -> Tensor:
        return torch.zeros((len(self.keys), *shape), device=self.keys.device)

    def kept(self, shape: tuple[int, ...], chance: float | Tensor) -> Tensor:  # noqa: ARG002
        return torch.ones((len(self.keys), *shape), dtype=torch.bool, device=self.keys.device)
