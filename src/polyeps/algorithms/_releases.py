"""Releases of a round: vectors that clients clip and sum with noise, their noise, and their price.

A release of share s costs s of a round's privacy: its noise multiplier is that of the round divided by √s, so releases
whose shares add up to one cost, together, one Gaussian with the round's noise multiplier.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any, Literal, get_args

from dp_accounting.dp_event import ComposedDpEvent

from polyeps.accounting.events import Gaussian, Poisson, RareFailureDpEvent
from polyeps.accounting.histories import on_one_sample
from polyeps.core import Spec, Specs
from polyeps.errors import InputError
from polyeps.mechanisms.integer import UNIT, Grid, event_of_parts, padded
from polyeps.mechanisms.integer_noise import LARGEST_DEVIATION, SMALLEST_DEVIATION, NoiseName
from polyeps.messages import vector

# gaussian: ideal, in floating point. Others: on integers, which a secure sum can hide, with the price of what is sent.
NoiseKind = Literal["gaussian", "skellam", "discrete-gaussian"]
FINE = 4096  # steps of the integers' grid in a clip norm: finer ones save no privacy worth having
_REMEDY = {
    True: "give a larger budgets.epsilon or smaller budgets.noise_multiplier, run fewer rounds",
    False: "give a smaller budgets.epsilon or larger budgets.noise_multiplier",
}


@dataclass(frozen=True)
class Release:
    """One vector of every client, clipped as a whole, summed with noise."""

    action: str  # in which it is made; the tensor has the same name
    size: int
    clip: float
    share: float = 1.0  # of the round's privacy
    noise: NoiseKind = "gaussian"
    clients: int = 1  # the most clients that ever add noise to one sum: only sums of discrete Gaussians depend on it

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise InputError(f"the share of a round's privacy must be above 0 and at most 1, not {self.share}")
        if self.noise not in get_args(NoiseKind):
            raise InputError(f"noise must be one of {', '.join(get_args(NoiseKind))}, not {self.noise!r}")

    def deviation(self, noise_multiplier: float) -> float:
        """Return the deviation of the noise that is paid for, given the round's noise multiplier."""
        return noise_multiplier / math.sqrt(self.share) * self.clip

    def event(self, noise_multiplier: float) -> Any:
        """Return the cost before sampling; noise beyond the guaranteed amount is not counted."""
        if self.noise == "gaussian":
            return Gaussian(noise_multiplier / math.sqrt(self.share))
        step, dimension = self.clip / FINE, padded(self.size)
        most = self.clients + 1  # the server adds noise, too
        return event_of_parts(self._lattice, self.clip, step, dimension, self.deviation(noise_multiplier), most)

    def grid(self, noise_multiplier: float, parts: int, bits: int, rotation: int = 0) -> Grid:
        """Return the integers that all agree on, with noise divided into so many parts."""
        deviation, lattice = self.deviation(noise_multiplier), self._lattice
        return Grid(self.clip, self.clip / FINE, self.size, parts, parts, deviation, bits, rotation, lattice)

    # Equal in every round and for every client of a run, so computed once; a release is frozen.

    @lru_cache(maxsize=256)  # noqa: B019
    def part(self, noise_multiplier: float, parts: int) -> Fraction:
        """Return the variance of one of so many parts of the noise; on integers, in squared steps."""
        if self.noise == "gaussian":
            return Fraction(self.deviation(noise_multiplier)) ** 2 / parts
        return Fraction(self.grid(noise_multiplier, parts, 1).client_variance)

    @lru_cache(maxsize=256)  # noqa: B019
    def total(self, noise_multiplier: float, enrolled: int, surplus: Fraction) -> Fraction:
        """Return the one variance of what is released, as `part` counts it.

        On integers it is a little more, so that the missing rest of it can be drawn: no less than a unit, and of
        discrete Gaussians, whose sums are only nearly one, no less than the smallest part of a client.
        """
        # All of the parts, n/(n - lost) of the variance paid for, where that is largest.
        largest = surplus.numerator * self.part(noise_multiplier, surplus.denominator)
        if self.noise == "gaussian":
            return largest
        smallest = UNIT if self.noise == "skellam" else self.part(noise_multiplier, max(1, self.clients))
        return largest + (enrolled + 1) * UNIT + smallest

    def gives(self, noise_multiplier: float) -> Specs:
        """Return the specification of a client's reply, which is also that of the sum."""
        if self.noise == "gaussian" or not noise_multiplier:
            return {self.action: vector(self.size, sys.float_info.max)}
        return {self.action: Spec((padded(self.size),), "int64", 0, 2**62)}

    def check_drawable(self, steps: float, drawing: str) -> None:
        """Refuse noise with a deviation of so many steps of the grid, if it cannot be drawn."""
        if not SMALLEST_DEVIATION <= steps <= LARGEST_DEVIATION:
            raise InputError(
                f'noise = "{self.noise}" can be drawn for deviations of {SMALLEST_DEVIATION:g} to '
                f"{LARGEST_DEVIATION:g} steps of the grid, and {drawing} would need {steps:g}; "
                + _REMEDY[steps > LARGEST_DEVIATION]
                + (", move split nearer to 0.5" if self.share < 1 else "")
                + ', or take noise = "gaussian"'
            )

    @property
    def _lattice(self) -> NoiseName:
        return "skellam" if self.noise == "skellam" else "discrete-gaussian"


def round_price(rate: float, releases: Iterable[Release], noise_multiplier: float, failure: float = 0.0) -> Any:
    """Return the cost of a round for every client: all releases from one secret cohort, and that its size was bad."""
    events = [release.event(noise_multiplier) for release in releases]
    events += [RareFailureDpEvent(failure)] if failure else []
    return Poisson(rate, on_one_sample(ComposedDpEvent(events)) if events[1:] else events[0])
