"""WeiAvg (algorithm 1): the mean of all updates, weighted by the clients' budgets.

Paper: Liu et al., "Projected Federated Averaging with Heterogeneous Differential Privacy", VLDB 2022,
https://doi.org/10.14778/3503585.3503592

    ε_m  Profile.epsilon     Δx_m  the update of client m     w_m = ε_m / Σ ε

Departure: the paper's contribution (2) prints the weights upside down; equation 4, which we follow, does not.
"""

from polyeps.algorithms._averaging import ask_updates, epsilons, mean, step, with_local_noise
from polyeps.core import Algorithm, Ask, State
from polyeps.training import Training


def weiavg(training: Training) -> Algorithm:
    """Return averaging of all updates, weighted by ε."""

    def round(state: State, ask: Ask) -> State:
        replies = ask_updates(state, ask, state.roster)
        if not replies.ids:
            return state
        return step(state, mean(replies.payload["update"], epsilons(state, replies.ids)))

    return with_local_noise(training, round, needs=("epsilon",))
