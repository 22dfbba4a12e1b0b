"""Laws of selections and values by brute force: every input, every output, for PE every perturbed status vector.

No law of a selection uses the formulas of `mechanisms.selection`: it is built from what the mechanism does, so that the
two can be held against each other. Small dimensions only; PE takes 2^d vectors for each input.
"""

from __future__ import annotations

import itertools
import math
from fractions import Fraction
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from polyeps.errors import InputError
from polyeps.mechanisms import selection
from polyeps.mechanisms.selection import WORD, SelectionForm, SelectName
from polyeps.mechanisms.values import CELLS, cell_counts, duchi_lead

LARGEST = 12  # dimension: 4096 perturbed vectors for each of up to 924 inputs

Laws = NDArray[np.float64]  # a row per input, a column per output; the last output is "none"


def statuses(dimension: int, top: int) -> NDArray[np.bool_]:
    """Every vector with exactly `top` of its coordinates marked, a row each."""
    rows = list(itertools.combinations(range(dimension), top))
    marked = np.zeros((len(rows), dimension), bool)
    marked[np.arange(len(rows))[:, None], rows] = True
    return marked


def orders(dimension: int) -> NDArray[np.int64]:
    """Ranks of d inputs among which every coordinate has every rank: for EXP all others are like one of them."""
    return (np.arange(dimension) + np.arange(dimension)[:, None]) % dimension


def laws(select: SelectName, dimension: int, top: int, epsilon: float, form: SelectionForm = "sound") -> Laws:
    """What a mechanism does with every input, from first principles."""
    selection.check_selection(dimension, top, epsilon)
    if dimension > LARGEST:
        raise InputError(f"enumeration goes up to dimension {LARGEST}, not {dimension}; use the Monte-Carlo audit")
    if select == "uniform":
        return np.append(np.full((1, dimension), 1 / dimension), [[0.0]], axis=1)
    if select == "exp":
        weight = np.exp(epsilon * orders(dimension) / max(1, dimension - 1))
        return np.append(weight / weight.sum(1, keepdims=True), np.zeros((dimension, 1)), axis=1)
    marked = statuses(dimension, top)
    if select == "ps":
        odds = math.exp(epsilon * top) / top if form == "published" else math.exp(epsilon)
        weight = np.where(marked, odds, 1.0)
        return np.append(weight / weight.sum(1, keepdims=True), np.zeros((len(marked), 1)), axis=1)
    keep = selection.published_keep(epsilon) if form == "published" else selection.sound_keep(dimension, top, epsilon)
    return encoding_laws(marked, keep)


def encoding_laws(marked: NDArray[np.bool_], keep: float) -> Laws:
    """PE: every bit told truly with probability `keep`, then one of the marked coordinates, or none."""
    dimension = marked.shape[1]
    told = (np.arange(1 << dimension)[:, None] >> np.arange(dimension)) & 1  # (2^d, d)
    share = told / np.maximum(1, told.sum(1, keepdims=True))
    outcome = np.append(share, told.sum(1, keepdims=True) == 0, axis=1)
    rows = []
    for truth in marked:
        agreeing = (told == truth).sum(1)
        rows.append((keep**agreeing * (1 - keep) ** (dimension - agreeing)) @ outcome)
    return np.array(rows)


def largest_log_ratio(found: Laws) -> float:
    """The ε of a mechanism: over all pairs of inputs and all outputs."""
    high, low = found.max(0), found.min(0)
    if np.any((low == 0) & (high > 0)):
        return math.inf
    possible = high > 0
    return float(np.log(high[possible] / low[possible]).max())


def sampler_ratio(
    select: SelectName, dimension: int, top: int, epsilon: float, form: SelectionForm = "sound"
) -> Fraction:
    """The largest ratio between two inputs of the sampler's own probabilities, as a fraction."""
    weights = sampler_laws(select, dimension, top, epsilon, form)
    columns = zip(*weights, strict=True)
    return max(Fraction(max(column), min(column)) for column in columns if max(column))


def sampler_laws(
    select: SelectName, dimension: int, top: int, epsilon: float, form: SelectionForm = "sound"
) -> list[list[int]]:
    """What `pick` does with every input: whole numbers out of 2⁵³, the last of each row for "none"."""
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
    """EXP where equal coordinates have equal ranks: one large entry among equal ones, and the same one smallest."""
    equal = np.full(dimension, (dimension - 2) / 2 if ranks == "average" else 0.0)
    equal[0] = dimension - 1
    weight = np.exp(epsilon * np.stack([equal, np.arange(dimension)]) / (dimension - 1))
    return np.asarray(weight / weight.sum(1, keepdims=True))


def value_laws(mechanism: Literal["duchi", "grid-pm"], epsilon: float) -> list[list[int]]:
    """What `perturb` does with the extreme values and, on the grid, with every place of its band: whole numbers of 2⁵³.

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
    """The largest ratio between two values of the sampler's own probabilities, as a fraction."""
    laws_of_all = np.array(value_laws(mechanism, epsilon))
    high, low = laws_of_all.max(0).tolist(), laws_of_all.min(0).tolist()
    return max(Fraction(a, b) for a, b in zip(high, low, strict=True))
