"""The price of noisy sums over cohorts against an observer that knows the cohorts: sampling amplifies nothing then.

The server that draws the cohorts knows whether a client took part. The guarantee that remains is that the client's
answers might as well have been zeros (zero-out), or anything else (replace-one).

An observer that does not know the cohorts learns no more. So this price also bounds that of secret cohorts, and is the
better bound where the noise is too small for a grid.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from scipy.stats import binom

from polyeps.accounting.events import FixedSize, Gaussian, Poisson
from polyeps.accounting.histories import History
from polyeps.accounting.privacy_profiles import FloatArray, gaussian_delta, gaussian_epsilon
from polyeps.core import Adjacency, check_delta, clip_norms_moved

_UNLIKELY = 1e-20  # a probability far below any useful δ
_MOST_COUNTS = 1 << 16
_MOST_ROUNDS = 1 << 40  # beyond, quantiles take too long: the client counts as drawn every time


def known_draws_epsilon(
    noise_multiplier: float, rate: float, rounds: int, delta: float, adjacency: Adjacency = "zero-out"
) -> float:
    """Return the ε of a Gaussian release in each round in which a client is drawn, if these rounds are known.

    The number of draws is binomial and independent of the data, so δ(ε) is a mean over it. With `rate` 1 it is the ε
    of a client that is drawn in every round.

    >>> round(known_draws_epsilon(1.0, 1.0, 1, 1e-5), 6)
    4.377178
    """
    check_delta(delta)
    if delta == 0:
        return math.inf
    return _drawn_at(rate, clip_norms_moved(adjacency) / noise_multiplier, rounds).epsilon(delta)


@dataclass(frozen=True)
class KnownDraws:
    """Gaussian releases whose number is public: probabilities, and the signal-to-noise ratio for each."""

    chances: FloatArray
    shifts: FloatArray  # above 0: a client that was never drawn loses nothing

    def delta(self, epsilon: float) -> float:
        return float(np.sum(self.chances * gaussian_delta(self.shifts, epsilon)))

    def epsilon(self, delta: float) -> float:
        low, high = 0.0, gaussian_epsilon(float(self.shifts[-1]), delta)
        if not math.isfinite(high):
            return math.inf
        while high - low > 1e-12 * high:  # keeps the sound end
            middle = (low + high) / 2
            low, high = (middle, high) if self.delta(middle) > delta else (low, middle)
        return high


def with_draws_known(history: History, adjacency: Adjacency) -> KnownDraws | None:
    """Return a history of (sampled) Gaussian releases as if samples were known; None for any other history."""
    reach, square, sampled = clip_norms_moved(adjacency), 0.0, False
    for step, uses in history.items():
        inner = step.event if isinstance(step, Poisson | FixedSize) else step
        if not isinstance(inner, Gaussian) or (isinstance(step, FixedSize) and adjacency != "replace-one"):
            return None  # fixed-size samples are undefined if a record is added: the accountant refuses them
        sampled |= inner is not step
        shift = reach / inner.noise_multiplier
        square += uses * shift * shift
        if len(history) == 1 and inner is not step:
            drawn = isinstance(step, Poisson)
            rate = step.sampling_probability if drawn else step.sample_size / step.source_dataset_size
            return _drawn_at(rate, shift, uses)
    # Several kinds of steps: as if the client had been in every sample, which is simpler and still a bound.
    return KnownDraws(np.ones(1), np.array([math.sqrt(square)])) if sampled else None


def _drawn_at(rate: float, shift: float, rounds: int) -> KnownDraws:
    draws, chances = _draws(rate, rounds)
    return KnownDraws(chances, shift * np.sqrt(draws))


@lru_cache(maxsize=64)  # a calibration asks for the same one many times
def _draws(rate: float, rounds: int) -> tuple[FloatArray, FloatArray]:
    """Return numbers of draws and their probabilities; unlikely numbers count as being drawn every time."""
    if rate == 1 or rounds > _MOST_ROUNDS:
        return np.array([float(rounds)]), np.ones(1)
    # Through the rounds without a draw: scipy's quantile of a small upper tail is that of probability 1.
    likely = min(rounds - 1, rounds - int(binom.ppf(_UNLIKELY, rounds, 1 - rate)))
    least = int(binom.ppf(_UNLIKELY, rounds, rate)) if likely > _MOST_COUNTS else 0
    if least >= likely:  # drawn nearly every time
        return np.array([float(rounds)]), np.ones(1)
    rare = float(binom.sf(likely, rounds, rate))
    if likely - least <= _MOST_COUNTS:
        often = np.arange(least + 1, likely + 1)
        chances = binom.pmf(often, rounds, rate)
    else:  # several numbers counted as the largest of them
        often = np.linspace(least, likely, _MOST_COUNTS + 1).astype(np.int64)[1:]
        chances = -np.diff(binom.sf(np.append(least, often), rounds, rate))
    if least:
        chances[0] += binom.cdf(least, rounds, rate)
    return np.append(often, rounds), np.append(chances, rare)
