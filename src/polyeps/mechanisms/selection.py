"""Private selection of one of a vector's largest coordinates: exact laws, their true ε, and samplers.

FedSel: Liu et al., "FedSel: Federated SGD under Local Differential Privacy with Top-k Dimension Selection", DASFAA
2020, https://arxiv.org/abs/2003.10637. A client's vector is reduced to which k of its d coordinates are largest (or,
for EXP, to their ranks). Paper to code: z status of a coordinate, ε₁ `epsilon`, ⊥ "none". Guarantee: for any two
vectors of a client (everything it holds may differ), with ranks a permutation and exactly k coordinates marked.

The samplers draw the *rank* to report by chance alone; the data only decide which coordinate has it. So one whole
number below 2⁵³ from a client's stream decides, its exact law is `selection_counts` (or `rank_counts`), and the number
of draws is constant. PE is drawn by its law (one of the top, one of the rest, or none) instead of by d coins: the
distribution is the same, since all coordinates of a kind are alike. NaN counts as 0, ±inf as the largest. Equal
magnitudes are ordered by chance in every report: any order is sound, but a fixed one would favour the first
coordinates.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from polyeps.core import Streams
from polyeps.errors import InputError

if TYPE_CHECKING:  # torch takes seconds to import; laws and prices need none of it
    from torch import Tensor

SelectName = Literal["exp", "pe", "ps", "uniform"]
SelectionForm = Literal["sound", "published"]
WORD = 1 << 53  # samplers draw whole numbers below it, so their probabilities are multiples of 2⁻⁵³
# A product of floats times this is below the exact product: it exceeds the rounding of e^ε and of the product.
BELOW = 1 - 2.0**-48
NONE = -1  # ⊥: nothing is reported
_AT_ONCE = 1 << 18  # numbers sorted at a time: they fit into the cache
# A bijection of 32-bit words (murmur3's last steps) and its inverse.
_MIX = (0x85EBCA6B, 0xC2B2AE35)
_UNMIX = tuple(pow(factor, -1, 1 << 32) for factor in _MIX)

_Integers = NDArray[np.int64]


@dataclass(frozen=True)
class Selection:
    """P[a given top coordinate], P[a given other one], P[none], and the largest log-ratio between two inputs."""

    top: float
    rest: float
    none: float
    epsilon: float


def check_selection(dimension: int, top: int, epsilon: float) -> None:
    """Refuse impossible parameters of a selection."""
    if dimension < 1:
        raise InputError(f"dimension must be at least 1, not {dimension}")
    if not 1 <= top <= dimension:
        raise InputError(f"top must be between 1 and the dimension {dimension}, not {top}")
    if not (math.isfinite(epsilon) and epsilon >= 0):
        raise InputError(f"epsilon-select must be a finite number of at least 0, not {epsilon}")


def uniform(dimension: int) -> Selection:
    """Return the law of a uniformly random coordinate, which costs nothing."""
    return Selection(1 / dimension, 1 / dimension, 0.0, 0.0)


def exponential(dimension: int, epsilon: float) -> Selection:
    """Return the law of EXP: probability ∝ e^(ε·rank/(d−1)); `top` is for the largest coordinate, `rest` the smallest.

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
    """Return the law of PS: one of the top k with probability k·e^ε/(d−k+k·e^ε), else one of the others.

    As in the paper's algorithm 4 and lemma 3. A sentence before the lemma has e^(ε·k) for k·e^ε, which is a slip.
    """
    if top == dimension:
        return uniform(dimension)
    log_normaliser = np.logaddexp(math.log(dimension - top), math.log(top) + epsilon)
    return Selection(math.exp(epsilon - log_normaliser), math.exp(-log_normaliser), 0.0, epsilon)


def perturbed_encoding(dimension: int, top: int, keep: float) -> Selection:
    """Return the law of PE: each status bit is kept with probability `keep`, then a marked coordinate is drawn.

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
    """Return E[1/(1 + Bin(marked, keep) + Bin(others, 1 − keep))]."""
    from scipy.signal import fftconvolve  # which takes half a second to import
    from scipy.stats import binom

    one = binom.pmf(np.arange(marked + 1), marked, keep)
    two = binom.pmf(np.arange(others + 1), others, 1 - keep)
    count = np.convolve(one, two) if len(one) * len(two) < 10_000_000 else fftconvolve(one, two)
    return float((count / (1 + np.arange(len(count)))).sum())


def published_keep(epsilon: float) -> float:
    """Return the paper's e^ε/(e^ε + 1), whose true ε is larger than ε."""
    return 1 / (1 + math.exp(-epsilon))


