"""The laws of FedSel's samplers, enumerated: every input, every output, in whole numbers out of 2⁵³."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from polyeps.mechanisms import selection
from polyeps.mechanisms.selection import WORD, SelectionForm, SelectName
from polyeps.mechanisms.values import CELLS, cell_counts, duchi_lead

Laws = NDArray[np.float64]  # a row per input, a column per output; the last output is "none"


def statuses(dimension: int, top: int) -> NDArray[np.bool_]:
    """Return every vector with exactly `top` of its coordinates marked, a row each."""
    rows = list(itertools.combinations(range(dimension), top))
    marked = np.zeros((len(rows), dimension), bool)
    marked[np.arange(len(rows))[:, None], rows] = True
    return marked


def orders(dimension: int) -> NDArray[np.int64]:
    """Return the ranks of d inputs, among which every coordinate has every rank; for EXP they represent all inputs."""
    return (np.arange(dimension) + np.arange(dimension)[:, None]) % dimension


def largest_log_ratio(found: Laws) -> float:
    """Return the ε of a mechanism: the largest over all pairs of inputs and all outputs."""
    high, low = found.max(0), found.min(0)
    if np.any((low == 0) & (high > 0)):
        return math.inf
    possible = high > 0
    return float(np.log(high[possible] / low[possible]).max())


def sampler_ratio(
    select: SelectName, dimension: int, top: int, epsilon: float, form: SelectionForm = "sound"
) -> Fraction:
    """Return the largest ratio of the sampler's probabilities between two inputs."""
    weights = sampler_laws(select, dimension, top, epsilon, form)
    columns = zip(*weights, strict=True)
    return max(Fraction(max(column), min(column)) for column in columns if max(column))


def sampler_laws(
    select: SelectName, dimension: int, top: int, epsilon: float, form: SelectionForm = "sound"
) -> list[list[int]]:
    """Return the law of `pick` for every input; the last number of each row is that of "none"."""
    if select == "uniform" or (select == "ps" and top == dimension):
        each = WORD // dimension
        return [[each + (WORD - each * dimension if j == 0 else 0) for j in range(dimension)] + [0]]
    if select == "exp":
        by_rank = selection.rank_counts(dimension, epsilon).tolist()
        rows = [[by_rank[rank] for rank in ranks] + [0] for ranks in orders(dimension).tolist()]
    else:
        law = selection.selection_counts(select, dimension, top, epsilon, form)
        rows = [[law.top if yes else law.rest for yes in marked] + [law.none] for marked in statuses(dimension, top)]
    left = WORD - sum(rows[0])
    spare = [left // dimension + (j < left % dimension) for j in range(dimension)] + [0]
    return [[count + more for count, more in zip(row, spare, strict=True)] for row in rows]


def tied_laws(dimension: int, epsilon: float, ranks: Literal["average", "min"]) -> Laws:
    """Return EXP's laws where ties share a rank: one large entry among equal ones, and the same entry smallest."""
    equal = np.full(dimension, (dimension - 2) / 2 if ranks == "average" else 0.0)
    equal[0] = dimension - 1
    weight = np.exp(epsilon * np.stack([equal, np.arange(dimension)]) / (dimension - 1))
    return np.asarray(weight / weight.sum(1, keepdims=True))


def value_laws(mechanism: Literal["duchi", "grid-pm"], epsilon: float) -> list[list[int]]:
    """Return the laws of `perturb` for the extreme values and, on the grid, for every place of its band.

    Other values are mixtures of these, so no pair of them has a larger ratio.
    """
    if mechanism == "duchi":
        lead = int(duchi_lead(np.array([epsilon]))[0])
        return [[WORD // 2 + lean, WORD // 2 - lean] for lean in (lead, -lead)]
    law = cell_counts(np.array([epsilon]), CELLS)
    band, inside, outside = int(law.band[0]), int(law.inside[0]), int(law.outside[0])
    left = WORD - band * inside - (CELLS - band) * outside
    spare = [0] * CELLS
    spare[CELLS // 2], spare[CELLS // 2 - 1] = (left + 1) // 2, left // 2
    starts = range(CELLS - band + 1)
    return [[spare[j] + (inside if s <= j < s + band else outside) for j in range(CELLS)] for s in starts]


def value_ratio(mechanism: Literal["duchi", "grid-pm"], epsilon: float) -> Fraction:
    """Return the largest ratio of the sampler's probabilities between two values."""
    laws_of_all = np.array(value_laws(mechanism, epsilon))
    high, low = laws_of_all.max(0).tolist(), laws_of_all.min(0).tolist()
    return max(Fraction(a, b) for a, b in zip(high, low, strict=True))
