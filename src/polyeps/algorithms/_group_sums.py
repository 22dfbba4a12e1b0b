"""Noisy sums of updates by privacy group, and of clip bits: by a trusted server, or of shares that clients add.

A group's noise multiplier is the noise of its sum over the clip norm; a group of multiplier 0 has no guarantee, and no
noise is added for it. Everything released about a group is in this module, so its price covers this module.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from polyeps.algorithms._releases import Release
from polyeps.algorithms._secure_sums import SecureSums
from polyeps.core import Ask, Payload, State, Streams, Task, Work
from polyeps.mechanisms.clipping import clip_to_norm, row_norms
from polyeps.mechanisms.grid_sums import GridSum
from polyeps.mechanisms.random_words import words_of


@dataclass(frozen=True)
class Noise:
    """The noise multipliers of the groups' sums, and the deviation of the noise on the sum of clip bits."""

    sums: Mapping[str, float]
    bits: float


@dataclass(frozen=True)
class GroupSums:
    """The releases of a round."""

    sums: dict[str, Tensor]  # (d,) of every group whose sum was made
    bits: float  # over all of those groups


def summed_by_server(
    state: State, ask: Ask, asked: Payload, noise: Noise, streams: Callable[[int], Streams]
) -> GroupSums:
    """Return each group's sum of rows that the server is trusted with, on a grid of integers, with noise.

    The sum of a group without drawn clients is noise alone: who was drawn is secret.
    """
    names, size = list(noise.sums), len(state.model)
    replies = ask(Task("train", tuple(client.id for client in state.roster), asked))
    group = {client.id: names.index(str(client.group)) for client in state.roster}
    place = torch.tensor([group[client] for client in replies.ids], dtype=torch.int64, device=state.model.device)
    rows = replies.payload["update"] if replies.ids else state.model.new_zeros(0, size)
    words = words_of(streams(state.round), "train")
    sums = {}
    for number, (name, multiplier) in enumerate(noise.sums.items()):
        own = rows[place == number]
        if multiplier:
            grid = GridSum(float(asked["clip"]), size, multiplier)
            sums[name] = grid.release(grid.rounded(own).sum(0), words, number).to(state.model)
        else:  # a group without a guarantee
            sums[name] = clip_to_norm(own, float(asked["clip"])).sum(0)
    if not noise.bits:
        return GroupSums(sums, float(replies.payload["bit"].double().sum()) if "bit" in replies.payload else 0.0)
    halves = GridSum(0.5, 1, 2 * noise.bits)  # a bit is ±1/2, so its multiplier is twice its deviation
    bits = replies.payload["bit"].double()[:, None] if replies.ids else torch.zeros(0, 1, dtype=torch.float64)
    return GroupSums(sums, float(halves.release(halves.rounded(bits).sum(0), words)))


@dataclass(frozen=True)
class GroupRelease:
    """A group's sum: updates and, where clip norms adapt, clip bits, as one vector with one noise.

    Of a group with noise the vector is (u·x/S, ±w), x the update clipped to S, u² + w² = 1: its norm is at most 1.
    Noise of the group's multiplier z on it is noise of z/u clip norms on updates and of z/(2w) on bits of ±1/2.
    """

    sums: SecureSums
    release: Release
    multiplier: float  # z/u: the noise of the updates' sum, in clip norms; 0: none
    bits: float | None  # z/(2w): the deviation of the bits' noise; None: no bits are sent

    def from_clients(self, work: Work, updates: Tensor, clip: float) -> Payload:
        """Return the replies of clients."""
        of_update, of_bit = self._factors(clip)
        values = clip_to_norm(updates, clip) * of_update
        if self.bits is not None:
            within = (row_norms(updates) <= clip).to(updates) - 0.5
            values = torch.cat([values, (2 * of_bit) * within[:, None]], 1)
        return self.sums.from_clients(self.release, work, values)

    def summed(self, state: State, ask: Ask, asked: Payload) -> tuple[Tensor, float] | None:
        """Return the sum of the updates and that of the bits; None where too few answered."""
        found = self.sums.of(state, ask, self.release, asked)
        if found is None:
            return None
        of_update, of_bit = self._factors(float(asked["clip"]))
        size = len(state.model)
        return found[:size] / of_update, float(found[size]) / (2 * of_bit) if self.bits is not None else 0.0

    def _factors(self, clip: float) -> tuple[float, float]:
        """Return the factors of updates and of bits in the vector that is sent."""
        if not self.multiplier:
            return 1.0, 0.5
        ratio = self.multiplier / (2 * self.bits) if self.bits else 0.0
        u = 1 / math.hypot(1.0, ratio)
        return u / clip, ratio * u


def summed_securely(state: State, ask: Ask, asked: Payload, groups: Mapping[str, GroupRelease]) -> GroupSums:
    """Return each group's secure sum of noisy rows; a group of which too few answered is left out."""
    sums: dict[str, Tensor] = {}
    bits = 0.0
    for name, group in groups.items():
        found = group.summed(state, ask, asked)
        if found is None and not any(client.group == name for client in state.roster):
            found = torch.zeros_like(state.model), 0.0  # without noise there is nothing to add
        if found is not None:
            sums[name] = found[0]
            bits += found[1]
    return GroupSums(sums, bits)
