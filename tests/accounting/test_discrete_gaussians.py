"""Sums of discrete Gaussians priced as Gaussians: against exact sums over the discrete_gaussians."""

from __future__ import annotations

import math
from typing import Any

import dp_accounting as dp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from polyeps.accounting import best_accountant, discrete_gaussians, epsilon, history_epsilon
from polyeps.accounting.calibration import calibrate_each
from polyeps.accounting.discrete_gaussians import as_gaussians, gap_of_sum
from polyeps.accounting.events import DiscreteGaussianSumDpEvent, Gaussian, Poisson, SkellamDpEvent, TogetherDpEvent
from polyeps.accounting.histories import history_of
from polyeps.algorithms._releases import Release
from polyeps.core import Budget
from polyeps.errors import UnknownEvent

Law = NDArray[np.float64]


def law_of(deviation: float, reach: int) -> Law:
    """A discrete Gaussian on −reach … reach."""
    x = np.arange(-reach, reach + 1)
    weights = np.exp(-(x**2) / (2 * deviation**2))
    return np.asarray(weights / weights.sum())


def exact_delta(with_it: Law, without: Law, at: float) -> float:
    """δ of the worse direction, summed over all outcomes."""
    return max(
        float(np.maximum(with_it - math.exp(at) * without, 0).sum()),
        float(np.maximum(without - math.exp(at) * with_it, 0).sum()),
    )


def moved(law: Law, by: tuple[int, ...]) -> Law:
    """A law moved by a vector; nothing of weight may leave."""
    return np.roll(law, by, axis=tuple(range(law.ndim)))


@pytest.mark.parametrize("rounding", [0.6, 0.8, 1.0])
@pytest.mark.parametrize(("rest", "centre"), [(0.5, 0.0), (1.7, 3.0), (6.0, 0.25)])
def test_a_rounded_gaussian_is_nearly_a_discrete_one(rounding: float, rest: float, centre: float) -> None:
    """A Gaussian of deviation `rest`, rounded at random; by the trapezoid rule, which here is as good as exact."""

    def weight(x: NDArray[np.floating[Any]], deviation: float) -> Law:
        return np.asarray(np.exp(-(x**2) / (2 * deviation**2)))

    lattice_points = np.arange(-150, 151)
    total = math.hypot(rounding, rest)
    step = rest / 40
    y = centre + step * np.arange(-600, 601)
    density = weight(y - centre, rest) / (rest * math.sqrt(2 * math.pi))
    about = weight(lattice_points - y[:, None], rounding)
    rounded = step * density @ (about / about.sum(1, keepdims=True))
    ideal = weight(lattice_points - centre, total)
    ideal /= ideal.sum()
    likely = ideal > 1e-6
    apart = np.abs(np.log(rounded[likely] / ideal[likely])).max()
    assert apart <= 10 * math.exp(-2 * (math.pi * rounding) ** 2)


