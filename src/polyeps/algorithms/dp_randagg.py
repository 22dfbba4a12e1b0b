"""DP-RandAgg, the baseline of CMP-Fed: a few coordinates of every update, the same for all, summed with noise.

Paper: Guo et al., "Agent-Level Differentially Private Federated Learning via Compressed Model Perturbation", IEEE CNS
2022, https://openreview.net/forum?id=IRG_AP-IHR

Coordinates are drawn anew for every round from public randomness, so the noisy sum is all that is learnt about any
client. They are as many as CMP-Fed sends at a rank; with rank 0 nothing is left out, which is DP-FedAvg with a fixed
clip, or FedAvg where there is no guarantee.

Departure: the paper clips the whole update, then leaves coordinates out, and the rest is much shorter than the clip its
noise is made for. `mask_first` clips what is sent. Coordinates are not enlarged to make up for those left out.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from polyeps.aggregation.low_rank import WholeTensors, low_rank
from polyeps.algorithms._averaging import Federation, check_learning_rates, start_of, starting, step, trained_in_cohort
from polyeps.algorithms._releases import NoiseKind, Release, round_price
from polyeps.algorithms._secure_sums import SecureSums
from polyeps.algorithms._sum_counts import Counts
from polyeps.core import Action, Algorithm, Ask, Payload, State, Work
from polyeps.errors import InputError
from polyeps.mechanisms.clipping import clip_to_norm
from polyeps.messages import whole_number


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
    counts = Counts.of(federation, dropouts, colluders)
    price = partial(round_price, federation.rate, (release,), failure=counts.failure)
    sums = SecureSums(max(federation.noise_for(price).values()), counts, federation.noise)
    sums.check(release)

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
        update = server_rate * total / counts.expected
        if kept < size:
            update = torch.zeros_like(state.model).index_put_((coordinates(seed).to(update.device),), update)
        return step(state, update)

    takes = {**starting(size, rate_decay), **sums.takes()}
    if kept < size:
        takes["mask"] = whole_number(0, 2**53)
    gives = release.gives(sums.noise_multiplier)
    return Algorithm(
        {"train": Action(train, price=None, takes=takes, fits=sums.fits(release), gives=lambda _: gives)},
        round,
        round_price=price,
        trust="secure-sum",
        unit="client",
        conditions=sums.conditions(),
        sums=lambda _, asked: sums.terms(release, asked),
        arithmetic="ideal" if noise == "gaussian" else "exact",
        seeded=federation.seeded,
    )
