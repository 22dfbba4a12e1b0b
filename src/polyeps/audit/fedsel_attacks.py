"""Attacks on FedSel: laws enumerated, answers that reveal a value, and reports as `client.answer` makes them.

FedSel: Liu et al., "FedSel: Federated SGD under Local Differential Privacy with Top-k Dimension Selection", DASFAA
2020, https://arxiv.org/abs/2003.10637.

In real numbers PM's answers are possible for every value. In floating point an answer is a rounded sum, and most sums
for one value are impossible for another (Mironov, "On Significance of the Least Significant Bits for Differential
Privacy", CCS 2012): such an answer reveals the value, whatever ε says.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from polyeps.accounting.certificate import Form
from polyeps.algorithms import ALGORITHMS
from polyeps.algorithms._averaging import Course
from polyeps.audit import enumeration
from polyeps.audit.lower_bounds import bound_from_counts
from polyeps.audit.results import Attack, AttackKind, Effort, Evidence, attack
from polyeps.audit.trial_clients import ask_trials, seeded
from polyeps.core import Records
from polyeps.engine.noise import SeededStreams
from polyeps.mechanisms import selection
from polyeps.mechanisms.selection import WORD, SelectName
from polyeps.mechanisms.values import CELLS, ValueArray, ValueMechanism, band_start, cell_counts, perturb
from polyeps.models import binary_logistic
from polyeps.training import sgd

_WIDE, _TOP = 10, 2  # coordinates, and how many of them count as large
_REPORTS = 20  # of every client, each a trial: with one epoch planned it keeps nothing from one to the next
_PAIRS = ((0.3, 0.3000001), (0.0, 0.001), (0.1, 0.2))  # values that answers must not distinguish
_BINS = 64  # of the histogram of a value mechanism's answers
_NEARBY = 8  # neighbours of the inverted uniform that could round to the same answer


def _selected(select: SelectName, form: Form, top: int, epsilon: float, _: Effort) -> Evidence:
    """Enumerate the sampler's own law, over all inputs."""
    ratio = enumeration.largest_ratio(enumeration.sampler_laws(select, _WIDE, top, epsilon, form))
    claimed = 0.0 if select == "uniform" else epsilon
    return Evidence(claimed, selection.selection_law(select, _WIDE, top, epsilon, form).epsilon, math.log(ratio))


def _tied(ranks: Any, dimension: int, epsilon: float, _: Effort) -> Evidence:
    """Enumerate EXP with tied ranks, for which nothing is certified."""
    laws = enumeration.tied_laws(dimension, epsilon, ranks)
    return Evidence(epsilon, math.inf, enumeration.largest_log_ratio(laws))


def _value(mechanism: Any, epsilon: float, _: Effort) -> Evidence:
    return Evidence(epsilon, epsilon, math.log(enumeration.largest_ratio(enumeration.value_laws(mechanism, epsilon))))


def _sampled_by_text(top: int, epsilon: float, _: Effort) -> Evidence:
    """Compare a coordinate among the top k with another under e^(ε·k), which the paper's text has for k·e^ε."""
    hit = 1 / (1 + (_WIDE - top) * math.exp(-epsilon * top))
    ratio = (hit / top) / ((1 - hit) / (_WIDE - top))
    return Evidence(epsilon, abs(epsilon * top - math.log(top)), abs(math.log(ratio)))


def _report(value: Any, first: float, second: float, _: Effort) -> Evidence:
    """Multiply the ratios of a coordinate that is large in one vector, small in another, with opposite values."""
    laws = enumeration.sampler_laws("ps", _WIDE, _TOP, first), enumeration.value_laws(value, second)
    ratio = enumeration.largest_ratio(laws[0]) * enumeration.largest_ratio(laws[1])
    return Evidence(first + second, first + second, math.log(ratio))


def audit_values(
    mechanism: ValueMechanism, epsilon: float, *, trials: int, seed: int = 0, confidence: float = 0.99
) -> float:
    """Compare the answers to −1 and 1; events are the bins of a histogram over all answers."""
    answers = []
    for number, value in enumerate((-1.0, 1.0)):
        streams = SeededStreams(2 * seed + number, range(trials), 0)
        answers.append(perturb(mechanism, np.full(trials, value), np.full(trials, epsilon), streams))
    reach = max(float(np.abs(answer).max()) for answer in answers)
    counts = [np.histogram(answer, _BINS, (-reach, reach))[0] for answer in answers]
    return bound_from_counts(counts[0], counts[1], (trials, trials), confidence)


def _sampled_value(mechanism: ValueMechanism, epsilon: float, effort: Effort) -> Evidence:
    trials = effort.trials(50_000)
    found = audit_values(mechanism, epsilon, trials=trials, seed=effort.seed_for(), confidence=effort.confidence)
    return Evidence(epsilon, epsilon, found, trials=trials)


def _support(mechanism: Any, epsilon: float, effort: Effort) -> Evidence:
    """Look for one answer that another value cannot give; floating point has no certificate."""
    leaked = max(leaked_share(mechanism, epsilon, *pair, seed=effort.seed_for()) for pair in _PAIRS)
    certified = math.inf if mechanism in ("pm", "hm") else epsilon
    return Evidence(epsilon, certified, math.inf if leaked else 0.0, trials=effort.trials(2000))


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


