"""How much each privacy group's mean counts in the mean of all: lemma 1 of paper 003, for any groups and many rounds.

A group's noisy mean misses that of all clients in three ways. By noise, which is another in every round and averages
out over all T of them. By who was drawn: the model follows those it heard lately, so this averages out over the 1/q
rounds in which everybody is drawn once, not over all. And by the group's own difference, since it is always the same
clients; this stays. With B_ij the products of groups' differences and v_j the variances of the rest, the weights w
that miss least are those of best linear estimation,

    w ∝ (B + diag(v))⁻¹ 1,

which are w ∝ N_j without noise, w ∝ 1/v_j where noise is all there is, and lemma 1's in between, if differences are
those of clients who choose whatever they hold. They need not be: groups may differ in kind. So B is estimated from
what rounds release anyway: means of different rounds have nothing but the difference in common.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from polyeps.core import Payload

SMOOTHING = 0.9  # of what is held about differences, the part that stays in each round
LEAST = 1e-6  # of a client's own variance, what always counts: groups without noise or luck may seem not to differ


@dataclass(frozen=True)
class PrivacyGroups:
    """What is public about the groups, in one order; lengths are in units of the clip norm, which bounds clients'."""

    sizes: Tensor  # (l,) N_j, float64
    rate: float
    rounds: int
    noise: Tensor  # (l,) variance of the noise on a round's sum, over all coordinates

    @property
    def averaged(self) -> Tensor:
        """What is left of the luck of the draw, of a round's (1 - q)/(q N_j), after 1/q rounds; of noise, after all."""
        return (1 - self.rate) / self.sizes + self.noise / (self.rate * self.sizes) ** 2 / self.rounds


def weights_by_ratio(sizes: Tensor, noisy: Tensor, ratio: float) -> Tensor:
    """The paper's: every client counts alike, but clients of noisy groups `ratio` times as much."""
    weights = torch.where(noisy, sizes * ratio, sizes)
    return weights / weights.sum() if weights.sum() else sizes / sizes.sum()


def best_group_weights(groups: PrivacyGroups, kept: Payload, present: Sequence[int]) -> Tensor:
    """The weights of the groups that have a sum, by what is known of their differences so far."""
    left = list(present)
    differences = kept.get("differences", _by_chance(groups))
    vectors = torch.linalg.eigh(differences.cpu())
    believed = vectors.eigenvectors * vectors.eigenvalues.clamp(min=0) @ vectors.eigenvectors.T
    missed = believed + torch.diag(groups.averaged + LEAST / groups.sizes)
    weights = torch.zeros(len(groups.sizes), dtype=torch.float64)
    while left:
        solved = torch.linalg.solve(missed[left][:, left], torch.ones(len(left), dtype=torch.float64))
        if bool((solved >= 0).all()):
            weights[left] = solved / solved.sum()
            break
        left = [group for group, weight in zip(left, solved.tolist(), strict=True) if weight > 0]
    return weights[list(present)]


def learn_differences(groups: PrivacyGroups, kept: Payload, means: Tensor) -> dict[str, Tensor]:
    """What to keep after a round that released the means (l, d) of all groups, in units of the clip norm."""
    shares = groups.sizes / groups.sizes.sum()
    apart = means - (shares.to(means) @ means)
    before = kept.get("apart", torch.zeros_like(apart))
    weight = kept.get("apart_weight", torch.zeros((), dtype=torch.float64))
    differences = kept.get("differences", _by_chance(groups))
    if weight > 0:
        products = (apart @ before.T).double().cpu() / weight.cpu()
        differences = SMOOTHING * differences.cpu() + (1 - SMOOTHING) * (products + products.T) / 2
    return {
        "apart": SMOOTHING * before + (1 - SMOOTHING) * apart,
        "apart_weight": SMOOTHING * weight + (1 - SMOOTHING),
        "differences": differences,
    }


def _by_chance(groups: PrivacyGroups) -> Tensor:
    """Differences between groups of clients that choose whatever they hold; no client is further out than the clip."""
    return torch.diag(1 / groups.sizes)
