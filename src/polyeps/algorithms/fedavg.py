"""FedAvg: every participant trains, the server takes the plain mean of their updates (the baseline of paper 000).

With each client's own budget it is the paper's "FedAvg"; the paper's Minimum, Maximum and non-private baselines
are the same algorithm with other budgets, which `polyeps.algorithms.ALGORITHMS` says. `public_only` is a control
the paper lacks: the mean over the liberal clients alone, without which a gain over FedAvg shows nothing.

Departure: the mean is over who answered, not over who was asked, so a client that declines does not shrink the step.
"""

from polyeps.algorithms.blocks import ask_updates, split_roster, step, train_locally
from polyeps.core import Algorithm, Ask, State
from polyeps.training import Training


def fedavg(training: Training) -> Algorithm:
    """The mean of all updates."""

    def round(state: State, ask: Ask) -> State:
        replies = ask_updates(state, ask, state.roster)
        return step(state, replies.payload["update"].mean(0)) if replies.ids else state

    return Algorithm({"train": train_locally(training)}, round, adjacency=training.adjacency)


def public_only(training: Training, *, split: str = "mixture") -> Algorithm:
    """The mean of the liberal clients' updates; the others are never asked."""

    def round(state: State, ask: Ask) -> State:
        public, _ = split_roster(state, split)
        replies = ask_updates(state, ask, public)
        return step(state, replies.payload["update"].mean(0)) if replies.ids else state

    return Algorithm({"train": train_locally(training)}, round, needs=("epsilon",), adjacency=training.adjacency)
