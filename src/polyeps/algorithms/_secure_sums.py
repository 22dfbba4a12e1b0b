"""Releases of a round that are summed unseen: what each client clips and adds, and what the server then knows.

A release of share s costs s of a round's privacy: its noise multiplier is scale/√s, so that releases whose shares add
up to one cost, together, one Gaussian of multiplier `scale`. Without a scale nothing is promised, and values are sent
as they are.

Of all that decides the noise a client is told one number, how many were drawn; everything else it has agreed to
(`Counts`, clip, scale, bits), and a fingerprint of that is part of every sum's name. So whoever is in a sum with it has
agreed to the same. Being told another number does not help: a larger one needs more answers than there are, a smaller
one makes the noise larger. What is released has one law, whoever and however many were drawn: see `counts`. For the
same reason integers have as many bits whoever was drawn: sums that wrap around elsewhere would tell of a larger cohort.
"""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from typing import Any, Literal, get_args

import dp_accounting
import numpy as np
import torch
from torch import Tensor

from polyeps.accounting.certificate import SECRET_COHORT
from polyeps.accounting.events import Gaussian, Poisson, RareFailureDpEvent
from polyeps.accounting.histories import on_one_sample
from polyeps.algorithms._averaging import LEARNING, RATE, Federation
from polyeps.algorithms._sum_counts import Counts
from polyeps.core import AGREED, PROGRESS, Ask, Payload, Spec, Specs, State, Streams, SumTerms, Task, Work
from polyeps.engine.noise import normals_for
from polyeps.errors import InputError
from polyeps.mechanisms.clipping import clip_to_norm
from polyeps.mechanisms.integer import UNIT, Grid, event_of_parts, padded
from polyeps.mechanisms.integer_encoding import decode_sum, encode_rows, top_up_noise
from polyeps.mechanisms.integer_noise import LARGEST_DEVIATION, SMALLEST_DEVIATION, NoiseName
from polyeps.mechanisms.random_words import words_of
from polyeps.messages import vector, whole_number

DRAWN = "drawn"  # in a task: how many clients were asked
# gaussian: ideal, in floating point. Others: on integers, which a secure sum can hide, with the price of what is sent.
NoiseKind = Literal["gaussian", "skellam", "discrete-gaussian"]
FINE = 4096  # steps of the integers' grid in a clip norm: finer ones save no privacy worth having
_REMEDY = {
    True: "give a larger budgets.epsilon or smaller budgets.scale, run fewer rounds",
    False: "give a smaller budgets.epsilon or larger budgets.scale",
}


@dataclass(frozen=True)
class Release:
    """One vector of every client, clipped as a whole, summed with noise."""

    action: str  # in which it is made; the tensor has the same name
    size: int
    clip: float
    share: float = 1.0  # of the round's privacy
    noise: NoiseKind = "gaussian"
    agents: int = 1  # most clients that may ever add noise to one sum: only sums of discrete Gaussians depend on it

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise InputError(f"the share of a round's privacy must be above 0 and at most 1, not {self.share}")
        if self.noise not in get_args(NoiseKind):
            raise InputError(f"noise must be one of {', '.join(get_args(NoiseKind))}, not {self.noise!r}")

    def deviation(self, scale: float) -> float:
        """Return the deviation of the noise that its price is for, where the round's multiplier is `scale`."""
        return scale / math.sqrt(self.share) * self.clip

    def event(self, scale: float) -> Any:
        """Return what it costs, before sampling; noise beyond what is promised is not counted."""
        if self.noise == "gaussian":
            return Gaussian(scale / math.sqrt(self.share))
        step, dimension = self.clip / FINE, padded(self.size)
        most = self.agents + 1  # the server tops noise up
        return event_of_parts(self._lattice, self.clip, step, dimension, self.deviation(scale), most)

    def grid(self, scale: float, parts: int, bits: int, rotation: int = 0) -> Grid:
        """Return the integers as all agree on them, with noise divided into so many parts."""
        deviation, lattice = self.deviation(scale), self._lattice
        return Grid(self.clip, self.clip / FINE, self.size, parts, parts, deviation, bits, rotation, lattice)

    def part(self, scale: float, parts: int) -> Fraction:
        """Return the variance of one of so many parts of the noise: in squared steps, where it is on integers."""
        return _part(self, scale, parts)

    def gives(self, scale: float) -> Specs:
        """What a client, or the sum over clients, sends of it."""
        if self.noise == "gaussian" or not scale:
            return {self.action: vector(self.size, sys.float_info.max)}
        return {self.action: Spec((padded(self.size),), "int64", 0, 2**62)}

    @property
    def _lattice(self) -> NoiseName:
        return "skellam" if self.noise == "skellam" else "discrete-gaussian"


