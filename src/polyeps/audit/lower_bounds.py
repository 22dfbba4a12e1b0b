"""Lower bounds on ε, from counts of events or from scores under two data sets.

For an event that happened c times of n under one input and c' of n' under another, ln(low(c, n)/high(c', n')) with
Clopper and Pearson's bounds is below the true ε with the stated confidence. Several events share the error. Where a
score orders the outcomes, the event is chosen on one half of the trials and counted on the other, so that the choice
costs no confidence.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.stats import beta, binom, norm

from polyeps.core import check_delta
from polyeps.errors import InputError

Samples = NDArray[np.float64]
Scores = NDArray[np.float32]  # half the time of doubles, and a bound is true for any score

_CANDIDATES = 400  # events tried on the first half, evenly spaced in the logarithm of how often they happen
_WARY = 10  # the choice uses so many times less error, else the luckiest of many rare events would win
_SURE = 80.0  # a log-ratio beyond which float32 cannot follow; the bound stays true


def bound_from_counts(
    one: NDArray[np.int64], other: NDArray[np.int64], trials: tuple[int, int], confidence: float = 0.99
) -> float:
    """Return the lower bound on ε from the counts of each event under two inputs, in both directions."""
    error = (1 - confidence) / (2 * len(one)) / 2  # events, directions, and two bounds for each
    there = _log_ratio_bound(one, other, trials, 0.0, error)
    back = _log_ratio_bound(other, one, (trials[1], trials[0]), 0.0, error)
    return max(0.0, float(there.max()), float(back.max()))


def sampled_log_ratio(if_joined: Scores, rate: float) -> Scores:
    """Return the log-likelihood ratio of a round that the canary joins with probability `rate`.

    The round is a mixture: with that probability the ratio is `if_joined`, otherwise nothing differs.
    """
    if rate == 1:
        return if_joined
    ratio: Scores = np.log1p(np.float32(rate) * np.expm1(np.minimum(if_joined, np.float32(_SURE))))
    return ratio


def bound_from_scores(present: Scores, absent: Scores, delta: float, confidence: float = 0.99) -> float:
    """Return the lower bound on ε from scores of two data sets: one event, chosen on their first halves.

    Events are "the score is above t" and, with the data sets exchanged, "the score is below t".
    """
    error = (1 - confidence) / 2  # two bounds, of one event
    half = len(present) // 2
    chosen = (-math.inf, 0, 0.0, 1)
    for sign, (likely, unlikely) in ((1, (present, absent)), (-1, (-absent, -present))):
        seen = np.sort(np.concatenate([likely[:half], unlikely[:half]]))[::-1]
        ranks = np.unique(np.geomspace(1, len(seen) - 1, _CANDIDATES).astype(int))
        thresholds = seen[ranks]
        counts = _above(likely[:half], thresholds), _above(unlikely[:half], thresholds)
        shown = _log_ratio_bound(*counts, (half, half), delta, error / _WARY)
        best = int(shown.argmax())
        chosen = max(chosen, (float(shown[best]), best, float(thresholds[best]), sign))
    *_, threshold, sign = chosen
    likely, unlikely = (present, absent) if sign > 0 else (-absent, -present)
    at = np.array([threshold], np.float32)
    held = len(present) - half
    found = _log_ratio_bound(_above(likely[half:], at), _above(unlikely[half:], at), (held, held), delta, error)
    return max(0.0, float(found[0]))


def _above(values: Scores, thresholds: Scores) -> NDArray[np.int64]:
    ascending = np.sort(values)
    return len(values) - np.searchsorted(ascending, thresholds, side="right")


def _log_ratio_bound(
    likely: NDArray[np.int64], unlikely: NDArray[np.int64], trials: tuple[int, int], delta: float, error: float
) -> Samples:
    """Return ln((P − δ)/Q) by Clopper and Pearson's lower bound on P and upper bound on Q; −∞ where δ explains all."""
    n, m = trials
    low = np.where(likely > 0, beta.ppf(error, likely, n - likely + 1), 0.0)
    high = np.where(unlikely < m, beta.isf(error, unlikely + 1, m - unlikely), 1.0)
    with np.errstate(divide="ignore"):
        ratio: Samples = np.log(np.maximum(low - delta, 0.0) / high)
    return ratio


def one_run_bound(canaries: int, guesses: int, right: int, delta: float, confidence: float = 0.95) -> float:
    """Return the lower bound on ε from one run with many independent canaries (Steinke, Nasr and Jagielski 2023).

    Each canary was included by a fair coin; `guesses` of the coins were guessed, `right` of them correctly. The number
    of guesses must not depend on the outcome of the run.

    >>> round(one_run_bound(1000, 100, 90, 0.0), 4)
    1.6308
    """
    check_delta(delta)
    if not 0 <= right <= guesses <= canaries or guesses < 1:
        raise InputError(f"{right} right of {guesses} guesses on {canaries} canaries is impossible; correct the counts")
    fewer = np.arange(1, right + 1)

    def chance(tried: float) -> float:
        """Bound the probability of so many right guesses when ε is `tried`; it grows with ε."""
        share = 1 / (1 + math.exp(-tried))
        below = binom.cdf(right - 1, guesses, share) - binom.cdf(right - 1 - fewer, guesses, share)
        lucky = canaries * delta * float(np.max(2 / fewer * below, initial=0.0))
        return float(binom.sf(right - 1, guesses, share)) + lucky

    low, high = 0.0, 64.0
    if chance(low) > 1 - confidence:
        return 0.0
    while high - low > 1e-9:
        middle = (low + high) / 2
        low, high = (middle, high) if chance(middle) <= 1 - confidence else (low, middle)
    return low


def bound_from_guesses(
    included: NDArray[np.bool_], scores: Scores, delta: float, confidence: float, shares: Sequence[float] = (0.1,)
) -> float:
    """Return the one-run bound from every canary's coin and score; the surest guesses are made, half "in", half "out".

    `shares` are the shares of canaries that are guessed; several share the error.
    """
    order = np.argsort(scores)
    best = 0.0
    for share in shares:
        half = max(1, round(share * len(scores) / 2))
        right = int((~included[order[:half]]).sum() + included[order[-half:]].sum())
        best = max(best, one_run_bound(len(scores), 2 * half, right, delta, 1 - (1 - confidence) / len(shares)))
    return best


def one_shot_estimate(present: Scores, absent: Scores, delta: float) -> float:
    """Estimate ε as Andrew et al. do (ICLR 2024), with Gaussian scores; an estimate, not a bound."""
    one, other = present.astype(float), absent.astype(float)
    apart, spread = float(one.mean() - other.mean()), (float(one.std()), float(other.std()))
    low, high = 0.0, 64.0
    while high - low > 1e-6:
        middle = (low + high) / 2
        low, high = (middle, high) if _hockey_stick(apart, spread, middle) > delta else (low, middle)
    return high


def _hockey_stick(apart: float, spread: tuple[float, float], epsilon: float) -> float:
    """Return the δ at ε between N(apart, s²) and N(0, t²), by numerical integration."""
    reach = abs(apart) + 12 * max(spread)
    at = np.linspace(-reach, reach, 20_001)
    one, other = norm.pdf(at, apart, spread[0]), norm.pdf(at, 0.0, spread[1])
    return float(np.maximum(0.0, one - math.exp(epsilon) * other).sum() * (at[1] - at[0]))
