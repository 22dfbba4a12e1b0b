"""Privacy profiles δ(ε) of single steps in closed form, which the PLD accountant composes.

For output distributions P and Q, δ(ε) = sup_E P(E) − e^ε·Q(E). A guarantee needs both orders: `remove` is the
profile of the pair, `add` of the pair taken the other way round. Each is needed for ε ≥ 0 only, where it can be
computed without cancellation; the negative losses of one order are the positive losses of the other.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from dp_accounting import dp_event as dp
from dp_accounting.dp_event import DpEvent
from numpy.typing import NDArray
from scipy.special import erfcx, log_ndtr, ndtr, ndtri

from polyeps.accounting.events import FixedSize, Gaussian, Poisson, PureDpEvent
from polyeps.core import Adjacency, clip_norms_moved
from polyeps.errors import UnknownEvent

FloatArray = NDArray[np.floating[Any]]
DeltaFunction = Callable[[FloatArray], FloatArray]  # ε ≥ 0 ↦ δ

_WIDE = 10.5  # deviations of noise to integrate over
_APART = 40.0  # deviations between two Gaussians beyond which hardly any outcome can be of both


@dataclass(frozen=True)
class PrivacyProfile:
    """The profiles of a pair in both orders, and the largest loss up to which each must be tabulated."""

    remove: DeltaFunction
    add: DeltaFunction
    highest_remove: float
    highest_add: float

    @property
    def symmetric(self) -> bool:
        return self.remove is self.add

    def reversed(self) -> "PrivacyProfile":
        return PrivacyProfile(self.add, self.remove, self.highest_add, self.highest_remove)


def symmetric_profile(delta: DeltaFunction, highest: float) -> PrivacyProfile:
    """Return the profile of a pair that is the same in both orders."""
    return PrivacyProfile(delta, delta, highest, highest)


def step_profile(step: DpEvent, adjacency: Adjacency, cut: float) -> PrivacyProfile:
    """Return the profile of one step, to be tabulated until δ is at most `cut`; refuse a step without a rule."""
    reach = clip_norms_moved(adjacency)
    match step:
        case PureDpEvent():
            return pure_profile(step.epsilon)
        case Gaussian():
            return sampled_gaussian_profile(1.0, reach / step.noise_multiplier, cut)
        case Poisson(event=Gaussian()) if adjacency != "replace-one":
            return sampled_gaussian_profile(step.sampling_probability, 1 / step.event.noise_multiplier, cut)
        case Poisson(event=Gaussian()):
            return sampled_replacement_profile(step.sampling_probability, 1 / step.event.noise_multiplier, cut)
        case FixedSize(event=Gaussian()) if adjacency == "replace-one":
            # The dominating pair of sampling without replacement (Zhu, Dong and Wang 2022) is as bad both ways.
            rate = step.sample_size / step.source_dataset_size
            worse = sampled_gaussian_profile(rate, reach / step.event.noise_multiplier, cut)
            return symmetric_profile(worse.remove, worse.highest_remove)
        case FixedSize():
            raise UnknownEvent(
                f"fixed-size samples have no guarantee under {adjacency} adjacency; use Poisson sampling or replace-one"
            )
    inner = getattr(step, "event", None)
    name = type(step).__name__ + (f" of {type(inner).__name__}" if inner is not None else "")
    raise UnknownEvent(f"the PLD accountant does not know {name} under {adjacency} adjacency; try the RDP accountant")


def pure_profile(epsilon: float) -> PrivacyProfile:
    """Return the profile of randomised response, which dominates every ε-pure release."""
    log_share = -np.logaddexp(0, epsilon)  # 1/(1 + e^ε)
    return symmetric_profile(lambda x: np.exp(x + log_share) * np.expm1(np.maximum(epsilon - x, 0.0)), epsilon)


def _log_mixed(rate: float, exponent: float) -> float:
    """Return log(1 − q + q·e^exponent), precise where it is small."""
    if abs(exponent) < 1:
        return math.log1p(rate * math.expm1(exponent))
    return float(np.logaddexp(_log1m(rate), math.log(rate) + exponent))


def _deviations(probability: float) -> float:
    """Return the upper quantile of a standard normal, at least 0."""
    return max(0.0, -float(ndtri(min(probability, 0.5))))


def _gaussian(mu: float, t: FloatArray) -> FloatArray:
    """Return δ of N(μ,1) against N(0,1) at t: Φ(a) − e^t·Φ(−b), a and b = μ/2 ∓ t/μ.

    As e^t·φ(b) = φ(a), both are e^(−a²/2)·erfcx(·/√2)/2, so the difference of two tiny numbers keeps its digits.
    """
    a, b = mu / 2 - t / mu, mu / 2 + t / mu
    near = np.maximum(a, 0.0)
    common = np.exp(-np.minimum(a * a, 1400.0) / 2) / 2
    second = common * erfcx(b / math.sqrt(2))
    return np.where(a > 0, ndtr(near) - second, common * erfcx(-np.minimum(a, 0.0) / math.sqrt(2)) - second)


def sampled_gaussian_profile(rate: float, mu: float, cut: float) -> PrivacyProfile:
    """Return the profile of (1−q)·N(0,1) + q·N(μ,1) against N(0,1); rate 1 is the plain Gaussian.

    remove: q·δ_Gauss(t), e^t = 1 + (e^ε − 1)/q.    add: (1 − (1−q)e^ε)₊·δ_Gauss(−t), e^t = 1 − (1 − e^−ε)/q.
    """
    tail = _deviations(cut / rate)  # as δ is at most q·Φ(−tail) there
    highest = _log_mixed(rate, mu * (tail + mu / 2))
    if rate == 1:
        return symmetric_profile(lambda epsilon: _gaussian(mu, epsilon), highest)

    def remove(epsilon: FloatArray) -> FloatArray:
        t = np.log1p(np.expm1(np.minimum(epsilon, 700.0)) / rate)
        return rate * _gaussian(mu, np.where(epsilon > 700, epsilon - math.log(rate), t))  # where e^ε overflows

    def add(epsilon: FloatArray) -> FloatArray:
        left = -np.expm1(np.minimum(epsilon + math.log1p(-rate), 0.0))
        ratio = np.maximum(np.expm1(-epsilon) / rate, -1 + 1e-16)
        return left * _gaussian(mu, -np.log1p(ratio))

    return PrivacyProfile(remove, add, highest, -math.log1p(-rate))


def sampled_replacement_profile(rate: float, mu: float, cut: float) -> PrivacyProfile:
    """Return the profile of Poisson sampling with one value replaced.

    It is that of (1−q)·N(0,1) + q·N(μ,1) against (1−q)·N(0,1) + q·N(−μ,1). The loss grows with the outcome x; solving
    for it gives μx = ε/2 + asinh((1−q)/q·e^(μ²/2)·sinh(ε/2)).
    """
    log_odds = _log1m(rate) - math.log(rate) + mu * mu / 2

    def delta(epsilon: FloatArray) -> FloatArray:
        log_sinh = epsilon / 2 + np.log(-np.expm1(-np.maximum(epsilon, 1e-300)) / 2)
        scaled = log_odds + log_sinh
        asinh = np.where(scaled > 30, scaled + math.log(2), np.arcsinh(np.exp(np.minimum(scaled, 30.0))))
        x = (epsilon / 2 + asinh) / mu
        unsampled = ndtr(-x) - np.exp(epsilon + log_ndtr(-x))
        return (1 - rate) * unsampled + rate * (ndtr(mu - x) - np.exp(epsilon + log_ndtr(-mu - x)))

    tail = _deviations(cut)
    up, down = mu * (tail + mu / 2), -mu * (tail + 3 * mu / 2)
    return symmetric_profile(delta, _log_mixed(rate, up) - _log_mixed(rate, down))


def second_moment(step: DpEvent, adjacency: Adjacency) -> float:
    """Return E[loss²] of one step, to a few per cent: it gives the width of a composition."""
    match step:
        case PureDpEvent():
            return step.epsilon**2
        case Gaussian():
            rate, sigma = 1.0, step.noise_multiplier
        case Poisson():
            rate, sigma = step.sampling_probability, step.event.noise_multiplier
        case _:
            rate, sigma = step.sample_size / step.source_dataset_size, step.event.noise_multiplier
    mu = clip_norms_moved(adjacency) / sigma
    if mu > _APART:
        return (1 - rate) * (_log1m(rate) if rate < 1 else 0.0) ** 2 + rate * (
            (math.log(rate) + mu * mu / 2) ** 2 + mu * mu
        )
    z = np.linspace(-_WIDE, _WIDE + mu, 2001)
    density = (1 - rate) * np.exp(-z * z / 2) + rate * np.exp(-((z - mu) ** 2) / 2)
    loss = np.logaddexp(_log1m(rate), math.log(rate) + mu * z - mu * mu / 2)
    if rate < 0.1:  # the loss is a small difference: keep its digits
        loss = np.where(mu * z < 20, np.log1p(rate * np.expm1(np.minimum(mu * z - mu * mu / 2, 20.0))), loss)
    return float(np.sum(density * loss**2) * (z[1] - z[0]) / math.sqrt(2 * math.pi))


def is_private(step: DpEvent) -> bool:
    """Return whether a step has any guarantee."""
    inner = step.event if isinstance(step, Poisson | FixedSize) else step
    return not isinstance(inner, dp.NonPrivateDpEvent)


def _log1m(rate: float) -> float:
    return math.log1p(-rate) if rate < 1 else -math.inf


def gaussian_delta(mu: FloatArray, epsilon: float) -> FloatArray:
    """Return δ of unsampled Gaussians for each total signal-to-noise ratio μ: Φ(a) − e^ε·Φ(−b), a, b = μ/2 ∓ ε/μ.

    As e^ε·φ(b) = φ(a), the second term is e^(−a²/2)·erfcx(b/√2)/2, which does not overflow for large ε.
    """
    a, b = mu / 2 - epsilon / mu, mu / 2 + epsilon / mu
    with np.errstate(over="ignore"):  # then the term is 0
        above: FloatArray = ndtr(a) - np.exp(-a * a / 2) * erfcx(b / math.sqrt(2)) / 2
    return above


def gaussian_epsilon(mu: float, delta: float) -> float:
    """Return ε of unsampled Gaussians with total signal-to-noise ratio μ, by inverting their δ.

    >>> round(gaussian_epsilon(1.0, 1e-5), 6)
    4.377178
    """

    def excess(epsilon: float) -> float:
        return float(gaussian_delta(np.asarray(mu), epsilon)) - delta

    low, high = 0.0, mu * mu / 2 + 40 * mu
    if excess(low) <= 0:
        return 0.0
    if not excess(high) <= 0:
        return math.inf
    while high - low > 1e-12 * high:  # bisection that keeps the sound end
        middle = (low + high) / 2
        low, high = (middle, high) if excess(middle) > 0 else (low, middle)
    return high
