"""CMP-Fed (algorithm 1) and its baseline DP-RandAgg: updates as two thin factors, each summed with noise.

Paper: Guo et al., "Agent-Level Differentially Private Federated Learning via Compressed Model Perturbation", IEEE CNS
2022, https://openreview.net/forum?id=IRG_AP-IHR

    Δ_i   an update, kept by its client    V_t   kept "right"      C_1, σ_1   clip_subspace, noise of share `split`
    U_i   release "subspace" = Δ_i V_t     Û     sent as "left"    C_2, σ_2   clip_embedding, noise of the rest
    V_i   release "embed"    = Δ_iᵀ Û      γ     server_rate       η·d^t      rate_decay is d

Whole clients are protected. Both releases come from one cohort and cost, together, one Gaussian with the round's noise
multiplier σ: 1/σ_1² + 1/σ_2² = 1/σ². For a round it has paid for, a client does each at most once, and the second only
after the first.

Departures. Cohorts are Poisson-sampled, and sums are divided by the public q·N. One norm bounds all of a release,
biases included. V_t is made orthonormal, so that U does not depend on the noise in V_t's length; `warm_start = "raw"`
is the paper. C_1 is a hundredth of C_2, where the paper took medians it does not pay for. Tensors that factors would
not make smaller are sent whole; `whole = "biases"` is the paper's count. U, of which only the directions are used, may
get more noise than V.

Beyond the paper. `directions = "model"` takes Û from the public model: random mixtures, new in every round, of the
directions in which the next layer reads a layer's outputs, through which gradients come back. Then U is neither sent
nor paid for, and V has all of the budget.

DP-RandAgg sums a few coordinates of every update, the same for all. They are drawn anew for every round from public
randomness, so the noisy sum is all that is learnt about any client. They are as many as CMP-Fed sends at a rank; with
rank 0 nothing is left out, which is DP-FedAvg with a fixed clip, or FedAvg where there is no guarantee. Departure: the
paper clips the whole update, then leaves coordinates out, and the rest is much shorter than the clip its noise is made
for. `mask_first` clips what is sent. Coordinates are not enlarged to make up for those left out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from polyeps.aggregation.low_rank import DirectionSource, WarmStart, WholeTensors, low_rank
from polyeps.algorithms._averaging import Federation, check_learning_rates, start_of, starting, step, trained_in_cohort
from polyeps.algorithms._releases import NoiseKind, Release
from polyeps.algorithms._secure_sums import paid_sums, summing
from polyeps.core import Algorithm, Ask, Payload, State, Work
from polyeps.errors import InputError
from polyeps.mechanisms.clipping import check_clip, clip_to_norm
from polyeps.messages import vector, whole_number

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
    given = {"clip_subspace": clip_subspace, "split": split, "warm_start": warm_start}
    for name, default in (("clip_subspace", None), ("split", 0.5), ("warm_start", "orthonormal")):
        if directions == "model" and given[name] != default:
            raise InputError(
                f'{name} is about left factors that clients send, and directions = "model" has none; leave it out'
            )
    training = federation.training
    factors = low_rank(training.model.slices, rank, whole=whole, warm_start=warm_start, directions=directions)
    clip = federation.clip if clip_embedding is None else clip_embedding
    short = SHORT * clip if clip_subspace is None else clip_subspace
    check_clip("clip_embedding", clip)
    check_clip(f"clip_subspace, {SHORT:g} of clip_embedding," if clip_subspace is None else "clip_subspace", short)
    # Where everything is sent whole, or the model gives the directions, there is no first release.
    paid = bool(factors.matrices) and directions == "paid"
    first = Release("subspace", factors.subspace_size, short, split, noise, federation.clients)
    second = Release("embed", factors.embedding_size, clip, 1 - split if paid else 1.0, noise, federation.clients)
    releases = (first, second) if paid else (second,)
    sums, price = paid_sums(federation, releases, dropouts, colluders)
    expected = sums.counts.expected

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

    begins, actions = starting(training.model.size, rate_decay), {}
    if paid:
        actions["subspace"] = sums.action(first, subspace, {**begins, "right": vector(factors.right_size)})
    takes = {**({} if paid else begins), "left": vector(factors.subspace_size)}
    actions["embed"] = sums.action(second, embed, takes, recalls=(UPDATE,) if paid else ())

    def claimed(multiplier: float, rounds: int, delta: float, _: Mapping[str, float]) -> float:
        return theorem_1(federation.rate, math.sqrt(len(releases)) * multiplier, rounds, delta)

    return summing(federation, sums, releases, actions, round, round_price=price, claimed=claimed)


def theorem_1(rate: float, sigma: float, rounds: int, delta: float) -> float:
    """Return the ε of the paper's theorem 1: σ² = 14 q² T (ε + 2 ln(1/δ))/ε² for each release, solved for ε."""
    if not delta:
        return math.inf
    a = rate * math.sqrt(14 * rounds) / sigma
    return a * (a / 2 + math.sqrt(a * a / 4 + 2 * math.log(1 / delta)))


def dp_randagg(
    federation: Federation,
    *,
    rank: int = 4,
    mask_first: bool = True,
    whole: WholeTensors = "when-cheaper",
    server_rate: float = 1.0,
    rate_decay: float = 1.0,
    dropouts: float = 0.1,
    colluders: float = 0.0,
    noise: NoiseKind = "gaussian",
) -> Algorithm:
    """Return federated averaging in which the server learns a noisy sum of some coordinates per round."""
    check_learning_rates(server_rate, rate_decay)
    if rank < 0:
        raise InputError(f"rank must be at least 0, not {rank}")
    training = federation.training
    size = training.model.size
    kept = min(size, low_rank(training.model.slices, rank, whole=whole).uplink) if rank else size
    release = Release("train", kept, federation.clip, noise=noise, clients=federation.clients)
    sums, price = paid_sums(federation, (release,), dropouts, colluders)

    def train(work: Work) -> tuple[Payload, Payload]:
        updates = trained_in_cohort(training, work)
        if kept < size:
            if work.noise_multiplier.any() and not mask_first:
                updates = clip_to_norm(updates, release.clip)
            updates = updates[:, coordinates(int(work.payload["mask"])).to(updates.device)]
        return sums.from_clients(release, work, updates), {}

    def coordinates(seed: int) -> Tensor:
        return torch.randperm(size, generator=torch.Generator().manual_seed(seed))[:kept]

    def round(state: State, ask: Ask) -> State:
        seed = federation.seed(state.round)
        asked = start_of(state, rate_decay)
        total = sums.of(state, ask, release, {**asked, "mask": torch.tensor(seed)} if kept < size else asked)
        if total is None:
            return state
        update = server_rate * total / sums.counts.expected
        if kept < size:
            update = torch.zeros_like(state.model).index_put_((coordinates(seed).to(update.device),), update)
        return step(state, update)

    takes = {**starting(size, rate_decay), **({"mask": whole_number(0, 2**53)} if kept < size else {})}
    actions = {"train": sums.action(release, train, takes)}
    return summing(federation, sums, (release,), actions, round, round_price=price)
