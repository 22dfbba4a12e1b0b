"""Private choice of one coordinate among the largest: the exact law of its output, and so its true ε (paper 001).

A client's vector is reduced to which k of its d coordinates are largest (or, for EXP, to their ranks). Paper to
code: z status of a coordinate, ε₁ `epsilon`, ⊥ "none". Guarantee: for any two vectors of a client (everything it
holds may differ), with ranks a permutation and exactly k coordinates marked, ties broken by order.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy.signal import fftconvolve
from scipy.stats import binom

from polyeps.errors import InputError

SelectName = Literal["exp", "pe", "ps", "uniform"]
Form = Literal["sound", "published"]
WORD = 1 << 53  # samplers draw whole numbers below it, so their probabilities are multiples of 2⁻⁵³
# Times this, a product of floats is below the true one: more than the rounding of e^ε and of the product.
BELOW = 1 - 2.0**-48


@dataclass(frozen=True)
class Selection:
    """P[a given top coordinate], P[a given other one], P[none], and the largest log-ratio between two inputs."""

    top: float
    rest: float
    none: float
    epsilon: float


def check(dimension: int, top: int, epsilon: float) -> None:
    """Refuse a selection that has no meaning."""
    if dimension < 1:
        raise InputError(f"dimension must be at least 1, not {dimension}")
    if not 1 <= top <= dimension:
        raise InputError(f"top must be between 1 and the dimension {dimension}, not {top}")
    if not (math.isfinite(epsilon) and epsilon >= 0):
        raise InputError(f"epsilon-select must be a finite number of at least 0, not {epsilon}")


def uniform(dimension: int) -> Selection:
    """A coordinate by chance alone; costs nothing."""
    return Selection(1 / dimension, 1 / dimension, 0.0, 0.0)


def exponential(dimension: int, epsilon: float) -> Selection:
    """EXP: probability ∝ e^(ε·rank/(d−1)), ranks a permutation. `top` is the largest coordinate, `rest` the smallest.

    >>> law = exponential(10, 1.0)
    >>> round(law.top, 10), round(law.rest, 10)
    (0.1567674179, 0.0576715101)
    """
    if dimension == 1:
        return Selection(1.0, 1.0, 0.0, 0.0)
    log_weight = epsilon * np.arange(dimension) / (dimension - 1)
    normaliser = np.logaddexp.reduce(log_weight)
    return Selection(math.exp(epsilon - normaliser), math.exp(-normaliser), 0.0, epsilon)


def perturbed_sampling(dimension: int, top: int, epsilon: float) -> Selection:
    """PS: one of the top k with probability k·e^ε/(d−k+k·e^ε), else one of the others."""
    if top == dimension:
        return uniform(dimension)
    log_normaliser = np.logaddexp(math.log(dimension - top), math.log(top) + epsilon)
    return Selection(math.exp(epsilon - log_normaliser), math.exp(-log_normaliser), 0.0, epsilon)


def perturbed_sampling_as_printed(dimension: int, top: int, epsilon: float) -> Selection:
    """PS with the formula in the paper's text, p = e^(ε·k)/(d−k+e^(ε·k)), at its true ε of |ε·k − ln k|."""
    if top == dimension:
        return uniform(dimension)
    hit = 1 / (1 + (dimension - top) * math.exp(-epsilon * top))
    return Selection(hit / top, hit * math.exp(-epsilon * top), 0.0, abs(epsilon * top - math.log(top)))


def perturbed_encoding(dimension: int, top: int, keep: float) -> Selection:
    """PE: every status bit is told truly with probability `keep`, then one of the marked coordinates is drawn.

    With p = keep and q = 1 − p: P[j | top] = p·E[1/(1+W)] with W ~ Bin(k−1, p) + Bin(d−k, q), and likewise for
    the rest; nothing is sent when no bit is marked.
    """
    flip = 1 - keep
    none = float(flip**top * keep ** (dimension - top))
    hit = keep * _mean_share(top - 1, dimension - top, keep)
    if top == dimension:
        return Selection(hit, hit, none, 0.0)
    miss = flip * _mean_share(top, dimension - top - 1, keep)
    return Selection(hit, miss, none, abs(math.log(hit / miss)) if miss > 0 else math.inf)


