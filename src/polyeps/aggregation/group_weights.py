"""Weights of privacy groups in the mean of all clients: FedHDP's lemma 1, for any number of groups and rounds.

FedHDP: Aldaghri et al., "Federated Learning with Heterogeneous Differential Privacy", 2021,
https://arxiv.org/abs/2110.15252. A group's noisy mean differs from that of all clients in three ways. By noise, which
is independent in every round and averages out over all T rounds. By sampling: the model follows the latest cohorts, so
this averages out over the 1/q rounds in which every client is drawn once, not over all. And by the group's own
difference, which stays, since the group always consists of the same clients. With B_ij the products of groups'
differences and v_j the variances of the rest, the weights w of the best linear estimate are

    w ∝ (B + diag(v))⁻¹ 1,

which is w ∝ N_j without noise, w ∝ 1/v_j if noise dominates, and lemma 1's weights in between, if clients choose
their group independently of their data. Groups may also differ systematically. So B is estimated from the noisy means
that rounds release anyway: means of different rounds have only the difference in common.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from polyeps.core import Payload

_SMOOTHING = 0.9  # weight of earlier rounds in the running estimate of differences
_LEAST = 1e-6  # share of a client's own variance that always counts: groups may seem not to differ


@dataclass(frozen=True)
class PrivacyGroups:
    """Public facts about the groups, in one order; lengths are in units of the clip norm."""

    sizes: Tensor  # (l,) N_j, float64
    rate: float
    rounds: int
    noise: Tensor  # (l,) variance of the noise on a round's sum, over all coordinates

    @property
    def averaged(self) -> Tensor:
        """Return the variance left of sampling, (1 - q)/(q N_j) a round, after 1/q rounds, and of noise after all."""
        return (1 - self.rate) / self.sizes + self.noise / (self.rate * self.sizes) ** 2 / self.rounds


def weights_by_ratio(sizes: Tensor, noisy: Tensor, ratio: float) -> Tensor:
    """Return FedHDP's weights: all clients count equally, but clients of noisy groups `ratio` times as much."""
    weights = torch.where(noisy, sizes * ratio, sizes)
    return weights / weights.sum() if weights.sum() else sizes / sizes.sum()


def best_group_weights(groups: PrivacyGroups, kept: Payload, present: Sequence[int]) -> Tensor:
    """Return the weights of the groups that have a sum, by the differences estimated so far."""
    left = list(present)
    differences = kept.get("differences", _by_chance(groups))
    vectors = torch.linalg.eigh(differences.cpu())
    believed = vectors.eigenvectors * vectors.eigenvalues.clamp(min=0) @ vectors.eigenvectors.T
    missed = believed + torch.diag(groups.averaged + _LEAST / groups.sizes)
    weights = torch.zeros(len(groups.sizes), dtype=torch.float64)
    while left:
        solved = torch.linalg.solve(missed[left][:, left], torch.ones(len(left), dtype=torch.float64))
        if bool((solved >= 0).all()):
            weights[left] = solved / solved.sum()
            break
        left = [group for group, weight in zip(left, solved.tolist(), strict=True) if weight > 0]
    return weights[list(present)]


def learn_differences(groups: PrivacyGroups, kept: Payload, means: Tensor) -> dict[str, Tensor]:
    """Update the estimate after a round that released the means (l, d) of all groups, in units of the clip norm."""
    shares = groups.sizes / groups.sizes.sum()
    apart = means - (shares.to(means) @ means)
    before = kept.get("apart", torch.zeros_like(apart))
    weight = kept.get("apart_weight", torch.zeros((), dtype=torch.float64))
    differences = kept.get("differences", _by_chance(groups))
    if weight > 0:
        products = (apart @ before.T).double().cpu() / weight.cpu()
        differences = _SMOOTHING * differences.cpu() + (1 - _SMOOTHING) * (products + products.T) / 2
    return {
        "apart": _SMOOTHING * before + (1 - _SMOOTHING) * apart,
        "apart_weight": _SMOOTHING * weight + (1 - _SMOOTHING),
        "differences": differences,
    }


def _by_chance(groups: PrivacyGroups) -> Tensor:
    """Return the differences between groups of clients that choose independently of their data, within the clip."""
    return torch.diag(1 / groups.sizes)
