"""Private release of one value in [−1, 1]: bounds, variances and exact laws of four mechanisms (paper 001).

All are unbiased and their densities (or masses) for two inputs differ by a factor of at most e^ε. PM and HM
draw real numbers: in floating point some outputs are impossible under a nearby input, so their guarantee is that
of ideal arithmetic. Duchi and grid-PM have finitely many outputs and lose nothing.
"""

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from polyeps.errors import InputError
from polyeps.mechanisms.selection import BELOW, WORD

ValueMechanism = Literal["pm", "hm", "duchi", "grid-pm"]
IDEAL_ONLY = ("pm", "hm")  # exact in real arithmetic, not in floating point
HYBRID_THRESHOLD = 0.6093524930  # below it the hybrid is Duchi's mechanism alone
_LARGEST = 36.0  # beyond it e^(−ε) vanishes beside one in double precision, and with it the guarantee


def check(epsilon: float) -> None:
    """Refuse an ε for which the mechanisms are not defined."""
    if not 0 < epsilon <= _LARGEST:
        raise InputError(f"epsilon-value must be above 0 and at most {_LARGEST:g}, not {epsilon}")


def piecewise_bound(epsilon: float) -> float:
    """PM answers within [−C, C], C = (e^(ε/2) + 1)/(e^(ε/2) − 1)."""
    return 1 / math.tanh(epsilon / 4)


def piecewise_variance(epsilon: float, value: float) -> float:
    """Var[PM | t] = t²/(A − 1) + (A + 3)/(3(A − 1)²), A = e^(ε/2)."""
    excess = math.expm1(epsilon / 2)
    return value**2 / excess + (excess + 4) / (3 * excess**2)


def duchi_bound(epsilon: float) -> float:
    """Duchi answers ±B, B = (e^ε + 1)/(e^ε − 1)."""
    return 1 / math.tanh(epsilon / 2)


def duchi_variance(epsilon: float, value: float) -> float:
    return duchi_bound(epsilon) ** 2 - value**2


def hybrid_variance(epsilon: float, value: float) -> float:
    """PM with the public probability 1 − e^(−ε/2) above the threshold, else Duchi."""
    share = -math.expm1(-epsilon / 2) if epsilon > HYBRID_THRESHOLD else 0.0
    return share * piecewise_variance(epsilon, value) + (1 - share) * duchi_variance(epsilon, value)


@dataclass(frozen=True)
class GridPiecewise:
    """PM on n cells: a uniform cell of a band of h with probability e^ε·h/(n − h + e^ε·h), else one outside it.

    The band's place is an unbiased rounding of the value, so every draw is of an integer.
    """

    epsilon: float
    cells: int = 1024

    @property
    def band(self) -> int:
        bound = piecewise_bound(self.epsilon)
        return min(self.cells - 1, max(1, round(self.cells * (bound - 1) / (2 * bound))))

    @property
    def in_band(self) -> float:
        n, h = self.cells, self.band
        return h / (h + (n - h) * math.exp(-self.epsilon))

    @property
    def step(self) -> float:
        n, h, p = self.cells, self.band, self.in_band
        return 2 / ((n - h) * (p - (1 - p) * h / (n - h)))

    @property
    def outputs(self) -> NDArray[np.float64]:
        return np.asarray(self.step * (np.arange(self.cells) - (self.cells - 1) / 2), dtype=np.float64)

    def masses(self, value: float) -> NDArray[np.float64]:
        """The probability of each output."""
        n, h = self.cells, self.band
        place = (value + 1) * (n - h) / 2
        low = min(math.floor(place), n - h - 1)
        mass = np.full(n, (1 - self.in_band) / (n - h))
        inside = self.in_band / h - (1 - self.in_band) / (n - h)
        mass[low : low + h] += inside * (low + 1 - place)
        mass[low + 1 : low + 1 + h] += inside * (place - low)
        return mass

    def variance(self, value: float) -> float:
        mass = self.masses(value)
        return float(mass @ self.outputs**2 - (mass @ self.outputs) ** 2)


@dataclass(frozen=True)
class Cells:
    """Grid-PM of n clients in whole numbers out of 2⁵³: cells in a band, a cell's count inside it and outside it.

    Guarantee: client (any two values); inside is at most e^ε times outside. What rounding leaves over goes to the
    two cells in the middle, whatever the value.
    """

    band: NDArray[np.int64]  # (n,) as all of them
    inside: NDArray[np.int64]
    outside: NDArray[np.int64]
    step: NDArray[np.float64]  # from one cell's output to the next


def cells_of(epsilon: NDArray[np.float64], cells: int = 1024) -> Cells:
    """Every client's `GridPiecewise`, as its sampler has it."""
    bound = 1 / np.tanh(epsilon / 4)
    band = np.clip(np.round(cells * (bound - 1) / (2 * bound)), 1, cells - 1).astype(np.int64)
    others = cells - band
    unlikely = np.exp(-epsilon)
    whole = band + others * unlikely
    outside = np.maximum(1, np.floor(unlikely / whole * BELOW * WORD).astype(np.int64))
    inside = np.floor(outside * np.exp(np.minimum(epsilon, 40.0)) * BELOW).astype(np.int64)
    inside = np.maximum(outside, np.minimum(inside, (WORD - others * outside) // band))
    return Cells(band, inside, outside, 2 * whole / (others * band * -np.expm1(-epsilon)))


def duchi_lead(epsilon: NDArray[np.float64]) -> NDArray[np.float64]:
    """How far out of 2⁵² Duchi's coin may lean at a value of one: (2⁵² + lead)/(2⁵² − lead) is at most e^ε."""
    return np.asarray(np.floor(np.tanh(epsilon / 2) * BELOW * (WORD // 2)), dtype=np.float64)


def variance(mechanism: ValueMechanism, epsilon: float, value: float) -> float:
    """The variance of any of the mechanisms at a value."""
    match mechanism:
        case "pm":
            return piecewise_variance(epsilon, value)
        case "hm":
            return hybrid_variance(epsilon, value)
        case "duchi":
            return duchi_variance(epsilon, value)
        case "grid-pm":
            return GridPiecewise(epsilon).variance(value)
