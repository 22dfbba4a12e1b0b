"""Weights of clients for every row of a model's tensors: what strict clients alone know, where that is proved.

`client_effects` weighs clients by what is to be expected of clients that differ by chance. A class that no client of
little noise holds is worse than chance. All clients of little noise agree then, and among all coordinates of noisy
clients its sign is too weak to be seen; but it can be seen within the few directions in which the rows of a tensor
moved in the first rounds. So clients are compared there, row by row, over all later rounds. Where the mean with some
weights is proved to differ from the plain mean by β, the row's error is taken to be larger by ρκβ², with ρ its width
over 300: an error within these directions, in which records differ most, harms predictions more than noise does, which
takes all directions alike. The row gets the weights of least error among those that balance noise against some κτ².

With nothing proved, these are the weights of `client_effects`.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod, sqrt

import torch
from torch import Tensor

from polyeps.aggregation.client_effects import balancing
from polyeps.aggregation.subspace import Slices
from polyeps.core import Payload

FIRST = 5  # rounds whose path gives the directions: later the noise of all rounds hides what moved the model
_RANK = 10  # most directions of a tensor
_PROVED = 3.0  # standard deviations of noise that a difference must exceed
_SPREAD_OUT = 300.0  # as many directions as matter for predictions, roughly; from docs/decisions/0016
_TRIED = 32  # larger values of κτ² that are compared
_NAMES = ("row_rounds", "row_directions", "row_sums", "row_counts")


@dataclass(frozen=True)
class _Part:
    """A tensor as rows of weights."""

    start: int
    rows: int
    width: int

    @property
    def rank(self) -> int:
        return min(self.rows, self.width, _RANK)

    def of(self, updates: Tensor) -> Tensor:
        """This tensor (k, rows, width) of updates (k, d)."""
        found = updates[:, self.start : self.start + self.rows * self.width]
        return found.reshape(len(updates), self.rows, self.width)


@dataclass
class RowEffects:
    """What is known about n clients along some directions of each tensor."""

    parts: tuple[_Part, ...]
    rounds: Tensor  # () rounds so far
    directions: Tensor  # first the path (d,) of the model, then the directions of all tensors, one after another
    sums: Tensor  # (n, l) of all updates of each client along these directions, row by row
    counts: Tensor  # (n,) float64: updates in these sums

    @classmethod
    def restored(cls, kept: Payload, clients: int, slices: Slices) -> RowEffects:
        """Return what was kept, or nothing known yet."""
        shapes = [(part.start, part.shape) for part in slices.values()]
        rows = [shape[0] if len(shape) > 1 else 1 for _, shape in shapes]
        parts = tuple(
            _Part(start, count, prod(shape) // count) for (start, shape), count in zip(shapes, rows, strict=True)
        )
        size, along = sum(part.rows * part.width for part in parts), sum(part.rows * part.rank for part in parts)
        sums, counts = torch.zeros(clients, along), torch.zeros(clients, dtype=torch.float64)
        found = cls(parts, torch.zeros((), dtype=torch.int64), torch.zeros(size), sums, counts)
        if _NAMES[0] in kept:
            found.rounds, found.directions = kept[_NAMES[0]], kept[_NAMES[1]]
            for held, name in ((sums, _NAMES[2]), (counts, _NAMES[3])):
                held[: len(kept[name])] = kept[name]  # nothing is known yet of clients that joined since
        return found

    @property
    def kept(self) -> dict[str, Tensor]:
        """What to keep until the next round."""
        return dict(zip(_NAMES, (self.rounds, self.directions, self.sums, self.counts), strict=True))

    def take(self, clients: Tensor, updates: Tensor, variances: Tensor) -> None:
        """Take note of updates (k, d) with noise variances (k,), those of some clients (k,) in one round."""
        self.rounds = self.rounds + 1
        if self.rounds <= FIRST:
            best = 1 / variances.clamp(min=torch.finfo(torch.float64).tiny)
            self.directions = self.directions + ((best / best.sum()).to(updates) @ updates).cpu()
            if self.rounds == FIRST:
                self.directions = torch.cat([_directions(part, self.directions) for part in self.parts])
            return
        self.sums[clients] += self._along(updates)
        self.counts[clients] += 1

    def weights(self, clients: Tensor, variances: Tensor, effects: float, persistence: float) -> Tensor:
        """Return the weights (rows of all tensors, k) of some clients (k,); every row adds up to 1.

        Clients have noise variances (k,); effects is κτ² and persistence κ.
        """
        base = balancing(torch.tensor([effects], dtype=torch.float64), variances)
        if self.rounds <= FIRST or not bool((variances > 0).all()):
            return base.expand(sum(part.rows for part in self.parts), -1)
        highest = 1e3 * float(variances.max())
        lowest = min(max(effects, 1e-3 * float(variances.min())), highest)
        larger = torch.logspace(0, 1, _TRIED, base=highest / lowest, dtype=torch.float64) * lowest
        tried = torch.cat([base, balancing(larger, variances)])  # (a, k)
        off = tried - 1 / len(variances)
        expected = effects * off.square().sum(1) + tried.square() @ variances  # (a,) for one coordinate
        chance = off.square() @ (variances / self.counts[clients])  # (a,) along one direction
        means = self.sums[clients].double() / self.counts[clients, None]
        seen = (off @ means).square()  # (a, l)
        found = []
        for part, mine in zip(
            self.parts, torch.split(seen, [part.rows * part.rank for part in self.parts], 1), strict=True
        ):
            by_chance = (part.rank + _PROVED * sqrt(2 * part.rank)) * chance
            proved = (mine.reshape(-1, part.rows, part.rank).sum(2) - by_chance[:, None]).clamp(min=0)
            error = part.width * (persistence * proved / _SPREAD_OUT + expected[:, None])
            found.append(tried[error.argmin(0)])
        return torch.cat(found)

    def mean(self, updates: Tensor, weights: Tensor) -> Tensor:
        """Return the mean (d,) of updates (k, d) with weights (rows of all tensors, k)."""
        shares = torch.split(weights.to(updates), [part.rows for part in self.parts], 0)
        found = [
            torch.einsum("krw,rk->rw", part.of(updates), mine) for part, mine in zip(self.parts, shares, strict=True)
        ]
        return torch.cat([part.flatten() for part in found])

    def _along(self, updates: Tensor) -> Tensor:
        """Return updates (k, d) along the directions of their tensors, (k, l)."""
        held = torch.split(self.directions.to(updates), [part.rank * part.width for part in self.parts], 0)
        found = [
            part.of(updates) @ mine.view(part.rank, part.width).T for part, mine in zip(self.parts, held, strict=True)
        ]
        return torch.cat([along.flatten(1) for along in found], 1).cpu()


def _directions(part: _Part, path: Tensor) -> Tensor:
    """Return the main directions of a tensor's rows on the path (d,): orthonormal rows, flattened."""
    rows = part.of(path[None])[0].double()
    if part.rows <= part.width:  # the small product holds all of it
        energies, turned = torch.linalg.eigh(rows @ rows.T)
        found = turned.T @ rows / energies.clamp(min=torch.finfo(torch.float64).tiny).sqrt()[:, None]
        found = torch.where(energies[:, None] > 1e-12 * energies[-1], found, 0.0)
    else:
        found = torch.linalg.eigh(rows.T @ rows).eigenvectors.T
    kept: Tensor = found[-part.rank :].float().flatten()
    return kept
