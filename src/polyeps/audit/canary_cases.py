"""The mistakes in accounts of FedHDP and CMP-Fed that a canary exposes, each beside a sound form it must not refute.

An account says what is run and what is charged for it; the two agree in the sound ones. Clipping is code that is run on
the canary, so that a wrong norm is found by its effect and not by being told.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import dp_accounting as dp
import numpy as np
import torch
from dp_accounting.dp_event import DpEvent

from polyeps.accounting import Accountant, epsilon
from polyeps.accounting.events import FixedSize, Gaussian, Poisson
from polyeps.accounting.histories import split_clip_bit
from polyeps.audit.canary import Clip, Mechanism, Release, audit, certified
from polyeps.audit.montecarlo import Floats
from polyeps.audit.rows import Case, Effort, Shown
from polyeps.mechanisms.clipping import clip_to_norm

DELTA = 1e-4  # of both papers' settings as docs/soundness.md takes them


@dataclass(frozen=True)
class Account:
    """One audit: what is run, what its account charges for a round, and how many trials tell the two apart."""

    paper: Literal["fedhdp", "cmp-fed"]
    name: str
    mechanism: Mechanism
    charged: DpEvent
    sound: bool
    trials: int = 50_000
    accountant: Accountant = "pld"

    @property
    def claimed(self) -> float:
        """The ε the account arrives at."""
        replaced = isinstance(self.charged, FixedSize)
        return epsilon(
            dp.SelfComposedDpEvent(self.charged, self.mechanism.rounds),
            DELTA,
            adjacency="replace-one" if replaced else "zero-out",
            accountant=self.accountant,
        )

    @property
    def what(self) -> str:
        return f"{self.paper} account: {self.name}"


def judge(account: Account, effort: Effort) -> Shown:
    """Audit one account: what it claims, what we certify for the mechanism as it is run, and what is shown."""
    trials = effort.trials(account.trials)
    found = audit(account.mechanism, DELTA, trials, effort.generator(account.what), effort.confidence)
    return Shown(account.claimed, certified(account.mechanism, DELTA), found.epsilon, DELTA, trials)


def cases() -> list[Case]:
    """Return a row for every account."""
    return [
        Case(one.what, "sound" if one.sound else "published", "worst-case pair", partial(judge, one))
        for one in accounts()
    ]


def large_canary(layers: int = 4, rank: int = 16, size: float = 1e6) -> Floats:
    """An update that fills every norm: layers of equal norm, each with all its singular values equal."""
    return np.tile(size * np.eye(rank), (layers, 1, 1))


def joint_clip(update: Floats) -> Floats:
    """One norm over all layers and their biases: the very code that FedHDP and CMP-Fed clip with."""
    row = torch.from_numpy(np.ascontiguousarray(update, dtype=np.float64)).reshape(1, -1)
    return clip_to_norm(row, 1.0).numpy().reshape(update.shape)


def layer_clip(update: Floats) -> Floats:
    """Unsound: every layer has a clip norm of its own, so four of them together have twice the norm."""
    return np.asarray(update / np.maximum(1.0, np.linalg.norm(update, axis=(1, 2), keepdims=True)))


def spectral_clip(update: Floats) -> Floats:
    """Unsound: `numpy.linalg.norm(U, 2)` of a matrix is its largest singular value, and there are others."""
    return update / max(1.0, float(np.linalg.norm(update.reshape(-1, update.shape[-1]), 2)))


def clip_bit(middle: float) -> Clip:
    """What is summed to learn how many updates are within the clip norm: 0 or 1, less `middle`."""
    return lambda sign: np.where(sign > 0, 1.0 - middle, -middle)


def accounts(clip: Clip = joint_clip) -> tuple[Account, ...]:
    """All accounts; `clip` is the clipping code under audit in those that are not about another one."""
    return (*_fedhdp_accounts(clip), *_cmp_fed_accounts(clip))


def _fedhdp_accounts(clip: Clip) -> list[Account]:
    rate, rounds = 0.05, 100
    whole = (2000, 100)  # clients, and how many are drawn a round

    def update(multiplier: float) -> Release:
        return Release(multiplier, clip, large_canary())

    def bit(deviation: float, middle: float) -> Release:
        return Release(deviation, clip_bit(middle), np.ones(1))

    def at(multiplier: float) -> DpEvent:
        return Poisson(rate, Gaussian(multiplier))

    noisy = (update(0.9),)
    uncharged = (update(1.0), bit(1.0, middle=0.0))
    charged = (update(split_clip_bit(1.0, 1.0)), bit(1.0, middle=0.5))
    fixed = Mechanism("fixed", *whole, rounds, noisy)
    # A small group, of which the realised count tells much; its own noise, rate and rounds.
    small = Mechanism("poisson", 4, 1, 10, (update(2.0),))
    of_small = Poisson(small.rate, Gaussian(2.0))
    case = partial(Account, "fedhdp")
    return [
        case("C2 fixed-size cohorts charged as Poisson", fixed, at(0.9), False, 20_000),
        case("Poisson cohorts", Mechanism("poisson", *whole, rounds, noisy), at(0.9), True),
        case("H1 sums divided by the realised count", replace(small, count_revealed=True), of_small, False),
        case("sums divided by the expected count", small, of_small, True),
        case("H2 clip bits not charged", Mechanism("poisson", *whole, rounds, uncharged), at(1.0), False, 500_000),
        case("clip bits charged", Mechanism("poisson", *whole, rounds, charged), at(1.0), True),
    ]


def _cmp_fed_accounts(clip: Clip) -> list[Account]:
    clients, cohort, rounds = 6000, 100, 180
    for_poisson, for_fixed, for_one_release = 1.5134, 3.2401, 1.1850  # noise that each account gives ε = 1 for

    def run(
        multiplier: float,
        sampler: Literal["poisson", "fixed"] = "poisson",
        clipping: Clip = clip,
        noise_lost: float = 0.0,
    ) -> Mechanism:
        both = (Release(multiplier, clipping, large_canary()),) * 2
        return Mechanism(sampler, clients, cohort, rounds, both, noise_lost=noise_lost)

    two = dp.ComposedDpEvent([Gaussian(for_poisson)] * 2)
    whole = Poisson(cohort / clients, two)
    half = Poisson(cohort / clients, Gaussian(for_one_release))
    fixed = FixedSize(clients, cohort, dp.ComposedDpEvent([Gaussian(for_fixed)] * 2))
    lost = 0.3
    case = partial(Account, "cmp-fed")
    return [
        case("C4 clipped by the spectral norm", run(for_poisson, clipping=spectral_clip), whole, False, 20_000),
        case("C4 clipped layer by layer", run(for_poisson, clipping=layer_clip), whole, False, 20_000),
        case("C3 one of two releases charged", run(for_one_release), half, False, 500_000, "rdp"),
        case("C2 fixed-size cohorts charged as Poisson", run(for_poisson, "fixed"), whole, False, 20_000),
        case("C5 noise of dropouts lost", run(for_poisson, noise_lost=lost), whole, False, 1_000_000),
        case("noise for the survivors alone", run(for_poisson / (1 - lost) ** 0.5, noise_lost=lost), whole, True),
        case("Poisson cohorts, one norm, both releases charged", run(for_poisson), whole, True),
        case("fixed-size cohorts charged as such", run(for_fixed, "fixed"), fixed, True),
    ]
