import math

import dp_accounting as dp
import numpy as np
import pytest
from dp_accounting.dp_event import RepeatAndSelectDpEvent
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import logsumexp
from scipy.stats import skellam
from support import oracles

from polyeps.accounting import epsilon, rdp
from polyeps.accounting.events import (
    DiscreteGaussianSumDpEvent,
    FixedSize,
    Gaussian,
    Poisson,
    PureDpEvent,
    SkellamDpEvent,
    TogetherDpEvent,
)
from polyeps.accounting.histories import history_of
from polyeps.core import Budget
from polyeps.errors import UnknownEvent
from polyeps.mechanisms.integer import integer_event


def repeated(event: dp.DpEvent, uses: int) -> dp.DpEvent:
    return dp.SelfComposedDpEvent(event, uses)


@pytest.mark.parametrize(
    ("rate", "sigma", "steps", "delta", "expected"),
    [(0.01, 1.0, 1000, 1e-5, 2.1014), (8 / 1200, 1.0, 8000, 1e-5, 3.7442), (0.05, 1.0, 100, 1e-4, 3.3870)],
)
def test_renyi_oracles(rate: float, sigma: float, steps: int, delta: float, expected: float) -> None:
    event = repeated(Poisson(rate, Gaussian(sigma)), steps)
    assert epsilon(event, delta, accountant="rdp") == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize("order", [1.5, 2.0, 4.3, 16.0])
def test_sampled_gaussian_curve_agrees_with_integration(order: float) -> None:
    (value,) = rdp.step_renyi_curve(Poisson(0.05, Gaussian(1.2)), "add-remove", [order])
    p, q = oracles.mixture_density(0.05, 1.0, 1.2), oracles.mixture_density(0.0, 1.0, 1.2)
    exact = max(oracles.renyi(p, q, order, -25, 25), oracles.renyi(q, p, order, -25, 25))
    assert value == pytest.approx(exact, rel=1e-6)


@pytest.mark.parametrize("sigma", [1e-150, 1e-5, 3.3e-5, 1e-3, 0.02])
def test_tiny_noise_is_never_priced_below_what_it_costs(sigma: float) -> None:
    rate, orders = 0.9, [1.55, 2.0, 3.37, 7.1]
    found = rdp.step_renyi_curve(Poisson(rate, Gaussian(sigma)), "add-remove", orders)
    for order, value in zip(orders, found, strict=True):
        plain = order / 2 / sigma / sigma
        assert value * (1 + 1e-12) >= plain + order / (order - 1) * math.log(rate)  # from the drawn part alone
        assert value <= plain * (1 + 1e-12)


def test_orders_reach_small_budgets() -> None:
    event = repeated(Poisson(8 / 1200, Gaussian(40.0)), 8000)
    assert epsilon(event, 1e-5) < epsilon(event, 1e-5, accountant="rdp") < 0.05


def test_pure_curve_agrees_with_the_two_point_sum() -> None:
    likely, rare = 1 / (1 + math.exp(-0.7)), 1 / (1 + math.exp(0.7))
    for order in (1.5, 3.0, 20.0):
        exact = math.log(likely**order * rare ** (1 - order) + rare**order * likely ** (1 - order)) / (order - 1)
        assert rdp.pure_curve(0.7, np.array([order]))[0] == pytest.approx(exact)


def test_pure_steps_never_cost_more_than_their_sum() -> None:
    assert epsilon(repeated(PureDpEvent(2.0), 5), 1e-5, accountant="rdp") <= 10.0
    assert epsilon(repeated(PureDpEvent(2.0), 5), 0.0, accountant="rdp") == 10.0
    assert epsilon(Gaussian(1.0), 0.0, accountant="rdp") == math.inf


def skellam_divergence(variance: float, shift: int, order: int) -> tuple[float, float]:
    """Return the exact divergence of shifted noise, and the bound on it."""
    k = np.arange(-250, 251)
    p, q = skellam.logpmf(k - shift, variance / 2, variance / 2), skellam.logpmf(k, variance / 2, variance / 2)
    kept = np.isfinite(p) & np.isfinite(q)
    exact = math.log(np.exp(order * p[kept] + (1 - order) * q[kept]).sum()) / (order - 1)
    (bound,) = rdp.skellam_curve(SkellamDpEvent(shift, shift, variance), np.array([float(order)]))
    return exact, float(bound)


def test_skellam_bound_holds_against_the_exact_sum() -> None:
    exact, bound = skellam_divergence(16.0, 2, 4)
    assert exact == pytest.approx(0.481213, abs=1e-6)
    assert bound == pytest.approx(0.539062, abs=1e-6)


