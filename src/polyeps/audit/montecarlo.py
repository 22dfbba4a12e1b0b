"""Statistical audits: run the samplers on two inputs, and bound from below the ε their answers show.

For an event that happened c times of n under one input and c' of n' under another, ln(low(c, n)/high(c', n')) with
Clopper and Pearson's bounds is below the true ε with the stated confidence. Several events share the error.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import beta

from polyeps.core import Streams
from polyeps.engine.noise import SeededStreams
from polyeps.mechanisms.perturb import perturb
from polyeps.mechanisms.pick import pick
from polyeps.mechanisms.selection import Form, SelectName
from polyeps.mechanisms.values import ValueMechanism

BINS = 64  # of the histogram a value mechanism's answers are sorted into


@dataclass(frozen=True)
class Finding:
    """With this confidence the true ε is at least `epsilon`; `event` is the answer that shows it most."""

    epsilon: float
    event: int
    trials: int
    confidence: float

    def refutes(self, certified: float) -> bool:
        """Whether a certificate cannot be true."""
        return self.epsilon > certified


def compare(
    one: NDArray[np.int64], other: NDArray[np.int64], trials: tuple[int, int], confidence: float = 0.99
) -> Finding:
    """The lower bound on ε from how often each event happened under two inputs; both directions are tried."""
    error = (1 - confidence) / (2 * len(one)) / 2  # events, directions, and two bounds for each
    best, event = 0.0, 0
    for (first, n), (second, m) in (
        ((one, trials[0]), (other, trials[1])),
        ((other, trials[1]), (one, trials[0])),
    ):
        low = np.where(first > 0, beta.ppf(error, first, n - first + 1), 0.0)
        high = np.where(second < m, beta.isf(error, second + 1, m - second), 1.0)
        bounds = np.log(np.maximum(low, 1e-300) / high)
        if bounds.max() > best:
            best, event = float(bounds.max()), int(bounds.argmax())
    return Finding(best, event, min(trials), confidence)


def audit_selection(
    select: SelectName,
    dimension: int,
    top: int,
    epsilon: float,
    *,
    form: Form = "sound",
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
    form: Form = "sound",
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
