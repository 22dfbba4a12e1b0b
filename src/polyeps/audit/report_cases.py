"""Rows about FedSel: laws enumerated, answers that give a value away, and reports as `client.answer` makes them."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import torch

from polyeps.accounting.certificate import Form
from polyeps.algorithms import ALGORITHMS
from polyeps.algorithms._averaging import Course
from polyeps.audit import exact, support
from polyeps.audit.montecarlo import compare
from polyeps.audit.rows import Attack, Case, Effort, Shown
from polyeps.audit.samplers import audit_values
from polyeps.audit.trial_clients import ask_trials, seeded
from polyeps.core import Records
from polyeps.mechanisms import selection
from polyeps.mechanisms.selection import SelectName
from polyeps.mechanisms.values import ValueMechanism
from polyeps.models import binary_logistic
from polyeps.training import sgd

_WIDE, _TOP = 10, 2  # coordinates, and how many of them count as large
_REPORTS = 20  # of every client, each a trial: with one epoch planned it keeps nothing from one to the next
_PAIRS = ((0.3, 0.3000001), (0.0, 0.001), (0.1, 0.2))  # values whose answers must not tell them apart


def _selected(select: SelectName, form: Form, top: int, epsilon: float, _: Effort) -> Shown:
    """The sampler's own law, over all inputs."""
    ratio = exact.sampler_ratio(select, _WIDE, top, epsilon, form)
    claimed = 0.0 if select == "uniform" else epsilon
    return Shown(claimed, selection.selection_law(select, _WIDE, top, epsilon, form).epsilon, math.log(ratio))


def _tied(ranks: Any, dimension: int, epsilon: float, _: Effort) -> Shown:
    """Nothing is certified for tied ranks, which no code here has."""
    return Shown(epsilon, math.inf, exact.largest_log_ratio(exact.tied_laws(dimension, epsilon, ranks)))


def _value(mechanism: Any, epsilon: float, _: Effort) -> Shown:
    return Shown(epsilon, epsilon, math.log(exact.value_ratio(mechanism, epsilon)))


def _report(value: Any, first: float, second: float, _: Effort) -> Shown:
    """A coordinate that is large in one vector and small in another, its value at opposite ends: ratios multiply."""
    ratio = exact.sampler_ratio("ps", _WIDE, _TOP, first) * exact.value_ratio(value, second)
    return Shown(first + second, first + second, math.log(ratio))


def _sampled_value(mechanism: ValueMechanism, epsilon: float, what: str, effort: Effort) -> Shown:
    trials = effort.trials(50_000)
    found = audit_values(mechanism, epsilon, trials=trials, seed=effort.seed_for(what), confidence=effort.confidence)
    return Shown(epsilon, epsilon, found.epsilon, trials=trials)


def _support(mechanism: Any, epsilon: float, what: str, effort: Effort) -> Shown:
    """One answer that another value cannot give is proof enough; floating point has no certificate."""
    seed = effort.seed_for(what)
    leaked = max(support.leak(mechanism, epsilon, *pair, seed=seed) for pair in _PAIRS)
    certified = math.inf if mechanism in ("pm", "hm") else epsilon
    return Shown(epsilon, certified, math.inf if leaked else 0.0, trials=effort.trials(2000))


