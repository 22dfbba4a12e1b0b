"""Worst-case pairs for record-level methods: DP-SGD as `client.answer` runs it, with canary records in every client.

The model is linear in d features and every canary record has one feature of its own, so that its gradient moves one
coordinate alone: a client with d canaries gives d independent trials. With the canaries each contributes the whole
clip; without them their records are empty (zero-out), or push the other way (replace-one). The server sends
the same model in every round and sees every reply.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import dp_accounting as dp
import numpy as np
import torch
from torch import Tensor

from polyeps.accounting import epsilon
from polyeps.accounting.events import Gaussian, Poisson
from polyeps.aggregation.subspace import Basis, Part
from polyeps.algorithms import ALGORITHMS
from polyeps.audit.montecarlo import Scores, bound, log_ratio
from polyeps.audit.rows import Case, Effort, Shown
from polyeps.audit.trial_clients import Answers, ask_trials, deployed, seeded
from polyeps.core import Algorithm, Payload, Records
from polyeps.models import Model, binary_logistic
from polyeps.training import dp_sgd

DELTA = 0.05  # large: what is rare takes many trials to see, and every δ has its own certificate
_WIDE = 100  # features, and canaries, of a client
_LARGE = 1e4  # a canary's feature: its gradient is far beyond the clip
_STEP = 1e-6  # learning rate: steps hardly move the model, so that later gradients are as large


@dataclass(frozen=True)
class Setting:
    """How clients train, and for how many rounds."""

    rate: float = 1.0
    noise_multiplier: float = 1.0
    steps: int = 1  # local steps of a round
    rounds: int = 1
    clip: float = 1.0
    replaced: bool = False  # neighbours differ by the value of a record
    deployed: bool = False  # noise from the operating system's entropy, on the integers

    def training(self, model: Model) -> Any:
        shared: dict[str, Any] = {"steps": self.steps, "clip": self.clip, "learning_rate": _STEP}
        return dp_sgd(model, rate=self.rate, batch=1, **shared)


GAUSSIAN = Setting()
SUBSAMPLED = Setting(rate=0.2, noise_multiplier=0.6, rounds=4)


def canaries(present: bool, replaced: bool, wide: int = _WIDE) -> Records:
    """The records of one client: canaries, or what stands in their places."""
    features = _LARGE * torch.eye(wide) if present or replaced else torch.zeros(wide, wide)
    labels = torch.full((wide,), int(present))
    return Records(features, labels, torch.tensor([0, wide]))


def scores_of(seen: list[Tensor], setting: Setting) -> Scores:
    """The log-likelihood ratio of all rounds, of every coordinate of every client.

    Of several local steps only the sum is seen: it is scored as one release of so many times the canary.
    """
    moved = 2.0 if setting.replaced else 1.0
    shift = moved * setting.steps**0.5 / setting.noise_multiplier
    total = np.zeros(seen[0].numel(), np.float32)
    for reply in seen:
        sums = reply.flatten().double().numpy() / (_STEP * setting.clip)
        away = (sums + (setting.steps * setting.rate if setting.replaced else 0.0)) / setting.noise_multiplier
        total += log_ratio((shift * (away / setting.steps**0.5 - shift / 2)).astype(np.float32), setting.rate)
    return total


def try_training(
    algorithm: Algorithm, setting: Setting, effort: Effort, what: str, trials: int, asked: tuple[str, str, Payload]
) -> Shown:
    """Run a pair of worlds; `asked` is an action, the tensor of its reply to look at, and what is sent besides."""
    action, looked_at, extra = asked
    clients = max(1, effort.trials(trials) // _WIDE)
    task = (action, {"model": torch.zeros(_WIDE), **extra})

    def world(present: bool) -> Answers:
        streams = deployed if setting.deployed else seeded(effort.seed_for(f"{what}/{present}"))
        return ask_trials(
            algorithm,
            canaries(present, setting.replaced),
            [task] * setting.rounds,
            trials=clients,
            scale=setting.noise_multiplier,
            delta=DELTA,
            streams=streams,
        )

    one, other = world(True), world(False)
    scores = [scores_of([reply[looked_at] for reply in found.replies], setting) for found in (one, other)]
    found = bound(scores[0], scores[1], DELTA, effort.confidence)
    return Shown(one.charged, one.charged, found.epsilon, DELTA, len(scores[0]))


def trained(name: str, setting: Setting, trials: int, what: str, effort: Effort) -> Shown:
    """Train by an algorithm and look at every update."""
    algorithm = ALGORITHMS[name].build(setting.training(binary_logistic(_WIDE)), **ALGORITHMS[name].options)
    return try_training(algorithm, setting, effort, what, trials, ("train", "update", {}))


def _projected(name: str, setting: Setting, trials: int, what: str, effort: Effort) -> Shown:
    """The server sends a basis that hides nothing."""
    algorithm = ALGORITHMS[name].build(setting.training(binary_logistic(_WIDE)), **ALGORITHMS[name].options)
    basis = Basis((Part(0, _WIDE, torch.eye(_WIDE)),), torch.zeros(_WIDE)).to_tensors()
    return try_training(algorithm, setting, effort, what, trials, ("project", "coordinates", basis))


# Fixed-size batches: which of a client's records are in a batch depends on the others, so a client is one trial.
# The canary is one record; the others push the other way, and one of them makes room for it.
_HELD, _BATCH = 8, 2
_FIXED = Setting(rate=_BATCH / _HELD, noise_multiplier=0.7, replaced=True)


def _fixed(charged_as: Literal["poisson", "fixed"], trials: int, what: str, effort: Effort) -> Shown:
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
            scale=setting.noise_multiplier,
            delta=DELTA,
            streams=seeded(effort.seed_for(f"{what}/{present}")),
        )
        # Sums are divided by the batch; without the canary they are -batch.
        sums = found.replies[0]["update"] * _BATCH + _STEP * (_BATCH - setting.rate)
        scores.append(scores_of([sums], setting))
        paid = found.charged
    shown = bound(scores[0], scores[1], DELTA, effort.confidence)
    claimed = paid
    if charged_as == "poisson":
        claimed = epsilon(Poisson(setting.rate, Gaussian(setting.noise_multiplier)), DELTA)
    return Shown(claimed, paid, shown.epsilon, DELTA, len(scores[0]))


def _replaced_as_zeroed(trials: int, what: str, effort: Effort) -> Shown:
    """A record replaced by its opposite moves a sum by two clips; certificates of zero-out do not cover that."""
    setting = replace(GAUSSIAN, replaced=True)
    shown = trained("fedavg", setting, trials, what, effort)
    certified = epsilon(Gaussian(setting.noise_multiplier), DELTA, adjacency="replace-one")
    return replace(shown, certified=certified)


def _late_charge(trials: int, what: str, effort: Effort) -> Shown:
    """P2: noise calibrated for rounds where every round has many steps."""
    setting = replace(SUBSAMPLED, rate=0.5, noise_multiplier=1.0, steps=1, rounds=8)
    shown = trained("fedavg", setting, trials, what, effort)
    event = Poisson(setting.rate, Gaussian(setting.noise_multiplier))
    return replace(shown, claimed=epsilon(dp.SelfComposedDpEvent(event, 1), DELTA))


def cases() -> list[Case]:
    """All rows about records: name, form, and what is run."""
    many, few = 200_000, 40_000

    def case(what: str, form: Any, run: Any, *given: Any) -> Case:
        return Case(what, form, "worst-case pair", partial(run, *given, what))

    local_steps = replace(SUBSAMPLED, rate=0.5, noise_multiplier=1.0, steps=4, rounds=1)
    small_clip = replace(GAUSSIAN, clip=1e-3)
    return [
        case("Gaussian: one full-batch step of DP-SGD", "sound", trained, "fedavg", GAUSSIAN, many),
        case("subsampled Gaussian: DP-SGD", "sound", trained, "fedavg", SUBSAMPLED, many),
        case("DP-SGD, 4 local steps a round", "sound", trained, "fedavg", local_steps, few),
        case("DP-SGD, clip 0.001", "sound", trained, "fedavg", small_clip, few),
        *(
            case(f"{name}: train", "sound", trained, name, SUBSAMPLED, few)
            for name in ("fedavg", "public-only", "weiavg", "pfa", "pfa-plus", "pdp-fl", "pdp-fl-plus")
        ),
        *(
            case(f"{name}: project, hostile basis", "sound", _projected, name, SUBSAMPLED, few)
            for name in ("pfa-plus", "pdp-fl-plus")
        ),
        case("DP-SGD, fixed-size batches, replace-one", "sound", _fixed, "fixed", 10_000),
        case("P4 PFA: fixed-size batches charged as Poisson", "published", _fixed, "poisson", 10_000),
        case("P2 PFA: rounds charged, steps taken", "published", _late_charge, few),
        case("record replaced, charged as zero-out", "published", _replaced_as_zeroed, few),
    ]
