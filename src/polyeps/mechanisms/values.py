"""Private release of one value in [−1, 1]: laws, variances and samplers of four mechanisms, as FedSel uses them.

All are unbiased, and their densities (or masses) for two inputs differ by a factor of at most e^ε. Duchi and grid-PM
decide by whole numbers and have the same few outputs for every input. PM and HM compute in floating point, as is usual:
some of their outputs are impossible under a nearby input (`audit.support` finds them), so their guarantee assumes ideal
arithmetic. NaN counts as 0; values beyond ±1 are clipped.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from polyeps.core import Streams
from polyeps.errors import InputError
from polyeps.mechanisms.selection import BELOW, WORD, whole_numbers

ValueArray = NDArray[np.float64]
CELLS = 1024

ValueMechanism = Literal["pm", "hm", "duchi", "grid-pm"]
IDEAL_ONLY = ("pm", "hm")  # exact in real arithmetic, not in floating point
HYBRID_THRESHOLD = 0.6093524930  # below it the hybrid is Duchi's mechanism alone
_LARGEST = 36.0  # beyond it 1 + e^(−ε) is 1 in double precision, and the guarantee is lost


def check_epsilon_value(epsilon: float) -> None:
    """Refuse an ε for which the mechanisms are not defined."""
    if not 0 < epsilon <= _LARGEST:
        raise InputError(f"epsilon-value must be above 0 and at most {_LARGEST:g}, not {epsilon}")


def piecewise_variance(epsilon: float, value: float) -> float:
    """Return Var[PM | t] = t²/(A − 1) + (A + 3)/(3(A − 1)²), A = e^(ε/2)."""
    excess = math.expm1(epsilon / 2)
    return value**2 / excess + (excess + 4) / (3 * excess**2)


def duchi_variance(epsilon: float, value: float) -> float:
    """Return Duchi's variance B² − t²; it answers ±B, B = (e^ε + 1)/(e^ε − 1)."""
    return (1 / math.tanh(epsilon / 2)) ** 2 - value**2


def hybrid_variance(epsilon: float, value: float) -> float:
    """Return HM's variance: PM with the public probability 1 − e^(−ε/2) above the threshold, else Duchi."""
    share = -math.expm1(-epsilon / 2) if epsilon > HYBRID_THRESHOLD else 0.0
    return share * piecewise_variance(epsilon, value) + (1 - share) * duchi_variance(epsilon, value)


@dataclass(frozen=True)
class CellCounts:
    """Grid-PM of n clients in whole numbers out of 2⁵³: cells in a band, a cell's count inside it and outside it.

    Guarantee: client (any two values); inside is at most e^ε times outside. The remainder after rounding goes to the
    two cells in the middle, whatever the value.
    """

    band: NDArray[np.int64]  # (n,), as are the others
    inside: NDArray[np.int64]
    outside: NDArray[np.int64]
    step: NDArray[np.float64]  # from one cell's output to the next


def cell_counts(epsilon: NDArray[np.float64], cells: int = 1024) -> CellCounts:
    """Return every client's law of grid-PM as it is sampled.

    PM on n cells: a uniform cell of a band of h cells with probability e^ε·h/(n − h + e^ε·h), else one outside it. The
    band's place is an unbiased rounding of the value, so every draw is of an integer.
    """
    bound = 1 / np.tanh(epsilon / 4)
    band = np.clip(np.round(cells * (bound - 1) / (2 * bound)), 1, cells - 1).astype(np.int64)
    others = cells - band
    unlikely = np.exp(-epsilon)
    whole = band + others * unlikely
    outside = np.maximum(1, np.floor(unlikely / whole * BELOW * WORD).astype(np.int64))
    inside = np.floor(outside * np.exp(np.minimum(epsilon, 40.0)) * BELOW).astype(np.int64)
    inside = np.maximum(outside, np.minimum(inside, (WORD - others * outside) // band))
    return CellCounts(band, inside, outside, 2 * whole / (others * band * -np.expm1(-epsilon)))


def duchi_lead(epsilon: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the bias of Duchi's coin at a value of one, out of 2⁵²: (2⁵² + lead)/(2⁵² − lead) is at most e^ε."""
    return np.asarray(np.floor(np.tanh(epsilon / 2) * BELOW * (WORD // 2)), dtype=np.float64)


def variance(mechanism: ValueMechanism, epsilon: float, value: float) -> float:
    """Return a mechanism's variance at a value; grid-PM's is PM's up to a thousandth."""
    match mechanism:
        case "pm" | "grid-pm":
            return piecewise_variance(epsilon, value)
        case "hm":
            return hybrid_variance(epsilon, value)
        case "duchi":
            return duchi_variance(epsilon, value)


def perturb(mechanism: ValueMechanism, values: ValueArray, epsilon: ValueArray, streams: Streams) -> ValueArray:
    """Return an unbiased private answer for each of n values, each at its own ε; (n,).

    Guarantee: client; any two values in [−1, 1]; ratio at most e^ε, for duchi and grid-pm in whole numbers.
    """
    if not len(values) == len(epsilon) == streams.clients:
        raise InputError(
            f"{len(values)} values need as many epsilons and streams, not {len(epsilon)} and {streams.clients}"
        )
    if len(values):
        check_epsilon_value(float(epsilon.min()))
        check_epsilon_value(float(epsilon.max()))
    if streams.exact and mechanism in IDEAL_ONLY:
        from polyeps.engine.noise import FLOATS_LEAK

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


def _duchi(values: ValueArray, epsilon: ValueArray, draws: NDArray[np.int64]) -> ValueArray:
    # A rounded lean never exceeds the lead, so the coin's ratio is at most e^ε.
    lean = np.round(values * duchi_lead(epsilon)).astype(np.int64)
    return np.where(draws < WORD // 2 + lean, 1, -1) / np.tanh(epsilon / 2)


def _grid(values: ValueArray, epsilon: ValueArray, draws: NDArray[np.int64]) -> ValueArray:
    law = cell_counts(epsilon, CELLS)
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


def piecewise(values: ValueArray, epsilon: ValueArray, coin: ValueArray, place: ValueArray) -> ValueArray:
    """Draw PM in floating point, from two uniforms."""
    bound = 1 / np.tanh(epsilon / 4)
    left = band_start(values, bound)
    inside = left + place * (bound - 1)
    around = place * (bound + 1)
    outside = np.where(around < left + bound, around - bound, around - 1)
    return np.where(coin <= 1 / (1 + np.exp(-epsilon / 2)), inside, outside)


def band_start(values: ValueArray, bound: ValueArray) -> ValueArray:
    """Return the start of PM's band of likely answers."""
    return (bound + 1) * values / 2 - (bound - 1) / 2
