"""FedAvg: every participant trains, the server takes the plain mean of their updates (the baseline of paper 000).

With each client's own budget it is the paper's "FedAvg"; the paper's Minimum, Maximum and non-private baselines
are the same algorithm with other budgets, which `polyeps.algorithms.ALGORITHMS` says. `public_only` is a control
the paper lacks: the mean over the liberal clients alone, without which a gain over FedAvg shows nothing.

Departure: the mean is over who answered, not over who was asked, so a client that declines does not shrink the step.
"""

from polyeps.algorithms.blocks import Split, ask_updates, mean, public_clients, step, train_locally
from polyeps.core import Algorithm, Ask, State
from polyeps.training import Training


def fedavg(training: Training) -> Algorithm:
    """The mean of all updates."""

    def round(state: State, ask: Ask) -> State:
        replies = ask_updates(state, ask, state.roster)
        return step(state, mean(replies.payload["update"])) if replies.ids else state

    return Algorithm({"train": train_locally(training)}, round, adjacency=training.adjacency)


def public_only(training: Training, *, split: Split = "mixture") -> Algorithm:
    """The mean of the liberal clients' updates; the others are never asked."""

    def round(state: State, ask: Ask) -> State:
        public = public_clients(state.enrolled, split)
        replies = ask_updates(state, ask, [client for client in state.roster if client.id in public])
        return step(state, mean(replies.payload["update"])) if replies.ids else state

    return Algorithm({"train": train_locally(training)}, round, needs=("epsilon",), adjacency=training.adjacency)
