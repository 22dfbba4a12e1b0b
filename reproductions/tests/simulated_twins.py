"""Simulations that closed forms of FedHDP's theory are tested against; they use no result of `points` but weights."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray
from polyeps_reproductions.theory.points import Federation, bayes_penalty, best_weights
from polyeps_reproductions.theory.printed import OptOut
from polyeps_reproductions.theory.regression import Regression
from polyeps_reproductions.theory.simulation import (
    TRUE_POINT,
    Draws,
    Measured,
    draw,
    in_blocks,
    measure,
    personal_errors,
    summarised,
)

Floats = NDArray[np.float64]


def server_gap(
    federation: Federation, weights: ArrayLike, better: ArrayLike, trials: int, generator: np.random.Generator
) -> Measured:
    """By how much the server's variance is larger with some weights than with others, on the same random numbers."""
    return measure(
        federation,
        trials,
        generator,
        lambda draws: (draws.server(weights) - TRUE_POINT) ** 2 - (draws.server(better) - TRUE_POINT) ** 2,
    )


def excess_error(
    federation: Federation, group: int, penalty: float, better: float, trials: int, generator: np.random.Generator
) -> Measured:
    """By how much one λ errs more than another one, on the same random numbers."""
    weights = best_weights(federation)

    def excess(draws: Draws) -> Floats:
        first, second = personal_errors(draws, group, weights, [penalty, better]).T
        return np.asarray(first - second)

    return measure(federation, trials, generator, excess)


def best_penalty(federation: Federation, group: int, trials: int, generator: np.random.Generator) -> Measured:
    """The λ that fits best, found by least squares of φ_j − φ̂_j on θ̂ − φ̂_j, without any formula for it.

    The slope is s = λ/(1 + λ); its standard error is that of a ratio of means (linearised), carried over to λ.
    """
    weights = best_weights(federation)

    def products(draws: Draws) -> Floats:
        members = draws.members(group)
        pull = draws.server(weights)[:, None] - draws.estimates[:, members]
        target = draws.points[:, members] - draws.estimates[:, members]
        return np.stack([(pull * target).mean(axis=1), (pull * pull).mean(axis=1)], axis=1)

    samples = in_blocks(trials, 3 * federation.clients, lambda count: products(draw(federation, count, generator)))
    above, below = samples.mean(axis=0)
    slope = above / below
    spread = summarised((samples[:, 0] - slope * samples[:, 1]) / below).error
    return Measured(np.asarray(slope / (1 - slope)), spread / (1 - slope) ** 2)


def bayes_error(federation: Federation, group: int, trials: int, generator: np.random.Generator) -> Measured:
    """Twin of `points.bayes_error`: each client takes its own message out of the server's sum, noise and all."""
    weights, penalty = best_weights(federation), bayes_penalty(federation, group)
    own_weight = weights[group]

    def squared(draws: Draws) -> Floats:
        members = draws.members(group)
        others = (draws.server(weights)[:, None] - own_weight * draws.messages[:, members]) / (1 - own_weight)
        estimate = (draws.estimates[:, members] + penalty * others) / (1 + penalty)
        return np.asarray(((estimate - draws.points[:, members]) ** 2).mean(axis=1))

    return measure(federation, trials, generator, squared)


def dp_fedavg_variance(setting: OptOut, trials: int, generator: np.random.Generator) -> Measured:
    """DP-FedAvg as it is run: all estimates summed, noise N_p·γ (z·S, as for the private group) added once, over N."""
    noise = setting.private * np.sqrt(setting.gamma2)

    def squared(draws: Draws) -> Floats:
        total = draws.estimates.sum(axis=1) + noise * generator.standard_normal(len(draws.estimates))
        return np.asarray((total / setting.clients - TRUE_POINT) ** 2)

    return measure(setting.federation, trials, generator, squared)


def regression_errors(
    regression: Regression,
    client: int,
    weights: Floats,
    penalty: float,
    trials: int,
    generator: np.random.Generator,
) -> Measured:
    """Squared errors of the server, of the client with this λ and of (8), from records drawn and regressions solved."""
    count, records, dimension = regression.designs.shape
    solver = np.linalg.pinv(regression.designs)  # least squares of all clients
    noise = np.sqrt(regression.message_noise)[:, None]
    precision = np.linalg.inv(regression.message_covariance)
    rest = precision.sum(axis=0) - precision[client]
    from_others = np.linalg.inv(np.linalg.inv(rest) + regression.tau2 * np.eye(dimension))
    from_own = np.linalg.inv(regression.own_covariance[client])
    truth = np.arange(1.0, dimension + 1)  # φ; nothing may depend on it

    def errors(size: int) -> Floats:
        points = truth + np.sqrt(regression.tau2) * generator.standard_normal((size, count, dimension))
        seen = np.einsum("ird,tid->tir", regression.designs, points)
        seen += np.sqrt(regression.beta2) * generator.standard_normal((size, count, records))
        estimates = np.einsum("idr,tir->tid", solver, seen)
        messages = estimates + noise * generator.standard_normal(estimates.shape)
        server = np.einsum("iab,tib->ta", weights, messages)
        local = (estimates[:, client] + penalty * server) / (1 + penalty)
        weighed = np.einsum("iab,tib->tia", precision, messages)
        others = (weighed.sum(axis=1) - weighed[:, client]) @ np.linalg.inv(rest)
        bayes = (estimates[:, client] @ from_own + others @ from_others) @ np.linalg.inv(from_own + from_others)
        misses = [server - truth, local - points[:, client], bayes - points[:, client]]
        return np.stack([(miss**2).sum(axis=1) for miss in misses], axis=1)

    return summarised(in_blocks(trials, count * (2 * dimension + records), errors))
