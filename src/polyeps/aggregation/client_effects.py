"""Weights that balance noise against what clients do not share: random effects, estimated from updates alone.

A client's updates differ from the mean of all by noise, which is drawn anew in every round, and by an effect of its own
data, which stays. The noise of a client shows in how its updates differ from one round to the next; the effects show in
how the means over rounds differ between clients, beyond what their noise explains. With v_i the noise variance of
client i, τ² the variance of effects (both per coordinate) and κ how much worse an error that stays is than one that is
drawn anew, the mean Σ w_i Δ_i with Σ w_i = 1 that is nearest to the plain mean of all clients has

    minimise  κ τ² Σ (w_i - 1/n)² + Σ w_i² v_i :     w_i = (κτ²/n + λ) / (κτ² + v_i).

Equal noise gives equal weights; no effects give weights by 1/v_i; effects beyond all noise give the plain mean; a
client of infinite noise is ignored.

This is what to expect of clients that differ by chance. A class that no client of little noise holds is worse than
that, and its sign is too weak to be seen among all coordinates of noisy clients; but along the direction in which a row
of weights has moved so far it can be seen. So updates are also compared along that one direction of every row, and
where the mean with these weights is proved to differ from the plain mean by β, κβ² is added to the error of the row:
its weights are then of the same form, with a larger κτ².

All of it reads updates that carry their noise, so it costs no privacy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log10, prod

import torch
from torch import Tensor

from polyeps.core import Payload

COORDINATES = 8192  # of each update that are remembered, the same for all clients; enough for variances
_LEAST = 0.05  # share of a difference between rounds that always counts as noise
_PROVED = 2.0  # standard deviations of noise that a difference along a direction must exceed
_PARTLY = 8.0  # how much more than what is seen along one direction a difference weighs as a whole
_GRID = 33  # values of κτ² that are compared for every row
_NAMES = ("effect_sums", "effect_last", "effect_counts", "effect_noise", "effect_along", "effect_path")


@dataclass
class ClientEffects:
    """What is known about n clients after some rounds; m coordinates of their updates are remembered."""

    sums: Tensor  # (n, m) of all updates of each client
    last: Tensor  # (n, m) its latest update
    counts: Tensor  # (n,) float64: its updates
    noise: Tensor  # (n,) float64: the sum of noise estimates, one for each update but the first
    along: Tensor  # (n, b) float64: the sum of its updates along the direction of each of b rows of weights
    path: Tensor  # (d,) the sum of all means by inverse variance: the way that the model was pushed so far
    rows: tuple[tuple[int, int], ...]  # of every tensor of the model, how many rows of how many weights

    @classmethod
    def restored(cls, kept: Payload, clients: int, shapes: Sequence[tuple[int, ...]]) -> ClientEffects:
        """Return what was kept of n clients and a model of tensors of these shapes, or nothing known yet."""
        rows = tuple((shape[0] if len(shape) > 1 else 1, prod(shape[len(shape) > 1 :])) for shape in shapes)
        size = sum(count * width for count, width in rows)
        remembered, each = min(size, COORDINATES), torch.zeros(clients, dtype=torch.float64)
        along = torch.zeros(clients, sum(count for count, _ in rows), dtype=torch.float64)
        sums = torch.zeros(clients, remembered)
        found = cls(sums, sums.clone(), each, each.clone(), along, torch.zeros(size), rows)
        if _NAMES[0] in kept:
            for name, held in found.kept.items():  # nothing is known yet of clients that joined since
                held[: len(kept[name])] = kept[name]
        return found

    @property
    def kept(self) -> dict[str, Tensor]:
        """What to keep until the next round."""
        held = (self.sums, self.last, self.counts, self.noise, self.along, self.path)
        return dict(zip(_NAMES, held, strict=True))

    def take(self, clients: Tensor, updates: Tensor) -> None:
        """Take note of updates (k, d), those of some clients (k,) in one round."""
        clients = clients.cpu()
        self.along[clients] += self._along(updates)  # directions of earlier rounds, whose noise is independent
        rows = updates.cpu()[:, _coordinates(updates.shape[1])]
        before = self.counts[clients] > 0
        known = clients[before]
        self.noise[known] += _fresh(rows[before] - self.last[known])
        self.sums[clients] += rows
        self.last[clients] = rows
        self.counts[clients] += 1
        best = 1 / self.variances[clients].clamp(min=1e-300)
        self.path = self.path.to(updates) + (best / best.sum()).to(updates) @ updates

    @property
    def variances(self) -> Tensor:
        """The noise variance of every client's update, per coordinate (n,); NaN for clients without one.

        After a single update all of it counts as noise.
        """
        alone = self.last.double().square().mean(1)
        return torch.where(self.counts > 1, self.noise / (self.counts - 1), alone).where(self.counts > 0, torch.nan)

    @property
    def spread(self) -> float:
        """The variance τ² of effects, per coordinate, estimated with most weight on the clients of least noise."""
        seen = (self.counts > 0) & (self.variances > 0)
        if seen.sum() < 2:
            return 0.0
        left = self.variances[seen] / self.counts[seen]  # of the mean over rounds
        means = self.sums[seen].double() / self.counts[seen][:, None]
        weights = (1 / left) / (1 / left).sum()
        found = weights @ (means - weights @ means).square().mean(1) - (weights * (1 - weights) * left).sum()
        return max(0.0, float(found / (1 - weights.square().sum())))

    def weights(self, clients: Tensor, persistence: float) -> Tensor:
        """Return the weights of some clients (b, k) for every row of weights, adding up to 1; persistence is κ."""
        variances, effects = self.variances[clients], persistence * self.spread
        count, blocks = len(clients), self.along.shape[1]
        if not bool((variances > 0).all()):  # no noise to balance
            return torch.full((blocks, count), 1 / count, dtype=torch.float64)
        highest = 1e3 * float(variances.max())
        lowest = min(max(effects, 1e-3 * float(variances.min())), highest)
        larger = torch.logspace(log10(lowest), log10(highest), _GRID - 1, dtype=torch.float64)
        tried = balancing(torch.cat([torch.tensor([effects]).double(), larger]), variances)  # (a, k)
        off = tried - 1 / count
        means = self.along[clients] / self.counts[clients, None]  # (k, b)
        chance = (off.square() @ (variances / self.counts[clients])).sqrt()  # (a,)
        proved = ((off @ means).abs() - _PROVED * chance[:, None]).clamp(min=0)  # (a, b)
        widths = torch.cat([torch.full((rows,), float(width)) for rows, width in self.rows]).double()  # (b,)
        expected = effects * off.square().sum(1) + tried.square() @ variances
        loss = _PARTLY * persistence * proved.square() + widths * expected[:, None]
        return tried[loss.argmin(0)]

    def mean(self, updates: Tensor, weights: Tensor) -> Tensor:
        """Return the mean of updates (k, d), with weights (b, k) for every row of weights."""
        found, row, place = [], 0, 0
        for rows, width in self.rows:
            part = updates[:, place : place + rows * width].reshape(-1, rows, width)
            found.append(torch.einsum("krw,rk->rw", part, weights[row : row + rows].to(part)).flatten())
            row, place = row + rows, place + rows * width
        return torch.cat(found)

    def _along(self, updates: Tensor) -> Tensor:
        """Return updates (k, d) along the direction of every row so far, (k, b); 0 where there is none."""
        found, place = [], 0
        path = self.path.to(updates)
        for rows, width in self.rows:
            here = slice(place, place + rows * width)
            direction = torch.nn.functional.normalize(path[here].view(rows, width), dim=1)
            found.append(torch.einsum("krw,rw->kr", updates[:, here].reshape(-1, rows, width), direction))
            place += rows * width
        return torch.cat(found, 1).double().cpu()


def balancing(effects: Tensor, variances: Tensor) -> Tensor:
    """Return the best weights (a, k) of clients with noise variances (k,), for several values of κτ² (a,)."""
    share = (effects / len(variances))[:, None]
    base = 1 / (effects[:, None] + variances)
    return (share + (1 - (share * base).sum(1, keepdim=True)) / base.sum(1, keepdim=True)) * base


def _coordinates(size: int) -> Tensor:
    """Return the coordinates that are remembered, chosen without looking at any update."""
    if size <= COORDINATES:
        return torch.arange(size)
    return torch.randperm(size, generator=torch.Generator().manual_seed(size))[:COORDINATES]


def _fresh(differences: Tensor) -> Tensor:
    """Return the noise variance per coordinate of each client (k,), from differences (k, m) between two rounds.

    What clients' differences have in common is that the model has moved, and is no noise: it is the mean product of
    two clients' differences, with most weight on those of least noise.
    """
    rows = differences.double()
    squares = rows.square().mean(1)
    if len(rows) < 2 or not bool((squares > 0).all()):
        return squares / 2
    weights = (1 / squares) / (1 / squares).sum()
    pairs = (weights @ rows).square().mean() - (weights.square() * squares).sum()
    shared = (pairs / (1 - weights.square().sum())).clamp(min=0)
    return (squares - shared).clamp(min=_LEAST * squares) / 2