def sound_keep(dimension: int, top: int, epsilon: float) -> float:
    """Return the largest `keep` found whose exact log-ratio is at most ε.

    >>> round(sound_keep(10, 1, 1.0), 8)
    0.70237469
    """
    low, high = 0.5, published_keep(epsilon)
    for _ in range(52):  # the bits of a double; the low end is sound at every turn
        middle = (low + high) / 2
        low, high = (middle, high) if perturbed_encoding(dimension, top, middle).epsilon <= epsilon else (low, middle)
    return low


@lru_cache(maxsize=4096)
def selection_law(
    select: SelectName, dimension: int, top: int, epsilon: float, form: SelectionForm = "sound"
) -> Selection:
    """Return the law of a selection by name; of the paper's probabilities ("published"), only PE's cost more than ε."""
    check_selection(dimension, top, epsilon)
    match select:
        case "uniform":
            return uniform(dimension)
        case "exp":
            return exponential(dimension, epsilon)
        case "ps":
            return perturbed_sampling(dimension, top, epsilon)
        case "pe":
            keep = published_keep(epsilon) if form == "published" else sound_keep(dimension, top, epsilon)
            return perturbed_encoding(dimension, top, keep)


@dataclass(frozen=True)
class SelectionCounts:
    """A law in whole numbers out of 2⁵³: of each top coordinate, of each other one, and of none.

    The remainder after rounding goes to coordinates by their index, whatever the data: added to both sides, it can
    only bring two inputs nearer.
    """

    top: int
    rest: int
    none: int


