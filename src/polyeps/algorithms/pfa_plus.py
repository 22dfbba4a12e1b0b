"""PFA+ (paper 000, algorithms 4 and 5): PFA with the last round's subspace, so private clients upload k numbers.

    V_k (delayed)  state.kept: basis, ranks, centre      V_kᵀ Δx  the reply "coordinates", k per tensor

The first round with a public answer is the warm-up: everybody uploads in full. From then on private clients
receive the subspace with the model and send coordinates; the noise they add is not reduced because of it.

Departures as in `pfa`. The subspace is renewed in every round with a public answer, also without private ones;
the paper's "V_k ∈ R^{p×k}" as upload is a misprint for V_kᵀ Δx. What the paper does not count, we do: the subspace
that private clients must download.
"""

from typing import Literal

from polyeps.algorithms.blocks import Split, ask_updates, epsilons, public_clients, step, train_locally
from polyeps.algorithms.projecting import Rank, SubspaceOf, combine, directions_of, project_locally, thin_round
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
) -> Algorithm:
    """PFA with a delayed subspace and thin uploads."""
    directions = directions_of(training, rank, subspace, per_tensor)

    def round(state: State, ask: Ask) -> State:
        def weigh(ids: tuple[str, ...]) -> list[float]:
            return epsilons(state, ids) if weights == "epsilon" else [1.0] * len(ids)

        liberal = public_clients(state.enrolled, split)
        if "basis" in state.kept:
            return thin_round(state, ask, liberal, weigh, directions, training, per_tensor)
        replies = ask_updates(state, ask, state.roster)
        if not replies.ids:
            return state
        public = [place for place, client in enumerate(replies.ids) if client in liberal]
        rows = replies.payload["update"]
        update, basis = combine(rows, weigh(replies.ids), public, directions, state.round)
        return step(state, update, **(basis.to_tensors() if basis else {}))

    actions = {"train": train_locally(training), "project": project_locally(training, per_tensor)}
    return Algorithm(actions, round, needs=("epsilon",), adjacency=training.adjacency)
