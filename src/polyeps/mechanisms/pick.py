"""Private choice of one coordinate, drawn for many clients at once (paper 001): the samplers of `selection`.

Which *rank* is reported is settled by chance alone; the data only say which coordinate has it. So one whole number
below 2⁵³ from a client's stream decides, its exact law is `selection.counts` (or `rank_counts`), and how many
numbers a client draws depends on nothing. PE is drawn by its law (one of the top, one of the rest, or none)
instead of by d coins: the same distribution, since all coordinates of a kind are alike.

NaN counts as 0, ±inf as the largest. Equal magnitudes are ordered by chance, anew for every report: any order is
sound, but a fixed one would favour the first coordinates.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from polyeps.core import Streams
from polyeps.errors import InputError
from polyeps.mechanisms.selection import WORD, Form, SelectName, counts, rank_counts

NONE = -1  # ⊥: nothing is reported
_AT_ONCE = 1 << 18  # numbers sorted at a time: they stay in the cache
# A bijection of 32-bit words (murmur3's last steps) and its inverse.
_MIX = (0x85EBCA6B, 0xC2B2AE35)
_UNMIX = tuple(pow(factor, -1, 1 << 32) for factor in _MIX)

Whole = NDArray[np.int64]


def pick(
    select: SelectName,
    values: Tensor,
    top: int,
    epsilon: NDArray[np.float64],
    streams: Streams,
    form: Form = "sound",
) -> Whole:
    """For each row of values (n, d) a coordinate chosen privately by magnitude at the row's ε, or NONE; (n,).

    Guarantee: client; any two rows of values; ratio at most e^ε for the ε of `selection.law`, in whole numbers.
    """
    clients, dimension = values.shape
    if len(epsilon) != clients or streams.clients != clients:
        raise InputError(f"{clients} rows need as many epsilons and streams, not {len(epsilon)} and {streams.clients}")
    draws = whole_numbers(streams, 2)
    if select == "uniform" or (select == "ps" and top == dimension):
        return draws[:, 0] // (WORD // dimension) % dimension  # by index: the data have no say
    position = _ranks(select, dimension, top, epsilon, draws[:, 0], form)
    found = np.where(position < 0, NONE - 1 - position, position)
    ranked = np.flatnonzero(position >= 0)
    found[ranked] = _with_rank(values, ranked, position[ranked], draws[ranked, 1], None if select == "exp" else top)
    return found


def whole_numbers(streams: Streams, count: int) -> Whole:
    """The next `count` whole numbers in [0, 2⁵³) of every client, (n, count)."""
    return (streams.uniforms(count) * WORD).astype(np.int64) - 1  # a uniform is a multiple of 2⁻⁵³ in (0, 1]


def _ranks(
    select: SelectName, dimension: int, top: int, epsilon: NDArray[np.float64], draws: Whole, form: Form
) -> Whole:
    """The rank to report, 0 the smallest; below 0 what the data have no say in: −1 none, −2 − j coordinate j."""
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
    laws = [counts(select, dimension, top, float(amount), form) for amount in amounts]
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


def _with_rank(values: Tensor, rows: Whole, rank: Whole, seed: Whole, top: int | None) -> Whole:
    """The coordinate of each row that has a rank; with `top`, any bijection within the top and within the rest."""
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


def _in_halves(words: Whole, rank: Whole, rest: int) -> Whole:
    """The coordinate of each row that has a rank when the smallest `rest` come first, each half in its own order.

    A partition leaves the halves in an order that depends on the machine; only which words are in them does not.
    """
    if not rest:
        return rank
    largest = np.partition(words, rest - 1, axis=1)[:, rest - 1 : rest]
    in_top = (rank >= rest)[:, None]
    mine = (words > largest) == in_top
    wanted = np.where(rank >= rest, rank - rest, rank)[:, None] + 1
    place: Whole = np.argmax(np.cumsum(mine, axis=1, dtype=np.int32) == wanted, axis=1)
    return place


def _mixed(words: Tensor) -> Tensor:
    """The bijection, in place on int32 words, whose products wrap and whose shifts must not bring in the sign."""
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
