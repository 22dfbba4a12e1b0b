"""The exact judge: privacy loss distributions, discretised so that what is printed is an upper bound.

Each step's profile is put on a grid by "connect the dots" (chords in e^ε, which can only raise δ), and all steps
are composed in one Fourier transform per direction. The grid is as fine as the composition needs: discretising
adds about interval²/6 of variance per step, and the interval keeps that below a fixed share of the variance of
the whole. Mass outside the tabulated window, and the rounding of the transform, count as infinite loss.
"""

import math
from collections.abc import Sequence

import numpy as np
from dp_accounting.dp_event import DpEvent
from scipy.fft import irfft, next_fast_len, rfft
from scipy.special import gammaln

from polyeps.accounting.events import Gaussian, History, PureDpEvent, pure_sum
from polyeps.accounting.gaussians import gaussian_epsilon
from polyeps.accounting.lattice import as_gaussians
from polyeps.accounting.open_cohorts import with_draws_known
from polyeps.accounting.profiles import Array, Delta, Profile, is_private, profile, second_moment
from polyeps.core import Adjacency, clip_norms_moved

VARIANCE_ADDED = 2e-4  # relative; raises ε by about half of it
_MOST_POINTS = 1 << 22  # a coarser grid is still an upper bound; an endless one is no answer
_FAR = 1e6  # of the sum of all releases, in deviations: beyond it, losses of a sampled one have not digits enough
_WINDOW_MASS = 1e-16  # probability left outside the window, on either side
# Deviations of a tail bound, as multiples of 1/spread: small ones for heavy tails, large ones for Gaussian tails.
_TILTS = np.geomspace(0.5, 30, 8)


def epsilon(history: History, delta: float, adjacency: Adjacency) -> float:
    """The smallest ε certified for this history at δ."""
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
        if isinstance(step, PureDpEvent):
            return pure_epsilon(step.epsilon, uses, delta)
        if isinstance(step, Gaussian):
            return gaussian_epsilon(clip_norms_moved(adjacency) / step.noise_multiplier, delta)
    known = with_draws_known(steps, adjacency)  # which costs no less: who knows the draws knows more
    if known is None:
        return _on_a_grid(steps, delta, adjacency)
    if known.delta(0.0) <= delta:
        return 0.0
    found = _on_a_grid(steps, delta, adjacency) if known.shifts.max() < _FAR else math.inf
    return found if known.delta(found) > delta else known.epsilon(delta)


def _on_a_grid(steps: History, delta: float, adjacency: Adjacency) -> float:
    pairs = [(profile(step, adjacency), uses) for step, uses in steps.items()]
    spread = math.sqrt(sum(uses * second_moment(step, adjacency) for step, uses in steps.items()))
    interval = spread * math.sqrt(6 * VARIANCE_ADDED / sum(steps.values()))
    answer = _both_ways(pairs, delta, interval, spread)
    if answer < spread / 10:  # a large δ: ε is small beside the spread, so the grid must be finer
        answer = _both_ways(pairs, delta, interval / 10, spread)
    return min(answer, pure_sum(steps))


def pure_epsilon(step_epsilon: float, uses: int, delta: float) -> float:
    """Optimal composition of equal pure-ε steps, exactly.

    The worst case is randomised response: δ(x) = Σₗ Bin(uses, 1/(1+e^ε))(l)·(1 − e^(x − (uses−2l)ε))₊, which
    between its kinks is linear in e^x, so it is inverted in closed form.

    >>> round(pure_epsilon(0.1, 100, 1e-5), 4)
    4.3068
    """
    flipped = np.arange(uses + 1)
    log_choices = gammaln(uses + 1) - gammaln(flipped + 1) - gammaln(uses - flipped + 1)
    log_weight = log_choices + (uses - flipped) * step_epsilon - uses * np.logaddexp(0, step_epsilon)
    loss = (uses - 2 * flipped) * step_epsilon
    found = _invert(loss[::-1], np.exp(log_weight)[::-1], np.exp(log_weight - loss)[::-1], 0.0, delta)
    return min(found, uses * step_epsilon)


def _merge_gaussians(history: History) -> dict[DpEvent, int]:
    """Gaussian releases on the whole data add up in precision; steps that promise everything drop out."""
    steps = {step: uses for step, uses in history.items() if not isinstance(step, Gaussian)}
    precision = sum(uses * step.noise_multiplier**-2 for step, uses in history.items() if isinstance(step, Gaussian))
    if precision > 0:
        steps[Gaussian(precision**-0.5)] = 1
    return {step: uses for step, uses in steps.items() if not (isinstance(step, PureDpEvent) and step.epsilon == 0)}


def _both_ways(pairs: Sequence[tuple[Profile, int]], delta: float, interval: float, spread: float) -> float:
    widest = max(pair.highest_remove + pair.highest_add for pair, _ in pairs)
    interval = max(interval, widest / _MOST_POINTS)
    remove = _composed_epsilon(pairs, delta, interval, spread)
    if all(pair.symmetric for pair, _ in pairs):
        return remove
    return max(remove, _composed_epsilon([(pair.reversed(), uses) for pair, uses in pairs], delta, interval, spread))


