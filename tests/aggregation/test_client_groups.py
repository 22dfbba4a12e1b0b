"""Who is public: degenerate and known populations, and how often norms give the noise levels away."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from polyeps.aggregation.client_groups import (
    SPLITS,
    NoiseGroups,
    group_by_log_norms,
    group_by_norms,
    high_epsilon_by_mixture,
    high_epsilon_by_share,
    split_by_epsilon,
)
from polyeps.data.budgets import draw_budgets
from polyeps.errors import InputError

Floats = NDArray[np.float64]
PARAMETERS = 7850
BUDGETS = st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=30)
LOGS = st.lists(st.floats(-700, 700) | st.sampled_from([math.nan, math.inf, -math.inf, 0.0]), min_size=1, max_size=25)


def parameter(rule: str) -> dict[str, float]:
    return {"threshold": 1.0} if rule == "threshold" else {}


@pytest.mark.parametrize("rule", ["mixture", "k-means"])
@pytest.mark.parametrize("name", ["mixgauss1", "mixgauss2", "mixgauss3", "pfa-code-mixgauss2"])
def test_two_kinds_of_clients_are_told_apart(rule: str, name: str) -> None:
    for seed in range(12):
        epsilons = draw_budgets(name, 30, np.random.default_rng(seed)).epsilons
        high = epsilons > 5
        if high.any():  # else there is one kind, and both rules cut it in two
            assert (split_by_epsilon(epsilons, rule) == high).all()


def test_the_top_tenth_hands_the_fourth_high_epsilon_client_to_the_others() -> None:
    epsilons = [0.1] * 26 + [10, 10.1, 9.9, 10.0]
    assert high_epsilon_by_share(epsilons).nonzero()[0].tolist() == [26, 27, 29]
    assert high_epsilon_by_share([1, 1, 1]).tolist() == [True, False, False]
    assert high_epsilon_by_share(range(1, 101), share=0.29).sum() == 29
    assert high_epsilon_by_share([1, 2], share=1).all()


@settings(max_examples=40, deadline=None)
@given(epsilons=BUDGETS, rule=st.sampled_from(sorted(SPLITS)), seed=st.integers(0, 100))
def test_a_split_is_upwards_closed_and_forgets_the_order(epsilons: list[float], rule: str, seed: int) -> None:
    values = np.array(epsilons)
    public = split_by_epsilon(values, rule, **parameter(rule))
    assert public.shape == values.shape
    assert public.dtype == np.bool_
    if public.any() and not public.all():
        assert values[public].min() >= values[~public].max()
    else:
        assert public.any() or rule == "threshold"
    order = np.random.default_rng(seed).permutation(len(values))
    if rule != "top":
        assert (split_by_epsilon(values[order], rule, **parameter(rule)) == public[order]).all()


@pytest.mark.parametrize("rule", ["mixture", "k-means"])
@pytest.mark.parametrize("epsilons", [[3.0], [2.0, 2.0], [0.5] * 9])
def test_clients_of_equal_epsilon_are_in_one_group(rule: str, epsilons: list[float]) -> None:
    assert split_by_epsilon(epsilons, rule).all()


def test_a_wide_high_gaussian_does_not_make_the_strictest_public() -> None:
    epsilons = np.exp(np.concatenate([[-9.0], np.linspace(-0.05, 0.05, 40), [5.0, 9.0]]))
    public = high_epsilon_by_mixture(epsilons)
    assert not public[0]
    assert public[-1]


# Noise multipliers by ε for MNIST logistic regression, and what they leave of an update's norm (SOUNDNESS 4).
EPSILON = np.log([0.1, 0.4, 1, 3, 10, 20])
SCALE = np.log([14.30, 4.137, 1.901, 0.948, 0.606, 0.490])


def population(name: str, clients: int, seed: int, silent: bool = False) -> tuple[Floats, NDArray[np.int64]]:
    """Norms of one round, or of 670 noise-only coordinates of it, and the true labels."""
    rng = np.random.default_rng(seed)
    epsilons = draw_budgets(name, clients, rng).epsilons
    noise = np.exp(np.interp(np.log(epsilons), EPSILON, SCALE)) / 7 * 0.94
    size, signal = (670, np.zeros(clients)) if silent else (PARAMETERS, rng.uniform(0.2, 0.6, clients))
    norms = np.sqrt(signal**2 + noise**2 * rng.chisquare(size, clients) / size)
    return norms, np.unique(-np.digitize(epsilons, [0.3, 3]), return_inverse=True)[1]


def recovered(find: Callable[[Floats], Any], name: str, clients: int, silent: bool = False) -> float:
    drawn = [population(name, clients, seed, silent) for seed in range(60)]
    return float(np.mean([np.array_equal(find(norms), truth) for norms, truth in drawn]))


def robust(norms: Floats) -> Any:
    return group_by_log_norms(np.log(norms), PARAMETERS).labels


@pytest.mark.parametrize(("clients", "least"), [(10, 0.9), (20, 0.95), (50, 0.95)])
def test_low_and_high_epsilon_clients_are_distinguished_by_norm(clients: int, least: float) -> None:
    assert recovered(robust, "pdp-fl-mixgauss1", clients) >= least


@pytest.mark.parametrize("name", ["pdp-fl-mixgauss1", "pdp-fl-mixgauss2"])
def test_ten_clients_are_grouped_right_more_often_than_by_the_published_rule(name: str) -> None:
    assert recovered(robust, name, 10) > recovered(group_by_norms, name, 10) + 0.15


@pytest.mark.parametrize("name", ["pdp-fl-mixgauss1", "pdp-fl-mixgauss2", "pdp-fl-mixgauss3"])
@pytest.mark.parametrize("clients", [10, 20])
def test_noise_only_coordinates_give_every_mixture_away(name: str, clients: int) -> None:
    assert recovered(robust, name, clients, silent=True) >= 0.95


def test_norms_alone_do_not_distinguish_weaker_mixtures() -> None:
    # The limit the documentation admits: a day this fails is a day to change it.
    assert recovered(robust, "pdp-fl-mixgauss2", 50) < 0.1


def brute_force(values: Floats) -> float:
    """The criterion of the best partition, by trying them all from the definition."""
    line, floor = np.sort(values), max(1 / (2 * PARAMETERS), 0.01)
    gaps = [i for i in range(1, len(line)) if line[i] - line[i - 1] >= math.log(1.3)]
    cuts = [[], *([a] for a in gaps), *([a, b] for a in gaps for b in gaps if a < b)]
    return min(price_of(np.split(line, cut), floor) for cut in cuts)


def price_of(groups: list[Floats], floor: float) -> float:
    size = sum(len(group) for group in groups)
    errors = [len(group) * float(group.var()) for group in groups]
    total = 3 * len(groups) * math.log(size)
    for group, error in zip(groups, errors, strict=True):
        variance, share = max(error / len(group), floor), len(group) / size
        total += len(group) * (math.log(variance) - 2 * math.log(share)) + error / variance
    return total


@settings(max_examples=60, deadline=None)
@given(values=st.lists(st.floats(-3, 3), min_size=4, max_size=14))
def test_the_best_partition_is_found(values: list[float]) -> None:
    array = np.array(values)
    groups = group_by_log_norms(array, PARAMETERS)
    parts = [np.sort(array[groups.labels == label]) for label in range(groups.count)]
    assert price_of(parts, 0.01) == pytest.approx(brute_force(array), abs=1e-6)


@settings(max_examples=100, deadline=None)
@given(values=LOGS, seed=st.integers(0, 100))
def test_groups_of_wild_norms(values: list[float], seed: int) -> None:
    array = np.array(values)
    groups = group_by_log_norms(array, PARAMETERS)
    finite = np.isfinite(array)
    assert (groups.labels[~finite] == -1).all()
    assert not groups.public[~finite].any()
    assert groups.public.any() == finite.any()
    assert groups.projecting == (groups.count > 1)
    if finite.any():
        assert set(groups.labels[finite]) == set(range(groups.count))
        order = np.argsort(array[finite])
        assert (np.diff(groups.labels[finite][order]) >= 0).all()
    if finite.sum() < 4:
        assert groups.count == 1
    order = np.random.default_rng(seed).permutation(len(array))
    assert (group_by_log_norms(array[order], PARAMETERS).labels == groups.labels[order]).all()


def test_equal_clients_are_one_group_and_project_nothing() -> None:
    groups = group_by_log_norms(np.zeros(20), PARAMETERS)
    assert isinstance(groups, NoiseGroups)
    assert not groups.projecting
    assert groups.public.all()
    continuum = group_by_log_norms(np.linspace(0, 10, 200), PARAMETERS)
    assert not continuum.projecting  # long, but nowhere a gap


def test_ten_thousand_clients_are_grouped_at_once() -> None:
    values = np.concatenate([np.random.default_rng(1).normal(mean, 0.1, 3333) for mean in (0, 2, 4)])
    groups = group_by_log_norms(values, PARAMETERS)
    assert groups.count == 3
    assert (groups.labels == np.repeat([0, 1, 2], 3333)).all()
    steps = group_by_log_norms(np.arange(2000) * 0.3, PARAMETERS)  # a gap everywhere: 2 million ways
    assert steps.count == 1  # evenly spread clients are no groups


@settings(max_examples=40, deadline=None)
@given(values=st.lists(st.floats(0, 1e30) | st.just(math.nan), min_size=1, max_size=20), groups=st.integers(1, 3))
def test_the_published_rule_on_wild_norms(values: list[float], groups: int) -> None:
    array = np.array(values)
    labels = group_by_norms(array, groups)
    finite = np.isfinite(array)
    assert (labels[~finite] == -1).all()
    if finite.any():
        assert labels[finite].min() == 0
        assert labels.max() < groups


def test_the_published_rule_splits_even_one_group() -> None:
    norms = population("pdp-fl-mixgauss1", 10, 2)[0][:4] * np.array([1, 1.01, 1.02, 1.03])
    assert len(set(group_by_norms(norms))) == 2
    found = group_by_norms([0.1, 0.12, 0.11, 5.0, 5.1])
    assert found.tolist() == [0, 0, 0, 1, 1]


BAD: dict[str, tuple[Callable[[], object], str]] = {
    "rule": (lambda: split_by_epsilon([1.0], "best"), "there is no split 'best'"),
    "unknown parameter": (lambda: split_by_epsilon([1.0], "k-means", share=0.1), "takes no 'share'"),
    "missing parameter": (lambda: split_by_epsilon([1.0], "threshold"), "needs 'threshold'"),
    "nobody": (lambda: split_by_epsilon([]), "epsilons must be one number per client"),
    "not positive": (lambda: split_by_epsilon([1.0, 0.0]), "finite numbers above 0"),
    "infinite": (lambda: split_by_epsilon([1.0, math.inf]), "finite numbers above 0"),
    "share": (lambda: split_by_epsilon([1.0], "top", share=0), "share must be"),
    "threshold": (lambda: split_by_epsilon([1.0], "threshold", threshold=math.nan), "threshold must be"),
    "groups": (lambda: group_by_norms([1.0], 0), "groups must be"),
    "negative norm": (lambda: group_by_norms([-1.0]), "norms must be at least 0"),
    "parameters": (lambda: group_by_log_norms([1.0], 0), "parameters must be"),
    "matrix": (lambda: group_by_log_norms([[1.0]], 5), "log_norms must be one number per client"),
}


@pytest.mark.parametrize("case", BAD)
def test_wrong_input_is_refused_in_a_sentence(case: str) -> None:
    call, message = BAD[case]
    with pytest.raises(InputError, match=message):
        call()
