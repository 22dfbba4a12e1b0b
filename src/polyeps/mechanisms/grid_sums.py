"""Sums of clipped rows on a public grid of integers, with discrete Gaussian noise: guarantees hold to the last bit.

Floating-point noise leaks: a value plus rounded noise keeps the value's own low digits (Mironov 2012). Here every row
is clipped and rounded to multiples of a public step, rows are added as integers, and the noise is an integer too. So
every integer vector can be released whatever the data, and no rounding depends on the other rows of the sum.

The price is that of the Gaussian mechanism. Rounding lengthens a row by √size/2 steps at most, a thousandth of the clip
on a grid this fine; the noise is enlarged by as much, and by the difference between a discrete Gaussian and a rounded
one (docs/reference/soundness.md).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from polyeps.accounting.discrete_gaussians import MARGIN, ROUNDING_DEVIATION
from polyeps.errors import InputError
from polyeps.mechanisms.clipping import check_clip, stable_norms
from polyeps.mechanisms.integer_noise import Integers, WideGaussian, wide_gaussian
from polyeps.mechanisms.random_words import WordStreams

_FINE = 9  # bits of a step beyond √size: rounding lengthens a row by a thousandth of the clip
_MOST_BITS = 26  # so that a row's squared norm is exact in float64
_LEAST_NOISE = 64.0  # deviation of the noise, in steps
_LARGEST_NOISE = 2.0**52  # likewise, so that sums of thousands of rows fit into 64 bits
_AIM = 1 - 2.0**-40  # clipped to slightly less than the clip, by more than later rounding in float64


@dataclass(frozen=True)
class GridSum:
    """A sum of rows of at most `size` numbers, each clipped to `clip`, released with Gaussian noise on a grid.

    Guarantee: one row against an empty one; the price is Gaussian(noise_multiplier), for the very integers that are
    released. A row that is not finite counts as empty. With a noise multiplier of 0 there is no guarantee.
    """

    clip: float
    size: int
    noise_multiplier: float

    def __post_init__(self) -> None:
        check_clip("clip", self.clip)
        if not (math.isfinite(self.noise_multiplier) and self.noise_multiplier >= 0):
            raise InputError(f"the noise multiplier must be a finite number of at least 0, not {self.noise_multiplier}")
        if self.noise_multiplier and (self.bits > _MOST_BITS or self.deviation > _LARGEST_NOISE):
            raise InputError(
                f"a noise multiplier of {self.noise_multiplier:g} for {self.size} numbers cannot be drawn on a grid "
                "of integers; multipliers from about 0.00001 to a million can"
            )

    @cached_property
    def bits(self) -> int:
        """Return the number of bits of the clip norm in steps of the grid."""
        by_size = math.ceil(math.log2(self.size) / 2) + _FINE
        return (
            max(by_size, math.ceil(math.log2(_LEAST_NOISE / self.noise_multiplier)))
            if self.noise_multiplier
            else by_size
        )

    @property
    def step(self) -> float:
        """Return the distance of two neighbouring points of the grid."""
        return math.ldexp(self.clip, -self.bits)

    @cached_property
    def longest(self) -> float:
        """Return the largest norm of a rounded row, in steps: nearest rounding moves each number by half a step."""
        return math.ldexp(1.0, self.bits) + math.sqrt(self.size) / 2

    @property
    def deviation(self) -> float:
        """Return the parameter of the discrete Gaussian noise, in steps."""
        return (
            math.hypot(self.noise_multiplier * self.longest / MARGIN, ROUNDING_DEVIATION)
            if self.noise_multiplier
            else 0.0
        )

    @cached_property
    def noise(self) -> WideGaussian:
        """Return the law of the noise on one coordinate."""
        return wide_gaussian(self.deviation**2)

    def rounded(self, rows: Tensor) -> Tensor:
        """Return rows (n, size) clipped and rounded to whole steps, in float64, each no longer than `longest`."""
        if not rows.numel():
            return rows.double()
        # Each row in an allocation of its own: otherwise its norm, and its rounding, would depend on the other rows.
        apart = [row.to(torch.float64, copy=True) for row in rows.unbind()]
        norms = stable_norms(apart)
        aim = self.clip * _AIM
        factors = torch.where(norms > aim, aim / norms, 1.0) * (math.ldexp(1.0, self.bits) / self.clip)
        steps = torch.stack(apart).mul_(factors[:, None]).round_()
        # Checked on the integers themselves: whatever went wrong before, no row exceeds the sensitivity of the price.
        lengths = torch.linalg.vecdot(steps, steps)
        fits = torch.isfinite(norms) & (lengths <= self.longest**2)
        return steps if bool(fits.all()) else steps.masked_fill_(~fits[:, None], 0.0)

    def add_noise(self, totals: Integers, words: WordStreams, rows: Sequence[int]) -> None:
        """Add independent noise to totals (m, size); row j draws from the stream of client rows[j]."""
        if self.noise_multiplier:
            self.noise.add_to(totals, words, rows)

    def release(self, total: Tensor, words: WordStreams, row: int = 0) -> Tensor:
        """Return a sum of rounded rows (size,) plus noise, in the units of the rows, float64, on the sum's device."""
        whole: Integers = total.to(torch.int64).cpu().numpy()[None].copy()
        self.add_noise(whole, words, [row])
        return (torch.from_numpy(whole[0].astype(np.float64)) * self.step).to(total.device)
