"""Private values in [−1, 1], drawn for many clients at once (paper 001): the samplers of `values`.

Duchi and grid-PM decide by whole numbers and have the same few outputs for every input. PM and HM compute in
floating point, as others do: some of their outputs are impossible under a nearby input (`audit.support` finds them),
so their guarantee is that of ideal arithmetic. NaN counts as 0; values beyond ±1 are clipped.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from polyeps.core import Streams
from polyeps.engine.noise import FLOATS_LEAK
from polyeps.errors import InputError
from polyeps.mechanisms.pick import whole_numbers
from polyeps.mechanisms.selection import WORD
from polyeps.mechanisms.values import HYBRID_THRESHOLD, IDEAL_ONLY, ValueMechanism, cells_of, check, duchi_lead

Floats = NDArray[np.float64]
CELLS = 1024


def perturb(mechanism: ValueMechanism, values: Floats, epsilon: Floats, streams: Streams) -> Floats:
    """An unbiased private answer for each of n values, each at its own ε; (n,).

    Guarantee: client; any two values in [−1, 1]; ratio at most e^ε, for duchi and grid-pm in whole numbers.
    """
    if not len(values) == len(epsilon) == streams.clients:
        raise InputError(
            f"{len(values)} values need as many epsilons and streams, not {len(epsilon)} and {streams.clients}"
        )
    if len(values):
        check(float(epsilon.min()))
        check(float(epsilon.max()))
    if streams.exact and mechanism in IDEAL_ONLY:
        raise InputError(f"value = {mechanism!r}: {FLOATS_LEAK}")
    values = np.clip(np.nan_to_num(np.asarray(values, np.float64), nan=0.0), -1, 1)
    match mechanism:
        case "duchi":
            return _duchi(values, epsilon, whole_numbers(streams, 1)[:, 0])
        case "grid-pm":
            return _grid(values, epsilon, whole_numbers(streams, 2))
        case "pm":
            return piecewise(values, epsilon, *streams.uniforms(2).T)
        case "hm":
            which, coin, place = streams.uniforms(3).T
            share = np.where(epsilon > HYBRID_THRESHOLD, -np.expm1(-epsilon / 2), 0.0)
            two = _duchi(values, epsilon, (coin * WORD).astype(np.int64) - 1)
            return np.where(which <= share, piecewise(values, epsilon, coin, place), two)


def _duchi(values: Floats, epsilon: Floats, draws: NDArray[np.int64]) -> Floats:
    # A rounded lean is never beyond the lead, so the coin's ratio is at most e^ε.
    lean = np.round(values * duchi_lead(epsilon)).astype(np.int64)
    return np.where(draws < WORD // 2 + lean, 1, -1) / np.tanh(epsilon / 2)


def _grid(values: Floats, epsilon: Floats, draws: NDArray[np.int64]) -> Floats:
    law = cells_of(epsilon, CELLS)
    others = CELLS - law.band
    place = (values + 1) * others / 2
    low = np.minimum(np.floor(place).astype(np.int64), others - 1)
    start = low + (draws[:, 1] < (place - low) * WORD)  # any way to round is sound; this one is unbiased
    of_rest = draws[:, 0] - law.band * law.inside
    left = of_rest - others * law.outside
    other = of_rest // law.outside
    cell = np.select(
        [of_rest < 0, left < 0],
        [start + draws[:, 0] // law.inside, other + law.band * (other >= start)],
        CELLS // 2 - left % 2,
    )
    return np.asarray(law.step * (cell - (CELLS - 1) / 2), dtype=np.float64)


def piecewise(values: Floats, epsilon: Floats, coin: Floats, place: Floats) -> Floats:
    """PM in floating point, from two uniforms."""
    bound = 1 / np.tanh(epsilon / 4)
    left = band_start(values, bound)
    inside = left + place * (bound - 1)
    around = place * (bound + 1)
    outside = np.where(around < left + bound, around - bound, around - 1)
    return np.where(coin <= 1 / (1 + np.exp(-epsilon / 2)), inside, outside)


def band_start(values: Floats, bound: Floats) -> Floats:
    """Where PM's band of likely answers begins."""
    return (bound + 1) * values / 2 - (bound - 1) / 2
