"""PFA+ (paper 000, algorithms 4 and 5): PFA with the last round's subspace, so private clients upload k numbers.

    V_k (delayed)  state.kept: basis, ranks, centre      V_kᵀ Δx  the reply "coordinates", k per tensor

The first round with a public answer is the warm-up: everybody uploads in full. From then on private clients
receive the subspace with the model and send coordinates; the noise they add is not reduced because of it.
`warm_up="in-turn"` spares private clients that one full upload, most of what they ever send: public clients answer
first, and the others are asked with the subspace of the same round. The model is the same, the round takes longer.

Departures as in `pfa`. The subspace is renewed in every round with a public answer, also without private ones;
the paper's "V_k ∈ R^{p×k}" as upload is a misprint for V_kᵀ Δx. What the paper does not count, we do: the subspace
that private clients must download. A round without a public answer goes on with the subspace at hand.
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
    with_noise_of_their_own,
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
    """PFA with a delayed subspace and thin uploads."""
    check_split(split, split_at)
    directions = directions_of(training, rank, subspace, per_tensor)

    def round(state: State, ask: Ask) -> State:
        def weigh(ids: tuple[str, ...]) -> list[float]:
            return epsilons(state, ids) if weights == "epsilon" else [1.0] * len(ids)

        liberal = public_clients(state.enrolled, split, split_at)
        if "basis" in state.kept or (warm_up == "in-turn" and any(client.id in liberal for client in state.roster)):
            return thin_round(state, ask, liberal, weigh, directions, training, per_tensor)
        replies = ask_updates(state, ask, state.roster)
        if not replies.ids:
            return state
        public = [place for place, client in enumerate(replies.ids) if client in liberal]
        rows = replies.payload["update"]
        update, basis = combine(rows, weigh(replies.ids), public, directions, state.round)
        return step(state, update, **kept_basis(basis))

    actions = {"train": train_locally(training), "project": project_locally(training, per_tensor)}
    return with_noise_of_their_own(training, round, ("epsilon",), actions)
