"""Weights that balance noise against what clients do not share: random effects, estimated from updates alone.

A client's updates differ from the mean of all by noise, which is drawn anew in every round, and by an effect of its own
data, which stays. The noise of a client shows in how its updates differ from one round to the next; the effects show in
how the means over rounds differ between clients, beyond what their noise explains. With v_i the noise variance of
client i, τ² the variance of effects (both per coordinate) and κ how much worse an error that stays is than one that is
drawn anew, the mean Σ w_i Δ_i with Σ w_i = 1 that is nearest to the plain mean of all clients has

    minimise  κ τ² Σ (w_i - 1/n)² + Σ w_i² v_i :     w_i = (κτ²/n + λ) / (κτ² + v_i).

Equal noise gives equal weights; no effects give weights by 1/v_i; effects beyond all noise give the plain mean; a
client of infinite noise is ignored. All of it reads updates that carry their noise, so it costs no privacy.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from polyeps.core import Payload

COORDINATES = 8192  # of each update that are remembered, the same for all clients; enough for variances
_LEAST = 0.05  # share of a difference between rounds that always counts as noise
_NAMES = ("effect_sums", "effect_last", "effect_counts", "effect_noise")


@dataclass
class ClientEffects:
    """What is known about n clients after some rounds; m coordinates of their updates are remembered."""

    sums: Tensor  # (n, m) of all updates of each client
    last: Tensor  # (n, m) its latest update
    counts: Tensor  # (n,) float64: its updates
    noise: Tensor  # (n,) float64: the sum of noise estimates, one for each update but the first

    @classmethod
    def restored(cls, kept: Payload, clients: int, size: int) -> ClientEffects:
        """Return what was kept, or nothing known yet."""
        each, sums = torch.zeros(clients, dtype=torch.float64), torch.zeros(clients, min(size, COORDINATES))
        found = cls(sums, sums.clone(), each, each.clone())
        if _NAMES[0] in kept:
            for name, held in found.kept.items():  # nothing is known yet of clients that joined since
                held[: len(kept[name])] = kept[name]
        return found

    @property
    def kept(self) -> dict[str, Tensor]:
        """What to keep until the next round."""
        return dict(zip(_NAMES, (self.sums, self.last, self.counts, self.noise), strict=True))

    def take(self, clients: Tensor, updates: Tensor) -> None:
        """Take note of updates (k, d), those of some clients (k,) in one round."""
        rows = updates.cpu()[:, _coordinates(updates.shape[1])]
        before, clients = self.counts[clients] > 0, clients.cpu()
        known = clients[before]
        self.noise[known] += _fresh(rows[before] - self.last[known])
        self.sums[clients] += rows
        self.last[clients] = rows
        self.counts[clients] += 1

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


def balancing(effects: Tensor, variances: Tensor) -> Tensor:
    """Return the best weights (a, k) of clients with noise variances (k,), for several values (a,) of κτ²."""
    if not bool(effects.all()) and not bool((variances > 0).all()):  # no noise to balance
        return torch.full((len(effects), len(variances)), 1 / len(variances), dtype=torch.float64)
    share = effects[:, None] / len(variances)
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
