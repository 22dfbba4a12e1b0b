"""What noisy sums over cohorts cost against somebody who knows who was drawn: nothing is amplified then.

Whoever draws the cohorts knows them, so it is told apart whether a client took part or not. What can still be promised
is that its answers might as well have been zeros (add-remove), or anything else (replace-one).
"""

import math

import numpy as np
from scipy.stats import binom

from polyeps.accounting.pld import gaussian_delta, gaussian_epsilon
from polyeps.core import Adjacency, check_delta


def known_draws_epsilon(
    noise_multiplier: float, rate: float, rounds: int, delta: float, adjacency: Adjacency = "add-remove"
) -> float:
    """ε of a Gaussian release in each round in which a client is drawn, when it is known in which.

    How often that is depends on coins and on nobody's data, so δ(ε) is its mean over the binomial number of draws.
    With `rate` 1 it is the ε of a client that is drawn in every round.

    >>> round(known_draws_epsilon(1.0, 1.0, 1, 1e-5), 6)
    4.377178
    """
    check_delta(delta)
    if delta == 0:
        return math.inf
    draws = np.arange(rounds + 1)
    chances = binom.pmf(draws, rounds, rate)
    reach = (1 if adjacency == "add-remove" else 2) / noise_multiplier
    shifts = reach * np.sqrt(draws[1:])  # who was never drawn loses nothing
    low, high = 0.0, gaussian_epsilon(reach * math.sqrt(rounds), delta)
    if not math.isfinite(high):
        return math.inf
    while high - low > 1e-12 * high:  # keeps the sound end
        middle = (low + high) / 2
        mean = float(np.sum(chances[1:] * gaussian_delta(shifts, middle)))
        low, high = (middle, high) if mean > delta else (low, middle)
    return high
