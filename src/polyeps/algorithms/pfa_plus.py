"""PFA+ (algorithms 4 and 5): PFA with the last round's subspace, so private clients upload k numbers.

Paper: Liu et al., "Projected Federated Averaging with Heterogeneous Differential Privacy", VLDB 2022,
https://doi.org/10.14778/3503585.3503592

    V_k (delayed)  state.kept: basis, ranks, centre      V_kᵀ Δx  the reply "coordinates", k per tensor

The first round with a public answer is the warm-up: all clients upload in full. From then on private clients
receive the subspace with the model and send coordinates; the noise they add is not reduced because of it.
`warm_up="in-turn"` saves private clients that one full upload, most of what they ever send: public clients answer
first, and the others are asked with the subspace of the same round. The model is the same, the round takes longer.

Departures as in `pfa`. The subspace is renewed in every round with a public answer, also without private ones;
the paper's "V_k ∈ R^{p×k}" as upload is a misprint for V_kᵀ Δx. We count the subspace that private clients must
download, the paper does not. A round without a public answer uses the last subspace.
"""

from typing import Literal

from polyeps.algorithms._averaging import (
    Split,
    ask_updates,
    check_split,
    epsilons,
    public_clients,
    step,
    train_locally,
    with_local_noise,
)
from polyeps.algorithms._projection import (
    Rank,
    SubspaceOf,
    combine,
    directions_of,
    kept_basis,
    project_locally,
    thin_round,
)
from polyeps.core import Algorithm, Ask, State
from polyeps.training import Training


def pfa_plus(
    training: Training,
    *,
    rank: Rank = 1,
    subspace: SubspaceOf = "set",
    per_tensor: bool = True,
    weights: Literal["epsilon", "count"] = "epsilon",
    split: Split = "mixture",
    split_at: float | None = None,
    warm_up: Literal["full", "in-turn"] = "full",
) -> Algorithm:
    """Return PFA with a delayed subspace and thin uploads."""
    check_split(split, split_at)
    directions = directions_of(training, rank, subspace, per_tensor)

    def round(state: State, ask: Ask) -> State:
        def weigh(ids: tuple[str, ...]) -> list[float]:
            return epsilons(state, ids) if weights == "epsilon" else [1.0] * len(ids)

        high = public_clients(state.enrolled, split, split_at)
        if "basis" in state.kept or (warm_up == "in-turn" and any(client.id in high for client in state.roster)):
            return thin_round(state, ask, high, weigh, directions, training, per_tensor)
        replies = ask_updates(state, ask, state.roster)
        if not replies.ids:
            return state
        public = [place for place, client in enumerate(replies.ids) if client in high]
        rows = replies.payload["update"]
        update, basis = combine(rows, weigh(replies.ids), public, directions, state.round)
        return step(state, update, **kept_basis(basis))

    actions = {"train": train_locally(training), "project": project_locally(training, per_tensor)}
    return with_local_noise(training, round, ("epsilon",), actions)
