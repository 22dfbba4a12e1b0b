"""PDP-FL: PFA for clients that do not disclose ε; groups are estimated from the updates themselves.

Paper: Liu et al., "Personalized Differentially Private Federated Learning without Exposing Privacy Budgets", CIKM 2023,
https://doi.org/10.1145/3583780.3615247

    ‖Δx_m‖₂  log_norms      C_pub  the group with the least noise      ω_m  weights from noise estimates

A low-ε client adds much noise, so its update is long: the server groups by norms, after local training (the paper's
algorithm lists the partition before it). All of this reads updates that are noisy already, and costs no privacy.

Departures: by default (`grouping="noise"`) clients are grouped by estimates of the noise itself, which finds the groups
also where signals differ more than noise does, as with two labels per client. Estimates are averaged over the rounds,
one to three groups are chosen by BIC, and with one group nothing is projected. `"robust"` does the same with norms;
`"mixture"` is the paper's mixture of `groups` Gaussians on the norms of one round (of all rounds, if `delayed`). The
paper weights by ε_m, which it hides: we weight by noise estimates, or equally (`weights="count"`). `delayed=True` is
PFA+ under hidden budgets, which the paper considers impossible: groups are fixed after the first `warm_up` rounds,
since noise levels do not change. As long as all clients look alike, rounds stay full. A client that never uploaded in
full counts as private and gets the smallest weight.

Only the declared number is hidden: updates reveal the noise level, and with it ε (docs/papers/pdp-fl.md).
"""

from __future__ import annotations

from typing import Annotated, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field

from polyeps.aggregation.client_groups import group_by_log_norms, group_by_norms
from polyeps.aggregation.noise_estimation import estimate_noise_variances
from polyeps.aggregation.subspace import inverse_variance_weights, variances_of_norms
from polyeps.algorithms._averaging import ask_updates, of_everybody, places_of, step, with_local_noise
from polyeps.algorithms._projection import Rank, SubspaceOf, combine, directions_of, project_locally, thin_round
from polyeps.core import Algorithm, Ask, Payload, Replies, State
from polyeps.training import Training

Grouping = Literal["noise", "robust", "mixture"]
Weights = Literal["noise", "count"]
KNOWN = ("log_norms", "log_noise", "seen")  # what is kept of every enrolled client


def pdp_fl(
    training: Training,
    *,
    rank: Rank = 1,
    subspace: SubspaceOf = "set",
    per_tensor: bool = True,
    grouping: Grouping = "noise",
    groups: int = 2,
    weights: Weights = "noise",
    delayed: bool = False,
    warm_up: Annotated[int, Field(ge=1)] = 3,
) -> Algorithm:
    """Return projected averaging with estimated groups."""
    directions = directions_of(training, rank, subspace, per_tensor)
    size = training.model.size

    def round(state: State, ask: Ask) -> State:
        if delayed and state.round >= warm_up and "basis" in state.kept:
            known = {name: of_everybody(state, state.kept, name) for name in KNOWN if name in state.kept}
            low_noise, weight = estimates(known, size, grouping, weights, groups)
            public = {client.id for client, yes in zip(state.enrolled, low_noise, strict=True) if yes}
            if public:

                def weigh(ids: tuple[str, ...]) -> list[float]:
                    return [float(weight[place]) for place in places_of(state, ids)]

                return thin_round(state, ask, public, weigh, directions, training, per_tensor)
        replies = ask_updates(state, ask, state.roster)
        if not replies.ids:
            return state
        memory = remember(state, replies, grouping, anew=grouping == "mixture" and not delayed)
        low_noise, weight = estimates(memory, size, grouping, weights, groups)
        places = places_of(state, replies.ids)
        chosen = np.flatnonzero(low_noise[places]).tolist()
        rows = replies.payload["update"]
        update, basis = combine(rows, weight[places].tolist(), chosen, directions, state.round)
        return step(state, update, **memory, **(basis.to_tensors() if delayed and basis is not None else {}))

    actions = {"project": project_locally(training, per_tensor)} if delayed else {}
    return with_local_noise(training, round, actions=actions)


def remember(state: State, replies: Replies, grouping: Grouping, anew: bool) -> dict[str, torch.Tensor]:
    """Return the sum of every enrolled client's log-norms, and over how many rounds; `anew` forgets earlier rounds.

    Where clients are grouped by noise, return the same for the estimated noise.
    """
    before = {} if anew else state.kept
    sums, noise, seen = (of_everybody(state, before, name) for name in KNOWN)
    places = places_of(state, replies.ids)
    norms = torch.linalg.vector_norm(replies.payload["update"], dim=1, dtype=torch.float64).cpu()
    finite = torch.isfinite(norms) & (norms > 0)  # an update without a length gives no estimate
    sums[places] += torch.where(finite, norms.log(), 0.0)
    seen[places] += finite
    memory = {"log_norms": sums, "seen": seen}
    if grouping == "noise":
        # Without measurable noise, the noise level is the smallest that floats resolve; log 0 must not be left out.
        floor = norms.square() / replies.payload["update"].shape[1] * 1e-12
        variances = torch.maximum(estimate_noise_variances(replies.payload["update"][:, None]).cpu(), floor)
        noise[places] += torch.where(finite, variances.log() / 2, 0.0)
        memory["log_noise"] = noise
    return memory


def estimates(
    memory: Payload, size: int, grouping: Grouping, weights: Weights, groups: int = 2
) -> tuple[NDArray[np.bool_], NDArray[np.float64]]:
    """Return whether each client seems public, and its weight; no client is public when all look alike."""
    seen = memory["seen"].cpu().numpy()
    known = seen > 0
    low_noise, weight = np.zeros(len(known), dtype=bool), np.ones(len(known))
    if not known.any():
        return low_noise, weight
    logs = memory["log_norms"].cpu().numpy()[known] / seen[known]
    if grouping == "mixture":
        low_noise[known] = group_by_norms(np.exp(logs), groups) == 0
    else:
        levels = memory["log_noise"].cpu().numpy()[known] / seen[known] if grouping == "noise" else logs
        found = group_by_log_norms(levels, size)
        low_noise[known] = (found == 0) & (found.max() > 0)  # with one noise level, nothing is projected
    if weights == "noise":
        squares = torch.from_numpy(np.exp(2 * logs))
        # The shortest update bounds the signal of all clients: no weight goes much beyond it.
        signal = float(squares.min() / size) ** 0.5
        weight[known] = inverse_variance_weights(variances_of_norms(squares, size), signal).numpy()
        weight[~known] = weight[known].min()
    return low_noise, weight
