"""Second ways to compute what polyeps computes, sharing none of its code: integration, enumeration, inversion."""

import itertools
import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray
from scipy.integrate import quad
from scipy.optimize import brentq
from scipy.stats import norm

Density = Callable[[NDArray[np.float64]], NDArray[np.float64]]


def mixture_density(rate: float, shift: float, sigma: float) -> Density:
    """(1 − rate)·N(0, σ²) + rate·N(shift, σ²)."""
    return lambda x: (1 - rate) * norm.pdf(x, 0, sigma) + rate * norm.pdf(x, shift, sigma)


def hockey_stick(p: Density, q: Density, epsilon: float, low: float, high: float) -> float:
    """∫ (p − e^ε q)₊ by a fine rectangle rule."""
    x = np.linspace(low, high, 400_001)
    return float(np.maximum(p(x) - math.exp(epsilon) * q(x), 0).sum() * (x[1] - x[0]))


def epsilon_of_pair(p: Density, q: Density, delta: float, low: float, high: float) -> float:
    """The ε at which the worse of the two hockey-stick divergences equals δ."""

    x = np.linspace(low, high, 400_001)
    at_p, at_q = p(x) * (x[1] - x[0]), q(x) * (x[1] - x[0])

    def excess(epsilon: float) -> float:
        one, other = at_p - math.exp(epsilon) * at_q, at_q - math.exp(epsilon) * at_p
        return float(max(one[one > 0].sum(), other[other > 0].sum())) - delta

    return float(brentq(excess, 0.0, 60.0, xtol=1e-9)) if excess(0.0) > 0 else 0.0


def composed_epsilon(p: Density, q: Density, uses: int, delta: float, reach: float) -> float:
    """ε of `uses` independent draws from one pair, by inverting the characteristic function of the privacy loss.

    P(L > ε) = 1/2 + (1/π) ∫ Im(e^(−itε) φ(t)^uses)/t dt with φ(t) = E[e^(itL)], once under p and once under q.
    Good when the composed loss is smooth, that is for many uses.
    """
    x = np.linspace(-reach, reach, 6_001)
    step = x[1] - x[0]
    loss = np.log(p(x)) - np.log(q(x))
    deviation = math.sqrt(uses * float((p(x) * loss**2).sum() * step))
    t = np.linspace(1e-9, 60 / deviation, 4_000)
    phi_p, phi_q = np.empty(len(t), complex), np.empty(len(t), complex)
    for part in np.array_split(np.arange(len(t)), 20):
        wave = np.exp(1j * np.outer(t[part], loss))
        phi_p[part], phi_q[part] = wave @ p(x) * step, wave @ q(x) * step
    phi_p, phi_q = phi_p**uses, phi_q**uses

    def above(phi: NDArray[np.complex128], epsilon: float) -> float:
        integrand = np.imag(np.exp(-1j * t * epsilon) * phi) / t
        return 0.5 + float(np.trapezoid(integrand, t)) / math.pi

    def excess(epsilon: float) -> float:
        return above(phi_p, epsilon) - math.exp(epsilon) * above(phi_q, epsilon) - delta

    return float(brentq(excess, 0.01, 12.0, xtol=1e-8))


def renyi(p: Density, q: Density, order: float, low: float, high: float) -> float:
    """The Rényi divergence of order α, by adaptive integration."""

    def integrand(x: float) -> float:
        at = np.array([x])
        return float(np.exp(order * np.log(p(at)) + (1 - order) * np.log(q(at)))[0])

    return math.log(quad(integrand, low, high, limit=500)[0]) / (order - 1)


def gaussian_delta(mu: float, epsilon: float) -> float:
    """δ of a Gaussian release with signal-to-noise μ."""
    return float(norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * norm.cdf(-mu / 2 - epsilon / mu))


def pure_delta(step: float, uses: int, epsilon: float) -> float:
    """δ of `uses` randomised responses at e^step, over all 2^uses outcomes grouped by count."""
    total = 0.0
    for wrong in range(uses + 1):
        p = math.comb(uses, wrong) * math.exp((uses - wrong) * step) / (1 + math.exp(step)) ** uses
        q = math.comb(uses, wrong) * math.exp(wrong * step) / (1 + math.exp(step)) ** uses
        total += max(0.0, p - math.exp(epsilon) * q)
    return total


def encoding_law(status: tuple[int, ...], keep: Fraction) -> dict[int | None, Fraction]:
    """PE's exact output law for one status vector, over all 2^d perturbed vectors."""
    law: dict[int | None, Fraction] = dict.fromkeys([*range(len(status)), None], Fraction(0))
    for bits in itertools.product((0, 1), repeat=len(status)):
        chance = Fraction(1)
        for bit, truth in zip(bits, status, strict=True):
            chance *= keep if bit == truth else 1 - keep
        marked = [place for place, bit in enumerate(bits) if bit]
        if not marked:
            law[None] += chance
        for place in marked:
            law[place] += chance / len(marked)
    return law