def _reported(algorithm_name: str, options: dict[str, Any], form: Form, claimed: float, effort: Effort) -> Evidence:
    """Compare two clients as different as possible: the order of their coordinates is reversed, and every sign."""
    entry = ALGORITHMS[algorithm_name]
    course = Course(learning_rate=1.0, clip=1.0, cohort=100, batches=1, epochs=1, form=form)
    local = sgd(binary_logistic(_WIDE), rate=1.0, steps=1, learning_rate=1.0)
    algorithm = entry.build(local, course, **entry.options, **options)
    clients, counts, paid = max(1, effort.trials(60_000) // _REPORTS), [], 0.0
    tasks = [("report", {"model": torch.zeros(_WIDE), "epoch": torch.tensor(n + 1)}) for n in range(_REPORTS)]
    steep = torch.linspace(40.0, 20.0, _WIDE)
    for number, vector in enumerate((steep, -steep.flip(0))):
        found = ask_trials(
            algorithm,
            Records(vector[None], torch.ones(1, dtype=torch.int64), torch.tensor([0, 1])),
            tasks,
            trials=clients,
            noise_multiplier=1 / claimed,
            delta=0.0,
            streams=seeded(effort.seed_for(str(number))),
        )
        index, values = (torch.cat([reply[name][:, 0] for reply in found.replies]) for name in ("index", "value"))
        counts.append(np.bincount(2 * (index.numpy() + 1) + (values > 0).numpy(), minlength=2 * _WIDE + 2))
        paid = found.charged / _REPORTS  # pure costs are added
    trials = clients * _REPORTS
    shown = bound_from_counts(counts[0], counts[1], (trials, trials), effort.confidence)
    return Evidence(claimed, paid, shown, trials=trials)


def _published_encoding(effort: Effort) -> Evidence:
    options = {"select": "pe", "value": "duchi", "share": 0.9}
    return _reported("fedsel", options, "published", 4.0, replace(effort, attack="S2"))


def fedsel_attacks() -> list[Attack]:
    """Return all attacks on FedSel's samplers and reports."""
    law: AttackKind = "enumeration"
    pair: AttackKind = "worst-case pair"
    exp_pm = {"select": "exp", "value": "pm", "share": 0.5}
    on_top = ("fedsel-extra", {"select": "ps", "value": "duchi", "share": 0.5})
    reports: dict[str, tuple[str, dict[str, Any]]] = {
        "fedsel: PS, grid-PM": ("fedsel", {"select": "ps", "value": "grid-pm", "share": 0.5}),
        "fedsel: PE, Duchi": ("fedsel", {"select": "pe", "value": "duchi", "share": 0.5}),
        "fedsel: EXP, PM (ideal arithmetic)": ("fedsel", exp_pm),
        "fedsel: uniform, HM (ideal arithmetic)": ("fedsel", {"select": "uniform", "value": "hm"}),
        "fedsel-flat: grid-PM": ("fedsel-flat", {}),
        "fedsel-compressed: grid-PM": ("fedsel-compressed", {"ratio": 0.5}),
        "fedsel-extra: choice on top, as charged": on_top,
    }
    return [
        attack("EXP: law of the choice", "sound", law, _selected, "exp", "sound", _TOP, 1.0),
        attack("PE: law of the choice", "sound", law, _selected, "pe", "sound", _TOP, 1.0),
        attack("PS: law of the choice", "sound", law, _selected, "ps", "sound", _TOP, 1.0),
        attack("uniform: law of the choice", "sound", law, _selected, "uniform", "sound", _TOP, 1.0),
        attack("S1 EXP: tied ranks averaged", "published", law, _tied, "average", 100, 1.0),
        attack("S1 EXP: tied ranks at their minimum", "published", law, _tied, "min", 100, 1.0),
        attack("S2 PE: as published, 1 of 10", "published", law, _selected, "pe", "published", 1, 1.0),
        attack("S2 PE: as published, 2 of 10", "published", law, _selected, "pe", "published", 2, 2.0),
        attack("S3 PS: by the formula in the paper's text", "published", law, _sampled_by_text, _TOP, 2.0),
        attack("Duchi: law of the value", "sound", law, _value, "duchi", 1.0),
        attack("grid-PM: law of the value", "sound", law, _value, "grid-pm", 1.0),
        attack("report: PS, then Duchi", "sound", law, _report, "duchi", 0.5, 0.5),
        attack("report: PS, then grid-PM", "sound", law, _report, "grid-pm", 0.5, 0.5),
        attack("duchi: values as drawn", "sound", pair, _sampled_value, "duchi", 2.0),
        attack("grid-pm: values as drawn", "sound", pair, _sampled_value, "grid-pm", 2.0),
        attack("pm: values as drawn (ideal arithmetic)", "sound", pair, _sampled_value, "pm", 2.0),
        attack("hm: values as drawn (ideal arithmetic)", "sound", pair, _sampled_value, "hm", 2.0),
        attack("Duchi: possible answers", "sound", "support", _support, "duchi", 1.0),
        attack("grid-PM: possible answers", "sound", "support", _support, "grid-pm", 1.0),
        attack("S6 PM: possible answers in floating point", "published", "support", _support, "pm", 1.0),
        attack("S6 HM: possible answers in floating point", "published", "support", _support, "hm", 1.0),
        *(attack(name, "sound", pair, _reported, *reported, "sound", 2.0) for name, reported in reports.items()),
        attack("S5 FedSel -C: choice on top, charged without it", "published", pair, _reported, *on_top, "sound", 2.0),
        attack("S2 FedSel: PE as published", "published", pair, _published_encoding),
    ]