@dataclass(frozen=True)
class SecureSums:
    """How releases are summed: over all clients of a federation, or over those of one group."""

    scale: float  # of a round, which is public
    counts: Counts
    streams: Callable[[int], Streams]  # the server's own, of a round
    row: int = 0  # of those streams
    group: str | None = None  # whose clients are summed; None: all

    @classmethod
    def of_all(cls, federation: Federation, dropouts: float, colluders: float) -> SecureSums:
        """Return sums over all clients, everybody at the strictest level."""
        rounds, delta = federation.rounds, federation.delta
        counts = Counts.settled(
            len(federation.groups), federation.rate, dropouts, colluders, delta=delta, rounds=rounds
        )
        return cls(max(federation.scales.values()), counts, federation.noise)

    @property
    def surplus(self) -> float:
        """The released variance over the one that is paid for, when nobody is missing."""
        return float(self.counts.rule(self.counts.enrolled).surplus)

    # What is agreed

    def bits(self, release: Release) -> int | None:
        """Return the bits of a number that is sent, so that likely sums fit; None where it is not an integer."""
        return _bits(release, self.scale, self.counts)

    def fingerprint(self, release: Release) -> Tensor:
        """Return what stands for all that decides the noise of a release, (4,) int64."""
        digest = _digest(release, self.scale, self.counts, self.group)
        return torch.from_numpy(np.frombuffer(digest, "<i8").copy())

    def drawn(self, release: Release, asked: Payload) -> int:
        """Return how many were drawn, as a client was told; refuse what it has not agreed to."""
        told, agreed = asked.get(DRAWN), asked.get(AGREED)
        if agreed is None or not torch.equal(agreed.cpu(), self.fingerprint(release)):
            raise InputError(f"{release.action!r} is asked for under other terms than were agreed to; build both alike")
        if told is None or told.numel() != 1 or told.dtype not in (torch.int64, torch.int32):
            raise InputError(f"{release.action!r} needs to know how many clients were drawn, as one integer")
        if not 1 <= int(told) <= self.counts.enrolled:
            raise InputError(
                f"{int(told)} clients cannot have been drawn of {self.counts.enrolled}; ask 1 to {self.counts.enrolled}"
            )
        return int(told)

    def terms(self, release: Release, asked: Payload) -> SumTerms:
        """Return what a client insists on, given what it was asked with."""
        drawn = self.drawn(release, asked)
        return SumTerms(drawn, self.counts.least(drawn), self.counts.colluders, self.bits(release))

    def agrees(self, release: Release, asked: Payload) -> bool:
        """Return whether clients agree to make a release, by what the server sent."""
        try:
            self.drawn(release, asked)
        except InputError:
            return False
        return True

    def takes(self) -> Specs:
        """Return what clients are told of a sum."""
        unneeded = not self.scale
        words = Spec((4,), "int64", -(2.0**63), 2.0**63, optional=unneeded)
        return {DRAWN: replace(whole_number(1, self.counts.enrolled), optional=unneeded), AGREED: words}

    def fits(self, release: Release) -> Callable[[Payload], None]:
        """Return the check of what the server sent. Without noise there is nothing to agree on."""

        def check(asked: Payload) -> None:
            if self.scale:
                self.drawn(release, asked)

        return check

    def check(self, *releases: Release) -> None:
        """Refuse noise that could not be drawn, before anybody has paid: for cohorts of all likely sizes."""
        for release in releases:
            if release.noise == "gaussian" or not self.scale:
                continue
            for drawn in self.counts.sizes:
                steps = release.deviation(self.scale) / math.sqrt(self.counts.parts(drawn)) / (release.clip / FINE)
                _check_drawable(release, steps, f"each of {drawn} clients")
            whole = self.released(release, self.counts.rule(self.counts.enrolled).surplus)
            _check_drawable(release, math.sqrt(whole), "the server")

    def conditions(self) -> tuple[str, ...]:
        """Return sentences on what the guarantee hangs on."""
        return conditions([self.counts])

    # What clients do

    def from_clients(self, release: Release, work: Work, values: Tensor) -> Payload:
        """Return what clients send of values (n, size): clipped, with their parts of the noise."""
        if float(work.scale.max(initial=0.0)) > self.scale:
            raise InputError(
                f"clients paid for the noise multiplier {work.scale.max():g}, and the sum is made for {self.scale:g}; "
                "build the algorithm with the noise they pay for"
            )
        if not self.scale:
            return {release.action: values}
        parts = self.counts.parts(self.drawn(release, work.payload))
        bits = self.bits(release)
        if bits is None:
            deviation = math.sqrt(release.part(self.scale, parts))
            clipped = clip_to_norm(values, release.clip)
            return {release.action: clipped + deviation * normals_for(work.streams, clipped, release.action)}
        rotation = int(work.memory[PROGRESS][0, 0]) - 1  # the round's number
        grid = release.grid(self.scale, parts, bits, rotation)
        return {release.action: torch.from_numpy(encode_rows(grid, values, words_of(work.streams, release.action)))}

    # What the server does

    def of(self, state: State, ask: Ask, release: Release, asked: Payload) -> Tensor | None:
        """Return the noisy sum over the clients drawn, or noise where too few were; None where too few answered."""
        drawn = self._clients(state.roster)
        entered = len(self._clients(state.entered)) if state.entered else self.counts.enrolled
        rule = self.counts.rule(max(entered, len(drawn)))
        bits = self.bits(release)
        told = {DRAWN: torch.tensor(len(drawn)), AGREED: self.fingerprint(release)}
        task = Task(release.action, drawn, {**asked, **told})
        if not self.scale:  # nothing is promised, and nothing to be kept alike
            return ask.total(task, self.counts.least(len(drawn))).payload.get(release.action) if drawn else None
        whole = self.released(release, rule.surplus)
        if len(drawn) < rule.fewest:
            size = release.size if bits is None else padded(release.size)
            nothing = torch.zeros(size, dtype=torch.float32 if bits is None else torch.int64)
            return self._topped_up(state, release, nothing, whole, bits)
        total = ask.total(task, max(len(drawn) - rule.dropouts, self.counts.least(len(drawn))), bits)
        if release.action not in total.payload:
            return None
        inside = len(total.ids) * release.part(self.scale, self.counts.parts(len(drawn)))
        missing = whole - inside if self.counts.rate < 1 else Fraction(0)
        return self._topped_up(state, release, total.payload[release.action], missing, bits)

    def released(self, release: Release, surplus: Fraction) -> Fraction:
        """Return the one variance of what is released, as `Release.part` counts it.

        On integers it is a little more, so that whatever is missing of it can be drawn: no less than a unit, and of
        discrete Gaussians, whose sums are only nearly one, no less than the smallest part of a client.
        """
        return _released(release, self.scale, self.counts.enrolled, surplus)

    def _clients(self, among: tuple[Any, ...]) -> tuple[str, ...]:
        return tuple(client.id for client in among if self.group is None or client.group == self.group)

    def _topped_up(self, state: State, release: Release, total: Tensor, variance: Fraction, bits: int | None) -> Tensor:
        """Return a sum with the server's own noise on top, as a vector."""
        own = self.streams(state.round).select([self.row])
        if bits is None:
            if variance > 0:
                noise = normals_for(own, torch.zeros(1, release.size, device=total.device), release.action)[0]
                total = total + (math.sqrt(variance) * noise).to(total)
            return total.to(state.model)
        grid = release.grid(self.scale, 1, bits, state.round)
        steps: Any = total.cpu().numpy().astype(np.int64)
        if variance > 0:
            steps = top_up_noise(grid, steps, float(variance), words_of(own, release.action))
        return decode_sum(grid, steps).to(state.model)


