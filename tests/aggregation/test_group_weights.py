"""How much groups count: the paper's lemma where it speaks, and what must hold wherever it does not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from polyeps_reproductions.theory.points import best_ratio, opt_out
from torch import Tensor

from polyeps.aggregation.group_weights import PrivacyGroups, best_group_weights, learn_differences, weights_by_ratio

CLOSE: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-6}


def of(sizes: list[float], noise: list[float], rate: float = 1.0, rounds: int = 1) -> PrivacyGroups:
    return PrivacyGroups(
        torch.tensor(sizes, dtype=torch.float64), rate, rounds, torch.tensor(noise, dtype=torch.float64)
    )


def weighed(groups: PrivacyGroups, differences: Tensor | None = None) -> Tensor:
    kept = {} if differences is None else {"differences": differences}
    return best_group_weights(groups, kept, range(len(groups.sizes)))


@pytest.mark.parametrize(("clients", "private", "gamma2"), [(100, 95, 0.02), (20, 15, 0.1), (10, 5, 0.2), (3, 1, 4.0)])
def test_two_groups_in_one_round_are_weighed_as_lemma_1_says(clients: int, private: int, gamma2: float) -> None:
    """Everybody drawn, and clients who choose whatever they hold: σ_c² is one in units of the clip norm."""
    found = weighed(of([private, clients - private], [gamma2 * private**2, 0.0]))
    ratio = best_ratio(opt_out(clients, private, 0.6, 0.4, gamma2))
    sizes, noisy = torch.tensor([private, clients - private], dtype=torch.float64), torch.tensor([True, False])
    torch.testing.assert_close(found, weights_by_ratio(sizes, noisy, ratio), **CLOSE)


@pytest.mark.parametrize("rate", [0.05, 0.5, 1.0])
def test_without_noise_clients_count_alike(rate: float) -> None:
    found = weighed(of([5.0, 80.0, 15.0], [0.0] * 3, rate, 500))
    torch.testing.assert_close(found, torch.tensor([0.05, 0.8, 0.15], dtype=torch.float64), **CLOSE)


def test_where_noise_is_all_there_is_groups_count_by_its_inverse() -> None:
    found = weighed(of([10.0, 10.0, 20.0], [1e9, 3e9, 4e9]))
    torch.testing.assert_close(found, torch.tensor([3, 1, 3], dtype=torch.float64) / 7, **CLOSE)


def test_a_group_that_differs_gains_no_weight_from_its_noise() -> None:
    """Open clients of one kind: without noise, but their mean is not everybody's."""
    groups = of([1900.0, 100.0], [1e5, 0.0], 0.05, 500)
    alike, apart = weighed(groups), weighed(groups, torch.diag(torch.tensor([1e-4, 0.5], dtype=torch.float64)))
    assert alike[1] > 0.5
    assert apart[1] < 0.1


def test_noise_averages_out_over_rounds_and_luck_over_those_in_which_all_are_drawn() -> None:
    groups = of([40.0, 10.0], [8.0, 0.0], 0.1, 200)
    expected = torch.tensor([0.9 / 40 + 8 / 4**2 / 200, 0.9 / 10], dtype=torch.float64)
    torch.testing.assert_close(groups.averaged, expected)


numbers = st.floats(0.0, 1e4)


@st.composite
def situations(draw: st.DrawFn) -> tuple[PrivacyGroups, Tensor]:
    many = draw(st.integers(1, 5))
    sizes = draw(st.lists(st.integers(1, 3000), min_size=many, max_size=many))
    noise = draw(st.lists(st.one_of(st.just(0.0), numbers), min_size=many, max_size=many))
    groups = of([float(size) for size in sizes], noise, draw(st.floats(0.01, 1.0)), draw(st.integers(1, 1000)))
    entries = draw(st.lists(st.floats(-1, 1), min_size=many * many, max_size=many * many))
    half = torch.tensor(entries, dtype=torch.float64).reshape(many, many)
    return groups, half + half.T  # measured, so that it need not be a matrix of products


@settings(max_examples=150, deadline=None)
@given(situations())
def test_weights_are_shares(situation: tuple[PrivacyGroups, Tensor]) -> None:
    weights = weighed(*situation)
    assert float(weights.sum()) == pytest.approx(1.0)
    assert bool((weights >= 0).all())


@settings(max_examples=100, deadline=None)
@given(situations(), st.floats(0.1, 10.0))
def test_weights_do_not_depend_on_units(situation: tuple[PrivacyGroups, Tensor], factor: float) -> None:
    """All that makes groups miss, times a factor."""
    groups, measured = situation
    products = measured @ measured.T / len(measured)
    larger = PrivacyGroups(groups.sizes * factor, groups.rate, groups.rounds, groups.noise * factor)
    torch.testing.assert_close(weighed(larger, products / factor), weighed(groups, products), rtol=1e-3, atol=1e-5)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 500), min_size=1, max_size=5), st.floats(0, 1), st.integers(0, 31))
def test_weights_by_ratio_are_shares_too(sizes: list[int], ratio: float, which: int) -> None:
    noisy = torch.tensor([bool(which >> place & 1) for place in range(len(sizes))])
    weights = weights_by_ratio(torch.tensor(sizes, dtype=torch.float64), noisy, ratio)
    assert float(weights.sum()) == pytest.approx(1.0)
    assert bool((weights >= 0).all())
    if noisy.all():
        torch.testing.assert_close(weights, torch.tensor(sizes, dtype=torch.float64) / sum(sizes))


def test_only_groups_that_have_a_sum_are_weighed() -> None:
    groups = of([10.0, 30.0, 60.0], [0.0] * 3)
    torch.testing.assert_close(
        best_group_weights(groups, {}, [0, 1]), torch.tensor([0.25, 0.75], dtype=torch.float64), **CLOSE
    )


def test_differences_are_learnt_from_what_rounds_have_in_common() -> None:
    """Noise that is ten times as long as the difference does not count as one."""
    generator = torch.Generator().manual_seed(1)
    groups, size = of([30.0, 10.0], [0.0, 0.0], 0.5, 400), 4000
    middle = torch.randn(2, size, generator=generator)
    difference = torch.zeros(2, size)
    difference[0, 0], difference[1, 1] = 0.2, 0.6
    kept: dict[str, Tensor] = {}
    found = []
    for _ in range(400):
        noise = torch.randn(2, size, generator=generator) * 0.1
        kept |= learn_differences(groups, kept, middle.mean(0) + difference + noise)
        found.append(kept["differences"])
    apart = difference - torch.tensor([0.75, 0.25]) @ difference
    expected = (apart @ apart.T).double()
    torch.testing.assert_close(torch.stack(found[50:]).mean(0), expected, rtol=0.0, atol=0.12)
