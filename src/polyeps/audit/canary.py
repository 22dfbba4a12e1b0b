"""Audits with a canary: noisy sums over a sampled cohort, run on the worst pair of neighbouring data sets.

No model is trained. One client, the canary, sends the largest update that the clipping code lets through; the others
send nothing where a client may be added or removed, and the canary's opposite where the size of the cohort is fixed and
a client can only be replaced. Clipping, sampling and noise are run many times with the canary and many times without,
and the sums are projected on the canary's direction: noise across it carries no information.

The score of a trial is the log-likelihood ratio of all its rounds. A bound on ε is true for any score; this score makes
it as large as possible.
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
from polyeps.audit.lower_bounds import Samples, Scores, bound_from_scores, sampled_log_ratio
from polyeps.core import check_delta
from polyeps.errors import InputError

Clip = Callable[[Samples], Samples]  # a client's clipping of its update

_BLOCK = 50_000  # trials at a time, so that they stay in the processor's cache


@dataclass(frozen=True)
class NoisySum:
    """A noisy sum. `noise_multiplier` is the deviation over the clip norm; `clip` clips to norm one.

    `canary` is an update of any size: layers, rows, columns. A clip bit is a release too: its "clip" turns the update
    into the number that is summed.
    """

    noise_multiplier: float
    clip: Clip
    canary: Samples

    def displacement(self, *, replaced: bool) -> float:
        """Measure how far the canary moves the sum, by running the clipping code."""
        sent = self.clip(self.canary)
        instead = self.clip(-self.canary) if replaced else np.zeros_like(sent)
        return float(np.linalg.norm((sent - instead).ravel()))


@dataclass(frozen=True)
class SumMechanism:
    """A mechanism that draws a cohort every round; all `releases` are sums over that cohort.

    A "poisson" cohort has `cohort` of `population` clients on average and a client may be added or removed; a
    "fixed" one has exactly that many and a client may be replaced. `noise_lost` is the share of clients that drop out
    after the noise was divided among them. `count_revealed`: the size of a Poisson cohort can be seen, as it can in
    the noise of sums that are divided by it.
    """

    sampler: Literal["poisson", "fixed"]
    population: int
    cohort: int
    rounds: int
    releases: tuple[NoisySum, ...]
    noise_lost: float = 0.0
    count_revealed: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.cohort <= self.population:
            raise InputError(f"cohort must be between 1 and the population {self.population}, not {self.cohort}")
        if self.rounds < 1 or not self.releases:
            raise InputError("a mechanism needs at least one round and one release")
        if not 0 <= self.noise_lost < 1:
            raise InputError(f"noise_lost must be at least 0 and below 1, not {self.noise_lost}")
        if self.shows_count and self.rate == 1:
            raise InputError("with full participation the count reveals the canary; there is nothing to audit")

    @property
    def rate(self) -> float:
        """Return the probability that a client is in a cohort."""
        return self.cohort / self.population

    @property
    def shows_count(self) -> bool:
        """Whether the size of the cohort is seen and informative; that of a fixed one is public."""
        return self.count_revealed and self.sampler == "poisson"

    @cached_property
    def shifts(self) -> tuple[float, ...]:
        """Return how far the canary moves each release, in deviations of the noise that is actually added."""
        kept = math.sqrt(1 - self.noise_lost)
        return tuple(
            release.displacement(replaced=self.sampler == "fixed") / (release.noise_multiplier * kept)
            for release in self.releases
        )


def certified_epsilon(mechanism: SumMechanism, delta: float) -> float:
    """Return the ε of the mechanism as it is run (docs/reference/soundness.md); infinite where no rule applies."""
    if mechanism.shows_count:
        return math.inf
    if mechanism.sampler == "fixed":  # its accounting doubles the sensitivity itself
        inner = Gaussian(2 * fold_gaussians(*(1 / shift for shift in mechanism.shifts)))
        event = FixedSize(mechanism.population, mechanism.cohort, inner)
        return epsilon(dp.SelfComposedDpEvent(event, mechanism.rounds), delta, adjacency="replace-one")
    event = Poisson(mechanism.rate, Gaussian(fold_gaussians(*(1 / shift for shift in mechanism.shifts))))
    return epsilon(dp.SelfComposedDpEvent(event, mechanism.rounds), delta)


def canary_scores(mechanism: SumMechanism, trials: int, generator: np.random.Generator) -> tuple[Scores, Scores]:
    """Run all rounds `trials` times; return the log-likelihood ratios with the canary, and without it.

    Trials are independent of each other. The two worlds of one trial share their noise, which halves the work and is
    allowed: the bound on each world holds by itself, and their errors are added.
    """
    blocks = [_block(mechanism, min(_BLOCK, trials - done), generator) for done in range(0, trials, _BLOCK)]
    present, absent = zip(*blocks, strict=True)
    return np.concatenate(present), np.concatenate(absent)


def _block(mechanism: SumMechanism, trials: int, generator: np.random.Generator) -> tuple[Scores, Scores]:
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


def _log_ratio(mechanism: SumMechanism, seen: list[Scores], count: NDArray[np.int64] | None) -> Scores:
    """Return the log-likelihood ratio of one round's releases, and of the cohort's size where it is seen."""
    rate = mechanism.rate
    if_joined = np.zeros(len(seen[0]), np.float32)
    for values, shift in zip(seen, mechanism.shifts, strict=True):
        if_joined += np.float32(shift) * values - np.float32(shift**2 / 2)
    if count is not None:
        with np.errstate(divide="ignore"):  # an empty cohort excludes the canary, one too large proves it
            if_joined += np.log(count / (mechanism.population - count) * ((1 - rate) / rate))
    return sampled_log_ratio(if_joined, rate)


def audit_mechanism(
    mechanism: SumMechanism, delta: float, trials: int, generator: np.random.Generator, confidence: float = 0.99
) -> float:
    """Return a lower bound on the mechanism's ε at δ, from `trials` runs with the canary and as many without."""
    check_delta(delta)
    if trials < 2:
        raise InputError(f"an audit needs at least 2 trials, not {trials}")
    return bound_from_scores(*canary_scores(mechanism, trials, generator), delta, confidence)
