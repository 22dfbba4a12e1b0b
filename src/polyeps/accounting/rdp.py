"""The RDP accountant (Rényi differential privacy): looser than PLD; prices integer noise, tuning and filters."""

import math
from collections.abc import Callable, Sequence

import numpy as np
from dp_accounting import dp_event as dp
from dp_accounting.dp_event import DpEvent, RepeatAndSelectDpEvent
from dp_accounting.privacy_accountant import NeighboringRelation
from dp_accounting.rdp import RdpAccountant, compute_epsilon
from scipy.special import gammaln, logsumexp

from polyeps.accounting.discrete_gaussians import gap_of_sum
from polyeps.accounting.events import (
    DiscreteGaussianSumDpEvent,
    FixedSize,
    Gaussian,
    Poisson,
    PureDpEvent,
    SkellamDpEvent,
    TogetherDpEvent,
    check_adjacency,
)
from polyeps.accounting.histories import History, history_of, pure_sum, without_failures
from polyeps.accounting.privacy_profiles import FloatArray
from polyeps.core import Adjacency, Budget
from polyeps.errors import UnknownEvent

# ε = 0.05 at δ = 1e-5 (8000 steps at 8/1200) has its best order near 215; larger ones serve smaller budgets.
ORDERS: tuple[float, ...] = (
    *(1 + step / 10 for step in range(1, 100)),
    *range(11, 65),
    *(round(64 * 2 ** (step / 4)) for step in range(1, 29)),
)
FAILURE_SHARE = 1 / 16  # of δ, reserved for rare failures under an adaptive schedule; costs about 0.3 % of ε
_MARGIN = 1 + 1e-9  # far above the rounding error of a sum of positive terms
_TOO_SMALL = 1e-3  # noise multiplier below which steps of 1e-4 are too coarse to integrate


def rdp_epsilon(history: History, delta: float, adjacency: Adjacency) -> float:
    """Return the smallest ε certified over all orders."""
    total = renyi_curve(history, adjacency, ORDERS)
    finite = np.isfinite(total)
    if delta == 0 or not finite.any():
        return pure_sum(history)
    return min(float(compute_epsilon(np.array(ORDERS)[finite], total[finite], delta)[0]), pure_sum(history))


def renyi_curve(history: History, adjacency: Adjacency, orders: Sequence[float]) -> FloatArray:
    """Return the Rényi divergence of a history at each order."""
    return sum(
        (uses * step_renyi_curve(step, adjacency, orders) for step, uses in history.items()), np.zeros(len(orders))
    )


def step_renyi_curve(step: DpEvent, adjacency: Adjacency, orders: Sequence[float]) -> FloatArray:
    """Return the Rényi divergence of one step at each order; refuse a step without a rule."""
    alpha = np.asarray(orders, dtype=float)
    match step:
        case dp.NonPrivateDpEvent():
            return np.full(len(alpha), np.inf)
        case PureDpEvent():
            return pure_curve(step.epsilon, alpha)
        # Sensitivities are those of a vector against zeros; replacing a vector moves a sum by up to twice that.
        case SkellamDpEvent() if adjacency != "replace-one":
            return skellam_curve(step, alpha)
        case DiscreteGaussianSumDpEvent() if adjacency != "replace-one":
            return discrete_gaussian_sum_curve(step, alpha)
        case Poisson(event=SkellamDpEvent() | DiscreteGaussianSumDpEvent() | TogetherDpEvent()) if (
            adjacency != "replace-one"
        ):
            inside = history_of(step.event)
            if all(isinstance(part, Gaussian | SkellamDpEvent | DiscreteGaussianSumDpEvent) for part in inside):
                return sampled_sum_curve(
                    step.sampling_probability, lambda at: renyi_curve(inside, adjacency, at.tolist()), alpha
                )
        case Poisson(event=Gaussian()) if adjacency != "replace-one":
            return sampled_gaussian_curve(step, alpha)
        case Gaussian() | FixedSize(event=Gaussian()) | RepeatAndSelectDpEvent():
            return _library(step, adjacency, orders)
        case Poisson(event=dp.NonPrivateDpEvent()) | FixedSize(event=dp.NonPrivateDpEvent()):
            return np.full(len(alpha), np.inf)
    raise UnknownEvent(
        f"the RDP accountant does not know {type(step).__name__} under {adjacency} adjacency; try the PLD accountant"
    )


