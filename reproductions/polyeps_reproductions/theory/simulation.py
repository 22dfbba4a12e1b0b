"""The closed forms' twins: federations drawn at random, every client in every one, and the errors they make.

Nothing here uses a result of `points` except the weights and penalties it is given, so agreement means something. A
rule maps draws to one number per federation (or several, side by side); means and their standard errors follow.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from polyeps_reproductions.theory.points import Federation, best_weights

Floats = NDArray[np.float64]
BLOCK = 1_000_000  # normal numbers drawn at once, so that memory stays small
TRUE_POINT = 3.0  # φ; nothing may depend on it


@dataclass(frozen=True)
class Measured:
    """Means over federations, each with its standard error; numbers, or arrays of one shape."""

    value: Floats
    error: Floats

    def off(self, expected: ArrayLike) -> Floats:
        """Return the distance from the expected value, in standard errors; 0 where both agree without any spread."""
        distance = np.abs(self.value - np.asarray(expected, dtype=np.float64))
        return np.asarray(np.divide(distance, self.error, out=np.zeros_like(distance), where=distance > 1e-12))


@dataclass(frozen=True)
class Draws:
    """Federations by rows, clients by columns, group after group."""

    groups: NDArray[np.intp]  # of each column
    points: Floats  # φ_i
    estimates: Floats  # φ̂_i
    messages: Floats  # ψ_i

    def server(self, weights: ArrayLike) -> Floats:
        """θ̂ of each federation, from the weight of one client by group."""
        return np.asarray(self.messages @ np.asarray(weights, dtype=np.float64)[self.groups], dtype=np.float64)

    def members(self, group: int) -> slice:
        """The group's columns."""
        first, last = np.searchsorted(self.groups, [group, group + 1])
        return slice(int(first), int(last))


def draw(federation: Federation, trials: int, generator: np.random.Generator) -> Draws:
    groups = np.repeat(np.arange(len(federation.sizes)), federation.sizes)
    noise = np.sqrt(federation.message_noise)[groups]
    shape = (trials, len(groups))
    points = TRUE_POINT + np.sqrt(federation.tau2) * generator.standard_normal(shape)
    estimates = points + np.sqrt(federation.alpha2) * generator.standard_normal(shape)
    return Draws(groups, points, estimates, estimates + noise * generator.standard_normal(shape))


def in_blocks(trials: int, size: int, work: Callable[[int], Floats]) -> Floats:
    """`work` for all trials, as many at a time as fit; `size` is how many numbers one trial takes."""
    step = max(1, BLOCK // size)
    return np.concatenate([work(min(step, trials - done)) for done in range(0, trials, step)])


def summarised(samples: Floats) -> Measured:
    """Mean along the first axis and its standard error."""
    spread = samples.std(axis=0, ddof=1) / np.sqrt(len(samples))
    return Measured(np.asarray(samples.mean(axis=0)), np.asarray(spread))


def measure(
    federation: Federation, trials: int, generator: np.random.Generator, rule: Callable[[Draws], Floats]
) -> Measured:
    """Return the mean of a rule over federations."""
    work = in_blocks(trials, 3 * federation.clients, lambda count: rule(draw(federation, count, generator)))
    return summarised(work)


def server_variance(
    federation: Federation, weights: Sequence[ArrayLike], trials: int, generator: np.random.Generator
) -> Measured:
    """Twin of `points.server_variance`, for several weights on the same federations."""
    chosen = [np.asarray(one, dtype=np.float64) for one in weights]
    return measure(
        federation,
        trials,
        generator,
        lambda draws: np.stack([(draws.server(one) - TRUE_POINT) ** 2 for one in chosen], axis=1),
    )


def personal_errors(draws: Draws, group: int, weights: ArrayLike, penalties: ArrayLike) -> Floats:
    """Mean squared error over the group's clients with each λ: federations by rows, λ by columns."""
    members = draws.members(group)
    own = draws.estimates[:, members] - draws.points[:, members]
    server = draws.server(weights)[:, None] - draws.points[:, members]
    given = np.asarray(penalties, dtype=np.float64)
    shares = np.where(np.isinf(given), 1.0, given / np.where(np.isinf(given), 1.0, 1 + given))
    # A square of a sum, by its three terms: no array is as large as federations × clients × penalties.
    moments = [np.einsum("tc,tc->t", a, b)[:, None] / own.shape[1] for a, b in ((own, own), (own, server))]
    last = np.einsum("tc,tc->t", server, server)[:, None] / own.shape[1]
    return np.asarray((1 - shares) ** 2 * moments[0] + 2 * shares * (1 - shares) * moments[1] + shares**2 * last)


def personal_error(
    federation: Federation,
    group: int,
    penalties: ArrayLike,
    trials: int,
    generator: np.random.Generator,
    weights: ArrayLike | None = None,
) -> Measured:
    """Twin of `points.Personal.error`, for several λ on the same federations; the best weights unless given."""
    chosen = best_weights(federation) if weights is None else weights
    return measure(
        federation, trials, generator, lambda draws: personal_errors(draws, group, chosen, np.atleast_1d(penalties))
    )
