"""Robust-HDP: weights against a slow reference, known noise and the limits of its rule."""

from typing import Any

import numpy as np
import pytest
import torch
from reference.federated import Vector
from reference.robust_pca import plain_admm
from support.prescribed import MODEL, TRAINING, Prescribed, Updates

from polyeps.algorithms.robust_hdp import noise_variances, robust_hdp
from polyeps.core import Replies
from polyeps.models import logistic
from polyeps.training import sgd

LARGE = logistic(features=299, classes=4)  # 1200 parameters


def noisy(deviations: Vector, size: int, shared: float = 0.2, seed: int = 0) -> Updates:
    common = np.random.default_rng([seed, 99]).normal(size=size)

    def updates(client: str, number: int, model: Vector) -> Vector:
        own = np.random.default_rng([seed, int(client), number]).normal(size=size)
        return np.asarray(shared * common + deviations[int(client)] * own)

    return updates


def replies_of(updates: Updates, clients: int, size: int) -> Replies:
    rows = np.stack([updates(str(client), 0, np.zeros(size)) for client in range(clients)])
    ids = tuple(str(client) for client in range(clients))
    return Replies(ids, {"update": torch.from_numpy(rows).float()}, (True,) * clients)


def test_finds_known_noise() -> None:
    """Up to a common factor, which weights do not see."""
    true = np.array([0.05, 0.1, 0.1, *[1.0] * 20, *[3.0] * 10])
    found = noise_variances(replies_of(noisy(true, 4000, shared=0.03), len(true), 4000), 0, 1000).sqrt().numpy() / true
    assert np.all(abs(found / np.median(found) - 1) < 0.2)
    assert 0.85 < np.median(found) < 1.05


def test_a_strong_signal_among_few_is_taken_for_noise_never_the_reverse() -> None:
    """Three clients see a signal four times their noise, and thirty others cannot: the method's own limit."""
    true = np.array([0.05, 0.1, 0.1, *[1.0] * 20, *[3.0] * 10])
    found = noise_variances(replies_of(noisy(true, 4000, shared=0.2), len(true), 4000), 0, 1000).sqrt().numpy() / true
    assert 1.2 < found[0] < 4
    assert found.min() > 0.85


def test_a_round_is_the_papers() -> None:
    """Stack, separate, weight by 1/‖S_i‖², add the mean: each step slowly, in numpy."""
    deviations = np.array([0.1, 0.2, 0.5, 1.0, 1.0, 2.0])
    updates = noisy(deviations, MODEL.size)
    rows = np.stack([updates(str(client), 0, np.zeros(MODEL.size)) for client in range(6)])
    squares = (plain_admm(rows)[1] ** 2).sum(1)
    expected = sum(row / square for row, square in zip(rows, squares, strict=True)) / sum(1 / squares)
    clients = Prescribed([None] * 6, updates)
    found = clients.run(robust_hdp(TRAINING), 1).model.numpy()
    assert np.linalg.norm(found - expected) < 0.05 * np.linalg.norm(expected)


def weights_of(deviations: Vector, rounds: int = 5, **options: Any) -> Vector:
    """The shares of the last round, read off updates that each move a coordinate of their own in that round."""
    size = LARGE.size
    updates = noisy(deviations, size)

    def marked(client: str, number: int, model: Vector) -> Vector:
        if number < rounds:
            return updates(client, number, model)
        row = np.zeros(size)
        row[int(client)] = 1.0
        return row

    training = sgd(LARGE, rate=0.5, steps=1, learning_rate=0.1)
    before = Prescribed([None] * len(deviations), marked, model=LARGE)
    first = before.run(robust_hdp(training, **options), rounds).model
    again = Prescribed([None] * len(deviations), marked, model=LARGE)
    return (again.run(robust_hdp(training, **options), rounds + 1).model - first)[: len(deviations)].double().numpy()


def test_equal_noise_gives_the_plain_mean() -> None:
    weights = weights_of(np.full(10, 0.7))
    np.testing.assert_allclose(weights, np.full(10, 0.1), rtol=0.1)
    assert weights.sum() == pytest.approx(1)


def test_weights_are_inverse_to_variances_and_endless_noise_is_ignored() -> None:
    deviations = np.array([0.5, 0.5, 1.0, 1.0, 2.0, 2.0, 1e3])
    weights = weights_of(deviations)
    np.testing.assert_allclose(weights[:6], deviations[:6] ** -2.0 / (deviations[:6] ** -2.0).sum(), rtol=0.15)
    assert weights[6] < 1e-5


def test_estimates_are_settled_after_the_warm_up() -> None:
    """Later updates do not change the weights, however they look."""
    deviations = np.array([0.5] * 4 + [1.0] * 4)
    np.testing.assert_allclose(weights_of(deviations, 3, warm_up=3), weights_of(deviations, 6, warm_up=3), atol=2e-6)


def test_an_update_of_zero_is_not_the_one_with_the_least_noise() -> None:
    deviations = np.array([0.5, 0.5, 1.0, 1.0, 2.0, 0.0])
    common = np.ones(LARGE.size)

    def updates(client: str, number: int, model: Vector) -> Vector:
        if client == "5":
            return np.zeros(LARGE.size)
        own = np.random.default_rng([int(client), number]).normal(size=LARGE.size)
        return np.asarray(common + deviations[int(client)] * own)

    training = sgd(LARGE, rate=0.5, steps=1, learning_rate=0.1)
    model = Prescribed([None] * 6, updates, model=LARGE).run(robust_hdp(training, coordinates=200), 3).model
    assert 2.7 < model.mean() < 3


def test_many_clients_are_separated_in_parts() -> None:
    true = np.where(np.arange(230) % 10 == 0, 0.1, 1.0)
    found = noise_variances(replies_of(noisy(true, 2000, shared=0.1), len(true), 2000), 0, 1000).sqrt().numpy() / true
    assert np.all(abs(found / np.median(found) - 1) < 0.4)
