"""The PLD accountant: privacy loss distributions, discretised so that every ε returned is an upper bound.

Each step's profile is put on a grid by "connect the dots" (chords in e^ε, which can only raise δ), and all steps are
composed in one Fourier transform per direction. Before that the losses are tilted, weighted by e^(θ·loss), so that the
losses that determine δ become likely: rounding errors are then small relative to δ, however small δ is, and the window
is narrow. The grid is as fine as the tolerance needs, found by comparison with a grid twice as coarse. Mass outside
the window, and the rounding errors of the transform, count as infinite loss.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from dp_accounting.dp_event import DpEvent
from scipy.fft import irfft, next_fast_len, rfft
from scipy.special import gammaln

from polyeps.accounting.discrete_gaussians import as_gaussians
from polyeps.accounting.events import Gaussian, PureDpEvent
from polyeps.accounting.histories import History, fold_gaussians, pure_sum
from polyeps.accounting.known_cohorts import with_draws_known
from polyeps.accounting.privacy_losses import PrivacyLosses, cumulant, gridded, least_ratio, spaced, tilt_towards
from polyeps.accounting.privacy_profiles import (
    DeltaFunction,
    FloatArray,
    PrivacyProfile,
    gaussian_epsilon,
    is_private,
    second_moment,
    step_profile,
)
from polyeps.core import Adjacency, clip_norms_moved

TOLERANCE = 5e-4  # relative error that the grid may add to ε, roughly
_MOST_POINTS = 1 << 20  # points of the window: with more, the grid is made coarser, which is still an upper bound
_LONGEST = 1 << 19  # points of one step's grid
_FEWEST = 50  # intervals in ε
_FAR = 1e6  # signal-to-noise ratio of all releases beyond which losses of a sampled one lack digits
_CUT = 1e-6  # share of δ that may be lost to the cut of single losses, and again to the window
_BEYOND = 1e-13  # mass of the tilted distribution on either side of the window
_FORGOTTEN = 45.0  # losses with weights below e^−45 may be rounded up
_ONE_BY_ONE = 1 << 20  # pure steps whose numbers of flips are enumerated
_SMALL = 0.02  # share of the spread below which ε need not be more precise


def pld_epsilon(history: History, delta: float, adjacency: Adjacency) -> float:
    """Return the smallest ε that this accountant certifies for a history at δ."""
    if adjacency != "replace-one":
        history = as_gaussians(history)
    if not all(is_private(step) for step in history):
        return math.inf
    steps = _merge_gaussians(history)
    if not steps:
        return 0.0
    if delta == 0:
        return pure_sum(steps)
    if len(steps) == 1:
        ((step, uses),) = steps.items()
        if isinstance(step, PureDpEvent) and uses <= _ONE_BY_ONE:
            return pure_epsilon(step.epsilon, uses, delta)
        if isinstance(step, Gaussian):
            return gaussian_epsilon(clip_norms_moved(adjacency) / step.noise_multiplier, delta)
    known = with_draws_known(steps, adjacency)  # an upper bound: that observer knows more
    if known is None:
        return _on_a_grid(steps, delta, adjacency)
    if not known.costs_more(0.0, delta):
        return 0.0
    found = _on_a_grid(steps, delta, adjacency) if known.largest_shift < _FAR else math.inf
    return found if known.costs_more(found, delta) else known.epsilon(delta)


def _on_a_grid(steps: History, delta: float, adjacency: Adjacency) -> float:
    total = sum(steps.values())
    pairs = [(step_profile(step, adjacency, _CUT * delta / total), uses) for step, uses in steps.items()]
    if total == 1:
        return min(max(_inverse(pairs[0][0].remove, delta), _inverse(pairs[0][0].add, delta)), pure_sum(steps))
    spread = math.sqrt(sum(uses * second_moment(step, adjacency) for step, uses in steps.items()))
    if not (spread > 0 and all(math.isfinite(spread + pair.highest_remove + pair.highest_add) for pair, _ in pairs)):
        raise OverflowError("privacy losses beyond a double's range")
    answer = _composed_epsilon(pairs, delta, spread)
    if not all(pair.symmetric for pair, _ in pairs):
        answer = max(answer, _composed_epsilon([(pair.reversed(), uses) for pair, uses in pairs], delta, spread))
    return min(answer, pure_sum(steps))


def pure_epsilon(step_epsilon: float, uses: int, delta: float) -> float:
    """Return the ε of equal pure steps under optimal composition.

    The worst case is randomised response: δ(x) = Σₗ Bin(uses, 1/(1+e^ε))(l)·(1 − e^(x − (uses−2l)ε))₊, which
    between its kinks is linear in e^x, so it is inverted in closed form.

    >>> round(pure_epsilon(0.1, 100, 1e-5), 4)
    4.3068
    """
    flipped = np.arange(uses + 1)
    log_choices = gammaln(uses + 1) - gammaln(flipped + 1) - gammaln(uses - flipped + 1)
    log_weight = log_choices + (uses - flipped) * step_epsilon - uses * np.logaddexp(0, step_epsilon)
    loss = (uses - 2 * flipped) * step_epsilon
    mass, scaled = np.exp(log_weight)[::-1], np.exp(log_weight - loss)[::-1]
    return min(_invert(loss[::-1], mass, scaled, np.zeros(uses + 1), delta), uses * step_epsilon)


def _merge_gaussians(history: History) -> dict[DpEvent, int]:
    """Merge unsampled Gaussians, whose precisions add up, and drop steps of ε = 0."""
    steps = {step: uses for step, uses in history.items() if not isinstance(step, Gaussian)}
    alone = [step.noise_multiplier / math.sqrt(uses) for step, uses in history.items() if isinstance(step, Gaussian)]
    if alone:
        steps[Gaussian(min(fold_gaussians(*alone), 1e300))] = 1  # finite, however large the noise
    return {step: uses for step, uses in steps.items() if not (isinstance(step, PureDpEvent) and step.epsilon == 0)}


def _inverse(delta_at: DeltaFunction, delta: float) -> float:
    """Return an ε, from above, at which one step's δ is at most `delta`."""
    low, high = 0.0, 1.0
    if delta_at(np.zeros(1))[0] <= delta:
        return 0.0
    while delta_at(np.array([high]))[0] > delta:
        low, high = high, 2 * high
    for _ in range(10):
        grid = np.linspace(low, high, 65)
        place = int(np.argmax(delta_at(grid[1:]) <= delta))
        low, high = float(grid[place]), float(grid[place + 1])
    return high