@settings(max_examples=30)
@given(variance=st.floats(2, 80), shift=st.integers(1, 3), order=st.integers(2, 8))
def test_skellam_bound_is_never_below_the_exact_divergence(variance: float, shift: int, order: int) -> None:
    exact, bound = skellam_divergence(variance, shift, order)
    assert exact <= bound * (1 + 1e-9)


@pytest.mark.parametrize(("deviation", "clients"), [(0.8, 3), (1.5, 10), (3.0, 4)])
def test_discrete_gaussian_sum_bound_holds_against_the_exact_convolution(deviation: float, clients: int) -> None:
    k = np.arange(-60, 61)
    one = np.exp(-(k**2) / (2 * deviation**2))
    law = np.ones(1)
    for _ in range(clients):
        law = np.convolve(law, one / one.sum())
    for order in (2.0, 5.0):
        p, q = law[1:], law[:-1]  # shifted by one
        kept = (p > 1e-290) & (q > 1e-290)
        exact = math.log(np.exp(order * np.log(p[kept]) + (1 - order) * np.log(q[kept])).sum()) / (order - 1)
        (bound,) = rdp.discrete_gaussian_sum_curve(
            DiscreteGaussianSumDpEvent(1.0, deviation, clients, 1), np.array([order])
        )
        assert exact <= bound * (1 + 1e-9)
    assert np.isinf(
        rdp.discrete_gaussian_sum_curve(DiscreteGaussianSumDpEvent(1.0, 0.4, clients, 1), np.array([2.0]))[0]
    )


@pytest.mark.parametrize(("scale", "generic"), [(256, 1.536), (1024, 1.238), (4096, 1.222)])
def test_sampled_skellam_costs_less_than_by_a_bound_for_any_noise(scale: int, generic: float) -> None:
    """The bound for any noise, computed elsewhere, has a factor 3 that symmetric noise does not need."""
    event = integer_event("skellam", 1.0, 1 / scale, 60_000, 1.676 / math.sqrt(2), 1)
    found = epsilon(repeated(Poisson(1 / 60, event), 180), 1e-4, accountant="rdp")
    gaussian = epsilon(repeated(Poisson(1 / 60, Gaussian(1.676 / math.sqrt(2))), 180), 1e-4, accountant="rdp")
    assert gaussian < found < 0.85 * generic


def test_amplified_sums_with_a_gaussians_curve_cost_what_a_gaussian_does() -> None:
    orders = np.array([2.0, 3.0, 8.0, 40.0, 300.0])
    found = rdp.sampled_sum_curve(1 / 60, lambda at: at / (2 * 1.2**2), orders)
    exact = rdp.step_renyi_curve(Poisson(1 / 60, Gaussian(1.2)), "add-remove", orders.tolist())
    np.testing.assert_allclose(found, exact, rtol=1e-9)


@settings(max_examples=40, deadline=None)
@given(
    variance=st.floats(2, 60), shift=st.tuples(st.integers(0, 3), st.integers(1, 3)), order=st.integers(2, 8),
    rate=st.floats(0.001, 0.999),
)  # fmt: skip
def test_amplification_holds_in_both_directions(
    variance: float, shift: tuple[int, int], order: int, rate: float
) -> None:
    """Exact sums over the plane: the mixture against the noise, and the noise against the mixture."""
    k = np.arange(-90, 91)
    law = [skellam.pmf(k - by, variance / 2, variance / 2) for by in (0, *shift)]
    without, moved = np.outer(law[0], law[0]), np.outer(law[1], law[2])
    kept = (without > 1e-280) & (moved > 1e-280)
    without, mixed = without[kept], (1 - rate) * without[kept] + rate * moved[kept]
    norm = math.hypot(*shift)
    (bound,) = rdp.step_renyi_curve(
        Poisson(rate, SkellamDpEvent(sum(shift), norm, variance)), "add-remove", [float(order)]
    ).tolist()
    for one, other in ((mixed, without), (without, mixed)):
        exact = float(logsumexp(order * np.log(one) + (1 - order) * np.log(other))) / (order - 1)
        assert exact <= bound * (1 + 1e-9)


@settings(max_examples=40, deadline=None)
@given(
    variance=st.floats(2, 30), order=st.integers(2, 6), rate=st.floats(0.01, 0.99), seed=st.integers(0, 10_000)
)  # fmt: skip
def test_a_second_release_may_depend_on_the_first(variance: float, order: int, rate: float, seed: int) -> None:
    """The first shift is 1; the second -1, 0 or 1, as what the first showed decides."""
    k = np.arange(-60, 61)
    law = {by: skellam.logpmf(k - by, variance / 2, variance / 2) for by in (-1, 0, 1)}
    chosen = np.random.default_rng(seed).integers(-1, 2, len(k))
    without = law[0][:, None] + law[0][None, :]
    moved = law[1][:, None] + np.stack([law[int(by)] for by in chosen])
    kept = (without > -200) & (moved > -200)
    without, mixed = without[kept], np.logaddexp(math.log1p(-rate) + without, math.log(rate) + moved)[kept]
    both = TogetherDpEvent([SkellamDpEvent(1, 1, variance), SkellamDpEvent(1, 1, variance)])
    (bound,) = rdp.step_renyi_curve(Poisson(rate, both), "add-remove", [float(order)]).tolist()
    for one, other in ((mixed, without), (without, mixed)):
        assert float(logsumexp(order * one + (1 - order) * other)) / (order - 1) <= bound * (1 + 1e-9)