def _composed_epsilon(pairs: Sequence[tuple[Profile, int]], delta: float, interval: float, spread: float) -> float:
    """ε of all steps in one direction."""
    while True:
        tables = [(*_connect_dots(pair, interval), uses) for pair, uses in pairs]
        first, last = _window(tables, spread / interval)
        if last - first < _MOST_POINTS:
            break
        interval *= 1.1 * (last - first) / _MOST_POINTS
    size = next_fast_len(last - first + 1, real=True)
    mass = np.roll(_convolve(tables, size), sum(uses * start for start, _, _, uses in tables) - first)
    log_finite = sum(uses * math.log1p(-infinite) for _, _, infinite, uses in tables)
    rounding = 1e-16 * (100 + sum(uses for *_, uses in tables))
    loss = (first + np.arange(size)) * interval
    kept = loss > -2 * interval  # negative ε is of no interest
    loss, mass = loss[kept], mass[kept]
    scaled = mass * np.exp(np.minimum(-loss, 700.0))  # the cap raises δ
    return _invert(loss, mass, scaled, -math.expm1(log_finite) + 2 * _WINDOW_MASS + rounding, delta)


def _convolve(tables: Sequence[tuple[int, Array, float, int]], size: int) -> Array:
    """Masses of the sum of all losses, counted from the sum of the first indices and modulo `size`."""
    log_magnitude, phase = np.zeros(size // 2 + 1), np.zeros(size // 2 + 1)
    for _, mass, _, uses in tables:
        spectrum = rfft(np.bincount(np.arange(len(mass)) % size, mass, size))
        log_magnitude += uses * np.log(np.abs(spectrum) + 1e-300)
        phase += uses * np.angle(spectrum)
    product = np.zeros(size // 2 + 1, dtype=complex)
    audible = log_magnitude > -80  # the rest adds nothing a double can hold
    product[audible] = np.exp(log_magnitude[audible]) * np.exp(1j * phase[audible])
    return np.maximum(irfft(product, size), 0.0)


def _connect_dots(pair: Profile, interval: float) -> tuple[int, Array, float]:
    """The grid distribution (first index, masses, infinite mass) whose profile is made of the given one's chords."""
    up, infinite = _positive_losses(pair.remove, pair.highest_remove, interval)
    down, _ = (up, 0.0) if pair.symmetric else _positive_losses(pair.add, pair.highest_add, interval)
    down = down * np.exp(-interval * np.arange(1, len(down) + 1))  # seen from P instead of Q
    at_zero = max(0.0, 1 - infinite - float(up.sum()) - float(down.sum()))
    return -len(down), np.concatenate([down[::-1], [at_zero], up]), infinite


def _positive_losses(delta: Delta, highest: float, interval: float) -> tuple[Array, float]:
    """Masses at the losses interval, 2·interval, … and at infinity."""
    grid = np.arange(max(2, math.ceil(highest / interval) + 1)) * interval
    drop = -np.diff(np.minimum.accumulate(np.clip(delta(grid), 0.0, 1.0)), append=0.0)  # ≥ 0
    infinite, drop[-1] = float(drop[-1]), 0.0
    mass = (drop[:-1] - drop[1:] * math.exp(-interval)) / -math.expm1(-interval)  # any interval: e^−x never overflows
    return np.maximum(mass, 0.0), infinite


def _window(tables: Sequence[tuple[int, Array, float, int]], spread: float) -> tuple[int, int]:
    """Grid indices outside which at most `_WINDOW_MASS` of the composition lies on either side (Chernoff)."""
    first = sum(uses * start for start, _, _, uses in tables)
    last = sum(uses * (start + len(mass) - 1) for start, mass, _, uses in tables)
    highest, lowest = float(last), float(first)
    for tilt in _TILTS / spread:
        up = down = -math.log(_WINDOW_MASS)
        for start, mass, _, uses in tables:
            index = start + np.arange(len(mass))
            up += uses * _log_sum(mass, tilt * index)
            down += uses * _log_sum(mass, -tilt * index)
        highest, lowest = min(highest, up / tilt), max(lowest, -down / tilt)
    return math.floor(lowest), math.ceil(highest)


def _log_sum(weight: Array, exponent: Array) -> float:
    """log Σ weight·e^exponent without overflow."""
    shift = max(exponent[0], exponent[-1])  # exponents are monotone
    # not a dot product: BLAS would start threads for it, and wait for them on a busy machine
    return float(shift + math.log(np.sum(weight * np.exp(exponent - shift)) + 1e-300))


def _invert(loss: Array, mass: Array, scaled: Array, infinite: float, delta: float) -> float:
    """The smallest ε ≥ 0 with infinite + Σ_{loss > ε} (mass − e^ε·scaled) ≤ δ, where scaled = mass·e^(−loss)."""
    if infinite > delta:
        return math.inf
    if not len(loss):
        return 0.0
    above = infinite + np.cumsum(mass[::-1])[::-1]  # mass with at least this loss
    below = np.cumsum(scaled[::-1])[::-1]
    # δ at ε = loss, decreasing; the cap only matters where nothing is left below, and raises δ
    at_loss = above - np.exp(np.minimum(loss, 700.0)) * below
    met = at_loss <= delta
    if not met.any():
        return math.inf
    active = int(np.argmax(met))
    lowest = float(loss[active - 1]) if active else 0.0
    return max(0.0, lowest, min(_solve(above[active], below[active], delta), float(loss[active])))


def _solve(above: float, below: float, delta: float) -> float:
    """The ε at which above − e^ε·below = δ; infinite when `below` is too small for a double to hold."""
    if above <= delta:
        return 0.0
    return math.log((above - delta) / below) if below > 0 else math.inf
