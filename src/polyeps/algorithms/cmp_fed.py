"""CMP-Fed (algorithm 1): updates as two thin factors, each summed with noise; whole clients protected.

Paper: Guo et al., "Agent-Level Differentially Private Federated Learning via Compressed Model Perturbation", IEEE CNS
2022, https://openreview.net/forum?id=IRG_AP-IHR

    Δ_i   an update, kept by its client    V_t   kept "right"      C_1, σ_1   clip_subspace, noise of share `split`
    U_i   release "subspace" = Δ_i V_t     Û     sent as "left"    C_2, σ_2   clip_embedding, noise of the rest
    V_i   release "embed"    = Δ_iᵀ Û      γ     server_rate       η·d^t      rate_decay is d

Both releases come from one cohort and cost, together, one Gaussian with the round's noise multiplier σ:
1/σ_1² + 1/σ_2² = 1/σ². For a round it has paid for, a client does each at most once, and the second only after the
first.

Departures. Cohorts are Poisson-sampled, and sums are divided by the public q·N. One norm bounds all of a release,
biases included. V_t is made orthonormal, so that U does not depend on the noise in V_t's length; `warm_start = "raw"`
is the paper. C_1 is a hundredth of C_2, where the paper took medians it does not pay for. Tensors that factors would
not make smaller are sent whole; `whole = "biases"` is the paper's count. U, of which only the directions are used, may
get more noise than V.

Beyond the paper. `directions = "model"` takes Û from the public model: random mixtures, new in every round, of the
directions in which the next layer reads a layer's outputs, through which gradients come back. Then U is neither sent
nor paid for, and V has all of the budget.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch

from polyeps.aggregation.low_rank import DirectionSource, WarmStart, WholeTensors, low_rank
from polyeps.algorithms._averaging import Federation, check_learning_rates, start_of, starting, step, trained_in_cohort
from polyeps.algorithms._releases import NoiseKind, Release, round_price
from polyeps.algorithms._secure_sums import SecureSums
from polyeps.algorithms._sum_counts import Counts
from polyeps.core import Action, Algorithm, Ask, Payload, State, SumTerms, Work
from polyeps.errors import InputError
from polyeps.mechanisms.clipping import check_clip
from polyeps.messages import vector

# The default clip of U over that of V. Only U's directions are used, so nothing is lost when all are clipped to one
# length; and V_t is so poor at first that U is a small part of Δ, which noise made for Δ would drown.
SHORT = 0.01
UPDATE = "update"  # kept by a client from the first release of a round to the second


def cmp_fed(
    federation: Federation,
    *,
    rank: int = 4,
    clip_subspace: float | None = None,
    clip_embedding: float | None = None,
    split: float = 0.5,
    whole: WholeTensors = "when-cheaper",
    warm_start: WarmStart = "orthonormal",
    directions: DirectionSource = "paid",
    server_rate: float = 1.0,
    rate_decay: float = 1.0,
    dropouts: float = 0.1,
    colluders: float = 0.0,
    noise: NoiseKind = "gaussian",
) -> Algorithm:
    """Return federated averaging in which the server learns two noisy sums of thin factors per round."""
    check_learning_rates(server_rate, rate_decay)
    if not 0 < split < 1:
        raise InputError(f"split must be above 0 and below 1, not {split:g}")
    if directions == "model":
        _check_nothing_paid(
            clip_subspace=(clip_subspace, None), split=(split, 0.5), warm_start=(warm_start, "orthonormal")
        )
    training = federation.training
    factors = low_rank(training.model.slices, rank, whole=whole, warm_start=warm_start, directions=directions)
    clip, short = _clips(federation.clip, clip_embedding, clip_subspace)
    # Where everything is sent whole, or the model gives the directions, there is no first release.
    paid = bool(factors.matrices) and directions == "paid"
    first = Release("subspace", factors.subspace_size, short, split, noise, federation.clients)
    second = Release("embed", factors.embedding_size, clip, 1 - split if paid else 1.0, noise, federation.clients)
    releases = (first, second) if paid else (second,)
    counts = Counts.of(federation, dropouts, colluders)
    price = partial(round_price, federation.rate, releases, failure=counts.failure)
    sums = SecureSums(max(federation.noise_for(price).values()), counts, federation.noise)
    sums.check(*releases)
    expected = counts.expected

    def subspace(work: Work) -> tuple[Payload, Payload]:
        updates = trained_in_cohort(training, work)
        return sums.from_clients(first, work, factors.subspace_of(updates, work.payload["right"])), {UPDATE: updates}

    def embed(work: Work) -> tuple[Payload, Payload]:
        updates = work.memory[UPDATE] if paid else trained_in_cohort(training, work)
        return sums.from_clients(second, work, factors.embedding_of(updates, work.payload["left"])), {}

    def round(state: State, ask: Ask) -> State:
        asked = start_of(state, rate_decay)
        if paid:
            right = state.kept["right"] if "right" in state.kept else factors.start(dice(0)).to(state.model)
            found = sums.of(state, ask, first, {**asked, "right": right})
            if found is None:
                return state
            left, asked = factors.orthonormal(found / expected), {}
        else:
            left = factors.left_of(state.model, dice(state.round))
        embedding = sums.of(state, ask, second, {**asked, "left": left})
        if embedding is None:
            return state
        mean = embedding / expected
        kept = {"right": factors.next_right(mean)} if paid else {}
        return step(state, server_rate * factors.rebuild(left, mean), **kept)

    def dice(round: int) -> torch.Generator:
        return torch.Generator().manual_seed(federation.seed(round))

    def terms(action: str, asked: Payload) -> SumTerms:
        return sums.terms(first if action == first.action else second, asked)

    begins, agreed = starting(training.model.size, rate_decay), sums.takes()
    actions = {}
    if paid:
        actions["subspace"] = Action(
            subspace,
            price=None,
            takes={**begins, **agreed, "right": vector(factors.right_size)},
            fits=sums.fits(first),
            gives=lambda _: first.gives(sums.noise_multiplier),
        )
    actions["embed"] = Action(
        embed,
        price=None,
        takes={**({} if paid else begins), **agreed, "left": vector(factors.subspace_size)},
        fits=sums.fits(second),
        gives=lambda _: second.gives(sums.noise_multiplier),
        recalls=(UPDATE,) if paid else (),
    )
    return Algorithm(
        actions,
        round,
        round_price=price,
        trust="secure-sum",
        unit="client",
        conditions=sums.conditions(),
        claimed=lambda multiplier, rounds, delta, _: theorem_1(
            federation.rate, math.sqrt(len(releases)) * multiplier, rounds, delta
        ),
        arithmetic="ideal" if noise == "gaussian" else "exact",
        sums=terms,
        seeded=federation.seeded,
    )


def theorem_1(rate: float, sigma: float, rounds: int, delta: float) -> float:
    """Return the ε of the paper's theorem 1: σ² = 14 q² T (ε + 2 ln(1/δ))/ε² for each release, solved for ε."""
    if not delta:
        return math.inf
    a = rate * math.sqrt(14 * rounds) / sigma
    return a * (a / 2 + math.sqrt(a * a / 4 + 2 * math.log(1 / delta)))


def _clips(of_training: float, embedding: float | None, subspace: float | None) -> tuple[float, float]:
    """Return the clips of right and left factors."""
    clip = of_training if embedding is None else embedding
    check_clip("clip_embedding", clip)
    short = SHORT * clip if subspace is None else subspace
    check_clip("clip_subspace" if subspace is not None else f"clip_subspace, {SHORT:g} of clip_embedding,", short)
    return clip, short


def _check_nothing_paid(**options: tuple[Any, Any]) -> None:
    """Refuse options, with their defaults, of a release that is not made."""
    for name, (value, default) in options.items():
        if value != default:
            raise InputError(
                f'{name} is about left factors that clients send, and directions = "model" has none; leave it out'
            )