def _mean_share(marked: int, others: int, keep: float) -> float:
    """E[1/(1 + Bin(marked, keep) + Bin(others, 1 − keep))]."""
    one = binom.pmf(np.arange(marked + 1), marked, keep)
    two = binom.pmf(np.arange(others + 1), others, 1 - keep)
    count = np.convolve(one, two) if len(one) * len(two) < 10_000_000 else fftconvolve(one, two)
    return float((count / (1 + np.arange(len(count)))).sum())


def published_keep(epsilon: float) -> float:
    """The paper's e^ε/(e^ε + 1), whose true ε is larger than ε."""
    return 1 / (1 + math.exp(-epsilon))


def sound_keep(dimension: int, top: int, epsilon: float) -> float:
    """The largest `keep` found whose exact log-ratio is at most ε.

    >>> round(sound_keep(10, 1, 1.0), 8)
    0.70237469
    """
    low, high = 0.5, published_keep(epsilon)
    for _ in range(52):  # the bits of a double; the low end is sound at every turn
        middle = (low + high) / 2
        low, high = (middle, high) if perturbed_encoding(dimension, top, middle).epsilon <= epsilon else (low, middle)
    return low


@lru_cache(maxsize=4096)
def law(select: SelectName, dimension: int, top: int, epsilon: float, form: Form = "sound") -> Selection:
    """The law of a selection by its name; `published` takes the probabilities the paper prints."""
    check(dimension, top, epsilon)
    match select:
        case "uniform":
            return uniform(dimension)
        case "exp":
            return exponential(dimension, epsilon)
        case "ps" if form == "published":
            return perturbed_sampling_as_printed(dimension, top, epsilon)
        case "ps":
            return perturbed_sampling(dimension, top, epsilon)
        case "pe":
            keep = published_keep(epsilon) if form == "published" else sound_keep(dimension, top, epsilon)
            return perturbed_encoding(dimension, top, keep)


@dataclass(frozen=True)
class Counts:
    """A law in whole numbers out of 2⁵³: of each top coordinate, of each other one, and of none.

    What rounding leaves over goes to coordinates by their index, whatever the data: added to both sides, it can
    only bring two inputs nearer.
    """

    top: int
    rest: int
    none: int


@lru_cache(maxsize=4096)
def counts(select: SelectName, dimension: int, top: int, epsilon: float, form: Form = "sound") -> Counts:
    """The law of PE, PS or uniform as a sampler has it.

    Guarantee: client (any two vectors); the larger count is at most e^ε of the smaller, for the ε of `law`.
    """
    exact = law(select, dimension, top, epsilon, form)
    none = math.floor(exact.none * WORD)
    likely_top = exact.top >= exact.rest
    few, many = (top, dimension - top) if likely_top else (dimension - top, top)
    smaller = min(exact.top, exact.rest) if many else exact.top
    low = min(max(1, math.floor(smaller * WORD)), (WORD - none) // dimension)
    high = math.floor(low * math.exp(min(exact.epsilon, 40.0)) * BELOW)
    high = max(low, min(high, (WORD - none - many * low) // few))
    return Counts(high, low, none) if likely_top else Counts(low, high, none)


@lru_cache(maxsize=256)
def rank_counts(dimension: int, epsilon: float) -> NDArray[np.int64]:
    """The law of EXP as a sampler has it: a whole number out of 2⁵³ for each rank, smallest first.

    Guarantee: client (any two vectors); the largest count is at most e^ε of the smallest.
    """
    if dimension == 1:
        return np.array([WORD])
    weight = np.exp(epsilon * (np.arange(dimension) / (dimension - 1) - 1))
    found: NDArray[np.int64] = np.floor(weight * (WORD / weight.sum() * (1 - 2.0**-44))).astype(np.int64)
    low = max(1, int(found[0]))
    found = np.clip(found, low, max(low, math.floor(low * math.exp(min(epsilon, 40.0)) * BELOW)))
    found[-1] -= max(0, int(found.sum()) - WORD)
    found.flags.writeable = False
    return found
