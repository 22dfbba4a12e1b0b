"""Privacy loss distributions of single steps on finite sets, and exponential tilts of their sums."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from polyeps.accounting.privacy_profiles import DeltaFunction, FloatArray, PrivacyProfile


@dataclass(frozen=True)
class PrivacyLosses:
    """The privacy losses of one step: masses at finite losses; the rest is infinite."""

    at: FloatArray
    mass: FloatArray
    infinite: float
    uses: int

    def cumulant(self, tilt: float) -> float:
        """Return log E[e^(tilt·loss)] of all uses."""
        exponent = tilt * self.at
        top = float(max(exponent[0], exponent[-1]))
        if min(exponent[0], exponent[-1]) > -1 and top < 1:  # a small tilt: keep the digits
            return self.uses * math.log1p(float(np.sum(self.mass * np.expm1(exponent))) - self.infinite)
        # not a dot product: BLAS would start threads for it, which is slow on a busy machine
        return self.uses * (top + math.log(float(np.sum(self.mass * np.exp(exponent - top)))))

    def tilted(self, tilt: float) -> FloatArray:
        return self.mass * np.exp(tilt * self.at - self.cumulant(tilt) / self.uses)


def cumulant(losses: Sequence[PrivacyLosses], tilt: float) -> float:
    return sum(each.cumulant(tilt) for each in losses)


def gridded(pair: PrivacyProfile, uses: int, interval: float, lowest: float) -> tuple[PrivacyLosses, PrivacyLosses]:
    """Return one step's losses rounded up to multiples of `interval`, and of twice that; none below −`lowest`."""

    def grid(highest: float) -> FloatArray:
        return interval * np.arange(1 + 2 * max(1, math.ceil(highest / interval / 2)))

    up, down = _tabulated(pair, grid(pair.highest_remove), grid(min(pair.highest_add, lowest)))
    return _connected(up, down, uses), _connected(up[:, ::2], down[:, ::2], uses)


def spaced(pair: PrivacyProfile, uses: int, least: float) -> PrivacyLosses:
    """Return one step's losses at steps of 2 %: a rough distribution with few points."""

    def grid(highest: float) -> FloatArray:
        return np.append(0.0, least * np.exp(0.02 * np.arange(2 + math.ceil(50 * math.log(max(highest / least, 1.0))))))

    return _connected(*_tabulated(pair, grid(pair.highest_remove), grid(pair.highest_add)), uses)


def _tabulated(pair: PrivacyProfile, up: FloatArray, down: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return both orders of a profile as tables: losses from 0, and δ at each of them, which never rises."""

    def table(delta: DeltaFunction, grid: FloatArray) -> FloatArray:
        return np.stack([grid, np.minimum.accumulate(np.clip(delta(grid), 0.0, 1.0))])

    rises = table(pair.remove, up)
    return rises, rises if pair.symmetric and len(up) == len(down) else table(pair.add, down)


def _connected(up: FloatArray, down: FloatArray, uses: int) -> PrivacyLosses:
    """Return the distribution whose profiles are the chords between tabulated points (in e^ε)."""
    rises, falls = _positive_losses(up), _positive_losses(down)
    falls = falls * np.exp(-down[0, 1:])  # seen from P instead of Q
    infinite = float(up[1, -1])
    at_zero = max(0.0, 1 - infinite - float(rises.sum()) - float(falls.sum()))
    at, mass = np.concatenate([-down[0, :0:-1], up[0]]), np.concatenate([falls[::-1], [at_zero], rises])
    some = np.flatnonzero(mass)
    held = slice(some[0], some[-1] + 1)
    return PrivacyLosses(at[held], mass[held], infinite, uses)


def _positive_losses(table: FloatArray) -> FloatArray:
    """Return the masses at the tabulated losses above 0."""
    gap, drop = np.minimum(np.diff(table[0]), 700.0), -np.diff(table[1])  # ≥ 0
    mass = drop / -np.expm1(-gap)
    mass[:-1] -= drop[1:] / np.expm1(gap[1:])
    return np.maximum(mass, 0.0)


def least_ratio(cost: Callable[[float], float], start: float) -> tuple[float, float]:
    """Minimise cost(s)/s over s > 0, by golden section in log s; return s and the minimum."""

    def value(log_s: float) -> float:
        s = math.exp(log_s)
        return cost(s) / s

    low, middle, high = (math.log(start) + step for step in (-1.5, 0.0, 1.5))
    at_low, at_middle, at_high = value(low), value(middle), value(high)
    for _ in range(60):
        if at_low < at_middle:
            low, middle, high = low - 1.5, low, middle
            at_low, at_middle, at_high = value(low), at_low, at_middle
        elif at_high < at_middle - 1e-3 * abs(at_middle):  # for bounded losses it may fall for ever
            low, middle, high = middle, high, high + 1.5
            at_low, at_middle, at_high = at_middle, at_high, value(high)
        else:
            break
    while high - low > 0.05:
        left = middle - low > high - middle
        new = middle + 0.38 * ((low if left else high) - middle)
        at_new = value(new)
        if at_new < at_middle:
            low, high = (low, middle) if left else (middle, high)
            middle, at_middle = new, at_new
        elif left:
            low = new
        else:
            high = new
    return math.exp(middle), at_middle


def tilt_towards(losses: Sequence[PrivacyLosses], loss: float, scale: float) -> float:
    """Return the tilt under which a loss is the mean loss; a small one if the loss is already above the mean."""

    def mean(tilt: float) -> float:
        return (cumulant(losses, 1.01 * tilt) - cumulant(losses, 0.99 * tilt)) / (0.02 * tilt)

    low, high = 1e-4 * scale, scale
    while mean(high) < loss and high < 1e6 * scale:
        high *= 2
    for _ in range(12):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if mean(middle) < loss else (low, middle)
    return high