def _composed_epsilon(pairs: Sequence[tuple[PrivacyProfile, int]], delta: float, spread: float) -> float:
    """Return the ε of all steps in one direction."""
    uses = sum(uses for _, uses in pairs)
    rough = [spaced(pair, n, 1e-4 * spread / math.sqrt(uses)) for pair, n in pairs]
    tilt, bound = least_ratio(lambda at: cumulant(rough, at) - math.log(delta), 1 / spread)
    hazard, tilt = 1 + tilt, tilt * max(0.05, 1 - math.sqrt(2 / max(-math.log10(delta), 2)))  # lifts δ above rounding
    answer, wanted, finest = math.inf, max(bound, _SMALL * spread), 0.0
    interval = min(6 * TOLERANCE * wanted, math.sqrt(12 * TOLERANCE * wanted / (uses * hazard)))
    for _ in range(12):
        lowest = _FORGOTTEN / tilt
        widest = max(pair.highest_remove + min(pair.highest_add, lowest) for pair, _ in pairs)
        finest = max(finest, widest / _LONGEST)
        interval = max(interval, finest)
        fine, coarse = zip(*(gridded(pair, n, interval, lowest) for pair, n in pairs), strict=True)
        # What a grid twice as coarse would add to ε for many small losses: at least as much as this one has added.
        excess = (cumulant(coarse, tilt) - cumulant(fine, tilt)) / tilt * max(1.0, hazard / (1 + tilt))
        if excess <= TOLERANCE * wanted or interval <= 1.1 * finest:
            found = _tilted_epsilon(fine, rough, delta, tilt, interval)
            if found.points > _MOST_POINTS:
                interval = finest = interval * 1.1 * found.points / _MOST_POINTS
                continue
            answer = min(answer, found.epsilon)
            if answer == 0:
                break
            if not math.isfinite(answer):
                tilt /= 2
                continue
            wanted = max(answer, _SMALL * spread)
            better = tilt_towards(rough, answer, 1 / spread) if found.blurred else tilt
            if not 0.9 < better / tilt < 1.1:
                tilt = better
                continue
            excess, hazard = excess * max(found.hazard, 1 + tilt) / max(hazard, 1 + tilt), found.hazard
            excess = max(excess, TOLERANCE * _FEWEST * interval)  # a few intervals in ε show nothing
            if excess <= 1.5 * TOLERANCE * wanted or interval <= 1.1 * finest:
                break
        interval *= max(0.2, 0.8 * math.sqrt(TOLERANCE * wanted / excess))
    return answer


@dataclass(frozen=True)
class _Found:
    epsilon: float
    hazard: float  # how fast δ falls there: this is what a wider distribution adds to ε
    points: int  # of the window; nothing was computed if there are too many
    blurred: bool  # errors of the transform were a notable part of δ: another tilt is better


