"""Support tests of value mechanisms: answers that one value can give and another, nearby value cannot.

In real numbers PM's answers are possible for every value. In floating point an answer is a rounded sum, and most sums
for one value are impossible for another (Mironov, "On Significance of the Least Significant Bits for Differential
Privacy", CCS 2012): such an answer reveals the value, whatever ε says.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from polyeps.engine.noise import SeededStreams
from polyeps.mechanisms.selection import WORD
from polyeps.mechanisms.values import CELLS, ValueArray, ValueMechanism, band_start, cell_counts, perturb

_NEARBY = 8  # neighbours of the inverted uniform that could round to the same answer


def leaked_share(
    mechanism: ValueMechanism, epsilon: float, value: float, other: float, *, trials: int = 2000, seed: int = 0
) -> float:
    """Return the share of answers to `value` that `other` cannot give (for PM: among those in both bands)."""
    streams = SeededStreams(seed, range(trials), 0)
    answers = perturb(mechanism, np.full(trials, value), np.full(trials, epsilon), streams)
    if mechanism in ("pm", "hm"):
        likely = _in_band(answers, epsilon, value) & _in_band(answers, epsilon, other)
        if mechanism == "hm":
            likely &= np.abs(answers) != 1 / np.tanh(epsilon / 2)
        answers = answers[likely]
    return float(1 - _reachable(mechanism, answers, epsilon, other).mean()) if len(answers) else 0.0


def _reachable(mechanism: ValueMechanism, answers: ValueArray, epsilon: float, value: float) -> NDArray[np.bool_]:
    """Say whether a value could give answers, bit for bit; for PM only answers inside its band count."""
    if mechanism == "duchi":
        return np.isin(np.abs(answers), 1 / np.tanh(np.array([epsilon]) / 2))
    if mechanism == "grid-pm":
        apart = cell_counts(np.array([epsilon]), CELLS).step
        return np.isin(answers, apart * (np.arange(CELLS) - (CELLS - 1) / 2))
    bound = 1 / np.tanh(np.array([epsilon]) / 4)
    left = band_start(np.array([value]), bound)
    nearest = np.round((answers - left) / (bound - 1) * WORD)
    # Rounding hides the last bits of the uniform: as many as the answer's spacing is coarser than the uniform's.
    reach = np.ceil(np.spacing(np.abs(answers)) / (bound - 1) * WORD) * _NEARBY
    found = np.zeros(len(answers), bool)
    for step in range(-4 * _NEARBY, 4 * _NEARBY + 1):
        place = np.clip(nearest + np.round(step / (4 * _NEARBY) * reach), 1, WORD) / WORD
        found |= left + place * (bound - 1) == answers
    return found


def _in_band(answers: ValueArray, epsilon: float, value: float) -> NDArray[np.bool_]:
    bound = 1 / np.tanh(np.array([epsilon]) / 4)
    left = band_start(np.array([value]), bound)
    return np.asarray((answers >= left) & (answers <= left + bound - 1))