@pytest.mark.parametrize("event", [SkellamDpEvent(1.0, 1.0, 4.0), DiscreteGaussianSumDpEvent(1.0, 2.0, 4, 1)])
def test_integers_are_not_priced_for_a_client_in_anothers_place(event: dp.DpEvent) -> None:
    for asked in (event, Poisson(0.1, event), Poisson(1.0, event)):
        with pytest.raises(UnknownEvent):
            epsilon(asked, 1e-5, adjacency="replace-one", accountant="rdp")


@settings(max_examples=300)
@given(order=st.floats(1, 200), rate=st.floats(0, 1), log_ratio=st.floats(-3, 3))
def test_turned_round_a_mixture_with_symmetric_noise_costs_no_more(order: float, rate: float, log_ratio: float) -> None:
    """The pointwise inequality the amplification stands on: h(a) + r·h(b) ≥ 0 with h(t) = t^α − t^(1−α)."""
    ratio = math.exp(log_ratio)
    a, b = 1 - rate + rate * ratio, 1 - rate + rate / ratio
    terms = [a**order, -(a ** (1 - order)), ratio * b**order, -ratio * b ** (1 - order)]
    assert math.fsum(terms) >= -1e-9 * max(map(abs, terms))


def test_tuning_costs_as_computed_elsewhere() -> None:
    base = repeated(Poisson(1 / 60, Gaussian(1.676 / math.sqrt(2))), 180)

    def cost(event: dp.DpEvent) -> float:
        return epsilon(event, 1e-4, accountant="rdp")

    assert cost(repeated(base, 4)) == pytest.approx(1.862, abs=1e-3)
    assert cost(repeated(base, 10)) == pytest.approx(3.017, abs=1e-3)
    assert cost(RepeatAndSelectDpEvent(base, 10, math.inf)) == pytest.approx(2.181, abs=1e-3)
    assert cost(RepeatAndSelectDpEvent(base, 10, 1.0)) == pytest.approx(2.250, abs=1e-3)
    assert cost(RepeatAndSelectDpEvent(base, 10, 0.0)) == pytest.approx(1.903, abs=1e-3)


def test_what_renyi_does_not_know_is_refused() -> None:
    with pytest.raises(UnknownEvent):
        epsilon(Poisson(0.1, PureDpEvent(1.0)), 1e-5, accountant="rdp")


def test_poisson_under_replacement_is_refused_by_renyi() -> None:
    with pytest.raises(UnknownEvent):
        epsilon(Poisson(0.1, Gaussian(1.0)), 1e-5, adjacency="replace-one", accountant="rdp")
    assert math.isfinite(epsilon(FixedSize(100, 5, Gaussian(3.0)), 1e-5, adjacency="replace-one", accountant="rdp"))


INTEGER_EVENTS = [
    SkellamDpEvent(4.0, 2.0, 300.0),
    Poisson(0.05, SkellamDpEvent(4.0, 2.0, 300.0)),
    DiscreteGaussianSumDpEvent(2.0, 3.0, 20, 5),
    Poisson(0.05, DiscreteGaussianSumDpEvent(2.0, 3.0, 20, 5)),
]


@pytest.mark.parametrize("event", INTEGER_EVENTS)
def test_many_at_once_cost_as_much_as_one_by_one(event: dp.DpEvent) -> None:
    at_once = epsilon(repeated(event, 30), 1e-5, accountant="rdp")
    assert at_once == epsilon(dp.ComposedDpEvent([event] * 30), 1e-5, accountant="rdp")
    assert epsilon(event, 1e-5, accountant="rdp") < at_once


def test_filter_is_sound_and_not_far_from_the_best_order() -> None:
    budget = Budget(1.0, 1e-5)
    history = history_of(repeated(Poisson(8 / 1200, Gaussian(2.6)), 8000))
    filtered = rdp.filter_epsilon(history, rdp.filter_order(budget), budget.delta, "add-remove")
    best = rdp.rdp_epsilon(history, budget.delta, "add-remove")
    assert best <= filtered <= 1.03 * best