def _tilted_epsilon(
    losses: Sequence[PrivacyLosses], rough: Sequence[PrivacyLosses], delta: float, tilt: float, interval: float
) -> _Found:
    """Return the ε of a composition, by the transform of its tilted losses."""
    total, cut = cumulant(losses, tilt), math.log(_CUT * delta)
    base, beyond = cumulant(rough, tilt), math.log(_BEYOND)
    up, _ = least_ratio(lambda at: cumulant(rough, at) - cut, tilt)
    over, _ = least_ratio(lambda at: cumulant(rough, tilt + at) - base - beyond, tilt)
    down, _ = least_ratio(lambda at: cumulant(rough, tilt - at) - base - beyond, tilt)
    # The first makes the answer sound; beyond the end of the tilted losses, more room would only raise it.
    top = max((cumulant(losses, up) - cut) / up, (cumulant(losses, tilt + over) - total - beyond) / over)
    bottom = -(cumulant(losses, tilt - down) - total - beyond) / down
    firsts = sum(each.uses * round(each.at[0] / interval) for each in losses)
    lasts = sum(each.uses * round(each.at[-1] / interval) for each in losses)
    first, last = max(math.floor(bottom / interval), firsts), min(math.ceil(top / interval), lasts)
    size = last - first + 1
    if size > _MOST_POINTS:
        return _Found(math.inf, 0.0, size, True)
    size = next_fast_len(max(size, 2), real=True)
    likely = np.roll(_convolve(losses, tilt, size), (firsts - first) % size)
    decay = min(size, 1 + 1 / (2 * tilt * interval))  # number of relevant losses, at most
    rounding = 1e-15 * (100 + 4 * sum(each.uses for each in losses)) * math.sqrt(float(np.sum(likely**2)) * decay)
    loss = interval * (first + np.arange(size))
    kept = loss > -2 * interval  # negative ε are not needed
    loss, likely = loss[kept], likely[kept]
    if not len(loss):
        return _Found(0.0, 0.0, size, False)
    factor = np.exp(np.minimum(total - tilt * loss, 700.0))  # undoes the tilt; the cap is far above any mass
    mass = likely * factor
    infinite = -math.expm1(sum(each.uses * math.log1p(-each.infinite) for each in losses))
    blur = (_BEYOND + rounding) * factor
    answer = _invert(loss, mass, mass * np.exp(np.minimum(-loss, 700.0)), infinite + _CUT * delta + blur, delta)
    answer = min(answer, max(0.0, lasts * interval)) if infinite <= delta else math.inf
    if not math.isfinite(answer):
        return _Found(answer, 0.0, size, True)
    place = max(0, int(np.searchsorted(loss, answer, side="right")) - 1)
    density = float(np.mean(mass[place : place + 9])) / interval
    left = float(np.sum(mass[place:] * np.exp(answer - loss[place:])))
    blurred = (place == 0 < loss[0]) or bool(blur[place] > 1e-4 * delta)
    return _Found(answer, density / left if left > 0 else 0.0, size, blurred)


def _convolve(losses: Sequence[PrivacyLosses], tilt: float, size: int) -> FloatArray:
    """Return the masses of the sum of all tilted losses, from the sum of the first indices on, modulo `size`."""
    log_magnitude, phase = np.zeros(size // 2 + 1), np.zeros(size // 2 + 1)
    for each in losses:
        spectrum = rfft(np.bincount(np.arange(len(each.mass)) % size, each.tilted(tilt), size))
        log_magnitude += each.uses * np.log(np.abs(spectrum) + 1e-300)
        phase += each.uses * np.angle(spectrum)
    product = np.zeros(size // 2 + 1, dtype=complex)
    relevant = log_magnitude > -80  # the rest is below a double's precision
    product[relevant] = np.exp(log_magnitude[relevant]) * np.exp(1j * phase[relevant])
    return np.maximum(irfft(product, size), 0.0)


def _invert(loss: FloatArray, mass: FloatArray, scaled: FloatArray, errors: FloatArray, delta: float) -> float:
    """Return the smallest ε ≥ 0 with errors(ε) + Σ_{loss > ε} (mass − e^ε·scaled) ≤ δ, for scaled = mass·e^(−loss).

    Errors are given at each loss, and decrease with it.
    """
    above = np.cumsum(mass[::-1])[::-1]  # mass with at least this loss
    below = np.cumsum(scaled[::-1])[::-1]
    # δ at ε = loss, decreasing; the cap matters only where nothing is left below, and raises δ
    at_loss = errors + above - np.exp(np.minimum(loss, 700.0)) * below
    met = at_loss <= delta
    if not met.any():
        return math.inf
    active = int(np.argmax(met))
    if active == 0:
        return max(0.0, float(loss[0]))
    rest = above[active] + errors[active - 1] - delta
    between = math.log(rest / below[active]) if rest > 0 and below[active] > 0 else math.inf
    if rest <= 0:
        between = 0.0
    return max(0.0, float(loss[active - 1]), min(between, float(loss[active])))