def _library(step: DpEvent, adjacency: Adjacency, orders: Sequence[float]) -> FloatArray:
    """Return the curve of a step by dp-accounting's rule, with the noise multiplier as defined there."""
    relation = NeighboringRelation.ADD_OR_REMOVE_ONE
    if adjacency == "replace-one":
        relation = NeighboringRelation.REPLACE_ONE
    step = _translated(step, adjacency)
    accountant = RdpAccountant(orders, relation)
    if not accountant.supports(step):
        raise UnknownEvent(f"the RDP accountant does not know {type(step).__name__} under {adjacency} adjacency")
    try:
        found = np.asarray(accountant.compose(step).rdp, dtype=float)
    except ValueError:  # numbers out of its range
        return np.full(len(orders), np.inf)
    # Its sums for samples of fixed size are off by up to this; a Gaussian's cost is in closed form.
    return found if isinstance(step, Gaussian) else np.maximum(found, 0.0) + 1e-11


def sampled_gaussian_curve(step: Poisson, alpha: FloatArray) -> FloatArray:
    """Return the Rényi divergence of (1−q)·N(0,σ²) + q·N(1,σ²) from N(0,σ²), the worse of the two directions.

    Whole orders are a binomial sum. The others are integrated: for this integrand the trapezoid rule is exact to
    rounding. Both give e^((α−1)R) − 1 as a sum of positive terms, so rare draws keep their digits. Where noise is too
    small for the rule's step, the other orders take the divergence without sampling.
    """
    rate, sigma = step.sampling_probability, step.event.noise_multiplier
    result = np.empty(len(alpha))
    for place, order in enumerate(alpha):
        if order == round(order):
            k = np.arange(2.0, order + 1)
            result[place] = _amplified(rate, int(order), k * (k - 1) / (2 * sigma**2))
        elif sigma < _TOO_SMALL:
            result[place] = order / 2 / sigma / sigma
        else:
            result[place] = _integrated(rate, sigma, float(order))
    return np.minimum(result * _MARGIN, alpha / 2 / sigma / sigma)  # sampling never costs privacy


def _amplified(rate: float, order: int, log_moments: FloatArray) -> float:
    """Return log(1 + Σ_l C(α,l)·(1−q)^(α−l)·q^l·(e^m(l) − 1))/(α−1), for moments m of l = 2, …, α."""
    draws = np.arange(2, order + 1)
    log_choose = gammaln(order + 1) - gammaln(draws + 1) - gammaln(order - draws + 1)
    terms = log_choose + draws * math.log(rate) + (order - draws) * math.log1p(-rate)
    return float(np.logaddexp(0, logsumexp(terms + _log_expm1(log_moments)))) / (order - 1)


def _integrated(rate: float, sigma: float, order: float) -> float:
    width = max(min(sigma, sigma**2) / 8, 1e-4)
    x = np.arange(-14 * sigma, order + 14 * sigma, width)
    log_ratio = np.logaddexp(math.log1p(-rate), math.log(rate) + (2 * x - 1) / (2 * sigma**2))
    log_base = -(x**2) / (2 * sigma**2) + math.log(width / (sigma * math.sqrt(2 * math.pi)))
    # ratio^α − 1 − α·(ratio − 1) ≥ 0 has the same mean as ratio^α − 1
    y = rate * np.expm1(np.minimum((2 * x - 1) / (2 * sigma**2), 50.0))  # ratio − 1
    series = order * (order - 1) / 2 * y**2 * (1 + (order - 2) / 3 * y * (1 + (order - 3) / 4 * y))
    small = np.abs(y) * order < 1e-3
    grown = np.maximum(order * log_ratio, -1e3)
    exact = np.expm1(np.minimum(grown, 50.0)) - order * y
    positive = np.maximum(np.where(small, series, exact), 1e-300)
    return float(np.logaddexp(0, logsumexp(np.where(grown > 50, grown, np.log(positive)) + log_base))) / (order - 1)


def _log_expm1(x: FloatArray) -> FloatArray:
    """Return log(e^x − 1) for x ≥ 0, without overflow."""
    tiny = np.maximum(x, 1e-300)
    return tiny + np.log(-np.expm1(-tiny))


def _translated(event: DpEvent, adjacency: Adjacency) -> DpEvent:
    """Translate noise multipliers: under replace-one, dp-accounting's RDP divides by twice the clip norm."""
    match event:
        case Gaussian():
            return Gaussian(event.noise_multiplier / (2 if adjacency == "replace-one" else 1))
        case FixedSize():
            return FixedSize(event.source_dataset_size, event.sample_size, _translated(event.event, adjacency))
        case RepeatAndSelectDpEvent():
            inside = [dp.SelfComposedDpEvent(_translated(e, adjacency), n) for e, n in history_of(event.event).items()]
            return RepeatAndSelectDpEvent(dp.ComposedDpEvent(inside), event.mean, event.shape)
        case Poisson() | dp.NonPrivateDpEvent() if adjacency != "replace-one":
            return event
        case _:
            raise UnknownEvent(f"the RDP accountant does not know {type(event).__name__} under {adjacency} adjacency")


