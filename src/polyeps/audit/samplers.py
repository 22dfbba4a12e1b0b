"""FedSel's samplers under two inputs: how often each answer comes, and the lower bound on ε that this shows."""

from __future__ import annotations

import numpy as np
import torch

from polyeps.audit.montecarlo import Finding, compare
from polyeps.core import Streams
from polyeps.engine.noise import SeededStreams
from polyeps.mechanisms.selection import SelectionForm, SelectName, pick
from polyeps.mechanisms.values import ValueMechanism, perturb

BINS = 64  # of the histogram a value mechanism's answers are sorted into


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
) -> Finding:
    """Two vectors whose largest coordinates are each other's smallest; every coordinate and "none" is an event."""
    ascending = torch.arange(1.0, dimension + 1)
    tallies = []
    for number, vector in enumerate((ascending, ascending.flip(0))):
        streams = _streams(seed, number, trials)
        found = pick(select, vector.expand(trials, -1), top, np.full(trials, epsilon), streams, form)
        tallies.append(np.bincount(found + 1, minlength=dimension + 1))
    return compare(tallies[0], tallies[1], (trials, trials), confidence)


def audit_values(
    mechanism: ValueMechanism, epsilon: float, *, trials: int = 100_000, seed: int = 0, confidence: float = 0.99
) -> Finding:
    """The values −1 and 1; events are the bins of a histogram over all answers."""
    answers = []
    for number, value in enumerate((-1.0, 1.0)):
        streams = _streams(seed, number, trials)
        answers.append(perturb(mechanism, np.full(trials, value), np.full(trials, epsilon), streams))
    reach = max(float(np.abs(answer).max()) for answer in answers)
    tallies = [np.histogram(answer, BINS, (-reach, reach))[0] for answer in answers]
    return compare(tallies[0], tallies[1], (trials, trials), confidence)


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
) -> Finding:
    """Both steps of a report together: the first coordinate large and positive, or small and negative."""
    tallies = []
    for number in range(2):
        streams = _streams(seed, number, trials)
        vector = torch.linspace(1.0, 1.5, dimension) if number else torch.linspace(1.5, 1.0, dimension)
        index = pick(select, vector.expand(trials, -1), top, np.full(trials, epsilon[0]), streams, form)
        answer = perturb(mechanism, np.full(trials, -1.0 if number else 1.0), np.full(trials, epsilon[1]), streams)
        tallies.append(np.bincount(2 * (index + 1) + (answer > 0), minlength=2 * dimension + 2))
    return compare(tallies[0], tallies[1], (trials, trials), confidence)


def _streams(seed: int, number: int, trials: int) -> Streams:
    return SeededStreams(2 * seed + number, range(trials), 0)