# What is the same in every round and for every client of a run is computed once.


@lru_cache(maxsize=256)
def _part(release: Release, scale: float, parts: int) -> Fraction:
    if release.noise == "gaussian":
        return Fraction(release.deviation(scale)) ** 2 / parts
    return Fraction(release.grid(scale, parts, 1).client_variance)


@lru_cache(maxsize=256)
def _bits(release: Release, scale: float, counts: Counts) -> int | None:
    if release.noise == "gaussian" or not scale:
        return None
    most = math.ceil(counts.expected + 6 * math.sqrt(counts.expected))
    everybodys = release.deviation(scale) * math.sqrt(counts.rule(counts.enrolled).surplus)
    grid = release.grid(scale, 1, 1)
    return Grid.fitting(grid.clip, grid.granularity, grid.size, most, most, everybodys, noise=grid.noise).bits


@lru_cache(maxsize=256)
def _digest(release: Release, scale: float, counts: Counts, group: str | None) -> bytes:
    spelled = repr((release, scale, counts, group, _bits(release, scale, counts)))
    return hashlib.blake2b(spelled.encode(), digest_size=32).digest()


@lru_cache(maxsize=256)
def _released(release: Release, scale: float, enrolled: int, surplus: Fraction) -> Fraction:
    # All of the parts, n/(n - lost) of the variance paid for, where that is largest.
    largest = surplus.numerator * release.part(scale, surplus.denominator)
    if release.noise == "gaussian":
        return largest
    smallest = UNIT if release.noise == "skellam" else release.part(scale, max(1, release.agents))
    return largest + (enrolled + 1) * UNIT + smallest


