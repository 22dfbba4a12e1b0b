"""PDP-FL: groups and weights from updates alone, thin uploads under hidden budgets, and what it does in doubt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from reference import federated
from reference.federated import Choice, Vector
from support.prescribed import Prescribed

from polyeps.aggregation.subspace import inverse_variance_weights, variances_of_norms
from polyeps.algorithms import ALGORITHMS
from polyeps.algorithms.pdp_fl import estimates, remember
from polyeps.core import Algorithm, Profile, Replies, State
from polyeps.models import logistic
from polyeps.training import sgd

MODEL = logistic(features=60, classes=10)
TRAINING = sgd(MODEL, rate=0.5, steps=1, learning_rate=0.1)
NOISE = (3.0, 0.1, 2.8, 3.2, 0.12, 3.1, 2.9, 0.11)
LOW_NOISE = {"1", "4", "7"}


def noisy(noise: Sequence[float] = NOISE) -> Any:
    """A shared signal of length 10, and noise of these deviations in all 610 coordinates."""
    signal = np.random.default_rng(5).normal(size=MODEL.size)
    signal *= 10 / np.linalg.norm(signal)

    def updates(client: str, number: int, model: Vector) -> Vector:
        drawn = np.random.default_rng([int(client), number]).normal(size=MODEL.size)
        return signal + noise[int(client)] * drawn

    return updates


def clients(updates: Any = None, count: int = len(NOISE), **more: Any) -> Prescribed:
    return Prescribed([None] * count, updates or noisy(), model=MODEL, **more)


def built(name: str = "pdp-fl", **options: Any) -> Algorithm:
    return ALGORITHMS[name].build(TRAINING, **{**ALGORITHMS[name].options, **options})


@pytest.mark.parametrize("grouping", ["noise", "robust", "mixture"])
def test_groups_are_the_true_ones_where_noise_tells_them_apart(grouping: Any) -> None:
    state = clients().run(built(grouping=grouping), 3)
    low_noise, trust = estimates(state.kept, MODEL.size, grouping, "noise")
    assert {str(place) for place in np.flatnonzero(low_noise)} == LOW_NOISE
    assert trust[[1, 4, 7]].min() > 10 * trust[[0, 2, 3, 5, 6]].max()
    assert state.kept["seen"].tolist() == [1.0 if grouping == "mixture" else 3.0] * 8


def test_noise_finds_groups_where_signals_differ_more_than_noise() -> None:
    """As with two labels per client: signals of their own, in few coordinates, longer than the noise."""
    noise = (0.10, 0.01, 0.09, 0.11, 0.012, 0.10, 0.09, 0.011)

    def updates(client: str, number: int, model: Vector) -> Vector:
        own = np.random.default_rng(50 + int(client))
        signal = np.zeros(MODEL.size)
        signal[own.choice(MODEL.size, 60, replace=False)] = own.normal(size=60) * own.uniform(0.3, 1.5)
        drawn = np.random.default_rng([int(client), number]).normal(size=MODEL.size)
        return signal + noise[int(client)] * drawn

    found = {}
    for grouping in ("robust", "noise"):
        state = clients(updates).run(built(grouping=grouping), 2)
        low_noise, _ = estimates(state.kept, MODEL.size, grouping, "noise")
        found[grouping] = {str(place) for place in np.flatnonzero(low_noise)}
    assert found["noise"] == LOW_NOISE
    assert found["robust"] != LOW_NOISE


def test_three_groups_of_the_published_mixture() -> None:
    noise = (0.1, 1.0, 4.0, 0.11, 1.05, 4.1, 0.12, 0.95, 3.9, 4.2)
    memory = {"log_norms": torch.log(torch.tensor(noise, dtype=torch.float64)), "seen": torch.ones(10).double()}
    two, _ = estimates(memory, MODEL.size, "mixture", "count", 2)
    three, _ = estimates(memory, MODEL.size, "mixture", "count", 3)
    assert np.flatnonzero(three).tolist() == [0, 3, 6]
    assert set(np.flatnonzero(three)) <= set(np.flatnonzero(two))


@pytest.mark.parametrize("weights", ["noise", "count"])
def test_one_group_is_averaged_by_noise_and_not_projected(weights: str) -> None:
    noise = (0.20, 0.21, 0.22, 0.23, 0.24, 0.25)  # a continuum: nobody is quieter than his neighbour
    members = clients(noisy(noise), 6)
    found = members.run(built(weights=weights), 1).model
    rows = {client: noisy(noise)(client, 0, np.zeros(MODEL.size)) for client in map(str, range(6))}
    squares = torch.tensor([float(row @ row) for row in rows.values()], dtype=torch.float64)
    shares = inverse_variance_weights(
        variances_of_norms(squares, MODEL.size), float(squares.min() / MODEL.size) ** 0.5
    ).tolist()
    choice = Choice(weights=dict(zip(rows, shares, strict=True)) if weights == "noise" else None)
    np.testing.assert_allclose(found.numpy(), federated.weighted_mean(rows, choice), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("grouping", ["noise", "robust", "mixture"])
def test_hidden_budgets_and_thin_uploads_after_the_warm_up(grouping: str) -> None:
    members = clients()
    state = members.run(built("pdp-fl-plus", grouping=grouping), 8)
    assert all(profile.epsilon is None for profile in state.enrolled)
    for task in members.tasks:
        if task.round < 3:
            assert task.action == "train"
            assert len(task.to) == 8
        else:
            assert set(task.to) == (LOW_NOISE if task.action == "train" else set("01234567") - LOW_NOISE)
    full, thin = members.traffic[2].traffic["0"], members.traffic[3].traffic["0"]
    assert thin[1] < 0.05 * full[1] < full[0] < thin[0]  # it sends two numbers, and receives the subspace
    assert members.traffic[3].traffic["1"] == full
    assert torch.isfinite(state.model).all()


def test_thin_rounds_are_those_of_pfa_plus_given_the_groups() -> None:
    members = clients()
    state = members.run(built("pdp-fl-plus", weights="count", warm_up=1), 5)
    everybody = [list("01234567")] * 5
    choice = Choice(1, "set", federated.spans_of(MODEL, True))
    expected = federated.pfa_plus(np.zeros(MODEL.size), everybody, noisy(), frozenset(LOW_NOISE), choice)
    np.testing.assert_allclose(state.model.numpy(), expected, rtol=1e-3, atol=1e-4)


def test_rounds_stay_full_when_groups_dissolve_in_the_warm_up() -> None:
    """A basis found by mistake in the first round must not be what everybody is projected onto for ever."""
    algorithm, members = built("pdp-fl-plus"), clients()
    state = members.run(algorithm, 3)
    alike = {**state.kept, "log_noise": torch.full((8,), 3.0).double()}
    members.tasks.clear()
    after = algorithm.round(replace(state, kept=alike, roster=state.enrolled), members)
    assert [task.action for task in members.tasks] == ["train"]
    assert len(members.tasks[0].to) == 8
    assert after.kept["seen"].tolist() == [4.0] * 8


def test_nobody_is_public_means_nobody_is_thin() -> None:
    members = clients(noisy((0.5,) * 8))
    state = members.run(built("pdp-fl-plus"), 6)
    assert {task.action for task in members.tasks} == {"train"}
    assert state.kept["seen"].tolist() == [6.0] * 8  # and the server goes on learning


def test_a_client_never_heard_in_full_is_private_and_trusted_least() -> None:
    late = clients()
    state = late.run(built("pdp-fl-plus"), 3)
    memory = {name: kept.clone() for name, kept in state.kept.items()}
    memory["seen"][1] = memory["log_norms"][1] = 0.0  # a quiet one, had anybody heard it
    low_noise, trust = estimates(memory, MODEL.size, "noise", "noise")
    assert not low_noise[1]
    assert trust[1] == trust[[0, 2, 3, 4, 5, 6, 7]].min()
    nothing = {"seen": torch.zeros(4).double(), "log_norms": torch.zeros(4).double()}
    low_noise, trust = estimates(nothing, MODEL.size, "noise", "noise")
    assert not low_noise.any()
    assert trust.tolist() == [1.0] * 4


def test_a_late_client_takes_part_in_thin_rounds() -> None:
    members = clients()
    joined = members.run(built("pdp-fl-plus", warm_up=1), 6, share=0.65)
    heard = {client for round in members.traffic[:1] for client in round.traffic}
    later = {client for round in members.traffic[1:] for client in round.traffic}
    assert later - heard  # somebody came only after the warm-up
    thin = {client for task in members.tasks if task.action == "project" for client in task.to}
    assert later - heard <= thin
    assert torch.isfinite(joined.model).all()


def test_updates_without_length_say_nothing_of_their_noise() -> None:
    def updates(client: str, number: int, model: Vector) -> Vector:
        row: Vector = noisy()(client, number, model)
        return row * (client != "1")

    state = clients(updates).run(built(), 2)
    assert state.kept["seen"][1] == 0
    low_noise, _ = estimates(state.kept, MODEL.size, "noise", "noise")
    assert np.flatnonzero(low_noise).tolist() == [4, 7]


def test_a_client_without_any_noise_is_the_quietest() -> None:
    rows = torch.randn(4, 100, generator=torch.Generator().manual_seed(1))
    rows[2] = 0.0
    rows[2, 0] = 50.0  # all signal: most coordinates are exactly zero
    ids = ("a", "b", "c", "d")
    state = State(torch.zeros(100), enrolled=tuple(Profile(client) for client in ids))
    memory = remember(state, Replies(ids, {"update": rows}, (True,) * 4), "noise", anew=False)
    assert int(memory["log_noise"].argmin()) == 2
