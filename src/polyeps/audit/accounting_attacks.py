"""Attacks on accounts of FedHDP and CMP-Fed: a canary exposes published mistakes, and must not refute sound forms.

An account pairs a mechanism with the price charged for it; in sound accounts the two agree. The clipping code is run on
the canary, so that a wrong norm is found by its effect.

FedHDP: Aldaghri et al., "Federated Learning with Heterogeneous Differential Privacy", 2021,
https://arxiv.org/abs/2110.15252. CMP-Fed: Guo et al., "Agent-Level Differentially Private Federated Learning via
Compressed Model Perturbation", IEEE CNS 2022, https://openreview.net/forum?id=IRG_AP-IHR.
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
from polyeps.audit.canary import Clip, NoisySum, SumMechanism, audit_mechanism, certified_epsilon
from polyeps.audit.lower_bounds import Samples
from polyeps.audit.results import Attack, Effort, Evidence
from polyeps.mechanisms.clipping import clip_to_norm

ACCOUNTING_DELTA = 1e-4  # of both papers' settings, as in docs/reference/soundness.md


@dataclass(frozen=True)
class AuditedAccount:
    """A mechanism, the price its account charges for a round, and the number of trials that tell them apart."""

    paper: Literal["fedhdp", "cmp-fed"]
    name: str
    mechanism: SumMechanism
    charged: DpEvent
    sound: bool
    trials: int = 50_000
    accountant: Accountant = "pld"

    @property
    def claimed(self) -> float:
        """Return the ε of the account."""
        replaced = isinstance(self.charged, FixedSize)
        return epsilon(
            dp.SelfComposedDpEvent(self.charged, self.mechanism.rounds),
            ACCOUNTING_DELTA,
            adjacency="replace-one" if replaced else "zero-out",
            accountant=self.accountant,
        )

    @property
    def title(self) -> str:
        """Return the name of the attack."""
        return f"{self.paper} account: {self.name}"


def audit_account(account: AuditedAccount, effort: Effort) -> Evidence:
    """Audit one account, with the certificate of the mechanism as it is run."""
    trials = effort.trials(account.trials)
    generator = np.random.default_rng(effort.seed_for())
    found = audit_mechanism(account.mechanism, ACCOUNTING_DELTA, trials, generator, effort.confidence)
    certified = certified_epsilon(account.mechanism, ACCOUNTING_DELTA)
    return Evidence(account.claimed, certified, found, ACCOUNTING_DELTA, trials)


def accounting_attacks() -> list[Attack]:
    """Return an attack on every account."""
    return [
        Attack(one.title, "sound" if one.sound else "published", "worst-case pair", partial(audit_account, one))
        for one in accounts()
    ]


def large_canary(layers: int = 4, rank: int = 16, size: float = 1e6) -> Samples:
    """Return an update that fills every norm: layers of equal norm, each with equal singular values."""
    return np.tile(size * np.eye(rank), (layers, 1, 1))


def joint_clip(update: Samples) -> Samples:
    """Clip by one norm over all layers and their biases, with the code that FedHDP and CMP-Fed use."""
    row = torch.from_numpy(np.ascontiguousarray(update, dtype=np.float64)).reshape(1, -1)
    return clip_to_norm(row, 1.0).numpy().reshape(update.shape)


def layer_clip(update: Samples) -> Samples:
    """Clip every layer by its own norm. Unsound: four layers together have twice the norm."""
    return np.asarray(update / np.maximum(1.0, np.linalg.norm(update, axis=(1, 2), keepdims=True)))


def spectral_clip(update: Samples) -> Samples:
    """Clip by `numpy.linalg.norm(U, 2)`. Unsound: that is the largest singular value, and there are others."""
    return update / max(1.0, float(np.linalg.norm(update.reshape(-1, update.shape[-1]), 2)))


def clip_bit(middle: float) -> Clip:
    """Return the number that is summed to count the updates within the clip norm: 0 or 1, less `middle`."""
    return lambda sign: np.where(sign > 0, 1.0 - middle, -middle)


def accounts(clip: Clip = joint_clip) -> tuple[AuditedAccount, ...]:
    """Return all accounts; `clip` is the clipping code under audit, except where the account is about another one."""
    return (*_fedhdp_accounts(clip), *_cmp_fed_accounts(clip))


def _fedhdp_accounts(clip: Clip) -> list[AuditedAccount]:
    rate, rounds = 0.05, 100
    whole = (2000, 100)  # clients, and how many are drawn a round

    def update(multiplier: float) -> NoisySum:
        return NoisySum(multiplier, clip, large_canary())

    def bit(deviation: float, middle: float) -> NoisySum:
        return NoisySum(deviation, clip_bit(middle), np.ones(1))

    def at(multiplier: float) -> DpEvent:
        return Poisson(rate, Gaussian(multiplier))

    noisy = (update(0.9),)
    uncharged = (update(1.0), bit(1.0, middle=0.0))
    charged = (update(split_clip_bit(1.0, 1.0)), bit(1.0, middle=0.5))
    fixed = SumMechanism("fixed", *whole, rounds, noisy)
    # A small group, whose realised count is informative; its own noise, rate and rounds.
    small = SumMechanism("poisson", 4, 1, 10, (update(2.0),))
    of_small = Poisson(small.rate, Gaussian(2.0))
    case = partial(AuditedAccount, "fedhdp")
    return [
        case("C2 fixed-size cohorts charged as Poisson", fixed, at(0.9), False, 20_000),
        case("Poisson cohorts", SumMechanism("poisson", *whole, rounds, noisy), at(0.9), True),
        case("H1 sums divided by the realised count", replace(small, count_revealed=True), of_small, False),
        case("sums divided by the expected count", small, of_small, True),
        case("H2 clip bits not charged", SumMechanism("poisson", *whole, rounds, uncharged), at(1.0), False, 500_000),
        case("clip bits charged", SumMechanism("poisson", *whole, rounds, charged), at(1.0), True),
    ]


def _cmp_fed_accounts(clip: Clip) -> list[AuditedAccount]:
    clients, cohort, rounds = 6000, 100, 180
    for_poisson, for_fixed, for_one_release = 1.5134, 3.2401, 1.1850  # noise for ε = 1 in each account

    def run(
        multiplier: float,
        sampler: Literal["poisson", "fixed"] = "poisson",
        clipping: Clip = clip,
        noise_lost: float = 0.0,
    ) -> SumMechanism:
        both = (NoisySum(multiplier, clipping, large_canary()),) * 2
        return SumMechanism(sampler, clients, cohort, rounds, both, noise_lost=noise_lost)

    two = dp.ComposedDpEvent([Gaussian(for_poisson)] * 2)
    whole = Poisson(cohort / clients, two)
    half = Poisson(cohort / clients, Gaussian(for_one_release))
    fixed = FixedSize(clients, cohort, dp.ComposedDpEvent([Gaussian(for_fixed)] * 2))
    lost = 0.3
    case = partial(AuditedAccount, "cmp-fed")
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