@lru_cache(maxsize=4096)
def selection_counts(
    select: SelectName, dimension: int, top: int, epsilon: float, form: SelectionForm = "sound"
) -> SelectionCounts:
    """Return the law of PE, PS or uniform as it is sampled.

    Guarantee: client (any two vectors); the larger count is at most e^ε of the smaller, for the ε of `law`.
    """
    exact = selection_law(select, dimension, top, epsilon, form)
    none = math.floor(exact.none * WORD)
    likely_top = exact.top >= exact.rest
    few, many = (top, dimension - top) if likely_top else (dimension - top, top)
    smaller = min(exact.top, exact.rest) if many else exact.top
    low = min(max(1, math.floor(smaller * WORD)), (WORD - none) // dimension)
    high = math.floor(low * math.exp(min(exact.epsilon, 40.0)) * BELOW)
    high = max(low, min(high, (WORD - none - many * low) // few))
    return SelectionCounts(high, low, none) if likely_top else SelectionCounts(low, high, none)


@lru_cache(maxsize=256)
def rank_counts(dimension: int, epsilon: float) -> NDArray[np.int64]:
    """Return the law of EXP as it is sampled: a whole number out of 2⁵³ for each rank, smallest first.

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


def pick(
    select: SelectName,
    values: Tensor,
    top: int,
    epsilon: NDArray[np.float64],
    streams: Streams,
    form: SelectionForm = "sound",
) -> _Integers:
    """Select for each row of values (n, d) a coordinate by magnitude at the row's ε, or NONE; (n,).

    Guarantee: client; any two rows of values; ratio at most e^ε for the ε of `selection_law`, in whole numbers.
    """
    clients, dimension = values.shape
    if len(epsilon) != clients or streams.clients != clients:
        raise InputError(f"{clients} rows need as many epsilons and streams, not {len(epsilon)} and {streams.clients}")
    draws = whole_numbers(streams, 2)
    if select == "uniform" or (select == "ps" and top == dimension):
        return draws[:, 0] // (WORD // dimension) % dimension  # by index, independent of the data
    position = _ranks(select, dimension, top, epsilon, draws[:, 0], form)
    found = np.where(position < 0, NONE - 1 - position, position)
    ranked = np.flatnonzero(position >= 0)
    found[ranked] = _with_rank(values, ranked, position[ranked], draws[ranked, 1], None if select == "exp" else top)
    return found


def whole_numbers(streams: Streams, count: int) -> _Integers:
    """Draw the next `count` whole numbers in [0, 2⁵³) of every client, (n, count)."""
    return (streams.uniforms(count) * WORD).astype(np.int64) - 1  # a uniform is a multiple of 2⁻⁵³ in (0, 1]


def _ranks(
    select: SelectName, dimension: int, top: int, epsilon: NDArray[np.float64], draws: _Integers, form: SelectionForm
) -> _Integers:
    """Return the rank to report, 0 the smallest; below 0, independent of the data: −1 none, −2 − j coordinate j."""
    ranks = np.empty(len(draws), np.int64)
    amounts, group = np.unique(epsilon, return_inverse=True)
    if select == "exp":
        order = np.argsort(group, kind="stable")
        for amount, rows in zip(amounts, np.split(order, np.cumsum(np.bincount(group))[:-1]), strict=True):
            edges = np.cumsum(rank_counts(dimension, float(amount)))
            ranks[rows] = np.searchsorted(edges, draws[rows], side="right")
            left = ranks[rows] == dimension
            ranks[rows] = np.where(left, -2 - (draws[rows] - edges[-1]) % dimension, ranks[rows])
        return ranks
    laws = [selection_counts(select, dimension, top, float(amount), form) for amount in amounts]
    high, low, none = (np.array([getattr(law, name) for law in laws])[group] for name in ("top", "rest", "none"))
    of_top = draws
    of_rest = draws - top * high
    of_none = of_rest - (dimension - top) * low
    left = of_none - none
    return np.select(
        [of_rest < 0, of_none < 0, left < 0],
        [dimension - 1 - of_top // high, of_rest // low, np.int64(-1)],
        -2 - left % dimension,
    )


def _with_rank(values: Tensor, rows: _Integers, rank: _Integers, seed: _Integers, top: int | None) -> _Integers:
    """Return the coordinate of each row that has a rank; with `top`, up to order within the top and the rest."""
    import torch

    dimension = values.shape[1]
    together = max(1, _AT_ONCE // dimension)
    index = torch.arange(dimension, dtype=torch.int32)
    found = np.empty(len(rows), np.int64)
    whole = len(rows) == len(values)
    for first in range(0, len(rows), together):
        some = slice(first, first + together)
        mine = values[some] if whole else values[torch.from_numpy(rows[some])]
        keys = (seed[some] >> 21).astype(np.uint32).view(np.int32)  # 32 of the 53 bits
        chance = _mixed(index ^ torch.from_numpy(keys)[:, None])
        # A magnitude's bits are in the order of magnitudes; below them the coordinate itself, scrambled by chance.
        bits = torch.nan_to_num(mine.detach().cpu().float().abs(), nan=0.0, posinf=torch.inf).view(torch.int32)
        words = (bits.to(torch.int64) << 32 | (chance.to(torch.int64) & 0xFFFFFFFF)).numpy()
        if top is not None:
            found[some] = _in_halves(words, rank[some], dimension - top)
            continue
        chosen = np.take_along_axis(np.sort(words, axis=1), rank[some, None], axis=1)[:, 0]
        found[some] = _unmixed((chosen & 0xFFFFFFFF).astype(np.uint32)) ^ keys.view(np.uint32)
    return found


def _in_halves(words: _Integers, rank: _Integers, rest: int) -> _Integers:
    """Return the coordinate of each row that has a rank when the smallest `rest` come first, each part by index.

    np.partition leaves the two parts in an order that depends on the machine; only their members do not.
    """
    if not rest:
        return rank
    largest = np.partition(words, rest - 1, axis=1)[:, rest - 1 : rest]
    in_top = (rank >= rest)[:, None]
    mine = (words > largest) == in_top
    wanted = np.where(rank >= rest, rank - rest, rank)[:, None] + 1
    place: _Integers = np.argmax(np.cumsum(mine, axis=1, dtype=np.int32) == wanted, axis=1)
    return place


def _mixed(words: Tensor) -> Tensor:
    """Apply the bijection in place to int32 words; products wrap, and shifts are masked to drop the sign."""
    words ^= (words >> 16) & 0xFFFF
    words *= _signed(_MIX[0])
    words ^= (words >> 13) & 0x7FFFF
    words *= _signed(_MIX[1])
    words ^= (words >> 16) & 0xFFFF
    return words


def _unmixed(words: NDArray[np.uint32]) -> NDArray[np.uint32]:
    words = words ^ (words >> np.uint32(16))
    words = words * np.uint32(_UNMIX[1])
    words = words ^ (words >> np.uint32(13)) ^ (words >> np.uint32(26))
    words = words * np.uint32(_UNMIX[0])
    return words ^ (words >> np.uint32(16))


def _signed(word: int) -> int:
    return word - (1 << 32) if word >= 1 << 31 else word
