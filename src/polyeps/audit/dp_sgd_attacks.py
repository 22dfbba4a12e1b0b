"""Attacks on DP-SGD as `client.answer` runs it: worst-case pairs, with canary records in every client.

The model is linear in d features and every canary record has a feature of its own, so that its gradient moves one
coordinate: a client with d canaries gives d independent trials. With the canaries, each contributes the whole clip;
without them, their records are empty (zero-out) or push the other way (replace-one). The server sends the same model in
every round and sees every reply. A canary may also be a person with many records, all of which pull the same way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from typing import Any, Literal

import dp_accounting as dp
import numpy as np
import torch
from torch import Tensor

from polyeps.accounting import epsilon
from polyeps.accounting.events import Gaussian, Poisson
from polyeps.aggregation.subspace import Basis, Part
from polyeps.algorithms import ALGORITHMS
from polyeps.audit.lower_bounds import Scores, bound_from_scores, sampled_log_ratio
from polyeps.audit.results import Attack, Effort, Evidence, attack
from polyeps.audit.trial_clients import ask_trials, deployed, seeded
from polyeps.core import Algorithm, Payload, Records
from polyeps.models import Model, binary_logistic, of_units
from polyeps.training import dp_sgd, whole_gradient

_DELTA = 0.05  # large, since rare events take many trials; every δ has its own certificate
_WIDE = 100  # features, and canaries, of a client
_LARGE = 1e4  # a canary's feature: its gradient is far beyond the clip
_VISITS = 40  # records of a canary that is a person
_STEP = 1e-6  # learning rate: steps hardly move the model, so that later gradients are as large


@dataclass(frozen=True)
class Setting:
    """The training of clients, and its rounds."""

    rate: float = 1.0
    noise_multiplier: float = 1.0
    steps: int = 1  # local steps of a round
    rounds: int = 1
    clip: float = 1.0
    replaced: bool = False  # neighbours differ in the value of a record
    deployed: bool = False  # noise from the operating system's entropy, on the integers
    visits: int = 1  # records of each canary, a person
    by_person: bool = False  # whether persons are protected; else their records, one by one
    whole: bool = False  # one gradient over all records a round, divided by their number

    @property
    def moved(self) -> float:
        """How many clips a canary moves a sum of which it is a part."""
        return 2.0 if self.replaced else 1.0 if self.by_person else float(self.visits)

    @property
    def unit(self) -> float:
        """What a clip in the sum is in the reply."""
        return self.clip * (1 / _WIDE if self.whole else _STEP)

    def training(self, model: Model) -> Any:
        if self.whole:
            return whole_gradient(model, clip=self.clip)
        return dp_sgd(model, rate=self.rate, batch=1, steps=self.steps, clip=self.clip, learning_rate=_STEP)


GAUSSIAN = Setting()
SUBSAMPLED = Setting(rate=0.2, noise_multiplier=0.6, rounds=4)
WHOLE = Setting(noise_multiplier=3.0, rounds=6, whole=True)


def _canaries(present: bool, setting: Setting) -> Records:
    """Return the records of one client: canaries, or their replacements."""
    features = _LARGE * torch.eye(_WIDE) if present or setting.replaced else torch.zeros(_WIDE, _WIDE)
    features = features.repeat_interleave(setting.visits, 0)
    edges = torch.arange(0, len(features) + 1, setting.visits) if setting.by_person else None
    held = torch.tensor([0, _WIDE if setting.by_person else len(features)])
    units = None if edges is None else edges.unfold(0, 2, 1)
    return Records(features, torch.full((len(features),), int(present)), held, units)


def _scores(seen: list[Tensor], setting: Setting) -> Scores:
    """Return the log-likelihood ratio of all rounds, for every coordinate of every client.

    The server sees only the sum of several local steps, which is scored as one release of so many canaries.
    """
    shift = setting.moved * setting.steps**0.5 / setting.noise_multiplier
    total = np.zeros(seen[0].numel(), np.float32)
    for reply in seen:
        sums = reply.flatten().double().numpy() / setting.unit
        away = (sums + (setting.steps * setting.rate if setting.replaced else 0.0)) / setting.noise_multiplier
        total += sampled_log_ratio((shift * (away / setting.steps**0.5 - shift / 2)).astype(np.float32), setting.rate)
    return total


def _compare(
    algorithm: Algorithm,
    records: Callable[[bool], Records],
    task: tuple[str, Payload],
    sums: Callable[[Payload], Tensor],
    setting: Setting,
    clients: int,
    effort: Effort,
    undo: Callable[[list[Tensor]], list[Tensor]] = list,
) -> Evidence:
    """Ask clients with and without canaries for a task in every round, and score the sums in their replies.

    `undo` removes from the sums of all rounds what the server knows that earlier rounds have added.
    """
    scores, paid = [], 0.0
    for present in (True, False):
        found = ask_trials(
            algorithm,
            records(present),
            [task] * setting.rounds,
            trials=clients,
            noise_multiplier=setting.noise_multiplier,
            delta=_DELTA,
            streams=deployed if setting.deployed else seeded(effort.seed_for(str(present))),
        )
        scores.append(_scores(undo([sums(reply) for reply in found.replies]), setting))
        paid = found.charged
    shown = bound_from_scores(scores[0], scores[1], _DELTA, effort.confidence)
    return Evidence(paid, paid, shown, _DELTA, len(scores[0]))


def _pair(
    name: str, setting: Setting, effort: Effort, trials: int, action: str, seen: str, sent: Payload, **others: Any
) -> Evidence:
    """Ask for an action of an algorithm; `seen` is the tensor of the replies that is scored."""
    entry = ALGORITHMS[name]
    model = binary_logistic(_WIDE)
    model = of_units(model, "patient") if setting.by_person else model
    algorithm = entry.build(setting.training(model), **entry.options)
    task = (action, {"model": torch.zeros(_WIDE), **sent})
    clients = max(1, effort.trials(trials) // _WIDE)
    records = partial(_canaries, setting=setting)
    return _compare(algorithm, records, task, itemgetter(seen), setting, clients, effort, **others)


def trained(algorithm_name: str, setting: Setting, trials: int, effort: Effort) -> Evidence:
    """Train by an algorithm and score every update."""
    return _pair(algorithm_name, setting, effort, trials, "train", "update", {})


def _corrected(setting: Setting, trials: int, effort: Effort) -> Evidence:
    """Send DP-SCAFFOLD's clients a control of zero, and add the last round's to every update.

    A client then subtracts its last update without correction from the next, and all the server has to undo is that.
    """

    def undo(seen: list[Tensor]) -> list[Tensor]:
        return [total.float() for total in torch.stack(seen).double().cumsum(0)]

    sent = {"control": torch.zeros(_WIDE)}
    return _pair("dp-scaffold", setting, effort, trials, "train", "update", sent, undo=undo)


def _projected(algorithm_name: str, setting: Setting, trials: int, effort: Effort) -> Evidence:
    """Send a basis that hides nothing and score the coordinates."""
    basis = Basis((Part(0, _WIDE, torch.eye(_WIDE)),), torch.zeros(_WIDE)).to_tensors()
    return _pair(algorithm_name, setting, effort, trials, "project", "coordinates", basis)


# Fixed-size batches: the records of a batch depend on each other, so a client is one trial. The canary is one record;
# the others push the other way, and it replaces one of them.
_HELD, _BATCH = 8, 2
_FIXED = Setting(rate=_BATCH / _HELD, noise_multiplier=0.7, replaced=True)


def _fixed(charged_as: Literal["poisson", "fixed"], trials: int, effort: Effort) -> Evidence:
    training = dp_sgd(binary_logistic(1), sampler="fixed", batch=_BATCH, steps=1, clip=1.0, learning_rate=_STEP)

    def records(present: bool) -> Records:
        labels = torch.zeros(_HELD, dtype=torch.int64)
        labels[0] = int(present)
        return Records(torch.full((_HELD, 1), _LARGE), labels, torch.tensor([0, _HELD]))

    def sums(reply: Payload) -> Tensor:
        """Undo the division by the batch; without the canary sums are -batch."""
        return reply["update"] * _BATCH + _STEP * (_BATCH - _FIXED.rate)

    algorithm, task = ALGORITHMS["fedavg"].build(training), ("train", {"model": torch.zeros(1)})
    shown = _compare(algorithm, records, task, sums, _FIXED, effort.trials(trials), effort)
    if charged_as == "fixed":
        return shown
    return replace(shown, claimed=epsilon(Poisson(_FIXED.rate, Gaussian(_FIXED.noise_multiplier)), _DELTA))


def _replaced_as_zeroed(trials: int, effort: Effort) -> Evidence:
    """Replace a record by its opposite, which moves a sum by two clips; zero-out certificates do not cover that."""
    setting = replace(GAUSSIAN, replaced=True)
    shown = trained("fedavg", setting, trials, effort)
    certified = epsilon(Gaussian(setting.noise_multiplier), _DELTA, adjacency="replace-one")
    return replace(shown, certified=certified)


def _person_as_records(trials: int, effort: Effort) -> Evidence:
    """Blank all records of a person; a certificate for single records does not cover that."""
    setting = replace(GAUSSIAN, noise_multiplier=5.0, visits=_VISITS)
    shown = trained("fedavg", setting, trials, effort)
    return replace(shown, certified=epsilon(Gaussian(setting.noise_multiplier / _VISITS), _DELTA))


def _late_charge(trials: int, effort: Effort) -> Evidence:
    """P2: calibrate noise for rounds where every round has many steps."""
    setting = replace(SUBSAMPLED, rate=0.5, noise_multiplier=1.0, steps=1, rounds=8)
    shown = trained("fedavg", setting, trials, effort)
    event = Poisson(setting.rate, Gaussian(setting.noise_multiplier))
    return replace(shown, claimed=epsilon(dp.SelfComposedDpEvent(event, 1), _DELTA))


def _whole_as_drawn(trials: int, effort: Effort) -> Evidence:
    """Take all records in every round, and charge for batches of a fifth of them."""
    shown = trained("fedavg", WHOLE, trials, effort)
    event = Poisson(0.2, Gaussian(WHOLE.noise_multiplier))
    return replace(shown, claimed=epsilon(dp.SelfComposedDpEvent(event, WHOLE.rounds), _DELTA))


def dp_sgd_attacks() -> list[Attack]:
    """Return all attacks on methods that protect records or persons."""
    many, few = 200_000, 40_000
    local_steps = replace(SUBSAMPLED, rate=0.5, noise_multiplier=1.0, steps=4, rounds=1)
    small_clip = replace(GAUSSIAN, clip=1e-3)
    patients = f"patients of {_VISITS} records"
    persons = replace(GAUSSIAN, visits=_VISITS, by_person=True)
    drawn_persons = replace(SUBSAMPLED, visits=_VISITS, by_person=True)
    by_name = ("fedavg", "public-only", "weiavg", "pfa", "pfa-plus", "pdp-fl", "pdp-fl-plus", "robust-hdp", "idp")
    whole_persons, whole_deployed = replace(WHOLE, visits=_VISITS, by_person=True), replace(WHOLE, deployed=True)
    twice = replace(GAUSSIAN, rounds=2, deployed=True)
    found: list[tuple[Any, ...]] = [
        ("Gaussian: one full-batch step of DP-SGD", "sound", trained, "fedavg", GAUSSIAN, many),
        ("subsampled Gaussian: DP-SGD", "sound", trained, "fedavg", SUBSAMPLED, many),
        ("DP-SGD, 4 local steps a round", "sound", trained, "fedavg", local_steps, few),
        ("one gradient a round, 6 rounds", "sound", trained, "fedavg", WHOLE, many),
        (f"one gradient a round, by person: {patients}", "sound", trained, "weiavg", whole_persons, few // 2),
        ("one gradient a round, deployed", "sound", trained, "fedavg", whole_deployed, 4000),
        ("one gradient a round, charged as a batch", "published", _whole_as_drawn, few),
        ("DP-SGD, clip 0.001", "sound", trained, "fedavg", small_clip, few),
        *((f"{name}: train", "sound", trained, name, SUBSAMPLED, few) for name in by_name),
        ("dp-scaffold: train, controls of 4 rounds", "sound", _corrected, SUBSAMPLED, few),
        ("dp-scaffold, deployed: controls of 2 rounds", "sound", _corrected, twice, 4000),
        ("pfa-plus: project, hostile basis", "sound", _projected, "pfa-plus", SUBSAMPLED, few),
        ("pdp-fl-plus: project, hostile basis", "sound", _projected, "pdp-fl-plus", SUBSAMPLED, few),
        (f"DP-SGD by person: {patients}", "sound", trained, "fedavg", persons, few),
        (f"DP-SGD by person, subsampled: {patients}", "sound", trained, "weiavg", drawn_persons, few),
        (f"DP-SGD by person, deployed: {patients}", "sound", trained, "fedavg", replace(persons, deployed=True), 4000),
        ("DP-SGD, fixed-size batches, replace-one", "sound", _fixed, "fixed", 10_000),
        ("P4 PFA: fixed-size batches charged as Poisson", "published", _fixed, "poisson", 10_000),
        ("P2 PFA: rounds charged, steps taken", "published", _late_charge, few),
        ("record replaced, charged as zero-out", "published", _replaced_as_zeroed, few),
        (f"{patients}, charged record by record", "published", _person_as_records, few // 4),
    ]
    return [attack(name, form, "worst-case pair", *given) for name, form, *given in found]