def _reported(name: str, options: dict[str, Any], form: Form, claimed: float, what: str, effort: Effort) -> Shown:
    """Two clients as different as can be: the order of their coordinates is reversed, and every sign."""
    entry = ALGORITHMS[name]
    course = Course(learning_rate=1.0, clip=1.0, cohort=100, batches=1, epochs=1, form=form)
    local = sgd(binary_logistic(_WIDE), rate=1.0, steps=1, learning_rate=1.0)
    algorithm = entry.build(local, course, **entry.options, **options)
    clients, tallies, paid = max(1, effort.trials(60_000) // _REPORTS), [], 0.0
    tasks = [("report", {"model": torch.zeros(_WIDE), "epoch": torch.tensor(n + 1)}) for n in range(_REPORTS)]
    steep = torch.linspace(40.0, 20.0, _WIDE)
    for number, vector in enumerate((steep, -steep.flip(0))):
        records = Records(vector[None], torch.ones(1, dtype=torch.int64), torch.tensor([0, 1]))
        streams = seeded(effort.seed_for(f"{what}/{number}"))
        found = ask_trials(algorithm, records, tasks, trials=clients, scale=1 / claimed, delta=0.0, streams=streams)
        index, values = (torch.cat([reply[name][:, 0] for reply in found.replies]) for name in ("index", "value"))
        tallies.append(np.bincount(2 * (index.numpy() + 1) + (values > 0).numpy(), minlength=2 * _WIDE + 2))
        paid = found.charged / _REPORTS  # pure costs are added
    trials = clients * _REPORTS
    shown = compare(tallies[0], tallies[1], (trials, trials), effort.confidence)
    return Shown(claimed, paid, shown.epsilon, trials=trials)


def cases() -> list[Case]:
    """All rows about reports: name, form, attack, and what is run."""
    listed: Attack = "enumeration"
    on_top: dict[str, Any] = {"select": "ps", "value": "duchi", "share": 0.5}
    pairs: list[tuple[str, str, dict[str, Any], Form]] = [
        ("fedsel: PS, grid-PM", "fedsel", {"select": "ps", "value": "grid-pm", "share": 0.5}, "sound"),
        ("fedsel: PE, Duchi", "fedsel", {"select": "pe", "value": "duchi", "share": 0.5}, "sound"),
        ("fedsel: EXP, PM (ideal arithmetic)", "fedsel", {"select": "exp", "value": "pm", "share": 0.5}, "sound"),
        ("fedsel: uniform, HM (ideal arithmetic)", "fedsel", {"select": "uniform", "value": "hm"}, "sound"),
        ("fedsel-flat: grid-PM", "fedsel-flat", {}, "sound"),
        ("fedsel-compressed: grid-PM", "fedsel-compressed", {"ratio": 0.5}, "sound"),
        (
            "fedsel-extra: choice on top, as charged",
            "fedsel-extra",
            {"select": "ps", "value": "duchi", "share": 0.5},
            "sound",
        ),
        ("S5 FedSel -C: choice on top, charged without it", "fedsel-extra", on_top, "published"),
    ]
    answers: list[tuple[str, Form, str]] = [
        ("duchi", "sound", "Duchi: possible answers"),
        ("grid-pm", "sound", "grid-PM: possible answers"),
        ("pm", "published", "S6 PM: possible answers in floating point"),
        ("hm", "published", "S6 HM: possible answers in floating point"),
    ]
    return [
        Case("EXP: law of the choice", "sound", listed, partial(_selected, "exp", "sound", _TOP, 1.0)),
        Case("PE: law of the choice", "sound", listed, partial(_selected, "pe", "sound", _TOP, 1.0)),
        Case("PS: law of the choice", "sound", listed, partial(_selected, "ps", "sound", _TOP, 1.0)),
        Case("uniform: law of the choice", "sound", listed, partial(_selected, "uniform", "sound", _TOP, 1.0)),
        Case("S1 EXP: tied ranks averaged", "published", listed, partial(_tied, "average", 100, 1.0)),
        Case("S1 EXP: tied ranks at their minimum", "published", listed, partial(_tied, "min", 100, 1.0)),
        Case("S2 PE: as published, 1 of 10", "published", listed, partial(_selected, "pe", "published", 1, 1.0)),
        Case("S2 PE: as published, 2 of 10", "published", listed, partial(_selected, "pe", "published", 2, 2.0)),
        Case("S3 PS: as published", "published", listed, partial(_selected, "ps", "published", _TOP, 2.0)),
        Case("Duchi: law of the value", "sound", listed, partial(_value, "duchi", 1.0)),
        Case("grid-PM: law of the value", "sound", listed, partial(_value, "grid-pm", 1.0)),
        Case("report: PS, then Duchi", "sound", listed, partial(_report, "duchi", 0.5, 0.5)),
        Case("report: PS, then grid-PM", "sound", listed, partial(_report, "grid-pm", 0.5, 0.5)),
        *(
            Case(what, "sound", "worst-case pair", partial(_sampled_value, name, 2.0, what))
            for name in ("duchi", "grid-pm", "pm", "hm")
            for what in (f"{name}: values as drawn{' (ideal arithmetic)' if name in ('pm', 'hm') else ''}",)
        ),
        *(Case(what, form, "support", partial(_support, name, 1.0, what)) for name, form, what in answers),
        *(
            Case(what, form, "worst-case pair", partial(_reported, name, options, "sound", 2.0, what))
            for what, name, options, form in pairs
        ),
        Case(
            "S2 FedSel: PE as published",
            "published",
            "worst-case pair",
            partial(_reported, "fedsel", {"select": "pe", "value": "duchi", "share": 0.9}, "published", 4.0, "S2"),
        ),
    ]
