"""FedAvg: every client of the cohort trains, and the server takes the plain mean of their updates.

It is the baseline of PFA, with each client's own budget. The baselines Minimum, Maximum and non-private are the same
algorithm under other budgets (`polyeps.algorithms`). `public_only` is a control that the paper lacks: the mean over the
high-ε clients alone, without which a gain over FedAvg shows nothing.

Paper: Liu et al., "Projected Federated Averaging with Heterogeneous Differential Privacy", VLDB 2022,
https://doi.org/10.14778/3503585.3503592

Departure: averages over the clients that replied, not over those that were invited, so a client that declines does not
shrink the step.
"""

from typing import Literal

from polyeps.algorithms._averaging import (
    Split,
    ask_updates,
    check_split,
    mean,
    public_clients,
    step,
    with_local_noise,
)
from polyeps.core import Algorithm, Ask, Field, State
from polyeps.errors import InputError
from polyeps.training import Training


def fedavg(training: Training, *, weights: Literal["equal", "examples"] = "equal") -> Algorithm:
    """Return averaging of all updates, with equal weights or by the clients' numbers of records."""
    if weights == "examples" and training.adjacency == "add-remove":
        raise InputError('weights = "examples" needs the numbers of records, which training.rate hides; leave out one')

    def round(state: State, ask: Ask) -> State:
        replies = ask_updates(state, ask, state.roster)
        if not replies.ids:
            return state
        known = {client.id: float(client.examples or 0) for client in state.roster}
        by = [known[client] for client in replies.ids] if weights == "examples" else None
        return step(state, mean(replies.payload["update"], by))

    needs: tuple[Field, ...] = ("examples",) if weights == "examples" else ()
    return with_local_noise(training, round, needs=needs)


def public_only(training: Training, *, split: Split = "mixture", split_at: float | None = None) -> Algorithm:
    """Return averaging of the high-ε clients' updates; the others are never asked."""
    check_split(split, split_at)

    def round(state: State, ask: Ask) -> State:
        public = public_clients(state.enrolled, split, split_at)
        replies = ask_updates(state, ask, [client for client in state.roster if client.id in public])
        return step(state, mean(replies.payload["update"])) if replies.ids else state

    return with_local_noise(training, round, needs=("epsilon",))
