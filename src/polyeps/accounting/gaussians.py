"""Gaussian releases on the whole data, in closed form: δ of an ε, and ε of a δ."""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import erfcx, ndtr

Array = NDArray[np.floating[Any]]


def gaussian_delta(mu: Array, epsilon: float) -> Array:
    """δ of Gaussian releases with total signal-to-noise μ, for each μ: Φ(a) − e^ε·Φ(−b), a and b = μ/2 ∓ ε/μ.

    As e^ε·φ(b) = φ(a), the second term is e^(−a²/2)·erfcx(b/√2)/2, which no large ε makes overflow.
    """
    a, b = mu / 2 - epsilon / mu, mu / 2 + epsilon / mu
    with np.errstate(over="ignore"):  # a square that is no double stands for a term of 0
        above: Array = ndtr(a) - np.exp(-a * a / 2) * erfcx(b / math.sqrt(2)) / 2
    return above


def gaussian_epsilon(mu: float, delta: float) -> float:
    """ε of Gaussian releases with total signal-to-noise μ, by inverting their δ.

    >>> round(gaussian_epsilon(1.0, 1e-5), 6)
    4.377178
    """

    def excess(epsilon: float) -> float:
        return float(gaussian_delta(np.asarray(mu), epsilon)) - delta

    low, high = 0.0, mu * mu / 2 + 40 * mu
    if excess(low) <= 0:
        return 0.0
    if not excess(high) <= 0:
        return math.inf
    while high - low > 1e-12 * high:  # bisection that keeps the sound end
        middle = (low + high) / 2
        low, high = (middle, high) if excess(middle) > 0 else (low, middle)
    return high
