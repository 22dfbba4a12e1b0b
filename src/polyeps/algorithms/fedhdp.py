"""FedHDP (paper 003, algorithm 1): whole clients protected, each by the privacy level it chose; personal models.

    C_j, N_j   Federation.groups, sizes     S^t   kept "clip"        b_i   reply "bit", less 1/2
    z_j        Federation.scales            κ     quantile           θ_i   memory "personal", never sent
    q          Federation.rate              η_b   clip_rate          λ_j   pull

A round's noisy sum of group j and the noisy sum of clip bits come from one cohort and cost, together, one Gaussian of
multiplier z_j; every enrolled client pays for it in every round, drawn or not. Which group a client is in is public.
Clients of a group without noise are promised nothing.

Departures. Sums are divided by the public q·N_j, not by how many were drawn, which is secret. Clip bits are paid
for: the noise of the sums is larger, so that both together cost z_j. `ratio = "auto"` is ours: groups count by how far
their means are from everybody's, which is lemma 1 for any number of groups and over all rounds (`weighing`). With
`trust = "secure-sum"` clients add shares of the noise themselves, and only sums over groups are seen.
"""

from __future__ import annotations

import math
import sys
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from polyeps.accounting.events import Gaussian, Poisson, split_clip_bit
from polyeps.algorithms.blocks import Federation, step, trained_in_cohort
from polyeps.algorithms.group_sums import Noise, summed_by_server, summed_securely
from polyeps.algorithms.personal import Personal
from polyeps.algorithms.releases import SecureSums, with_parts_of_noise
from polyeps.algorithms.weighing import Groups, best_weights, learn_differences, weights_by_ratio
from polyeps.certificate import PUBLIC_GROUP, SECRET_COHORT
from polyeps.core import Action, Algorithm, Ask, Payload, Spec, Specs, State, Work
from polyeps.errors import InputError
from polyeps.mechanisms.clipping import LONGEST, SHORTEST, clip_to_norm, norms_of
from polyeps.messages import vector


def fedhdp(
    federation: Federation,
    *,
    ratio: float | Literal["auto"] = "auto",
    adaptive: bool = True,
    quantile: float = 0.5,
    clip_rate: float = 0.2,
    clip_noise: float | None = None,
    personal: bool = True,
    pull: float | dict[str, float] = 0.05,
    personal_rate: float | None = None,
    trust: Literal["server", "secure-sum"] = "server",
    dropouts: float = 0.1,
) -> Algorithm:
    """Federated averaging in which clients choose how private they are."""
    _check(ratio=ratio, quantile=quantile)
    drawn = federation.rate * len(federation.groups)
    secure = SecureSums(max(federation.scales.values()), drawn, federation.noise, dropouts)
    noise = _noise(federation, clip_noise) if adaptive else Noise(federation.scales, 0.0)
    own = Personal(federation, pull, personal_rate) if personal else None
    plain = federation.training(federation.learning_rate, 0.0)
    securely = partial(summed_securely, noise=noise, secure=secure)
    sums = securely if trust == "secure-sum" else partial(summed_by_server, noise=noise, streams=federation.noise)

    names = list(federation.scales)
    sizes = torch.tensor([federation.sizes[name] for name in names], dtype=torch.float64)
    multipliers = torch.tensor([noise.sums[name] for name in names], dtype=torch.float64)
    surplus = 1 / secure.honest_share if trust == "secure-sum" else 1.0  # of the noise's variance, when all answer

    def train(work: Work) -> tuple[Payload, Payload]:
        updates, kept = own.run(work) if own is not None else (trained_in_cohort(plain, work), {})
        clip = float(work.payload["clip"])
        bits = (norms_of(updates) <= clip).to(updates) - 0.5
        reply = {"update": clip_to_norm(updates, clip), "bit": bits}
        if trust == "secure-sum":  # whatever was sent: alone, a client never replies without its part of the noise
            values = torch.cat([reply["update"], bits[:, None]], 1)
            own_multipliers = [noise.sums[federation.groups[row]] for row in work.rows]
            deviations = noise.deviations(own_multipliers, work.payload["clip"], values.shape[1])
            values = with_parts_of_noise(work, values, deviations, "train")
            reply = {"update": values[:, :-1], "bit": values[:, -1]}
        return reply, kept

    def round(state: State, ask: Ask) -> State:
        clip = state.kept.get("clip", torch.tensor(federation.clip, dtype=torch.float64))
        found = sums(state, ask, {"model": state.model, "clip": clip})
        if not found.sums:
            return state
        present = [place for place, name in enumerate(names) if name in found.sums]
        expected = federation.rate * sizes[present]
        means = torch.stack(list(found.sums.values())) / expected.to(state.model)[:, None]
        kept: dict[str, Tensor] = {}
        if ratio == "auto":
            groups = Groups(sizes, federation.rate, federation.rounds, len(state.model) * multipliers**2 * surplus)
            weights = best_weights(groups, state.kept, present)
            if len(present) == len(names) > 1:
                kept = learn_differences(groups, state.kept, means / clip.to(means))
        else:
            weights = weights_by_ratio(sizes[present], multipliers[present] > 0, ratio)
        if adaptive:
            share = found.bits / float(expected.sum()) + 0.5
            # What floats cannot clip to is not asked for: a clip that fell so low has stopped the training anyway.
            clip = (clip * math.exp(-clip_rate * (share - quantile))).clamp(SHORTEST, LONGEST)
        return step(state, weights.to(means) @ means, clip=clip, **kept)

    bounds = (SHORTEST, LONGEST) if adaptive else (federation.clip, federation.clip)
    takes = {"model": vector(plain.model.size), "clip": Spec((), "float64", *bounds)}
    if trust == "secure-sum":
        takes |= secure.takes(len(federation.groups))

    def gives(_: Payload) -> Specs:
        return {"update": vector(plain.model.size, sys.float_info.max), "bit": Spec(())}

    return Algorithm(
        {"train": Action(train, price=None, takes=takes, gives=gives)},
        round,
        dues=partial(_dues, federation.rate),
        needs=("group",),
        trust=trust,
        unit="client",
        conditions=(PUBLIC_GROUP, *(secure.conditions(federation.rate) if trust == "secure-sum" else (SECRET_COHORT,))),
        memory={} if own is None else own.memory(plain.model.size),
        groups=tuple(names),
        seeded=federation.seeded,
    )


def _dues(rate: float, scale: float) -> Any:
    return Poisson(rate, Gaussian(scale))


def _noise(federation: Federation, clip_noise: float | None) -> Noise:
    """The noise of sums and bits that cost a group its z_j together.

    By default the bits' noise is a twentieth of the cohort expected, which costs next to nothing; where that is little,
    as much as the strictest group's, which takes a quarter of its privacy.
    """
    strictest = max(federation.scales.values(), default=0.0)
    bits = max(0.05 * federation.rate * len(federation.groups), strictest) if clip_noise is None else clip_noise
    if strictest and 2 * bits <= strictest:
        raise InputError(f"clip_noise must be above half the strictest group's multiplier {strictest:g}, not {bits:g}")
    split = {name: split_clip_bit(z, bits) if z else 0.0 for name, z in federation.scales.items()}
    return Noise(split, bits if strictest else 0.0)


def _check(**shares: float | str) -> None:
    for name, value in shares.items():
        if not isinstance(value, str) and not 0 <= value <= 1:
            raise InputError(f"{name} must lie between 0 and 1, not {value}")
