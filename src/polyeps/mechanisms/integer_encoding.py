"""Vectors to integers and back for a secure sum: clip, rotate, round, add noise, reduce; many clients at once.

Random signs and a Hadamard transform make all coordinates about equally large, so that few bits hold each of them.
Randomised rounding keeps sums unbiased. A vector that happens to be rounded to a larger norm would cost more privacy,
so it is rounded again (Kairouz, Liu and Steinke 2021).

The price rests on the integers themselves: their squared norm, in whole numbers, is at most `Grid.largest_square`, else
the row is truncated towards zero, and if even that is too long, sent as zeros. So floating-point errors can only cost
accuracy. How often a row is rounded depends on the row, and so does the time it takes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from polyeps.errors import InputError
from polyeps.mechanisms.integer import Grid
from polyeps.mechanisms.integer_noise import Integers, add_noise, table_for
from polyeps.mechanisms.random_words import WordStreams

_Floats = NDArray[np.float64]

_TRIES = 40  # each fails with probability e^(−1/2) at most, so all do once in 5e8 rows
_AT_ONCE = 1 << 21  # coordinates encoded at a time
_STAGE = 5  # the transform is made of products with 32 x 32 matrices: least time on the machines measured
_BELOW = 1 - 2.0**-20  # clipped to slightly less than the clip, by more than later rounding in floating point


def encode_rows(grid: Grid, values: Tensor, words: WordStreams) -> Integers:
    """Return what clients send for values (n, grid.size), before masks: integers below 2^bits, (n, grid.dimension).

    Guarantee: client; see `Grid`. Rows with NaN or infinity count as zeros.
    """
    if values.ndim != 2 or values.shape[1] != grid.size:
        raise InputError(f"values must be rows of {grid.size} coordinates, not of shape {tuple(values.shape)}")
    if words.clients != len(values):
        raise InputError(f"{len(values)} rows need as many streams of words, not {words.clients}")
    table, largest_square, mask = grid.table, grid.largest_square, _mask(grid)
    sent = np.empty((len(values), grid.dimension), np.int64)
    together = max(1, _AT_ONCE // grid.dimension)
    for first in range(0, len(values), together):
        rows = range(first, min(first + together, len(values)))
        whole = rounded(rotated(grid, values[rows.start : rows.stop]), largest_square, words, rows)
        add_noise(table, whole, words, rows)
        sent[rows.start : rows.stop] = whole & mask
    return sent


def top_up_noise(grid: Grid, total: Integers, variance: float, words: WordStreams) -> Integers:
    """Add noise of a variance, in squared steps, to a sum of what was sent, (grid.dimension,), modulo 2^bits."""
    noisy = total[None].astype(np.int64)
    add_noise(table_for(grid.noise, variance), noisy, words, range(1))
    sum_: Integers = noisy[0] & _mask(grid)
    return sum_


def decode_sum(grid: Grid, total: Integers) -> Tensor:
    """Return the sum of the vectors, (grid.size,) float64, from the sum of what was sent, modulo 2^bits or not."""
    if total.shape != (grid.dimension,):
        raise InputError(f"a sum on this grid has shape {(grid.dimension,)}, not {total.shape}")
    half = 1 << (grid.bits - 1)
    steps = ((total + half) & _mask(grid)) - half
    turned = walsh_hadamard(torch.from_numpy(steps.astype(np.float64))[None])[0]
    vector = turned * _signs(grid.rotation, grid.dimension) * (grid.granularity / math.sqrt(grid.dimension))
    return vector[: grid.size]


def walsh_hadamard(rows: Tensor) -> Tensor:
    """Multiply each row (n, d), d a power of two, by the unscaled Hadamard matrix: its own inverse times d."""
    shape, done = rows.shape, 1
    while done < shape[1]:
        factor = min(1 << _STAGE, shape[1] // done)
        matrix = _hadamard(factor, rows.dtype)
        if done == 1:
            rows = rows.reshape(-1, factor) @ matrix
        else:
            rows = matrix @ rows.reshape(-1, factor, done)
        done *= factor
    return rows.reshape(shape)


def rotated(grid: Grid, values: Tensor) -> _Floats:
    """Return rows clipped, padded with zeros and rotated, in steps of the grid, (n, d)."""
    clipped = _clipped(values.detach().cpu().to(torch.float64), grid.clip * _BELOW)
    padded = torch.zeros(len(values), grid.dimension, dtype=torch.float64)
    torch.mul(clipped, _signs(grid.rotation, grid.dimension)[: grid.size], out=padded[:, : grid.size])
    turned: _Floats = walsh_hadamard(padded).mul_(1 / (grid.granularity * math.sqrt(grid.dimension))).numpy()
    return turned


def rounded(steps: _Floats, largest_square: int, words: WordStreams, rows: range) -> Integers:
    """Round rows at random, without bias; repeat until a row's squared norm is at most `largest_square`."""
    whole = _by_chance(steps, words, rows)
    long = np.flatnonzero(_squares(whole) > largest_square)
    for _ in range(_TRIES - 1):
        if not len(long):
            return whole
        whole[long] = _by_chance(steps[long], words, [rows[place] for place in long])
        long = long[_squares(whole[long]) > largest_square]
    whole[long] = np.trunc(steps[long])
    whole[_squares(whole) > largest_square] = 0
    return whole


def _by_chance(steps: _Floats, words: WordStreams, rows: Sequence[int]) -> Integers:
    dimension = steps.shape[1]
    drawn = np.empty((len(steps), (dimension + 1) // 2), np.uint64)
    words.fill(drawn, rows)
    moved = drawn.view(np.uint32)[:, :dimension] * 2.0**-32  # half a word each: biased by 2⁻³² of a step at most
    moved += steps
    floor: _Floats = np.floor(moved, out=moved)
    return floor.astype(np.int64)


def _squares(whole: Integers) -> Integers:
    """Return squared norms, exact because rows longer than 2³⁰ are refused."""
    squares: Integers = np.einsum("ij,ij->i", whole, whole)
    return squares


def _clipped(values: Tensor, clip: float) -> Tensor:
    """Clip rows, whatever they hold; rows with NaN or infinity become zeros."""
    largest = values.abs().amax(1, keepdim=True)
    usable = torch.isfinite(largest)
    unit = torch.where(usable & (largest > 0), values / largest, 0.0)  # first to [−1, 1]: squares cannot overflow
    length = torch.linalg.vector_norm(unit, dim=1, keepdim=True)
    inside = usable & (largest * length <= clip)
    return torch.where(inside, values, unit * (clip / length.clamp(min=1.0)))


@lru_cache(maxsize=2 * _STAGE)
def _hadamard(size: int, dtype: torch.dtype) -> Tensor:
    from scipy.linalg import hadamard

    return torch.from_numpy(hadamard(size)).to(dtype)


@lru_cache(maxsize=2)
def _signs(seed: int, dimension: int) -> Tensor:
    """Return the rotation's signs; they are public, so any generator will do."""
    coins = np.random.Generator(np.random.Philox(seed)).integers(0, 2, dimension, np.int8)
    return torch.from_numpy(1.0 - 2.0 * coins)


def _mask(grid: Grid) -> int:
    return (1 << grid.bits) - 1