def _check_drawable(release: Release, steps: float, who: str) -> None:
    if not SMALLEST_DEVIATION <= steps <= LARGEST_DEVIATION:
        raise InputError(
            f'noise = "{release.noise}" can be drawn for deviations of {SMALLEST_DEVIATION:g} to '
            f"{LARGEST_DEVIATION:g} steps of the grid, and {who} would need {steps:g}; "
            + _REMEDY[steps > LARGEST_DEVIATION]
            + (", move split nearer to 0.5" if release.share < 1 else "")
            + ', or take noise = "gaussian"'
        )


def dues(rate: float, releases: Iterable[Release], scale: float, failure: float = 0.0) -> Any:
    """Return what a round costs every client: all its releases from one secret cohort, and that its size was bad."""
    events = [release.event(scale) for release in releases]
    events += [RareFailureDpEvent(failure)] if failure else []
    return Poisson(rate, on_one_sample(dp_accounting.ComposedDpEvent(events)) if events[1:] else events[0])


def conditions(all_counts: list[Counts]) -> tuple[str, ...]:
    """Return what a guarantee by secure sums hangs on, of one or several groups."""
    missing, telling = ([getattr(counts, name) for counts in all_counts] for name in ("dropouts", "colluders"))
    told = f"at most {_range(telling)} of them tell others their noise" if any(telling) else "none tells its noise"
    sums = (
        f"It holds as long as the server sees only sums from which at most {_range(missing)} of the clients drawn are "
        f"missing, and {told}."
        if any(missing)
        else f"It holds as long as the server sees only sums from which no client drawn is missing, and {told}."
    )
    return sums, *((SECRET_COHORT,) if any(counts.rate < 1 for counts in all_counts) else ())


def _range(numbers: list[int]) -> str:
    low, high = min(numbers), max(numbers)
    return str(low) if low == high else f"{low} to {high} (by privacy level)"


def starting(size: int, rate_decay: float) -> Specs:
    """What `start_of` sends for a model of `size` parameters."""
    return {"model": vector(size)} | ({RATE: LEARNING} if rate_decay != 1 else {})


def start_of(state: State, rate_decay: float) -> Payload:
    """What clients need to train in a round: the model, and the learning rate's factor where it falls."""
    asked = {"model": state.model}
    if rate_decay != 1:
        asked[RATE] = torch.tensor(rate_decay**state.round, dtype=torch.float64)
    return asked


def check_rates(server_rate: float, rate_decay: float) -> None:
    if not 0 < server_rate < math.inf:
        raise InputError(f"server_rate must be a finite number above 0, not {server_rate}")
    if not 0 < rate_decay <= 1:
        raise InputError(f"rate_decay must be above 0 and at most 1, not {rate_decay}")
