"""Paper 003's algorithm 1 as slow plain loops over clients, in numpy and float64, with cohorts and noise given.

With the corrections that make it private: sums are divided by the public q·N_j, never by how many were drawn; a clip
bit counts as ± 1/2, and the noise of sums is that of what is left of a group's multiplier after the bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]
Updates = Callable[[int, Vector], Vector]  # of (client, model)


@dataclass(frozen=True)
class Plan:
    """What is settled before the first round."""

    groups: Sequence[str]  # of every client
    multipliers: Mapping[str, float]  # z_j, of all that a round releases
    bit_deviation: float
    rate: float
    ratio: float
    quantile: float
    clip_rate: float

    def noise_of_sums(self, group: str) -> float:
        """z_Δ,j: both releases together cost z_j."""
        z = self.multipliers[group]
        return 1 / math.sqrt(1 / z**2 - 1 / (2 * self.bit_deviation) ** 2) if z else 0.0


def clipped(update: Vector, clip: float) -> Vector:
    norm = math.sqrt(sum(float(number) ** 2 for number in update))
    return update if norm <= clip else update * (clip / norm)


def one_round(
    plan: Plan,
    model: Vector,
    clip: float,
    cohort: Sequence[int],
    updates: Updates,
    noise: Mapping[str, Vector],  # standard normals of each group's sum
    bit_noise: float,  # a standard normal
) -> tuple[Vector, float]:
    """The next model and clip norm."""
    sizes = {name: sum(group == name for group in plan.groups) for name in plan.multipliers}
    counted = {name: sizes[name] * (plan.ratio if z else 1.0) for name, z in plan.multipliers.items()}
    step = np.zeros_like(model)
    for name in plan.multipliers:
        total = np.zeros_like(model)
        for client in cohort:
            if plan.groups[client] == name:
                total += clipped(updates(client, model), clip)
        total += plan.noise_of_sums(name) * clip * noise[name]
        step += counted[name] / sum(counted.values()) * total / (plan.rate * sizes[name])
    bits = plan.bit_deviation * bit_noise
    for client in cohort:
        bits += 0.5 if np.linalg.norm(updates(client, model)) <= clip else -0.5
    share = bits / (plan.rate * len(plan.groups)) + 0.5
    return model + step, clip * math.exp(-plan.clip_rate * (share - plan.quantile))


def ditto_step(model: Vector, received: Vector, gradient: Vector, rate: float, pull: float) -> Vector:
    """One step of a personal model, which is pulled to the model received."""
    return model - rate * (gradient + pull * (model - received))
