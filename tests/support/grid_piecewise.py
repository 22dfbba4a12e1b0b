"""The law of grid-PM by its formula, as an oracle for the sampler."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class GridPiecewise:
    """The law of grid-PM, PM on n cells: a cell of a band of h with probability e^ε·h/(n − h + e^ε·h), else another.

    The band's place is an unbiased rounding of the value, so every draw is of an integer.
    """

    epsilon: float
    cells: int = 1024

    @property
    def band(self) -> int:
        bound = 1 / math.tanh(self.epsilon / 4)
        return min(self.cells - 1, max(1, round(self.cells * (bound - 1) / (2 * bound))))

    @property
    def in_band(self) -> float:
        n, h = self.cells, self.band
        return h / (h + (n - h) * math.exp(-self.epsilon))

    @property
    def step(self) -> float:
        n, h, p = self.cells, self.band, self.in_band
        return 2 / ((n - h) * (p - (1 - p) * h / (n - h)))

    @property
    def outputs(self) -> NDArray[np.float64]:
        return np.asarray(self.step * (np.arange(self.cells) - (self.cells - 1) / 2), dtype=np.float64)

    def masses(self, value: float) -> NDArray[np.float64]:
        """Return the probability of each output."""
        n, h = self.cells, self.band
        place = (value + 1) * (n - h) / 2
        low = min(math.floor(place), n - h - 1)
        mass = np.full(n, (1 - self.in_band) / (n - h))
        inside = self.in_band / h - (1 - self.in_band) / (n - h)
        mass[low : low + h] += inside * (low + 1 - place)
        mass[low + 1 : low + 1 + h] += inside * (place - low)
        return mass

    def variance(self, value: float) -> float:
        mass = self.masses(value)
        return float(mass @ self.outputs**2 - (mass @ self.outputs) ** 2)
