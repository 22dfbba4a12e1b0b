"""Robust-HDP: the mean of all updates, weighted inversely to noise variances that the server estimates.

Paper: Malekmohammadi, Yu and Cao, "Noise-Aware Algorithm for Heterogeneous Differentially Private Federated Learning",
ICML 2024, https://arxiv.org/abs/2406.03519

    M  the updates of a round, a row per client here      (L, S)  `principal_component_pursuit` of M
    ‖S_i‖²  the estimated noise of client i      w_i ∝ 1/‖S_i‖²

What clients share is of low rank and goes into L; independent noise goes into S. Clients disclose nothing, so a false ε
gains no weight. Estimates read updates that are noisy already, and cost no privacy.

Departures: the pursuit sees at most `coordinates` of the parameters, drawn anew in every round (the paper's code takes
the first 200 000), and at most a hundred clients at a time. Estimates are geometric means over the first `warm_up`
rounds that a client answered, since noise levels do not change; the paper's code takes the first round.

A signal that a client shares with no other one counts as its noise, which lowers the weight of clients with rare data.
"""

from __future__ import annotations

from typing import Annotated

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from polyeps.aggregation.robust_pca import principal_component_pursuit
from polyeps.aggregation.subspace import inverse_variance_weights
from polyeps.algorithms._averaging import ask_updates, mean, of_everybody, places_of, step, with_local_noise
from polyeps.core import Algorithm, Ask, Replies, State
from polyeps.training import Training

_TOGETHER = 100  # clients in one pursuit, whose time grows with their cube
_ROUNDING = 1e-12  # share of an update's energy that float32 cannot tell from none


def robust_hdp(
    training: Training,
    *,
    coordinates: Annotated[int, Field(ge=1)] = 1000,
    warm_up: Annotated[int, Field(ge=1)] = 5,
) -> Algorithm:
    """Return averaging of all updates, weighted by the inverse of their estimated noise."""

    def round(state: State, ask: Ask) -> State:
        replies = ask_updates(state, ask, state.roster)
        if not replies.ids:
            return state
        places = places_of(state, replies.ids)
        memory = {name: of_everybody(state, state.kept, name) for name in ("log_noise", "seen")}
        if bool((memory["seen"][places] < warm_up).any()):
            found = noise_variances(replies, state.round, coordinates)
            memory["log_noise"][places] += torch.where(found > 0, found.log(), 0.0)
            memory["seen"][places] += found > 0
        seen = memory["seen"][places]
        estimates = (memory["log_noise"][places] / seen.clamp(min=1)).exp()
        if bool(seen.any()):  # clients without an estimate count as the noisiest
            estimates = torch.where(seen > 0, estimates, estimates[seen > 0].max())
        return step(state, mean(replies.payload["update"], inverse_variance_weights(estimates).tolist()), **memory)

    return with_local_noise(training, round)


def noise_variances(replies: Replies, round: int, coordinates: int) -> Tensor:
    """Return the estimated noise variance per coordinate of each reply, (n,) float64.

    It is 0 only for an update of exactly zero, which gives no estimate: it must not pass for the one with least noise.
    """
    rows = replies.payload["update"]
    if rows.shape[1] > coordinates:
        # Public and the same for all clients; noise has the same variance everywhere.
        chosen = np.random.default_rng(round).choice(rows.shape[1], coordinates, replace=False)
        rows = rows[:, torch.from_numpy(np.sort(chosen)).to(rows.device)]
    groups = torch.arange(len(rows)).tensor_split(-(-len(rows) // _TOGETHER))
    rows = rows.cpu().double()
    found = torch.cat([principal_component_pursuit(rows[group])[1].square().mean(1) for group in groups])
    # Where there is no noise, the smallest level that floats resolve.
    return torch.maximum(found, rows.square().mean(1) * _ROUNDING)