@pytest.mark.parametrize("agents", [2, 5, 9])
@pytest.mark.parametrize("deviation", [0.6, 0.9])
def test_a_sum_of_discrete_gaussians_is_nearly_one(agents: int, deviation: float) -> None:
    one = law_of(deviation, 60)
    total = one
    for _ in range(agents - 1):
        total = np.convolve(total, one)
    near = law_of(deviation * math.sqrt(agents), (len(total) - 1) // 2)
    likely = near > 1e-12  # beyond, doubles have not the digits
    apart = np.abs(np.log(total[likely] / near[likely])).max()
    assert apart <= gap_of_sum(deviation, agents)


@given(
    rate=st.floats(0.01, 0.9),
    deviation=st.floats(30, 45),
    vector=st.tuples(st.integers(-30, 30), st.integers(-30, 30)).filter(any),
    at=st.floats(0.05, 3),
)
@settings(max_examples=60, deadline=None)
def test_never_below_what_one_release_really_costs(
    rate: float, deviation: float, vector: tuple[int, int], at: float
) -> None:
    """Two coordinates, of which every outcome is looked at."""
    one = law_of(deviation, int(9 * deviation) + 40)
    without = one[:, None] * one
    with_it = (1 - rate) * without + rate * moved(without, vector)
    delta = exact_delta(with_it, without, at)
    if delta < 1e-9:
        return
    event = Poisson(rate, DiscreteGaussianSumDpEvent(math.hypot(*vector), deviation, 1, 2))
    assert at <= epsilon(event, delta) * (1 + 1e-9)


@pytest.mark.parametrize("rate", [0.2, 1.0])
def test_several_rounds_of_sums_over_agents(rate: float) -> None:
    """Two rounds, three agents: the plane of both sums, outcome by outcome."""
    agents, deviation, shift = 3, 18.0, 20
    one = law_of(deviation, 160)
    total = np.convolve(np.convolve(one, one), one)
    there = (1 - rate) * total + rate * moved(total, (shift,))
    without, with_it = total[:, None] * total, there[:, None] * there
    step = DiscreteGaussianSumDpEvent(float(shift), deviation, agents, 1)
    price = dp.SelfComposedDpEvent(Poisson(rate, step), 2)
    for at in (0.7, 1.5, 2.5):
        found = epsilon(price, exact_delta(with_it, without, at))
        assert at <= found * (1 + 1e-9) <= at * 1.012  # rounding takes 9 of a variance of 972


def test_two_releases_of_one_sample_fold_before_they_are_amplified() -> None:
    first, second = (DiscreteGaussianSumDpEvent(4096.0, 500.0 * k, 100, 1 << 16) for k in (1, 2))
    (step,) = as_gaussians(history_of(Poisson(0.1, TogetherDpEvent([first, second]))))
    assert isinstance(step, Poisson)
    assert isinstance(step.event, Gaussian)
    assert step.event.noise_multiplier == pytest.approx(1 / math.hypot(4096 / 5000, 4096 / 10000), rel=1e-5)
    assert step.event.noise_multiplier < 1 / math.hypot(4096 / 5000, 4096 / 10000)


def test_integers_cost_a_thousandth_more_than_ideal_gaussians() -> None:
    ideal, integers = (
        Poisson(1 / 60, Release("train", 100_000, 1.0, noise=noise, clients=160).event(1.2))
        for noise in ("gaussian", "discrete-gaussian")
    )
    costs = [epsilon(dp.SelfComposedDpEvent(price, 180), 1e-4) for price in (ideal, integers)]
    assert costs[0] < costs[1] < 1.003 * costs[0]


@pytest.mark.parametrize(
    "step",
    [
        DiscreteGaussianSumDpEvent(1.0, 0.7, 100, 1),  # parts too small for their sum to be smooth
        DiscreteGaussianSumDpEvent(1.0, 29.9, 1, 1),  # too little room for a rounding
        DiscreteGaussianSumDpEvent(0.0, 40.0, 1, 1),
        SkellamDpEvent(10.0, 3.0, 1e6),
    ],
)
def test_what_is_not_near_enough_stays_as_it_is(step: dp.DpEvent) -> None:
    assert as_gaussians({step: 3}) == {step: 3}
    assert best_accountant({Poisson(0.1, step): 1}) == "rdp"
    with pytest.raises(UnknownEvent):
        epsilon(step, 1e-5)


def test_what_many_steps_lack_adds_up(monkeypatch: pytest.MonkeyPatch) -> None:
    step = DiscreteGaussianSumDpEvent(4096.0, 1.75, 4096, 1 << 20)
    monkeypatch.setattr(discrete_gaussians, "_NEGLIGIBLE", 1e-1)
    assert any(isinstance(one, Gaussian) for one in as_gaussians({step: 1}))
    assert as_gaussians({step: 10_000_000}) == {step: 10_000_000}


def test_one_in_anothers_place_stays_refused() -> None:
    with pytest.raises(UnknownEvent):
        epsilon(DiscreteGaussianSumDpEvent(4096.0, 500.0, 100, 1 << 16), 1e-5, adjacency="replace-one")


@pytest.mark.parametrize(
    "step",
    [
        DiscreteGaussianSumDpEvent(1.0, 1e200, 10, 10),
        DiscreteGaussianSumDpEvent(1.0, 100.0, 10**300, 10),
        DiscreteGaussianSumDpEvent(1.0, 100.0, 10, 10**300),
        DiscreteGaussianSumDpEvent(1e-320, 100.0, 10, 10),
    ],
)
@pytest.mark.parametrize("sampled", [False, True])
def test_numbers_that_no_double_can_hold_are_no_reason_to_fail(step: dp.DpEvent, sampled: bool) -> None:
    history = history_of(Poisson(0.1, step) if sampled else step)
    assert history_epsilon(history, 1e-5, "add-remove", best_accountant(history)) >= 0.0


def test_the_gap_of_millions_is_bounded_without_a_term_for_each() -> None:
    agents = 1 << 20
    k = np.arange(1, agents)
    exact = 10 * float(np.exp(-2 * math.pi**2 * 2.5**2 * k / (k + 1)).sum())
    assert exact <= gap_of_sum(2.5, agents) <= 1.01 * exact
    assert gap_of_sum(2.5, 10**15) < 1e-25


@pytest.mark.parametrize(("epsilon", "deviation"), [(20.0, 4.0), (1.0, 4.0), (20.0, 2.5), (300.0, 40.0)])
def test_noise_is_calibrated_by_the_price_that_ledgers_ask(epsilon: float, deviation: float) -> None:
    """Which accountant that is depends on the scale: parts of small noise are not smooth."""

    def price(scale: float, _: int) -> dp.DpEvent:
        return DiscreteGaussianSumDpEvent(8.0, deviation * scale, 4, 1000)

    answer = calibrate_each([Budget(epsilon, 1e-5)], price, 10)
    history = history_of(price(float(answer.noise_multiplier[0]), 0), 10)
    asked = history_epsilon(history, 1e-5, "add-remove", best_accountant(history))
    assert 0.98 * epsilon <= asked == answer.certified[0] <= epsilon


def test_a_total_does_not_fall_where_steps_become_too_many() -> None:
    step = Poisson(0.1, DiscreteGaussianSumDpEvent(16.0, 2.38, 400, 1000))
    spent = {}
    for uses in (1, 2, 4, 8, 16, 32, 64, 128, 256):
        accountant = best_accountant({step: uses})
        spent[uses] = accountant, history_epsilon({step: uses}, 1e-5, "add-remove", accountant)
    assert {name for name, _ in spent.values()} == {"pld", "rdp"}
    costs = [cost for _, cost in spent.values()]
    assert costs == sorted(costs)
