"""Sums of discrete Gaussians, accounted as Gaussians that are rounded to integers.

Rounding is post-processing. A Gaussian of variance s² − r², rounded at random by a discrete Gaussian of variance r²
about it, is within e^(±10·exp(−2π²r²)) of the discrete Gaussian of variance s², at every integer; and a sum of discrete
Gaussians is as near to one (docs/reference/soundness.md has the proof).
"""

import math
from collections import Counter
from functools import lru_cache

import numpy as np
from dp_accounting import dp_event as dp
from dp_accounting.dp_event import DpEvent

from polyeps.accounting.events import DiscreteGaussianSumDpEvent, Gaussian, Poisson, TogetherDpEvent
from polyeps.accounting.histories import History, on_one_sample

ROUNDING_DEVIATION = 3.0  # r, in steps of the grid: takes 9 of a variance, usually of millions
# Of a variance: of smaller ones rounding takes so much that Rényi's bounds may be lower.
_LEAST = 100 * ROUNDING_DEVIATION**2
_ONE_BY_ONE = 1 << 16  # clients: for more, the terms hardly differ
# Largest K by which the logarithms of a history's probabilities may be off in total. That adds 2K to ε and multiplies δ
# by e^K; reducing every deviation by a factor of 10⁻¹² costs far more.
_NEGLIGIBLE = 1e-20
MARGIN = 1 - 1e-12


def gap_of_sum(deviation: float, clients: int) -> float:
    """Bound how far a sum of discrete Gaussians is from a discrete Gaussian, in the logarithm of any probability."""
    k = np.arange(1, min(clients, _ONE_BY_ONE))
    terms = np.exp(-2 * math.pi**2 * deviation**2 * k / (k + 1))  # they fall with k: the last stands for all after it
    return 10 * float(terms.sum() + (terms[-1] * (clients - _ONE_BY_ONE) if clients > _ONE_BY_ONE else 0.0))


def as_gaussians(history: History) -> History:
    """Return a history with Gaussians in place of sums of discrete Gaussians, if together they are near enough."""
    smooth: Counter[DpEvent] = Counter()
    try:
        if not 0 < sum(uses * _gap(step) for step, uses in history.items()) <= _NEGLIGIBLE:
            return history  # too far, or no such sums
        for step, uses in history.items():
            smooth[_smooth(step)] += uses
    except ArithmeticError:  # numbers that no double can hold
        return history
    return smooth


@lru_cache(maxsize=1 << 14)  # a cohort pays the same events round after round
def _gap(step: DpEvent) -> float:
    """Bound how far a step's log probabilities are from those of Gaussians; 0 for steps without integer noise."""
    match step:
        case DiscreteGaussianSumDpEvent():
            if not step.l2_sensitivity or step.clients * step.deviation**2 < _LEAST:
                return math.inf
            of_rounding = 10 * math.exp(-2 * (math.pi * ROUNDING_DEVIATION) ** 2)
            return step.dimension * (gap_of_sum(step.deviation, step.clients) + of_rounding)
        case TogetherDpEvent():
            return sum(map(_gap, step.events))
        case Poisson():
            return _gap(step.event)
        case _:
            return 0.0


def _smooth(step: DpEvent) -> DpEvent:
    match step:
        case DiscreteGaussianSumDpEvent():
            deviation = math.sqrt(step.clients * step.deviation**2 - ROUNDING_DEVIATION**2)
            multiplier = MARGIN * deviation / step.l2_sensitivity
            if not math.isfinite(multiplier):
                raise OverflowError
            return Gaussian(multiplier)
        case Poisson(event=DiscreteGaussianSumDpEvent() | TogetherDpEvent()):
            inside = step.event.events if isinstance(step.event, TogetherDpEvent) else (step.event,)
            return Poisson(step.sampling_probability, on_one_sample(dp.ComposedDpEvent([*map(_smooth, inside)])))
        case _:
            return step
