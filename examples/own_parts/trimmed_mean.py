"""An own algorithm: the coordinate-wise trimmed mean of the clients' updates."""

from polyeps.algorithms import ask_updates, step, with_local_noise
from polyeps.core import Algorithm, Ask, State
from polyeps.errors import InputError
from polyeps.training import Training


def trimmed_mean(training: Training, *, trim: float = 0.1) -> Algorithm:
    """Mean of all updates without the smallest and largest values of each coordinate."""
    if not 0 <= trim < 0.5:
        raise InputError(f"trim is {trim:g}; it must be at least 0 and below 0.5")

    def round(state: State, ask: Ask) -> State:
        replies = ask_updates(state, ask, state.roster)
        if not replies.ids:
            return state
        values = replies.payload["update"].sort(dim=0).values  # (n, d)
        cut = int(trim * len(values))
        return step(state, values[cut : len(values) - cut].mean(dim=0))

    return with_local_noise(training, round)
