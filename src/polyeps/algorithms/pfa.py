"""PFA (algorithm 3): private updates are projected onto the subspace of the public ones.

Paper: Liu et al., "Projected Federated Averaging with Heterogeneous Differential Privacy", VLDB 2022,
https://doi.org/10.14778/3503585.3503592

    C_pub, C_pri  public_clients and the rest      x̄_pub, x̄_pri  means weighted by ε
    V_k           Basis, k = rank per tensor       x̂_pri         the private mean, projected

Departures, each an option: `subspace="set"` takes the second moment of all public updates (the paper prints that
of their mean, `"mean"`, which has rank one; its code centres them, `"centred"`). An exact thin SVD stands for 256
Lanczos steps on a matrix of rank at most |C_pub|. The last line of algorithm 3 prints the unprojected private mean;
the text and algorithm 5 project it, and so do we. `weights="count"` is the reference code's second class.
`projection="gaussian"` and `"sparse"` are the paper's controls with random directions. Public clients are chosen among
all that are enrolled, not anew in every cohort; in a round without a public answer nothing is projected.
"""

from typing import Literal

from polyeps.algorithms._averaging import (
    Split,
    ask_updates,
    check_split,
    epsilons,
    public_clients,
    step,
    with_local_noise,
)
from polyeps.algorithms._projection import Projection, Rank, SubspaceOf, combine, directions_of
from polyeps.core import Algorithm, Ask, State
from polyeps.training import Training


def pfa(
    training: Training,
    *,
    rank: Rank = 1,
    subspace: SubspaceOf = "set",
    per_tensor: bool = True,
    projection: Projection = "subspace",
    weights: Literal["epsilon", "count"] = "epsilon",
    split: Split = "mixture",
    split_at: float | None = None,
) -> Algorithm:
    """Return projected federated averaging."""
    check_split(split, split_at)
    directions = directions_of(training, rank, subspace, per_tensor, projection)

    def round(state: State, ask: Ask) -> State:
        replies = ask_updates(state, ask, state.roster)
        if not replies.ids:
            return state
        high = public_clients(state.enrolled, split, split_at)
        public = [place for place, client in enumerate(replies.ids) if client in high]
        weighing = epsilons(state, replies.ids) if weights == "epsilon" else [1.0] * len(replies.ids)
        update, _ = combine(replies.payload["update"], weighing, public, directions, state.round)
        return step(state, update)

    return with_local_noise(training, round, needs=("epsilon",))
