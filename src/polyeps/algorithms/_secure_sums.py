"""Secure sums of releases: what clients agree to and add, and what the server learns.

Of all that decides the noise, the server sends a client one number: how many were drawn. Everything else a client has
agreed to beforehand (`Counts`, clip, noise multiplier, bits), and a fingerprint of it is part of every sum's name. So
all clients of a sum have agreed to the same. Lying about the number does not help a server: a larger one needs more
answers than there are, a smaller one makes the noise larger. The law of what is released does not depend on who or how
many were drawn: see `_sum_counts`. For the same reason integers always have as many bits: sums that wrap around
elsewhere would reveal a larger cohort. Without noise there is no guarantee, and values are sent as they are.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polyeps import core
from polyeps.accounting.certificate import SECRET_COHORT
from polyeps.algorithms._averaging import Federation
from polyeps.algorithms._releases import FINE, Release, round_price
from polyeps.algorithms._sum_counts import Counts
from polyeps.core import Action, Algorithm, Ask, Payload, Profile, Spec, Specs, State, Streams, SumTerms, Task, Work
from polyeps.engine.noise import normals_for
from polyeps.errors import InputError
from polyeps.mechanisms.clipping import clip_to_norm
from polyeps.mechanisms.integer import padded
from polyeps.mechanisms.integer_encoding import decode_sum, encode_rows, top_up_noise
from polyeps.mechanisms.random_words import words_of
from polyeps.messages import whole_number

DRAWN = "drawn"  # in a task: how many clients were asked


@dataclass(frozen=True)
class SecureSums:
    """How releases are summed: over all clients of a federation, or over those of one group."""

    noise_multiplier: float  # of a round, which is public
    counts: Counts
    streams: Callable[[int], Streams]  # the server's own, of a round
    row: int = 0  # of those streams
    group: str | None = None  # the group whose clients are summed; None: all

    @lru_cache(maxsize=256)  # noqa: B019 - equal in every round and for every client of a run, so computed once
    def bits(self, release: Release) -> int | None:
        """Return the bits of a number that is sent, so that likely sums fit; None where it is not an integer."""
        if release.noise == "gaussian" or not self.noise_multiplier:
            return None
        most = math.ceil(self.counts.expected + 6 * math.sqrt(self.counts.expected))
        everybodys = release.deviation(self.noise_multiplier) * math.sqrt(self.counts.surplus)
        grid = release.grid(self.noise_multiplier, 1, 1)
        return replace(grid, clients=most, honest=most, deviation=everybodys).fitted().bits

    def fingerprint(self, release: Release) -> Tensor:
        """Return a fingerprint of all that decides the noise of a release, (4,) int64."""
        spelled = repr((release, self.noise_multiplier, self.counts, self.group, self.bits(release)))
        digest = hashlib.blake2b(spelled.encode(), digest_size=32).digest()
        return torch.from_numpy(np.frombuffer(digest, "<i8").copy())

    def drawn(self, release: Release, asked: Payload) -> int:
        """Return the disclosed number of clients drawn; refuse terms that a client has not agreed to."""
        drawn, agreed = asked.get(DRAWN), asked.get(core.AGREED)
        if agreed is None or not torch.equal(agreed.cpu(), self.fingerprint(release)):
            raise InputError(f"{release.action!r} is asked for under other terms than were agreed to; build both alike")
        if drawn is None or drawn.numel() != 1 or drawn.dtype not in (torch.int64, torch.int32):
            raise InputError(f"{release.action!r} needs to know how many clients were drawn, as one integer")
        if not 1 <= int(drawn) <= self.counts.enrolled:
            enrolled = self.counts.enrolled
            raise InputError(f"{int(drawn)} clients cannot have been drawn of {enrolled}; ask 1 to {enrolled}")
        return int(drawn)

    def terms(self, release: Release, asked: Payload) -> SumTerms:
        """Return the terms that a client insists on, given what the server sent."""
        drawn = self.drawn(release, asked)
        return SumTerms(drawn, self.counts.least(drawn), self.counts.colluders, self.bits(release))

    def largest(self, release: Release) -> SumTerms:
        """Return the terms of a sum over all clients."""
        counts = self.counts
        return SumTerms(counts.enrolled, counts.least(counts.enrolled), counts.colluders, self.bits(release))

    def agrees(self, release: Release, asked: Payload) -> bool:
        """Return whether clients have agreed to the terms that the server sent."""
        try:
            self.drawn(release, asked)
        except InputError:
            return False
        return True

    def takes(self) -> Specs:
        """Return the specification of what a task says about its sum."""
        unneeded = not self.noise_multiplier
        words = Spec((4,), "int64", -(2.0**63), 2.0**63, optional=unneeded)
        return {DRAWN: replace(whole_number(1, self.counts.enrolled), optional=unneeded), core.AGREED: words}

    def fits(self, release: Release) -> Callable[[Payload], None]:
        """Return the check of the terms in a task; without noise there is nothing to agree on."""

        def check(asked: Payload) -> None:
            if self.noise_multiplier:
                self.drawn(release, asked)

        return check

    def check(self, *releases: Release) -> None:
        """Refuse noise that could not be drawn for some likely cohort, before any client has paid."""
        for release in releases:
            if release.noise == "gaussian" or not self.noise_multiplier:
                continue
            grid = release.clip / FINE
            for drawn in self.counts.sizes:
                steps = release.deviation(self.noise_multiplier) / math.sqrt(self.counts.parts(drawn)) / grid
                release.check_drawable(steps, f"each of {drawn} clients")
            whole = release.total(self.noise_multiplier, self.counts.enrolled, self.counts.surplus)
            release.check_drawable(math.sqrt(whole), "the server")

    def action(
        self,
        release: Release,
        run: Callable[[Work], tuple[Payload, Payload]],
        takes: Specs,
        recalls: tuple[str, ...] = (),
    ) -> Action:
        """Return the action that makes a release, for a round that is paid for; `takes` is beside the sum's terms."""
        given = release.gives(self.noise_multiplier)
        takes = {**takes, **self.takes()}
        return Action(run, None, takes=takes, fits=self.fits(release), gives=lambda _: given, recalls=recalls)

    def check_paid(self, noise_multiplier: float) -> None:
        """Refuse a noise multiplier that clients pay for and a sum does not have."""
        if noise_multiplier > self.noise_multiplier:
            raise InputError(
                f"clients paid for the noise multiplier {noise_multiplier:g}, and the sum is made for "
                f"{self.noise_multiplier:g}; build the algorithm with the noise they pay for"
            )

    def from_clients(self, release: Release, work: Work, values: Tensor) -> Payload:
        """Return the replies of clients with values (n, size): clipped, with their parts of the noise."""
        self.check_paid(float(work.noise_multiplier.max(initial=0.0)))
        if not self.noise_multiplier:
            return {release.action: values}
        parts = self.counts.parts(self.drawn(release, work.payload))
        bits = self.bits(release)
        if bits is None:
            deviation = math.sqrt(release.part(self.noise_multiplier, parts))
            clipped = clip_to_norm(values, release.clip)
            return {release.action: clipped + deviation * normals_for(work.streams, clipped, release.action)}
        rotation = int(work.memory[core.PROGRESS][0, 0]) - 1  # the round's number
        grid = release.grid(self.noise_multiplier, parts, bits, rotation)
        return {release.action: torch.from_numpy(encode_rows(grid, values, words_of(work.streams, release.action)))}

    def of(self, state: State, ask: Ask, release: Release, asked: Payload) -> Tensor | None:
        """Return the noisy sum over the clients drawn, or noise where too few were; None where too few answered."""
        drawn = self._clients(state.roster)
        entered = len(self._clients(state.entered)) if state.entered else self.counts.enrolled
        rule = self.counts.rule(max(entered, len(drawn)))
        bits = self.bits(release)
        agreed = {DRAWN: torch.tensor(len(drawn)), core.AGREED: self.fingerprint(release)}
        task = Task(release.action, drawn, {**asked, **agreed})
        terms = SumTerms(len(drawn), self.counts.least(len(drawn)), self.counts.colluders, bits)
        if not self.noise_multiplier:  # no guarantee, so sums may differ in law
            return ask.total(task, terms).payload.get(release.action) if drawn else None
        whole = release.total(self.noise_multiplier, self.counts.enrolled, rule.surplus)
        if len(drawn) < rule.fewest:
            size = release.size if bits is None else padded(release.size)
            nothing = torch.zeros(size, dtype=torch.float32 if bits is None else torch.int64)
            return self._topped_up(state, release, nothing, whole, bits)
        total = ask.total(task, replace(terms, least=max(len(drawn) - rule.dropouts, terms.least)))
        if release.action not in total.payload:
            return None
        inside = len(total.ids) * release.part(self.noise_multiplier, self.counts.parts(len(drawn)))
        missing = whole - inside if self.counts.rate < 1 else Fraction(0)
        return self._topped_up(state, release, total.payload[release.action], missing, bits)

    def _clients(self, among: tuple[Profile, ...]) -> tuple[str, ...]:
        return tuple(client.id for client in among if self.group is None or client.group == self.group)

    def _topped_up(self, state: State, release: Release, total: Tensor, variance: Fraction, bits: int | None) -> Tensor:
        """Return a sum with the server's own noise on top, as a vector."""
        own = self.streams(state.round).select([self.row])
        if bits is None:
            if variance > 0:
                noise = normals_for(own, torch.zeros(1, release.size, device=total.device), release.action)[0]
                total = total + (math.sqrt(variance) * noise).to(total)
            return total.to(state.model)
        grid = release.grid(self.noise_multiplier, 1, bits, state.round)
        steps: Any = total.cpu().numpy().astype(np.int64)
        if variance > 0:
            steps = top_up_noise(grid, steps, float(variance), words_of(own, release.action))
        return decode_sum(grid, steps).to(state.model)


