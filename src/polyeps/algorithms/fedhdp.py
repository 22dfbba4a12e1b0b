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
`trust = "secure-sum"` clients add shares of the noise themselves, and only sums over groups are seen: of real numbers,
or of integers as `noise` says. Where clip norms do not adapt, no clip bits are sent.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from polyeps.accounting.certificate import PUBLIC_GROUP, SECRET_COHORT
from polyeps.accounting.histories import split_clip_bit
from polyeps.aggregation.group_weights import PrivacyGroups, best_group_weights, learn_differences, weights_by_ratio
from polyeps.algorithms._averaging import Federation, step, trained_in_cohort
from polyeps.algorithms._group_sums import GroupRelease, Noise, summed_by_server, summed_securely
from polyeps.algorithms._personal_models import Personal
from polyeps.algorithms._secure_sums import NoiseKind, Release, SecureSums, conditions, dues
from polyeps.algorithms._sum_counts import Counts
from polyeps.core import Action, Algorithm, Ask, Payload, Spec, Specs, State, SumTerms, Work
from polyeps.errors import InputError
from polyeps.mechanisms.clipping import LONGEST_CLIP, SHORTEST_CLIP, clip_to_norm, row_norms
from polyeps.messages import vector

_STEEPEST = 50.0  # largest exponent by which a clip norm changes in a round: noise on few bits may be anything


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
    noise: NoiseKind = "gaussian",
) -> Algorithm:
    """Federated averaging in which clients choose how private they are."""
    _check(ratio=ratio, quantile=quantile)
    if trust == "server" and noise != "gaussian":
        raise InputError(
            f'noise = "{noise}" is about shares that clients add; leave it out, or take trust = "secure-sum"'
        )
    multipliers = _noise(federation, clip_noise) if adaptive else Noise(federation.scales, 0.0)
    own = Personal(federation, pull, personal_rate) if personal else None
    plain = federation.training(federation.learning_rate, 0.0)
    names = list(federation.scales)
    release = Release("train", plain.model.size + adaptive, 1.0, noise=noise, agents=len(federation.groups))
    groups = {
        name: GroupRelease(_sums(federation, name, dropouts), release, multipliers.sums[name], bits)
        for bits in [multipliers.bits if adaptive else None]
        for name in names
    }
    if trust == "secure-sum":
        for group in groups.values():
            group.sums.check(release)
        sums = partial(summed_securely, groups=groups)
    else:
        sums = partial(summed_by_server, noise=multipliers, streams=federation.noise)

    sizes = torch.tensor([federation.sizes[name] for name in names], dtype=torch.float64)
    variances = torch.tensor(
        [multipliers.sums[name] ** 2 * (groups[name].sums.surplus if trust == "secure-sum" else 1.0) for name in names],
        dtype=torch.float64,
    )

    def train(work: Work) -> tuple[Payload, Payload]:
        found = {federation.groups[row] for row in work.rows}
        if trust == "secure-sum" and len(found) > 1:
            raise InputError("clients of several groups are asked for one sum; ask each group for its own")
        group = groups[found.pop()]
        if trust == "secure-sum":
            group.sums.drawn(release, work.payload)  # it must be their own group, and before anybody trains
        updates, kept = own.run(work) if own is not None else (trained_in_cohort(plain, work), {})
        clip = float(work.payload["clip"])
        if trust == "secure-sum":
            return group.from_clients(work, updates, clip), kept
        reply = {"update": clip_to_norm(updates, clip)}
        if adaptive:
            reply["bit"] = (row_norms(updates) <= clip).to(updates) - 0.5
        return reply, kept

    def group_of(asked: Payload) -> GroupRelease:
        """The group whose sum such a task is for, by what its clients have agreed to."""
        for group in groups.values():
            if group.sums.agrees(release, asked):
                return group
        raise InputError("'train' is asked for under other terms than were agreed to; build both alike")

    def terms(_: str, asked: Payload) -> SumTerms:
        return group_of(asked).sums.terms(release, asked)

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
            weighed = PrivacyGroups(sizes, federation.rate, federation.rounds, len(state.model) * variances)
            weights = best_group_weights(weighed, state.kept, present)
            if len(present) == len(names) > 1:
                kept = learn_differences(weighed, state.kept, means / clip.to(means))
        else:
            weights = weights_by_ratio(sizes[present], variances[present] > 0, ratio)
        if adaptive:
            share = found.bits / float(expected.sum()) + 0.5
            # What floats cannot clip to is not asked for: a clip that fell so low has stopped the training anyway.
            exponent = min(max(-clip_rate * (share - quantile), -_STEEPEST), _STEEPEST)
            clip = (clip * math.exp(exponent)).clamp(SHORTEST_CLIP, LONGEST_CLIP)
        return step(state, weights.to(means) @ means, clip=clip, **kept)

    bounds = (SHORTEST_CLIP, LONGEST_CLIP) if adaptive else (federation.clip, federation.clip)
    takes = {"model": vector(plain.model.size), "clip": Spec((), "float64", *bounds)}
    if trust == "secure-sum":
        # Of all groups: which one a task is for, its fingerprint says.
        most = replace(next(iter(groups.values())).sums.counts, enrolled=len(federation.groups))
        takes |= SecureSums(1.0, most, federation.noise).takes()

    def gives(asked: Payload) -> Specs:
        if trust == "secure-sum":
            return release.gives(group_of(asked).sums.scale)
        bit = {"bit": Spec((), "float32", -0.5, 0.5)} if adaptive else {}
        return {"update": vector(plain.model.size, float(asked["clip"])), **bit}

    def fits(asked: Payload) -> None:
        if trust == "secure-sum":
            group_of(asked)

    all_counts = [group.sums.counts for group in groups.values() if group.multiplier]
    # The same before and after noise is calibrated, so of all groups.
    failure = max(group.sums.counts.failure for group in groups.values()) if trust == "secure-sum" else 0.0
    return Algorithm(
        {"train": Action(train, price=None, takes=takes, fits=fits, gives=gives)},
        round,
        dues=partial(dues, federation.rate, (release,), failure=failure),
        needs=("group",),
        trust=trust,
        unit="client",
        conditions=(
            PUBLIC_GROUP,
            *(conditions(all_counts) if trust == "secure-sum" and all_counts else (SECRET_COHORT,)),
        ),
        arithmetic="ideal" if trust == "secure-sum" and noise == "gaussian" else "exact",
        sums=terms if trust == "secure-sum" else None,
        memory={} if own is None else own.memory(plain.model.size),
        groups=tuple(names),
        seeded=federation.seeded,
    )


def _sums(federation: Federation, name: str, dropouts: float) -> SecureSums:
    """The secure sums of one group."""
    size, place = federation.sizes[name], list(federation.scales).index(name)
    counts = Counts.settled(size, federation.rate, dropouts, delta=federation.delta, rounds=federation.rounds)
    return SecureSums(federation.scales[name], counts, federation.noise, place, name)


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
