"""FedSel's selections by brute force, an oracle for `mechanisms.selection`, and audits of its samplers.

No law uses the formulas of `mechanisms.selection`: it is built from what the mechanism does. Small dimensions only; PE
takes 2^d perturbed vectors for each input.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray

from polyeps.audit.enumeration import Laws, orders, statuses
from polyeps.audit.lower_bounds import bound_from_counts
from polyeps.core import Streams
from polyeps.engine.noise import SeededStreams
from polyeps.mechanisms import selection
from polyeps.mechanisms.selection import SelectionForm, SelectName, pick
from polyeps.mechanisms.values import ValueMechanism, perturb


def laws(select: SelectName, dimension: int, top: int, epsilon: float, form: SelectionForm = "sound") -> Laws:
    """What a mechanism does with every input, from first principles."""
    selection.check_selection(dimension, top, epsilon)
    if select == "uniform":
        return np.append(np.full((1, dimension), 1 / dimension), [[0.0]], axis=1)
    if select == "exp":
        weight = np.exp(epsilon * orders(dimension) / max(1, dimension - 1))
        return np.append(weight / weight.sum(1, keepdims=True), np.zeros((dimension, 1)), axis=1)
    marked = statuses(dimension, top)
    if select == "ps":
        weight = np.where(marked, math.exp(epsilon), 1.0)
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


def audit_selection(
    select: SelectName,
    dimension: int,
    top: int,
    epsilon: float,
    *,
    form: SelectionForm = "sound",
    trials: int = 100_000,
    seed: int = 0,
    confidence: float = 0.99,
) -> float:
    """Two vectors whose largest coordinates are each other's smallest; every coordinate and "none" is an event."""
    ascending = torch.arange(1.0, dimension + 1)
    tallies = []
    for number, vector in enumerate((ascending, ascending.flip(0))):
        streams = _streams(seed, number, trials)
        found = pick(select, vector.expand(trials, -1), top, np.full(trials, epsilon), streams, form)
        tallies.append(np.bincount(found + 1, minlength=dimension + 1))
    return bound_from_counts(tallies[0], tallies[1], (trials, trials), confidence)


def audit_report(
    select: SelectName,
    mechanism: ValueMechanism,
    dimension: int,
    top: int,
    epsilon: tuple[float, float],
    *,
    form: SelectionForm = "sound",
    trials: int = 100_000,
    seed: int = 0,
    confidence: float = 0.99,
) -> float:
    """Both steps of a report together: the first coordinate large and positive, or small and negative."""
    tallies = []
    for number in range(2):
        streams = _streams(seed, number, trials)
        vector = torch.linspace(1.0, 1.5, dimension) if number else torch.linspace(1.5, 1.0, dimension)
        index = pick(select, vector.expand(trials, -1), top, np.full(trials, epsilon[0]), streams, form)
        answer = perturb(mechanism, np.full(trials, -1.0 if number else 1.0), np.full(trials, epsilon[1]), streams)
        tallies.append(np.bincount(2 * (index + 1) + (answer > 0), minlength=2 * dimension + 2))
    return bound_from_counts(tallies[0], tallies[1], (trials, trials), confidence)


def _streams(seed: int, number: int, trials: int) -> Streams:
    return SeededStreams(2 * seed + number, range(trials), 0)
