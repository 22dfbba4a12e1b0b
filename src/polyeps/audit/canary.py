"""Audits with a canary: noisy sums over a sampled cohort, run on the worst pair of neighbouring data sets.

There is no model here. One client, the canary, sends what the clipping code lets through at most; the others send what
shows the canary best: nothing where a client may be added or removed, the canary's opposite where the size of the
cohort is fixed and a client can only be replaced. Only clipping, sampling and noise are run, many times with the
canary and many times without, and what is seen is projected on the canary's direction: noise across it tells nothing.

Each trial is summed up by the logarithm of the likelihood ratio of all its rounds. A bound on ε is true whatever the
score is; this one makes it as large as it can be.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import dp_accounting as dp
import numpy as np
from numpy.typing import NDArray

from polyeps.accounting import epsilon
from polyeps.accounting.events import FixedSize, Gaussian, Poisson
from polyeps.accounting.histories import fold_gaussians
from polyeps.audit.montecarlo import Finding, Floats, Scores, bound, guesses_in_one_run, log_ratio
from polyeps.core import check_delta
from polyeps.errors import InputError

Clip = Callable[[Floats], Floats]  # what a client does to its update before it is summed

_BLOCK = 50_000  # trials at a time, so that they stay in the processor's cache


@dataclass(frozen=True)
class Release:
    """One noisy sum. `noise_multiplier` is the deviation over the clip norm; `clip` clips to norm one.

    `canary` is an update as large as the auditor likes: layers, rows, columns. A clip bit is a release too: its
    "clip" turns the update into what is summed.
    """

    noise_multiplier: float
    clip: Clip
    canary: Floats

    def displacement(self, *, replaced: bool) -> float:
        """How far the sum moves when the canary is in the cohort, measured by running the clipping code."""
        sent = self.clip(self.canary)
        instead = self.clip(-self.canary) if replaced else np.zeros_like(sent)
        return float(np.linalg.norm((sent - instead).ravel()))


@dataclass(frozen=True)
class Mechanism:
    """What is run: every round a cohort is drawn, and all `releases` are sums over that one cohort.

    A "poisson" cohort has `cohort` of `population` clients on average and a client may be added or removed; a
    "fixed" one has exactly that many and a client may be replaced. `noise_lost` is the share of clients that
    drop out after the noise was divided among them. `count_revealed` says that the size of a Poisson cohort can be
    seen, as it can be in the scale of the noise where sums are divided by it.
    """

    sampler: Literal["poisson", "fixed"]
    population: int
    cohort: int
    rounds: int
    releases: tuple[Release, ...]
    noise_lost: float = 0.0
    count_revealed: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.cohort <= self.population:
            raise InputError(f"cohort must be between 1 and the population {self.population}, not {self.cohort}")
        if self.rounds < 1 or not self.releases:
            raise InputError("a mechanism needs at least one round and one release")
        if not 0 <= self.noise_lost < 1:
            raise InputError(f"noise-lost must be at least 0 and below 1, not {self.noise_lost}")
        if self.shows_count and self.rate == 1:
            raise InputError("where everybody takes part the count tells who is there; there is nothing to audit")

    @property
    def rate(self) -> float:
        """How likely a client is to be in a cohort."""
        return self.cohort / self.population

    @property
    def shows_count(self) -> bool:
        """Whether the size of the cohort is seen and tells something: that of a fixed one is known anyway."""
        return self.count_revealed and self.sampler == "poisson"

    @cached_property
    def shifts(self) -> tuple[float, ...]:
        """How far the canary moves each release, in deviations of the noise that was really added."""
        kept = math.sqrt(1 - self.noise_lost)
        return tuple(
            release.displacement(replaced=self.sampler == "fixed") / (release.noise_multiplier * kept)
            for release in self.releases
        )


def certified(mechanism: Mechanism, delta: float) -> float:
    """The ε of what is really run, by the rules of docs/soundness.md; infinite where none applies."""
    if mechanism.shows_count:
        return math.inf
    if mechanism.sampler == "fixed":  # whose accounting doubles the reach itself
        inner = Gaussian(2 * fold_gaussians(*(1 / shift for shift in mechanism.shifts)))
        event = FixedSize(mechanism.population, mechanism.cohort, inner)
        return epsilon(dp.SelfComposedDpEvent(event, mechanism.rounds), delta, adjacency="replace-one")
    event = Poisson(mechanism.rate, Gaussian(fold_gaussians(*(1 / shift for shift in mechanism.shifts))))
    return epsilon(dp.SelfComposedDpEvent(event, mechanism.rounds), delta)


def scores(mechanism: Mechanism, trials: int, generator: np.random.Generator) -> tuple[Scores, Scores]:
    """Run all rounds `trials` times: the log-likelihood ratios seen with the canary, and without it.

    Trials are independent of each other. The two worlds of one trial share their noise, which halves the work and
    is allowed: the bound on each world holds by itself, and their errors are added.
    """
    blocks = [_block(mechanism, min(_BLOCK, trials - done), generator) for done in range(0, trials, _BLOCK)]
    present, absent = zip(*blocks, strict=True)
    return np.concatenate(present), np.concatenate(absent)


def _block(mechanism: Mechanism, trials: int, generator: np.random.Generator) -> tuple[Scores, Scores]:
    present, absent = np.zeros((2, trials), np.float32)
    others = mechanism.population - 1
    count: NDArray[np.int64] | None = None
    for _ in range(mechanism.rounds):
        joined = np.flatnonzero(generator.random(trials, np.float32) < mechanism.rate)
        noise = [generator.standard_normal(trials, np.float32) for _ in mechanism.shifts]
        if mechanism.shows_count:
            count = generator.binomial(others, mechanism.rate, trials)
        without = _log_ratio(mechanism, noise, count)
        absent += without
        moved = [seen[joined] + np.float32(shift) for seen, shift in zip(noise, mechanism.shifts, strict=True)]
        without[joined] = _log_ratio(mechanism, moved, None if count is None else count[joined] + 1)
        present += without
    return present, absent


def _log_ratio(mechanism: Mechanism, seen: list[Scores], count: NDArray[np.int64] | None) -> Scores:
    """How much likelier one round's releases, and the cohort's size where it is seen, are with the canary than without.

    With the canary a round is a mixture: it joined with probability q, and otherwise nothing differs.
    """
    rate = mechanism.rate
    if_joined = np.zeros(len(seen[0]), np.float32)
    for values, shift in zip(seen, mechanism.shifts, strict=True):
        if_joined += np.float32(shift) * values - np.float32(shift**2 / 2)
    if count is not None:
        with np.errstate(divide="ignore"):  # nobody came: surely not joined; all, and one more: surely joined
            if_joined += np.log(count / (mechanism.population - count) * ((1 - rate) / rate))
    return log_ratio(if_joined, rate)


def audit(
    mechanism: Mechanism, delta: float, trials: int, generator: np.random.Generator, confidence: float = 0.99
) -> Finding:
    """A lower bound on the mechanism's ε at δ, from `trials` runs with the canary and as many without."""
    check_delta(delta)
    if trials < 2:
        raise InputError(f"an audit needs at least 2 trials, not {trials}")
    return bound(*scores(mechanism, trials, generator), delta, confidence)


def one_run(
    mechanism: Mechanism,
    canaries: int,
    guesses: int,
    delta: float,
    generator: np.random.Generator,
    confidence: float = 0.99,
) -> Finding:
    """Audit a single run: orthogonal canaries do not disturb each other, so each is a trial of its own.

    The boldest guesses are made, half of them "in" and half "out".
    """
    if mechanism.sampler == "fixed" or mechanism.shows_count:
        raise InputError("one run audits Poisson cohorts of hidden size only: else canaries betray each other")
    put_in = generator.random(canaries) < 0.5
    seen = np.where(put_in, *scores(mechanism, canaries, generator))
    return guesses_in_one_run(put_in, seen, delta, confidence, (guesses / canaries,))
