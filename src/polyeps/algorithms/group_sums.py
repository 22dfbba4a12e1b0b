"""Noisy sums of updates by privacy group, and of clip bits: made by a trusted server, or of shares clients add.

A group's noise multiplier is the noise of its sum over the clip norm; a group of multiplier 0 is promised nothing,
and no noise is added for it. Everything released about a group is in here, so this is what its price is for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from polyeps.algorithms.blocks import Floats
from polyeps.core import Ask, Payload, State, Streams, Task, Work


@dataclass(frozen=True)
class Noise:
    """The noise multipliers of the groups' sums, and the deviation of the noise on the sum of clip bits."""

    sums: Mapping[str, float]
    bits: float


@dataclass(frozen=True)
class GroupSums:
    """What a round released."""

    sums: dict[str, Tensor]  # (d,) of every group whose sum was made
    bits: float  # over all of those groups


def summed_by_server(
    state: State, ask: Ask, asked: Payload, noise: Noise, streams: Callable[[int], Streams]
) -> GroupSums:
    """Sums of rows the server is trusted with. A group of which nobody was drawn is noise alone: who was is secret."""
    names, size = list(noise.sums), len(state.model)
    replies = ask(Task("train", tuple(client.id for client in state.roster), asked))
    group = {client.id: names.index(str(client.group)) for client in state.roster}
    place = torch.tensor([group[client] for client in replies.ids], dtype=torch.int64, device=state.model.device)
    rows = replies.payload["update"] if replies.ids else state.model.new_zeros(0, size)
    sums = state.model.new_zeros(len(names), size).index_add_(0, place, rows)
    drawn = torch.zeros(len(names), 1, size + 1)
    streams(state.round).normals(drawn, range(len(names)))
    scale = torch.tensor([noise.sums[name] for name in names], dtype=torch.float64)[:, None] * asked["clip"].cpu()
    sums += (drawn[:, 0, :-1] * scale).to(sums)
    bits = float(replies.payload["bit"].double().sum()) if replies.ids else 0.0
    return GroupSums(dict(zip(names, sums, strict=True)), bits + noise.bits * float(drawn[0, 0, -1]))


def summed_securely(state: State, ask: Ask, asked: Payload, noise: Noise, dropouts: float) -> GroupSums:
    """Sums of noisy rows nobody sees, one for each group with clients drawn; noise is whole if enough of them answer.

    How many were drawn is known to them, and each adds its share of the noise that so many less `dropouts` make up:
    so the noise of the sum does not depend on who was drawn. If fewer answer, nothing is summed.
    """
    sums, bits = {}, 0.0
    for name in noise.sums:
        drawn = tuple(client.id for client in state.roster if client.group == name)
        promised = max(1, math.ceil(len(drawn) * (1 - dropouts)))
        total = ask.total(Task("train", drawn, {**asked, "shares": torch.tensor(promised)}), least=promised)
        if total.payload:
            sums[name] = total.payload["update"]
            bits += float(total.payload["bit"])
    return GroupSums(sums, bits)


def with_shares(work: Work, values: Tensor, deviations: Floats | Tensor) -> Tensor:
    """Values (n, k) with each client's share of noise whose sum has these deviations, (n, 1) or (n, k)."""
    deviation = torch.as_tensor(np.asarray(deviations) if not isinstance(deviations, Tensor) else deviations)
    noisy = deviation.reshape(len(values), -1).any(1).nonzero()[:, 0].tolist()
    drawn = torch.zeros(len(values), 1, values.shape[1])
    work.streams.normals(drawn, noisy)
    share = deviation.to(values) / math.sqrt(float(work.payload["shares"]))
    return values + drawn[:, 0].to(values) * share
