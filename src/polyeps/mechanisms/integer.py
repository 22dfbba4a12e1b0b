"""Noise on integers, as secure sums need it: what rounding does to a sensitivity, and what the noise costs."""

import math

from polyeps.accounting.events import DiscreteGaussianSumDpEvent, SkellamDpEvent
from polyeps.errors import InputError


def rounded_sensitivity(clip: float, granularity: float, dimension: int, bias: float = math.exp(-0.5)) -> float:
    """The largest norm of a vector of norm `clip` after randomised rounding to multiples of `granularity`.

    Rounding is repeated until the norm is within this bound, which happens with probability at least 1 − `bias`.

    >>> round(rounded_sensitivity(1.0, 1e-3, 100_000), 6)
    1.012995
    """
    if not 0 < bias < 1:
        raise InputError(f"bias must lie between 0 and 1, not {bias}")
    drift = granularity * math.sqrt(dimension) / 2
    likely = clip**2 + drift**2 + math.sqrt(2 * math.log(1 / bias)) * granularity * (clip + drift)
    return math.sqrt(min(likely, (clip + 2 * drift) ** 2))


def skellam_event(clip: float, granularity: float, dimension: int, deviation: float) -> SkellamDpEvent:
    """The price of summing vectors of norm `clip`, rounded to the grid, with Skellam noise of total `deviation`."""
    l2 = rounded_sensitivity(clip, granularity, dimension) / granularity
    return SkellamDpEvent(min(math.sqrt(dimension) * l2, l2**2), l2, (deviation / granularity) ** 2)


def discrete_gaussian_event(
    clip: float, granularity: float, dimension: int, agent_deviation: float, agents: int
) -> DiscreteGaussianSumDpEvent:
    """The price of the same sum when each of `agents` adds discrete Gaussian noise of `agent_deviation`."""
    l2 = rounded_sensitivity(clip, granularity, dimension) / granularity
    return DiscreteGaussianSumDpEvent(l2, agent_deviation / granularity, agents, dimension)