def pure_curve(epsilon: float, alpha: FloatArray) -> FloatArray:
    """Return the Rényi divergence of randomised response, which dominates every ε-pure release.

    e^((α−1)R) − 1 = (e^(αε) − 1)·(1 − e^(−(α−1)ε))/(1 + e^ε), precise where it is small.
    """
    if epsilon == 0:
        return np.zeros(len(alpha))
    excess = _log_expm1(alpha * epsilon) + np.log(-np.expm1(-(alpha - 1) * epsilon)) - np.logaddexp(0, epsilon)
    return np.logaddexp(0, excess) / (alpha - 1)


def skellam_curve(step: SkellamDpEvent, alpha: FloatArray) -> FloatArray:
    """Return a bound for Skellam noise; proved for whole orders, so others are rounded up."""
    order, l1, l2 = np.ceil(alpha), step.l1_sensitivity, step.l2_sensitivity
    if step.variance == 0:
        return np.full(len(alpha), np.inf)
    gaussian = order * l2**2 / (2 * step.variance)
    excess = np.minimum(((2 * order - 1) * l2**2 + 6 * l1) / (4 * step.variance**2), 3 * l1 / (2 * step.variance))
    return gaussian + excess


def discrete_gaussian_sum_curve(step: DiscreteGaussianSumDpEvent, alpha: FloatArray) -> FloatArray:
    """Return a bound for a sum of discrete Gaussians: a Gaussian's, plus the gap between the two per coordinate."""
    if step.deviation < 0.5:  # the bound's own condition
        return np.full(len(alpha), np.inf)
    gap = gap_of_sum(step.deviation, step.clients)
    u = step.l2_sensitivity / (math.sqrt(step.clients) * step.deviation)
    return np.minimum(alpha * u * u / 2 + gap * step.dimension, alpha / 2 * (u + math.sqrt(step.dimension) * gap) ** 2)


def sampled_sum_curve(rate: float, inner: Callable[[FloatArray], FloatArray], alpha: FloatArray) -> FloatArray:
    """Return a bound for Poisson-sampled sums with symmetric noise; orders that are not whole are rounded up.

    (α−1)·ε(α) ≤ log Σ_l C(α,l)·(1−q)^(α−l)·q^l·e^((l−1)ε(l)), for the mixture against the noise alone and in the other
    direction: a reflection of the lattice exchanges noise and noise plus vector (docs/reference/soundness.md).
    """
    whole = np.ceil(alpha).astype(int)
    result = np.array(inner(alpha))  # sampling never costs privacy; for huge orders nothing better is known
    largest = 1024
    at = np.arange(2, largest + 1, dtype=float)
    log_moments = (at - 1) * inner(at)
    for place, order in enumerate(whole):
        if 2 <= order <= largest:
            result[place] = min(result[place], _amplified(rate, order, log_moments[: order - 1]) * _MARGIN)
    return result


def filter_order(budget: Budget) -> float:
    """Return the order of the Rényi filter of an adaptive ledger, fixed by the budget before anything is spent.

    It is somewhat below the best order for a cost proportional to the order, such as a Gaussian's: sampled Gaussians
    cost more than proportionally at high orders (docs/decisions/0003).
    """
    alpha = np.concatenate([np.arange(11, 110) / 10, np.arange(11.0, 1000), np.geomspace(1000, 8192, 200).round()])
    slack = np.log1p(-1 / alpha) - (math.log((1 - FAILURE_SHARE) * budget.delta) + np.log(alpha)) / (alpha - 1)
    best = float(alpha[np.argmax((budget.epsilon - slack) / alpha)])
    return float(alpha[alpha <= max(0.9 * best, alpha[0])][-1])


def filter_epsilon(history: History, order: float, delta: float, adjacency: Adjacency) -> float:
    """Return the ε of a history whose steps may have been chosen adaptively, after earlier answers.

    A Rényi filter at one order, fixed beforehand, is valid then (Feldman and Zrnic 2021); composing privacy loss
    distributions, or choosing the best of many orders afterwards, is not known to be.

    Rare failures have a fixed share of δ. If they shared all of it, an adaptive analyst could spend δ on failures where
    the noise held and on noise where it did not: up to twice the δ in total.
    """
    check_adjacency(adjacency)
    history, failure = without_failures(history)
    if failure > FAILURE_SHARE * delta:
        return math.inf
    (spent,) = renyi_curve(history, adjacency, [order])
    if not math.isfinite(spent):
        return math.inf
    return float(max(0.0, compute_epsilon(np.array([order]), np.array([spent]), (1 - FAILURE_SHARE) * delta)[0]))
