"""FedHDP (algorithm 1): whole clients protected, each at the privacy level it chose; personal models.

Paper: Aldaghri et al., "Federated Learning with Heterogeneous Differential Privacy", 2021,
https://arxiv.org/abs/2110.15252

    C_j, N_j   Work.groups, Federation.sizes   S^t   kept "clip"        b_i   reply "bit", less 1/2
    z_j        Federation.noise_for            κ     quantile           θ_i   memory "personal", never sent
    q          Federation.rate                 η_b   clip_rate          λ_j   pull

A round's noisy sum of group j and the noisy sum of clip bits come from one cohort and cost, together, one Gaussian of
multiplier z_j; every enrolled client pays for it in every round, drawn or not. The group of a client is public. Clients
of a group without noise have no guarantee.

Departures. Sums are divided by the public q·N_j, not by how many were drawn, which is secret. Clip bits are paid for:
the noise of the sums is larger, so that both together cost z_j. `ratio = "auto"` is ours: groups are weighted by how
far their means are from the mean of all, which is lemma 1 for any number of groups and over all rounds
(`aggregation.group_weights`). With `trust = "secure-sum"` clients add shares of the noise themselves, and only sums
over groups are seen: of real numbers, or of integers as `noise` says. Where clip norms do not adapt, no clip bits are
sent.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Literal

import torch
from dp_accounting.dp_event import SelfComposedDpEvent
from torch import Tensor

from polyeps.accounting import epsilon
from polyeps.accounting.certificate import PUBLIC_GROUP, SECRET_COHORT
from polyeps.accounting.events import Gaussian, Poisson
from polyeps.accounting.histories import split_clip_bit
from polyeps.aggregation.group_weights import PrivacyGroups, best_group_weights, learn_differences, weights_by_ratio
from polyeps.algorithms._averaging import Federation, step, trained_in_cohort
from polyeps.algorithms._group_sums import GroupRelease, Noise, summed_by_server, summed_securely
from polyeps.algorithms._personal_models import Personal
from polyeps.algorithms._releases import NoiseKind, Release, round_price
from polyeps.algorithms._secure_sums import SecureSums, conditions
from polyeps.algorithms._sum_counts import Counts
from polyeps.core import Action, Algorithm, Ask, Payload, Spec, Specs, State, SumTerms, Work
from polyeps.errors import InputError
from polyeps.mechanisms.clipping import LONGEST_CLIP, SHORTEST_CLIP, clip_to_norm, row_norms
from polyeps.messages import vector

_STEEPEST = 50.0  # largest exponent by which a clip norm changes in a round: noise on few bits is unbounded


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
    """Return federated averaging in which clients choose their privacy level."""
    for name, share in (("ratio", ratio), ("quantile", quantile)):
        if not isinstance(share, str) and not 0 <= share <= 1:
            raise InputError(f"{name} must lie between 0 and 1, not {share}")
    if trust == "server" and noise != "gaussian":
        raise InputError(
            f'noise = "{noise}" is about shares that clients add; leave it out, or take trust = "secure-sum"'
        )
    own = Personal(federation, pull, personal_rate) if personal else None
    training, names = federation.training, list(federation.sizes)
    release = Release("train", training.model.size + adaptive, 1.0, noise=noise, clients=federation.clients)
    counts = {name: Counts.of(federation, dropouts, group=name) for name in names}
    # Of all groups, with noise or without: the price must not depend on the noise that it leads to.
    failure = max(counts[name].failure for name in names) if trust == "secure-sum" else 0.0
    price = partial(round_price, federation.rate, (release,), failure=failure)
    given = federation.noise_for(price)
    of_groups = {name: given[name] for name in names}
    multipliers = _noise(federation, of_groups, clip_noise) if adaptive else Noise(of_groups, 0.0)
    groups = {
        name: GroupRelease(
            SecureSums(of_groups[name], counts[name], federation.noise, row, name),
            release,
            multipliers.sums[name],
            multipliers.bits if adaptive else None,
        )
        for row, name in enumerate(names)
    }
    if trust == "secure-sum":
        for group in groups.values():
            group.sums.check(release)
        sums = partial(summed_securely, groups=groups)
    else:
        sums = partial(summed_by_server, noise=multipliers, streams=federation.noise)

    sizes = torch.tensor([federation.sizes[name] for name in names], dtype=torch.float64)
    surplus = {name: float(counts[name].surplus) if trust == "secure-sum" else 1.0 for name in names}
    variances = torch.tensor([multipliers.sums[name] ** 2 * surplus[name] for name in names], dtype=torch.float64)

    def train(work: Work) -> tuple[Payload, Payload]:
        for name, paid in zip(work.groups, work.noise_multiplier.tolist(), strict=True):
            groups[name].sums.check_paid(paid)
        if trust == "secure-sum":
            if len(set(work.groups)) != 1:
                raise InputError("clients of several groups are asked for one sum; ask each group for its own")
            group = groups[work.groups[0]]
            group.sums.drawn(release, work.payload)  # it must be their own group, and before any client trains
        updates, kept = own.run(work) if own is not None else (trained_in_cohort(training, work), {})
        clip = float(work.payload["clip"])
        if trust == "secure-sum":
            return group.from_clients(work, updates, clip), kept
        reply = {"update": clip_to_norm(updates, clip)}
        if adaptive:
            reply["bit"] = (row_norms(updates) <= clip).to(updates) - 0.5
        return reply, kept

    def group_of(asked: Payload) -> GroupRelease:
        """Return the group of a task's sum, by the fingerprint of what its clients have agreed to."""
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
            # Floats cannot clip to less: a clip that fell so low has stopped the training anyway.
            exponent = min(max(-clip_rate * (share - quantile), -_STEEPEST), _STEEPEST)
            clip = (clip * math.exp(exponent)).clamp(SHORTEST_CLIP, LONGEST_CLIP)
        return step(state, weights.to(means) @ means, clip=clip, **kept)

    bounds = (SHORTEST_CLIP, LONGEST_CLIP) if adaptive else (federation.clip, federation.clip)
    takes = {"model": vector(training.model.size), "clip": Spec((), "float64", *bounds)}
    if trust == "secure-sum":
        # For all groups: the fingerprint of a task names its group.
        most = replace(next(iter(counts.values())), enrolled=federation.clients)
        takes |= SecureSums(1.0, most, federation.noise).takes()

    def gives(asked: Payload) -> Specs:
        if trust == "secure-sum":
            return release.gives(group_of(asked).sums.noise_multiplier)
        bit = {"bit": Spec((), "float32", -0.5, 0.5)} if adaptive else {}
        return {"update": vector(training.model.size, float(asked["clip"])), **bit}

    def fits(asked: Payload) -> None:
        if trust == "secure-sum":
            group_of(asked)

    def claimed(noise_multiplier: float, rounds: int, delta: float, _: Mapping[str, float]) -> float:
        """Charge the noisy sums alone, as the paper does: clip bits are free there."""
        of_sums = split_clip_bit(noise_multiplier, multipliers.bits) if multipliers.bits else noise_multiplier
        event = SelfComposedDpEvent(Poisson(federation.rate, Gaussian(of_sums)), rounds)
        return epsilon(event, delta, accountant="rdp")

    all_counts = [group.sums.counts for group in groups.values() if group.multiplier]
    assumed: tuple[str, ...] = (SECRET_COHORT,) if federation.rate < 1 else ()
    if trust == "secure-sum" and all_counts:
        assumed = conditions(all_counts)
    return Algorithm(
        {"train": Action(train, price=None, takes=takes, fits=fits, gives=gives)},
        round,
        round_price=price,
        needs=("group",),
        trust=trust,
        unit="client",
        conditions=(PUBLIC_GROUP, *assumed),
        claimed=claimed,
        arithmetic="ideal" if trust == "secure-sum" and noise == "gaussian" else "exact",
        sums=terms if trust == "secure-sum" else None,
        largest_sums={name: (group.sums.largest(release),) for name, group in groups.items()}
        if trust == "secure-sum"
        else {},
        memory={"personal": (training.model.size,), "started": ()} if personal else {},
        groups=tuple(names),
        seeded=federation.seeded,
    )


def _noise(federation: Federation, of_groups: Mapping[str, float], clip_noise: float | None) -> Noise:
    """Return the noise of sums and bits that cost a group its z_j together.

    By default the bits' noise is a twentieth of the expected cohort, which costs next to nothing; where that is little,
    as much as the noise multiplier of the strictest group, which takes a quarter of its privacy.
    """
    strictest = max(of_groups.values(), default=0.0)
    bits = max(0.05 * federation.rate * federation.clients, strictest) if clip_noise is None else clip_noise
    if strictest and 2 * bits <= strictest:
        raise InputError(f"clip_noise must be above half the strictest group's multiplier {strictest:g}, not {bits:g}")
    split = {name: split_clip_bit(z, bits) if z else 0.0 for name, z in of_groups.items()}
    return Noise(split, bits if strictest else 0.0)