def statuses(dimension: int, top: int) -> list[tuple[int, ...]]:
    """All ways to mark `top` of `dimension` coordinates."""
    return [
        tuple(int(place in chosen) for place in range(dimension))
        for chosen in itertools.combinations(range(dimension), top)
    ]


def largest_log_ratio(laws: list[dict[int | None, float]]) -> float:
    """The true ε of a randomiser whose output laws for all inputs are given."""
    worst = 0.0
    for output in laws[0]:
        chances = [law[output] for law in laws]
        if max(chances) > 0:
            worst = max(worst, math.log(max(chances) / min(chances)) if min(chances) > 0 else math.inf)
    return worst


def log_ratio(rate: float, sigma: float, x: NDArray[np.float64]) -> NDArray[np.float64]:
    """The privacy loss of a sampled Gaussian at an outcome: log((1 − q) + q·e^((2x − 1)/(2σ²)))."""
    return np.logaddexp(math.log1p(-rate), math.log(rate) + (2 * x - 1) / (2 * sigma**2))


def twice_sampled_delta(rate: float, sigma: float, epsilon: float) -> float:
    """δ of two sampled Gaussians (mixture against noise), by one integral: given the first outcome x, the second counts
    from y with loss(x) + loss(y) = ε on, and its tails are closed forms."""
    x = np.linspace(-14 * sigma, 14 * sigma + 1, 60_001)
    left = epsilon - log_ratio(rate, sigma, x)  # what the second has to lose
    with np.errstate(divide="ignore", invalid="ignore"):
        inside = np.log(np.expm1(np.minimum(left, 600.0)) + rate)
        start = np.where(
            np.expm1(np.minimum(left, 600.0)) + rate > 0, sigma**2 * (inside - math.log(rate)) + 0.5, -np.inf
        )
    far = start / sigma
    tail_q, tail_1 = norm.sf(far), norm.sf(far - 1 / sigma)
    p, q = mixture_density(rate, 1.0, sigma)(x), norm.pdf(x, 0, sigma)
    inner = p * ((1 - rate) * tail_q + rate * tail_1) - np.exp(epsilon) * q * tail_q
    return float(np.trapezoid(np.maximum(inner, 0.0), x))


def many_sampled_delta(rate: float, sigma: float, uses: int, epsilon: float, *, add: bool = False) -> float:
    """δ of sampled Gaussians composed, as an inverse Laplace transform: no grid of losses, no convolution.

    E[(1 − e^(ε − L))₊] = (1/2πi) ∫ E[e^(sL)]·e^(−sε)/(s(s + 1)) ds along Re s = θ, for any θ > 0; θ is the saddle.
    Good when the composed loss is smooth, that is for many uses.
    """

    x = np.linspace(-14 * sigma, 15 * sigma + 1, 2_001)  # what is beyond has a probability below 1e-43
    loss = (-1 if add else 1) * log_ratio(rate, sigma, x)
    log_weight = norm.logpdf(x, 0, sigma) + (0 if add else loss) + math.log(x[1] - x[0])

    def cumulant(theta: float) -> float:
        return uses * float(np.logaddexp.reduce(log_weight + theta * loss))

    grid = np.exp(np.linspace(math.log(1e-3), math.log(1e9), 400))
    theta = float(min(grid, key=lambda at: cumulant(at) - at * epsilon - math.log(at * (at + 1))))
    tilted = np.exp(log_weight + theta * loss - cumulant(theta) / uses)
    mean = float(np.sum(tilted * loss))
    deviation = math.sqrt(uses * float(np.sum(tilted * (loss - mean) ** 2)))
    span = 40 * deviation + 2 * abs(epsilon - uses * mean) + float(loss[tilted > 1e-9].max(initial=0.0) * 3)
    u = np.arange(0, 20_000) * 2 * math.pi / span
    total, shift = 0.0, cumulant(theta) - theta * epsilon
    for part in np.array_split(u, 200):
        moment = np.exp(1j * np.outer(part, loss)) @ tilted
        s = theta + 1j * part
        values = np.real(np.exp(uses * np.log(moment) - 1j * part * epsilon) / (s * (s + 1)))
        total += float(values.sum()) - (values[0] / 2 if part[0] == 0 else 0.0)
        if np.abs(values).max() * 100 < 1e-6 * abs(total):
            break
    return float(total * (u[1] - u[0]) / math.pi * math.exp(shift))
