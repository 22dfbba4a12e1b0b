"""FedAvg: every participant trains, the server takes the plain mean of their updates (the baseline of paper 000).

With each client's own budget it is the paper's "FedAvg"; the paper's Minimum, Maximum and non-private baselines
are the same algorithm with other budgets, which `polyeps.algorithms.ALGORITHMS` says. `public_only` is a control
the paper lacks: the mean over the liberal clients alone, without which a gain over FedAvg shows nothing.

Departure: the mean is over who answered, not over who was asked, so a client that declines does not shrink the step.
"""

from typing import Literal

from polyeps.algorithms._averaging import (
    Split,
    ask_updates,
    check_split,
    mean,
    public_clients,
    step,
    with_noise_of_their_own,
)
from polyeps.core import Algorithm, Ask, Field, State
from polyeps.errors import InputError
from polyeps.training import Training


def fedavg(training: Training, *, weights: Literal["equal", "examples"] = "equal") -> Algorithm:
    """Average all updates, with equal weights or by the clients' numbers of records."""
    if weights == "examples" and training.adjacency == "add-remove":
        raise InputError('weights = "examples" needs the numbers of records that training.rate hides; leave out one')

    def round(state: State, ask: Ask) -> State:
        replies = ask_updates(state, ask, state.roster)
        if not replies.ids:
            return state
        known = {client.id: float(client.examples or 0) for client in state.roster}
        by = [known[client] for client in replies.ids] if weights == "examples" else None
        return step(state, mean(replies.payload["update"], by))

    needs: tuple[Field, ...] = ("examples",) if weights == "examples" else ()
    return with_noise_of_their_own(training, round, needs=needs)


def public_only(training: Training, *, split: Split = "mixture", split_at: float | None = None) -> Algorithm:
    """The mean of the liberal clients' updates; the others are never asked."""
    check_split(split, split_at)

    def round(state: State, ask: Ask) -> State:
        public = public_clients(state.enrolled, split, split_at)
        replies = ask_updates(state, ask, [client for client in state.roster if client.id in public])
        return step(state, mean(replies.payload["update"])) if replies.ids else state

    return with_noise_of_their_own(training, round, needs=("epsilon",))
