"""Noisy sums of updates by privacy group, and of clip bits: made by a trusted server, or of shares clients add.

A group's noise multiplier is the noise of its sum over the clip norm; a group of multiplier 0 is promised nothing,
and no noise is added for it. Everything released about a group is in here, so this is what its price is for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from polyeps.algorithms.releases import SecureSums
from polyeps.core import Ask, Payload, State, Streams, Task
from polyeps.engine.noise import normals_for
from polyeps.mechanisms.grid_sums import GridSum
from polyeps.mechanisms.words import words_of


@dataclass(frozen=True)
class Noise:
    """The noise multipliers of the groups' sums, and the deviation of the noise on the sum of clip bits."""

    sums: Mapping[str, float]
    bits: float

    def deviations(self, multipliers: Sequence[float], clip: Tensor, size: int) -> Tensor:
        """Of sums with these multipliers, (n, size): of updates and, last, of bits where each has a sum of its own."""
        own = torch.tensor(multipliers, dtype=torch.float64)[:, None]
        return torch.cat([(own * clip.cpu()).expand(-1, size - 1), self.bits * (own > 0)], 1)


@dataclass(frozen=True)
class GroupSums:
    """What a round released."""

    sums: dict[str, Tensor]  # (d,) of every group whose sum was made
    bits: float  # over all of those groups


def summed_by_server(
    state: State, ask: Ask, asked: Payload, noise: Noise, streams: Callable[[int], Streams]
) -> GroupSums:
    """Sum rows the server is trusted with, on a grid of integers, and add noise to each group's sum.

    A group of which nobody was drawn is noise alone: who was is secret.
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
            sums[name] = own.sum(0)
    if not noise.bits:
        return GroupSums(sums, float(replies.payload["bit"].double().sum()) if replies.ids else 0.0)
    halves = GridSum(0.5, 1, 2 * noise.bits)  # a bit is ±1/2, so its multiplier is twice its deviation
    bits = replies.payload["bit"].double()[:, None] if replies.ids else torch.zeros(0, 1, dtype=torch.float64)
    return GroupSums(sums, float(halves.release(halves.rounded(bits).sum(0), words)))


def summed_securely(state: State, ask: Ask, asked: Payload, noise: Noise, secure: SecureSums) -> GroupSums:
    """Sums of noisy rows nobody sees, one for each group; a group of which too few answered is left out.

    Parts of the noise are as in `releases`, so that a sum's noise tells nothing of how many were drawn; for a group of
    which nobody was, the server makes it all.
    """
    sums: dict[str, Tensor] = {}
    bits = 0.0
    for place, (name, multiplier) in enumerate(noise.sums.items()):
        drawn = tuple(client.id for client in state.roster if client.group == name)
        if drawn:
            found = secure.opened(ask, Task("train", drawn, asked))
        else:
            own = secure.streams(state.round).select([place])
            normals = normals_for(own, state.model.new_zeros(1, len(state.model) + 1), "train")[0]
            deviations = noise.deviations([multiplier], asked["clip"], len(normals))[0] / math.sqrt(secure.honest_share)
            alone = normals * deviations.to(normals)
            found = {"update": alone[:-1], "bit": alone[-1]}
        if found:
            sums[name] = found["update"]
            bits += float(found["bit"])
    return GroupSums(sums, bits)
