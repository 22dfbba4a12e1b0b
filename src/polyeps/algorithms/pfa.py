"""PFA and PFA+ (algorithms 3 to 5): private updates are projected onto the subspace of the public ones.

Paper: Liu et al., "Projected Federated Averaging with Heterogeneous Differential Privacy", VLDB 2022,
https://doi.org/10.14778/3503585.3503592

    C_pub, C_pri  public_clients and the rest      x̄_pub, x̄_pri   means weighted by ε
    V_k           Basis, k = rank per tensor       x̂_pri          the private mean, projected
    V_kᵀ Δx       the reply "coordinates"          V_k (delayed)  state.kept: basis, ranks, centre

Departures, each an option: `subspace="set"` takes the second moment of all public updates (the paper prints that
of their mean, `"mean"`, which has rank one; its code centres them, `"centred"`). An exact thin SVD stands for 256
Lanczos steps on a matrix of rank at most |C_pub|. The last line of algorithm 3 prints the unprojected private mean;
the text and algorithm 5 project it, and so do we. `weights="count"` is the reference code's second class.
`projection="gaussian"` and `"sparse"` are the paper's controls with random directions. Public clients are chosen among
all that are enrolled, not anew in every cohort; in a round without a public answer nothing is projected.

PFA+ uses the last round's subspace, so private clients upload k numbers per tensor. The first round with a public
answer is the warm-up: all clients upload in full. From then on private clients receive the subspace with the model and
send coordinates; the noise they add is not reduced because of it. `warm_up="in-turn"` saves private clients that one
full upload, most of what they ever send: public clients answer first, and the others are asked with the subspace of the
same round. The model is the same, the round takes longer.

Departures of PFA+. The subspace is renewed in every round with a public answer, also without private ones; the paper's
"V_k ∈ R^{p×k}" as upload is a misprint for V_kᵀ Δx. We count the subspace that private clients must download, the paper
does not. A round without a public answer uses the last subspace.
"""

from functools import partial
from typing import Literal

from polyeps.algorithms._averaging import Split, check_split, disclosed_weights, public_clients, with_local_noise
from polyeps.algorithms._projection import Rank, SubspaceOf, directions_of, full_round, project_locally, thin_round
from polyeps.core import Algorithm, Ask, State
from polyeps.training import Training

_Weights = Literal["epsilon", "count"]


def pfa(
    training: Training,
    *,
    rank: Rank = 1,
    subspace: SubspaceOf = "set",
    per_tensor: bool = True,
    projection: Literal["subspace", "gaussian", "sparse"] = "subspace",
    weights: _Weights = "epsilon",
    split: Split = "mixture",
    split_at: float | None = None,
) -> Algorithm:
    """Return projected federated averaging."""
    check_split(split, split_at)
    directions = directions_of(training, rank, subspace, per_tensor, projection)

    def round(state: State, ask: Ask) -> State:
        high = public_clients(state.enrolled, split, split_at)
        return full_round(state, ask, high, partial(disclosed_weights, state, weights), directions)

    return with_local_noise(training, round, needs=("epsilon",))


def pfa_plus(
    training: Training,
    *,
    rank: Rank = 1,
    subspace: SubspaceOf = "set",
    per_tensor: bool = True,
    weights: _Weights = "epsilon",
    split: Split = "mixture",
    split_at: float | None = None,
    warm_up: Literal["full", "in-turn"] = "full",
) -> Algorithm:
    """Return PFA with a delayed subspace and thin uploads."""
    check_split(split, split_at)
    directions = directions_of(training, rank, subspace, per_tensor)

    def round(state: State, ask: Ask) -> State:
        high, weigh = public_clients(state.enrolled, split, split_at), partial(disclosed_weights, state, weights)
        if "basis" in state.kept or (warm_up == "in-turn" and any(client.id in high for client in state.roster)):
            return thin_round(state, ask, high, weigh, directions, training, per_tensor)
        return full_round(state, ask, high, weigh, directions, delayed=True)

    return with_local_noise(training, round, ("epsilon",), {"project": project_locally(training, per_tensor)})