def paid_sums(
    federation: Federation, releases: tuple[Release, ...], dropouts: float, colluders: float
) -> tuple[SecureSums, Callable[[float], Any]]:
    """Return how a federation's releases are summed, with noise for the price of a round, and that price."""
    counts = Counts.of(federation, dropouts, colluders)
    price = partial(round_price, federation.rate, releases, failure=counts.failure)
    sums = SecureSums(max(federation.noise_for(price).values()), counts, federation.noise)
    sums.check(*releases)
    return sums, price


def summing(
    federation: Federation,
    sums: SecureSums,
    releases: tuple[Release, ...],
    actions: Mapping[str, Action],
    round: Callable[[State, Ask], State],
    **guarantee: Any,
) -> Algorithm:
    """Return an algorithm in which the server learns secure sums of releases, each made in the action of its name."""
    by_action = {release.action: release for release in releases}
    return Algorithm(
        actions,
        round,
        trust="secure-sum",
        unit="client",
        conditions=conditions([sums.counts]),
        arithmetic="ideal" if releases[0].noise == "gaussian" else "exact",
        sums=lambda action, asked: sums.terms(by_action.get(action, releases[-1]), asked),
        largest_sums={"": tuple(map(sums.largest, releases))},
        seeded=federation.seeded,
        **guarantee,
    )


def conditions(all_counts: list[Counts]) -> tuple[str, ...]:
    """Return the conditions of a guarantee by secure sums, of one or several groups."""
    missing, colluding = ([getattr(counts, name) for counts in all_counts] for name in ("dropouts", "colluders"))
    telling = f"at most {_range(colluding)} of them reveal their" if any(colluding) else "none reveals its"
    absent = f"at most {_range(missing)} of the clients drawn are" if any(missing) else "no client drawn is"
    sums = f"It holds as long as the server sees only sums from which {absent} missing, and {telling} noise."
    return sums, *((SECRET_COHORT,) if any(counts.rate < 1 for counts in all_counts) else ())


def _range(numbers: list[int]) -> str:
    low, high = min(numbers), max(numbers)
    return str(low) if low == high else f"{low} to {high} (by privacy level)"
