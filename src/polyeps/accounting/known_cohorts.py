"""The price of noisy sums over cohorts against an observer that knows the cohorts: sampling amplifies nothing then.

The server that draws the cohorts knows whether a client took part. The guarantee that remains is that the client's
answers might as well have been zeros (zero-out), or anything else (replace-one).

An observer that does not know the cohorts learns no more. So this price also bounds that of secret cohorts, and is the
better bound where the noise is too small for a grid.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from scipy.special import gammaln

from polyeps.accounting.events import FixedSize, Gaussian, Poisson
from polyeps.accounting.histories import History
from polyeps.accounting.privacy_profiles import FloatArray, gaussian_delta, gaussian_epsilon
from polyeps.core import Adjacency, check_delta, clip_norms_moved

_UNLIKELY = 1e-20  # a probability far below any useful δ
_MOST_COUNTS = 1 << 16
_ROUGHLY = 1 << 16  # rounds up to which logarithms of factorials are known to ten digits
_MARGIN = 1e-6  # far above the error of such a probability
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
    return KnownDraws(rate, clip_norms_moved(adjacency) / noise_multiplier, rounds).epsilon(delta)


@dataclass(frozen=True)
class KnownDraws:
    """Gaussian releases, each made with a probability, whose number is public."""

    rate: float
    shift: float  # the signal-to-noise ratio of one release
    rounds: int

    @cached_property
    def chances(self) -> FloatArray:
        return _draws(self.rate, self.rounds)[1]

    @cached_property
    def shifts(self) -> FloatArray:
        """The signal-to-noise ratio for each number of draws above 0: a client that was never drawn loses nothing."""
        return self.shift * np.sqrt(_draws(self.rate, self.rounds)[0])

    @property
    def largest_shift(self) -> float:
        return self.shift * math.sqrt(self.rounds)

    def delta(self, epsilon: float) -> float:
        return float(np.sum(self.chances * gaussian_delta(self.shifts, epsilon)))

    def costs_more(self, epsilon: float, delta: float) -> bool:
        """Return whether the releases cost more than an ε at δ.

        It is mostly clear from the likely numbers of draws alone, which take no import of scipy's distributions.
        """
        if self.rate < 1 and self.rounds <= _ROUGHLY:
            draws, chances = _likely_draws(self.rate, self.rounds)
            least = float(np.sum(chances * gaussian_delta(self.shift * np.sqrt(draws), epsilon)))
            if least > (1 + _MARGIN) * delta:
                return True
        return self.delta(epsilon) > delta

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
            return KnownDraws(rate, shift, uses)
    # Several kinds of steps: as if the client had been in every sample, which is simpler and still a bound.
    return KnownDraws(1.0, math.sqrt(square), 1) if sampled else None


@lru_cache(maxsize=64)
def _likely_draws(rate: float, rounds: int) -> tuple[FloatArray, FloatArray]:
    """Return numbers of draws within forty deviations of the mean, and their probabilities to ten digits."""
    spread = 40 * math.sqrt(rounds * rate * (1 - rate)) + 1
    draws = np.arange(max(1, math.floor(rounds * rate - spread)), min(rounds, math.ceil(rounds * rate + spread)) + 1)
    log_choices = gammaln(rounds + 1) - gammaln(draws + 1) - gammaln(rounds - draws + 1)
    return draws.astype(np.float64), np.exp(log_choices + draws * math.log(rate) + (rounds - draws) * math.log1p(-rate))


@lru_cache(maxsize=64)  # a calibration asks for the same one many times
def _draws(rate: float, rounds: int) -> tuple[FloatArray, FloatArray]:
    """Return numbers of draws and their probabilities; unlikely numbers count as being drawn every time."""
    if rate == 1 or rounds > _MOST_ROUNDS:
        return np.array([float(rounds)]), np.ones(1)
    from scipy.stats import binom  # which takes half a second to import

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
