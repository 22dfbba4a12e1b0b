"""Attacks on DP-SGD as `client.answer` runs it: worst-case pairs, with canary records in every client.

The model is linear in d features and every canary record has a feature of its own, so that its gradient moves one
coordinate: a client with d canaries gives d independent trials. With the canaries, each contributes the whole clip;
without them, their records are empty (zero-out) or push the other way (replace-one). The server sends the same model in
every round and sees every reply.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import dp_accounting as dp
import numpy as np
import torch
from torch import Tensor

from polyeps.accounting import epsilon
from polyeps.accounting.certificate import Form
from polyeps.accounting.events import Gaussian, Poisson
from polyeps.aggregation.subspace import Basis, Part
from polyeps.algorithms import ALGORITHMS
from polyeps.audit.lower_bounds import Scores, bound_from_scores, sampled_log_ratio
from polyeps.audit.results import Attack, Effort, Evidence
from polyeps.audit.trial_clients import Answers, ask_trials, deployed, seeded
from polyeps.core import Payload, Records
from polyeps.models import Model, binary_logistic
from polyeps.training import dp_sgd

_DELTA = 0.05  # large, since rare events take many trials; every δ has its own certificate
_WIDE = 100  # features, and canaries, of a client
_LARGE = 1e4  # a canary's feature: its gradient is far beyond the clip
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

    def training(self, model: Model) -> Any:
        shared: dict[str, Any] = {"steps": self.steps, "clip": self.clip, "learning_rate": _STEP}
        return dp_sgd(model, rate=self.rate, batch=1, **shared)


GAUSSIAN = Setting()
SUBSAMPLED = Setting(rate=0.2, noise_multiplier=0.6, rounds=4)


def _canaries(present: bool, replaced: bool, wide: int = _WIDE) -> Records:
    """Return the records of one client: canaries, or their replacements."""
    features = _LARGE * torch.eye(wide) if present or replaced else torch.zeros(wide, wide)
    labels = torch.full((wide,), int(present))
    return Records(features, labels, torch.tensor([0, wide]))


def _scores(seen: list[Tensor], setting: Setting) -> Scores:
    """Return the log-likelihood ratio of all rounds, for every coordinate of every client.

    The server sees only the sum of several local steps, which is scored as one release of so many canaries.
    """
    moved = 2.0 if setting.replaced else 1.0
    shift = moved * setting.steps**0.5 / setting.noise_multiplier
    total = np.zeros(seen[0].numel(), np.float32)
    for reply in seen:
        sums = reply.flatten().double().numpy() / (_STEP * setting.clip)
        away = (sums + (setting.steps * setting.rate if setting.replaced else 0.0)) / setting.noise_multiplier
        total += sampled_log_ratio((shift * (away / setting.steps**0.5 - shift / 2)).astype(np.float32), setting.rate)
    return total


def _pair(
    algorithm_name: str, setting: Setting, effort: Effort, trials: int, action: str, seen: str, sent: Payload
) -> Evidence:
    """Ask clients with and without canaries to do an action; `seen` is the tensor of their replies that is scored."""
    entry = ALGORITHMS[algorithm_name]
    algorithm = entry.build(setting.training(binary_logistic(_WIDE)), **entry.options)
    clients = max(1, effort.trials(trials) // _WIDE)
    task = (action, {"model": torch.zeros(_WIDE), **sent})

    def world(present: bool) -> Answers:
        streams = deployed if setting.deployed else seeded(effort.seed_for(str(present)))
        return ask_trials(
            algorithm,
            _canaries(present, setting.replaced),
            [task] * setting.rounds,
            trials=clients,
            noise_multiplier=setting.noise_multiplier,
            delta=_DELTA,
            streams=streams,
        )

    one, other = world(True), world(False)
    scores = [_scores([reply[seen] for reply in found.replies], setting) for found in (one, other)]
    found = bound_from_scores(scores[0], scores[1], _DELTA, effort.confidence)
    return Evidence(one.charged, one.charged, found, _DELTA, len(scores[0]))


def trained(algorithm_name: str, setting: Setting, trials: int, effort: Effort) -> Evidence:
    """Train by an algorithm and score every update."""
    return _pair(algorithm_name, setting, effort, trials, "train", "update", {})


def _projected(algorithm_name: str, setting: Setting, trials: int, effort: Effort) -> Evidence:
    """Send a basis that hides nothing and score the coordinates."""
    basis = Basis((Part(0, _WIDE, torch.eye(_WIDE)),), torch.zeros(_WIDE)).to_tensors()
    return _pair(algorithm_name, setting, effort, trials, "project", "coordinates", basis)


# Fixed-size batches: the records of a batch depend on each other, so a client is one trial. The canary is one record;
# the others push the other way, and it replaces one of them.
_HELD, _BATCH = 8, 2
_FIXED = Setting(rate=_BATCH / _HELD, noise_multiplier=0.7, replaced=True)


def _fixed(charged_as: Literal["poisson", "fixed"], trials: int, effort: Effort) -> Evidence:
    setting = _FIXED
    training = dp_sgd(binary_logistic(1), sampler="fixed", batch=_BATCH, steps=1, clip=1.0, learning_rate=_STEP)
    algorithm = ALGORITHMS["fedavg"].build(training)
    scores = []
    paid = 0.0
    for present in (True, False):
        labels = torch.zeros(_HELD, dtype=torch.int64)
        labels[0] = int(present)
        records = Records(torch.full((_HELD, 1), _LARGE), labels, torch.tensor([0, _HELD]))
        found = ask_trials(
            algorithm,
            records,
            [("train", {"model": torch.zeros(1)})],
            trials=effort.trials(trials),
            noise_multiplier=setting.noise_multiplier,
            delta=_DELTA,
            streams=seeded(effort.seed_for(str(present))),
        )
        # Sums are divided by the batch; without the canary they are -batch.
        sums = found.replies[0]["update"] * _BATCH + _STEP * (_BATCH - setting.rate)
        scores.append(_scores([sums], setting))
        paid = found.charged
    shown = bound_from_scores(scores[0], scores[1], _DELTA, effort.confidence)
    claimed = paid
    if charged_as == "poisson":
        claimed = epsilon(Poisson(setting.rate, Gaussian(setting.noise_multiplier)), _DELTA)
    return Evidence(claimed, paid, shown, _DELTA, len(scores[0]))


def _replaced_as_zeroed(trials: int, effort: Effort) -> Evidence:
    """Replace a record by its opposite, which moves a sum by two clips; zero-out certificates do not cover that."""
    setting = replace(GAUSSIAN, replaced=True)
    shown = trained("fedavg", setting, trials, effort)
    certified = epsilon(Gaussian(setting.noise_multiplier), _DELTA, adjacency="replace-one")
    return replace(shown, certified=certified)


def _late_charge(trials: int, effort: Effort) -> Evidence:
    """P2: calibrate noise for rounds where every round has many steps."""
    setting = replace(SUBSAMPLED, rate=0.5, noise_multiplier=1.0, steps=1, rounds=8)
    shown = trained("fedavg", setting, trials, effort)
    event = Poisson(setting.rate, Gaussian(setting.noise_multiplier))
    return replace(shown, claimed=epsilon(dp.SelfComposedDpEvent(event, 1), _DELTA))


def dp_sgd_attacks() -> list[Attack]:
    """Return all attacks on record-level methods."""
    many, few = 200_000, 40_000

    def attack(name: str, form: Form, run: Callable[..., Evidence], *given: Any) -> Attack:
        return Attack(name, form, "worst-case pair", partial(run, *given))

    local_steps = replace(SUBSAMPLED, rate=0.5, noise_multiplier=1.0, steps=4, rounds=1)
    small_clip = replace(GAUSSIAN, clip=1e-3)
    return [
        attack("Gaussian: one full-batch step of DP-SGD", "sound", trained, "fedavg", GAUSSIAN, many),
        attack("subsampled Gaussian: DP-SGD", "sound", trained, "fedavg", SUBSAMPLED, many),
        attack("DP-SGD, 4 local steps a round", "sound", trained, "fedavg", local_steps, few),
        attack("DP-SGD, clip 0.001", "sound", trained, "fedavg", small_clip, few),
        *(
            attack(f"{name}: train", "sound", trained, name, SUBSAMPLED, few)
            for name in ("fedavg", "public-only", "weiavg", "pfa", "pfa-plus", "pdp-fl", "pdp-fl-plus")
        ),
        *(
            attack(f"{name}: project, hostile basis", "sound", _projected, name, SUBSAMPLED, few)
            for name in ("pfa-plus", "pdp-fl-plus")
        ),
        attack("DP-SGD, fixed-size batches, replace-one", "sound", _fixed, "fixed", 10_000),
        attack("P4 PFA: fixed-size batches charged as Poisson", "published", _fixed, "poisson", 10_000),
        attack("P2 PFA: rounds charged, steps taken", "published", _late_charge, few),
        attack("record replaced, charged as zero-out", "published", _replaced_as_zeroed, few),
    ]
