"""Integer noise for secure sums: the grid, the sensitivity after rounding, and the price.

A secure sum adds integers modulo 2^bits. So every client rounds its vector to a public grid and adds its own integer
noise before masking; the price is that of the noisy sum. Reducing modulo 2^bits is post-processing: a sum that wraps
around is wrong but no less private. `integer_encoding` encodes and decodes, `integer_noise` draws.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

from dp_accounting.dp_event import DpEvent, NonPrivateDpEvent

from polyeps.accounting.events import DiscreteGaussianSumDpEvent, SkellamDpEvent
from polyeps.errors import InputError
from polyeps.mechanisms.integer_noise import NoiseName, NoiseTable, table_for

# Deviation of a client's noise, in steps, from which sums over cohorts of any two sizes differ by 10⁻⁶⁰ at most.
_SMOOTH = 4.0
UNIT = Fraction(1, 1 << 16)  # of variances, in squared steps: those that can be drawn, below 10^10, are exact floats
_REACH = 4.0  # deviations of a sum's coordinate that fit: 6e-5 of the coordinates wrap around
_BIAS = math.exp(-0.5)  # probability that a rounding is repeated, at most
_MOST_BITS = 62
_LARGEST_NORM = 2.0**30  # in steps of the grid, so that squared norms are exact in 64 bits


def rounded_sensitivity(clip: float, granularity: float, dimension: int) -> float:
    """Return the largest norm of a vector of norm `clip` after randomised rounding to multiples of `granularity`.

    Rounding is repeated until the norm is within this bound, which happens with probability at least 1 − e^(−1/2).

    >>> round(rounded_sensitivity(1.0, 1e-3, 100_000), 6)
    1.012995
    """
    drift = granularity * math.sqrt(dimension) / 2
    likely = clip**2 + drift**2 + math.sqrt(2 * math.log(1 / _BIAS)) * granularity * (clip + drift)
    return math.sqrt(min(likely, (clip + 2 * drift) ** 2))


def padded(size: int) -> int:
    """Return the number of coordinates sent for a vector of `size`: the rotation needs a power of two.

    >>> padded(78_942)
    131072
    """
    return 1 << (size - 1).bit_length()


def skellam_event(clip: float, granularity: float, dimension: int, deviation: float) -> SkellamDpEvent:
    """Return the price of a sum of vectors of norm `clip`, rounded to the grid, with total Skellam noise."""
    l2 = rounded_sensitivity(clip, granularity, dimension) / granularity
    return SkellamDpEvent(min(math.sqrt(dimension) * l2, l2**2), l2, (deviation / granularity) ** 2)


def discrete_gaussian_event(
    clip: float, granularity: float, dimension: int, client_deviation: float, clients: int
) -> DiscreteGaussianSumDpEvent:
    """Return the price of the same sum when each client adds discrete Gaussian noise of `client_deviation`."""
    l2 = rounded_sensitivity(clip, granularity, dimension) / granularity
    return DiscreteGaussianSumDpEvent(l2, client_deviation / granularity, clients, dimension)


def event_of_parts(
    noise: NoiseName, clip: float, granularity: float, dimension: int, deviation: float, clients: int
) -> DpEvent:
    """Return the price of the same sum when at most `clients` clients add equal parts of noise of total `deviation`.

    For discrete Gaussians the price is highest for the most clients: fewer add more noise each, and their sum is closer
    to a Gaussian. Parts below a few steps of the grid have no guarantee.
    """
    if noise == "skellam":
        return skellam_event(clip, granularity, dimension, deviation)
    part = deviation / math.sqrt(clients)
    if part < _SMOOTH * granularity:
        return NonPrivateDpEvent()
    return discrete_gaussian_event(clip, granularity, dimension, part, clients)


def fitting_bits(clip: float, granularity: float, dimension: int, clients: int, client_deviation: float) -> int:
    """Return the fewest bits that hold four standard deviations of a rotated sum's coordinate on either side of 0.

    The deviation is √((c·n)²/d + n(γ²/4 + s²))/γ steps for the largest sum, of norm c·n.

    >>> fitting_bits(1.0, 1e-3, 1 << 17, 100, 0.15)
    14
    """
    signal = (clip * clients) ** 2 / dimension
    deviation = math.sqrt(signal + clients * (granularity**2 / 4 + client_deviation**2)) / granularity
    return max(1, math.ceil(math.log2(2 * _REACH * deviation)))


@dataclass(frozen=True)
class Grid:
    """The public parameters of a secure sum of vectors, on which clients and server must agree.

    `clip`, `granularity` and `deviation` are in the units of the vectors. At least `honest` clients are in every sum
    that is opened and keep their noise secret: any that many give the full `deviation` together, and noise of further
    clients is surplus. The rotation must not depend on the vectors; use a new seed every round.

    Guarantee: client; one vector, whatever it holds, against zeros in its place; the price is `event`, before sampling.
    The number of noise shares must not depend on which clients take part: missing shares must be added by others.
    """

    clip: float
    granularity: float
    size: int  # coordinates of a vector
    clients: int  # largest number of vectors in a sum
    honest: int
    deviation: float  # of the noise of `honest` clients together, in every coordinate
    bits: int  # of a coordinate that is sent
    rotation: int = 0  # public seed
    noise: NoiseName = "skellam"

    def __post_init__(self) -> None:
        for name in ("clip", "granularity", "deviation"):
            if not (math.isfinite(value := getattr(self, name)) and value > 0):
                raise InputError(f"{name} must be a finite number above 0, not {value}")
        if self.size < 1:
            raise InputError(f"size must be at least 1, not {self.size}")
        if not 1 <= self.honest <= self.clients:
            raise InputError(f"honest must be between 1 and the number of clients, {self.clients}, not {self.honest}")
        if not 1 <= self.bits <= _MOST_BITS:
            raise InputError(f"bits must be between 1 and {_MOST_BITS}, not {self.bits}; choose a coarser granularity")
        if self.rotation < 0:
            raise InputError(f"rotation must be a seed of at least 0, not {self.rotation}")
        if not rounded_sensitivity(self.clip, self.granularity, self.dimension) / self.granularity <= _LARGEST_NORM:
            raise InputError(
                f"granularity {self.granularity:g} is too fine for clip {self.clip:g}; choose a coarser one"
            )
        if self.noise == "discrete-gaussian" and self.client_deviation < self.granularity / 2:
            raise InputError(
                f"a client's discrete Gaussian noise of {self.client_deviation:g} is below half the granularity "
                f"{self.granularity:g}, where nothing is proved; choose a finer granularity or skellam"
            )

    @classmethod
    def fitting(
        cls,
        clip: float,
        granularity: float,
        size: int,
        clients: int,
        honest: int,
        deviation: float,
        *,
        rotation: int = 0,
        noise: NoiseName = "skellam",
    ) -> Grid:
        """Return the grid with as few bits as hold the largest sum."""
        widest = cls(clip, granularity, size, clients, honest, deviation, _MOST_BITS, rotation, noise)
        bits = fitting_bits(clip, granularity, widest.dimension, clients, widest.client_deviation)
        return cls(clip, granularity, size, clients, honest, deviation, bits, rotation, noise)

    @property
    def dimension(self) -> int:
        """Return the number of coordinates that are sent."""
        return padded(self.size)

    @property
    def client_deviation(self) -> float:
        """Return the deviation of one client's noise, in the units of the vectors."""
        return self.deviation / math.sqrt(self.honest)

    @property
    def event(self) -> SkellamDpEvent | DiscreteGaussianSumDpEvent:
        """Return the price of opening one sum; callers wrap it in Poisson where cohorts are sampled."""
        if self.noise == "skellam":
            return skellam_event(self.clip, self.granularity, self.dimension, self.deviation)
        return discrete_gaussian_event(self.clip, self.granularity, self.dimension, self.client_deviation, self.honest)

    @property
    def client_variance(self) -> float:
        """Return the parameter of one client's noise, in squared steps; no less than its share of the event's.

        A multiple of UNIT, so that the variances of any clients add up exactly, also in floating point.
        """
        event = self.event
        if isinstance(event, SkellamDpEvent):
            share = Fraction(event.variance) / self.honest
        else:
            share = Fraction(event.deviation) ** 2
        units = math.ceil(share / UNIT) * UNIT
        nearest = float(units)  # equal, unless too large to be drawn
        return nearest if nearest >= units else math.nextafter(nearest, math.inf)

    @property
    def largest_square(self) -> int:
        """Return the largest squared norm of a rounded vector, in squared steps."""
        return math.floor(Fraction(self.event.l2_sensitivity) ** 2)

    @property
    def table(self) -> NoiseTable:
        """Return the table from which one client's noise is drawn."""
        return table_for(self.noise, self.client_variance)
