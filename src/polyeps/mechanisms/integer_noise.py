"""Skellam and discrete Gaussian noise on the integers, drawn by comparing whole numbers.

A draw is an inversion: a number below 2¹²⁸ is compared with the thresholds 2¹²⁸·P[X < x], rounded down to whole
numbers. Its upper 64 bits decide alone unless they equal a threshold's; only then is another word drawn. No floating
point is involved, neither here nor in the thresholds, which come from integers of 300 bits and more.

Exactness: given uniform bits, a draw's law is within `NoiseTable.distance` ≤ 2⁻¹⁰⁰ of the ideal one in total variation,
so no observer distinguishes N draws from ideal ones with an advantage above N·2⁻¹⁰⁰. The bits are the output of a
cipher (`random_words.SystemWords`), uniform unless it is broken. The time of a lookup depends on the value drawn,
through the processor's caches; an attacker that can measure it on the client's machine is not defended against.

Sources of distance, in units of 2⁻¹²⁸ and for a table of m values: rounding thresholds, m/2; values without a
threshold of their own, 2; the weights' errors and the tails they leave out, below 2⁻²⁰ (see `_skellam_weights` and
`_gaussian_weights`). Together below m + 4.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal, localcontext
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from polyeps.errors import InputError
from polyeps.mechanisms.random_words import WordArray, WordStreams

NoiseName = Literal["skellam", "discrete-gaussian"]
Integers = NDArray[np.int64]

SMALLEST_DEVIATION, LARGEST_DEVIATION = 2.0**-10, 1e5  # deviations for which tables are made
_BITS = 128  # of a threshold: two words
_TAIL = 170 * math.log(2)  # where tables end, P < 2⁻¹⁷⁰
_WEIGHT_BITS = 320
_TILE = 1 << 15  # draws at a time: they fit into the cache
_GUIDE_BITS = 20  # at most: four megabytes
_WIDEST = 1024.0  # deviation of a single table of a wide law: larger ones leave the cache
_SMOOTHING = 4  # deviations of the finer part, in steps of the coarser one


@dataclass(frozen=True)
class NoiseTable:
    """A law on the integers: X = first + the number of thresholds ≤ U, for U uniform below 2¹²⁸.

    `high` and `low` are the words of the thresholds, ascending, and of a sentinel 2¹²⁸ − 1 that ends every search.
    `guide` holds, for each value of U's leading bits, the number of thresholds before it, or −1 where several
    thresholds begin with those bits, so that one comparison does not decide the draw.
    """

    first: int
    high: WordArray
    low: WordArray
    guide: NDArray[np.int32]
    shift: np.uint64

    @property
    def distance(self) -> float:
        """Return an upper bound on the total variation distance of a single draw from the ideal law."""
        return math.ldexp(len(self.high) + 4, -_BITS)

    def counts(self) -> list[int]:
        """Return the whole law: the probability times 2¹²⁸ of `first` and of each value after it."""
        words = zip(self.high[:-1].tolist(), self.low[:-1].tolist(), strict=True)
        edges = [0, *(high << 64 | low for high, low in words), 1 << _BITS]
        return [after - before for before, after in pairwise(edges)]


def add_noise(table: NoiseTable, values: Integers, words: WordStreams, rows: Sequence[int]) -> None:
    """Add an independent draw to every element of values (m, d); row j draws from the stream of client rows[j]."""
    drawn = np.empty(values.shape, np.uint64)
    words.fill(drawn, rows)
    uniforms, sums = drawn.reshape(-1), values.reshape(-1)
    if not np.shares_memory(sums, values):
        raise InputError("values are not contiguous, so noise cannot be added in place; pass a contiguous array")
    for begin in range(0, len(uniforms), _TILE):
        tile = slice(begin, begin + _TILE)
        index, undecided = _lookup(table, uniforms[tile])
        for place in undecided:  # once in 2⁴⁰ draws or more
            client = rows[(begin + int(place)) // values.shape[1]]
            index[place] = _settle(table, int(uniforms[begin + place]), words, client)
        sums[tile] += index
        sums[tile] += table.first


@dataclass(frozen=True)
class WideGaussian:
    """A discrete Gaussian too wide for one table: the sum of independent draws, each times a whole number.

    Of x = a + k·b, where a and b are discrete Gaussians of variances s² and t², every probability is that of the
    discrete Gaussian of variance s² + k²t² within e^±10·exp(−2π²r²), r = st/√(s² + k²t²): x decides b up to a discrete
    Gaussian of deviation r on the integers, whose weights add up to nearly the same wherever it is centred
    (docs/reference/soundness.md). Here s ≥ 4k, so r ≥ 3.9, and the difference is below 10⁻¹²⁹.
    """

    parts: tuple[tuple[int, NoiseTable], ...]  # (factor, law), the coarsest first

    def add_to(self, values: Integers, words: WordStreams, rows: Sequence[int]) -> None:
        """Add an independent draw to every element of values (m, d); row j draws from the stream of client rows[j]."""
        noise = np.zeros(values.shape, np.int64)
        before = 0
        for factor, table in self.parts:
            if before:
                noise *= before // factor
            add_noise(table, noise, words, rows)
            before = factor
        values += noise


def wide_gaussian(variance: float) -> WideGaussian:
    """Return the discrete Gaussian of a variance of any size, never of a smaller one."""
    parts: list[tuple[int, NoiseTable]] = []
    _split(variance, 1, parts)
    return WideGaussian(tuple(parts))


def _split(variance: float, factor: int, parts: list[tuple[int, NoiseTable]]) -> None:
    """Append the parts of `factor` times a discrete Gaussian: one table, or a coarse part and a finer one."""
    if variance <= _WIDEST**2:
        parts.append((factor, table_for("discrete-gaussian", variance)))
        return
    k = math.ceil(math.sqrt(variance) / _WIDEST) * 2
    if k * _SMOOTHING > _WIDEST:
        k = int(_WIDEST // _SMOOTHING)
    fine = (_SMOOTHING * k) ** 2
    coarse = (variance - fine) / k**2 * (1 + 2.0**-50)  # rounded upwards
    _split(coarse, factor * k, parts)
    parts.append((factor, table_for("discrete-gaussian", float(fine))))


def _lookup(table: NoiseTable, uniforms: WordArray) -> tuple[Integers, Integers]:
    """Return the number of thresholds at or below each uniform, and the places that 64 bits leave undecided."""
    index = table.guide.take((uniforms >> table.shift).view(np.int64)).astype(np.int64)
    crowded = np.flatnonzero(index < 0)
    index[crowded] = np.searchsorted(table.high, uniforms[crowded])
    threshold = table.high.take(index)
    undecided = np.flatnonzero(uniforms == threshold)
    index += uniforms > threshold
    return index, undecided


def _settle(table: NoiseTable, high: int, words: WordStreams, client: int) -> int:
    """Return the number of thresholds at or below a uniform that begins with `high`, by its second word."""
    second = np.empty((1, 1), np.uint64)
    words.fill(second, [client])
    begin, end = (int(np.searchsorted(table.high[:-1], np.uint64(high), side=side)) for side in ("left", "right"))
    return begin + int(np.searchsorted(table.low[begin:end], second[0, 0], side="right"))


@lru_cache(maxsize=32)
def table_for(noise: NoiseName, variance: float) -> NoiseTable:
    """Return the table of Skellam noise of a variance, or of the discrete Gaussian with that parameter σ².

    >>> table = table_for("skellam", 16.0)
    >>> round(table.counts()[-table.first] / 2**128, 12)  # P[X = 0] = e^-16 · I₀(16)
    0.100544127361
    """
    deviation = math.sqrt(variance) if variance > 0 else math.nan
    if not SMALLEST_DEVIATION <= deviation <= LARGEST_DEVIATION:
        raise InputError(
            f"noise can be drawn for deviations of {SMALLEST_DEVIATION:g} to {LARGEST_DEVIATION:g} steps of the grid, "
            f"not {deviation:g}; change the granularity"
        )
    weights = _skellam_weights(variance) if noise == "skellam" else _gaussian_weights(variance)
    return _tabulated(weights, deviation)


def _skellam_weights(variance: float) -> list[int]:
    """Return integers proportional to I₀(μ), I₁(μ), ..., I_N(μ), and so to P[X = k], for variance μ.

    By the recurrence I(k−1) = I(k+1) + (2k/μ)·I(k) downwards from 0 and 1 (Miller). Its solution is, up to a factor,
    I(k)/I(N+1) ± K(k)/K(N+1); K grows with k, so P[X = k] is wrong by at most P[X = N+1], in sum below 2N·2⁻¹⁷⁰.
    All terms are positive and above 2³⁰⁰, so that rounding them adds a relative error of 2⁻³⁰⁰ a step.
    """
    exact = Fraction(variance)
    numerator, denominator = exact.numerator, 2 * exact.denominator
    # −ln P[X ≥ k] ≥ k·t − μ(cosh t − 1) at t = asinh(k/μ) (Chernoff)
    reach = 1 + bisect_left(
        range(1, 1 << 22),
        _TAIL,
        key=lambda k: k * math.asinh(k / variance) - 2 * variance * math.sinh(math.asinh(k / variance) / 2) ** 2,
    )
    weights = [0, 1 << _WEIGHT_BITS]
    for k in range(reach, 0, -1):
        weights.append(weights[-2] + weights[-1] * (k * denominator) // numerator)
    return weights[:0:-1]


def _gaussian_weights(variance: float) -> list[int]:
    """Return integers proportional to e^(−k²/2σ²) for k = 0, 1, ... until the tail is below 2⁻¹⁷⁰ of all.

    In fixed point with 320 bits: w(k+1) = w(k)·r(k), r(k+1) = r(k)·e^(−1/σ²). Each product is wrong by at most one
    unit more than its factors together, so w(k) by at most (k + 1)² units, and all of them by less than 2⁻²⁵⁰.
    """
    exact = Fraction(variance)
    with localcontext() as context:
        context.prec = 120
        root = (-Decimal(exact.denominator) / Decimal(2 * exact.numerator)).exp()
        ratio = int(root * (1 << _WEIGHT_BITS))
    shrink = ratio * ratio >> _WEIGHT_BITS
    weights = [1 << _WEIGHT_BITS]
    for _ in range(math.ceil(math.sqrt(2 * variance * _TAIL)) + 1):
        weights.append(weights[-1] * ratio >> _WEIGHT_BITS)
        ratio = ratio * shrink >> _WEIGHT_BITS
    return weights


def _tabulated(weights: list[int], deviation: float) -> NoiseTable:
    """Return the table of the symmetric law in which 0 has weights[0], and k and −k have weights[k] each.

    P[X ≤ x] = 1 − P[X ≤ −x − 1]: thresholds above the middle are those below it with every bit flipped, which is what
    rounding them down gives, too, unless one is a whole number: then it is less by one.
    """
    outer = list(accumulate(reversed(weights[1:])))
    total = weights[0] + 2 * (outer[-1] if outer else 0)
    scaled = [(below << _BITS) // total for below in outer]  # 2¹²⁸·P[X ≤ x] for x = −N, ..., −1
    begin = bisect_left(scaled, 1)  # values beyond have probability 0
    packed = b"".join(threshold.to_bytes(16, "little") for threshold in scaled[begin:])
    lower = np.frombuffer(packed, np.uint64).reshape(-1, 2)
    pairs = np.concatenate([lower, ~lower[::-1], ~np.zeros((1, 2), np.uint64)])
    low, high = pairs[:, 0].copy(), pairs[:, 1].copy()
    guide_bits = min(_GUIDE_BITS, max(8, math.ceil(math.log2(deviation)) + 5))
    shift = np.uint64(64 - guide_bits)
    starts = np.arange(1 << guide_bits, dtype=np.uint64) << shift
    before = np.searchsorted(high, starts)
    crowded = np.searchsorted(high, starts | np.uint64((1 << int(shift)) - 1), side="right") - before > 1
    guide = np.where(crowded, -1, before).astype(np.int32)
    for array in (high, low, guide):
        array.flags.writeable = False
    return NoiseTable(begin - len(weights) + 1, high, low, guide, shift)
