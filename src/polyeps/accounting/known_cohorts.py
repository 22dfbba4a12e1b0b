"""What noisy sums over cohorts cost against somebody who knows who was drawn: nothing is amplified then.

Whoever draws the cohorts knows them, so it is told apart whether a client took part or not. What can still be promised
is that its answers might as well have been zeros (zero-out), or anything else (replace-one).

Who does not know the draws learns no more: a sampled step is the same without being told whether it was a draw. So
this is also a bound on what secret draws cost, and a better one where noise is so small that a grid is too coarse.
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

_UNLIKELY = 1e-20  # a chance far below any δ of use
_MOST_COUNTS = 1 << 16
_MOST_ROUNDS = 1 << 40  # of more, quantiles take for ever: then as if drawn every time


def known_draws_epsilon(
    noise_multiplier: float, rate: float, rounds: int, delta: float, adjacency: Adjacency = "zero-out"
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
    return _drawn_at(rate, clip_norms_moved(adjacency) / noise_multiplier, rounds).epsilon(delta)


@dataclass(frozen=True)
class KnownDraws:
    """Gaussian releases of which it is public how many there are: with these chances, these signals to noise."""

    chances: FloatArray
    shifts: FloatArray  # above 0: who was never drawn loses nothing

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
    """A history some of whose Gaussian releases were sampled, as if the samples were known; else nothing."""
    reach, square, sampled = clip_norms_moved(adjacency), 0.0, False
    for step, uses in history.items():
        inner = step.event if isinstance(step, Poisson | FixedSize) else step
        if not isinstance(inner, Gaussian) or (isinstance(step, FixedSize) and adjacency != "replace-one"):
            return None  # fixed-size samples mean nothing where somebody is added: the judge refuses them
        sampled |= inner is not step
        shift = reach / inner.noise_multiplier
        square += uses * shift * shift
        if len(history) == 1 and inner is not step:
            return _drawn_at(_rate(step), shift, uses)
    # Of several kinds of steps, as if all samples had had this client: simpler, and still a bound.
    return KnownDraws(np.ones(1), np.array([math.sqrt(square)])) if sampled else None


def _rate(step: Poisson | FixedSize) -> float:
    """Return how likely a sample is to hold one unit."""
    return step.sampling_probability if isinstance(step, Poisson) else step.sample_size / step.source_dataset_size


def _drawn_at(rate: float, shift: float, rounds: int) -> KnownDraws:
    draws, chances = _draws(rate, rounds)
    return KnownDraws(chances, shift * np.sqrt(draws))


@lru_cache(maxsize=64)  # a calibration asks for one over and over
def _draws(rate: float, rounds: int) -> tuple[FloatArray, FloatArray]:
    """How often a client is drawn, and how likely; what hardly ever happens counts as being drawn every time."""
    if rate == 1 or rounds > _MOST_ROUNDS:
        return np.array([float(rounds)]), np.ones(1)
    # By the rounds without a draw: scipy's own quantile of a small upper tail is that of 1.
    likely = min(rounds - 1, rounds - int(binom.ppf(_UNLIKELY, rounds, 1 - rate)))
    least = int(binom.ppf(_UNLIKELY, rounds, rate)) if likely > _MOST_COUNTS else 0
    if least >= likely:  # drawn nearly every time
        return np.array([float(rounds)]), np.ones(1)
    rare = float(binom.sf(likely, rounds, rate))
    if likely - least <= _MOST_COUNTS:
        often = np.arange(least + 1, likely + 1)
        chances = binom.pmf(often, rounds, rate)
    else:  # several counts as one, the largest of them
        often = np.linspace(least, likely, _MOST_COUNTS + 1).astype(np.int64)[1:]
        chances = -np.diff(binom.sf(np.append(least, often), rounds, rate))
    if least:
        chances[0] += binom.cdf(least, rounds, rate)
    return np.append(often, rounds), np.append(chances, rare)
