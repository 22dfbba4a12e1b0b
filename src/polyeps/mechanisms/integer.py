"""Noise on integers, as secure sums need it: what rounding does to a sensitivity, and what the noise costs.

A secure sum adds integers modulo 2^bits. So every agent rounds its vector to a public grid and adds integer noise of
its own before anything is masked; the price is that of the sum of both. Reducing modulo 2^bits is post-processing: a
sum that wraps around is wrong but no less private. `rounding` encodes and decodes, `lattice_noise` draws.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

from dp_accounting.dp_event import DpEvent, NonPrivateDpEvent
from scipy.special import ndtr

from polyeps.accounting.events import DiscreteGaussianSumDpEvent, SkellamDpEvent
from polyeps.errors import InputError
from polyeps.mechanisms.integer_noise import NoiseName, NoiseTable, table_for

# Steps of an agent's discrete Gaussian noise from which sums over cohorts of any two sizes are alike but for 10⁻⁶⁰.
SMOOTH = 4.0
UNIT = Fraction(1, 1 << 16)  # of variances, in squared steps: those that can be drawn, below 10^10, are exact floats
REACH = 4.0  # deviations of a sum's coordinate that fit: 6e-5 of the coordinates wrap around
_MOST_BITS = 62
_LARGEST_NORM = 2.0**30  # in steps of the grid, so that squared norms are exact in 64 bits


def rounded_sensitivity(clip: float, granularity: float, dimension: int, bias: float = math.exp(-0.5)) -> float:
    """The largest norm of a vector of norm `clip` after randomised rounding to multiples of `granularity`.

    Rounding is repeated until the norm is within this bound, which happens with probability at least 1 − `bias`.

    >>> round(rounded_sensitivity(1.0, 1e-3, 100_000), 6)
    1.012995
    """
    if not 0 < bias < 1:
        raise InputError(f"bias must lie between 0 and 1, not {bias}")
    drift = granularity * math.sqrt(dimension) / 2
    likely = clip**2 + drift**2 + math.sqrt(2 * math.log(1 / bias)) * granularity * (clip + drift)
    return math.sqrt(min(likely, (clip + 2 * drift) ** 2))


def padded(size: int) -> int:
    """Coordinates that are sent of so many: the rotation needs a power of two.

    >>> padded(78_942)
    131072
    """
    return 1 << (size - 1).bit_length()


def skellam_event(clip: float, granularity: float, dimension: int, deviation: float) -> SkellamDpEvent:
    """The price of summing vectors of norm `clip`, rounded to the grid, with Skellam noise of total `deviation`."""
    l2 = rounded_sensitivity(clip, granularity, dimension) / granularity
    return SkellamDpEvent(min(math.sqrt(dimension) * l2, l2**2), l2, (deviation / granularity) ** 2)


def discrete_gaussian_event(
    clip: float, granularity: float, dimension: int, agent_deviation: float, agents: int
) -> DiscreteGaussianSumDpEvent:
    """The price of the same sum when each of `agents` adds discrete Gaussian noise of `agent_deviation`."""
    l2 = rounded_sensitivity(clip, granularity, dimension) / granularity
    return DiscreteGaussianSumDpEvent(l2, agent_deviation / granularity, agents, dimension)


def event_of_parts(
    noise: NoiseName, clip: float, granularity: float, dimension: int, deviation: float, agents: int
) -> DpEvent:
    """The price of the same sum when at most so many agents add equal parts of noise of total `deviation`.

    For discrete Gaussians that of the most agents is the highest: fewer have more noise each, and their sum is more
    Gaussian. Of parts below a few steps of the grid nothing is promised.
    """
    if noise == "skellam":
        return skellam_event(clip, granularity, dimension, deviation)
    part = deviation / math.sqrt(agents)
    if part < SMOOTH * granularity:
        return NonPrivateDpEvent()
    return discrete_gaussian_event(clip, granularity, dimension, part, agents)


def sum_deviation(
    clip: float, granularity: float, dimension: int, agents: int, agent_deviation: float, norm: float | None = None
) -> float:
    """About the standard deviation of a coordinate of a sum, after rotation, in steps of the grid.

    √(norm²/d + n(γ²/4 + s²))/γ with norm that of the sum before rounding; the largest it can be, c·n, if not known.
    """
    signal = (clip * agents if norm is None else norm) ** 2 / dimension
    return math.sqrt(signal + agents * (granularity**2 / 4 + agent_deviation**2)) / granularity


def fitting_bits(
    clip: float, granularity: float, dimension: int, agents: int, agent_deviation: float, reach: float = REACH
) -> int:
    """The fewest bits that hold `reach` deviations of a sum's coordinate on either side of 0.

    >>> fitting_bits(1.0, 1e-3, 1 << 17, 100, 0.15)
    14
    """
    return max(
        1, math.ceil(math.log2(2 * reach * sum_deviation(clip, granularity, dimension, agents, agent_deviation)))
    )


@dataclass(frozen=True)
class Grid:
    """How a secure sum of vectors is released: all that agents and server must agree on, none of it secret.

    `clip`, `granularity` and `deviation` are in the units of the vectors. `honest` agents are promised to be in every
    sum that is opened and to tell nobody their noise: any that many give the full `deviation` together, and what more
    agents add is surplus. The rotation must not depend on the vectors; take a new seed every round.

    Guarantee: client; one vector, whatever it holds, against zeros in its place; the price is `event`, before sampling.
    How many add noise must not depend on who takes part, so somebody has to add noise in the place of who does not.
    """

    clip: float
    granularity: float
    size: int  # coordinates of a vector
    agents: int  # most vectors in a sum
    honest: int
    deviation: float  # of the noise of `honest` agents together, in every coordinate
    bits: int  # of a coordinate that is sent
    rotation: int = 0  # public seed
    noise: NoiseName = "skellam"

    def __post_init__(self) -> None:
        for name in ("clip", "granularity", "deviation"):
            if not (math.isfinite(value := getattr(self, name)) and value > 0):
                raise InputError(f"{name} must be a finite number above 0, not {value}")
        if self.size < 1:
            raise InputError(f"size must be at least 1, not {self.size}")
        if not 1 <= self.honest <= self.agents:
            raise InputError(f"honest must be between 1 and the number of agents {self.agents}, not {self.honest}")
        if not 1 <= self.bits <= _MOST_BITS:
            raise InputError(f"bits must be between 1 and {_MOST_BITS}, not {self.bits}; choose a coarser granularity")
        if self.rotation < 0:
            raise InputError(f"rotation must be a seed of at least 0, not {self.rotation}")
        if not rounded_sensitivity(self.clip, self.granularity, self.dimension) / self.granularity <= _LARGEST_NORM:
            raise InputError(
                f"granularity {self.granularity:g} is too fine for clip {self.clip:g}; choose a coarser one"
            )
        if self.noise == "discrete-gaussian" and self.agent_deviation < self.granularity / 2:
            raise InputError(
                f"an agent's discrete Gaussian noise of {self.agent_deviation:g} is below half the granularity "
                f"{self.granularity:g}, where nothing is proved; choose a finer granularity or skellam"
            )

    @classmethod
    def fitting(
        cls,
        clip: float,
        granularity: float,
        size: int,
        agents: int,
        honest: int,
        deviation: float,
        *,
        rotation: int = 0,
        noise: NoiseName = "skellam",
        reach: float = REACH,
    ) -> Grid:
        """The grid with as few bits as hold `reach` deviations of the largest sum."""
        widest = cls(clip, granularity, size, agents, honest, deviation, _MOST_BITS, rotation, noise)
        bits = fitting_bits(clip, granularity, widest.dimension, agents, widest.agent_deviation, reach)
        return cls(clip, granularity, size, agents, honest, deviation, bits, rotation, noise)

    @property
    def dimension(self) -> int:
        """Coordinates that are sent."""
        return padded(self.size)

    @property
    def agent_deviation(self) -> float:
        """Of one agent's noise, in the units of the vectors."""
        return self.deviation / math.sqrt(self.honest)

    @property
    def event(self) -> SkellamDpEvent | DiscreteGaussianSumDpEvent:
        """The price of opening one sum; callers wrap it in Poisson when cohorts are sampled."""
        if self.noise == "skellam":
            return skellam_event(self.clip, self.granularity, self.dimension, self.deviation)
        return discrete_gaussian_event(self.clip, self.granularity, self.dimension, self.agent_deviation, self.honest)

    @property
    def agent_variance(self) -> float:
        """The parameter of one agent's noise, in squared steps; no less than the event's share of it.

        A multiple of UNIT, so that the variances of any agents add up exactly, also in floating point.
        """
        event = self.event
        if isinstance(event, SkellamDpEvent):
            share = Fraction(event.variance) / self.honest
        else:
            share = Fraction(event.deviation) ** 2
        units = math.ceil(share / UNIT) * UNIT
        nearest = float(units)  # it is the same, unless it is too large to be drawn
        return nearest if nearest >= units else math.nextafter(nearest, math.inf)

    @property
    def largest_square(self) -> int:
        """The most a rounded vector's squared norm may be, in squared steps."""
        return math.floor(Fraction(self.event.l2_sensitivity) ** 2)

    @property
    def table(self) -> NoiseTable:
        """What one agent's noise is drawn from."""
        return table_for(self.noise, self.agent_variance)

    def wrap_probability(self, norm: float | None = None) -> float:
        """The share of a sum's coordinates to expect beyond what the bits hold, taking them as normal.

        For a sum of the largest norm there can be, clip · agents, unless its norm is given.
        """
        spread = sum_deviation(self.clip, self.granularity, self.dimension, self.agents, self.agent_deviation, norm)
        return float(2 * ndtr(-math.ldexp(1.0, self.bits - 1) / spread))
