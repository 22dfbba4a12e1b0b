import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from polyeps.accounting import rdp
from polyeps.accounting.events import DiscreteGaussianSumDpEvent, SkellamDpEvent
from polyeps.errors import InputError
from polyeps.mechanisms.integer import (
    UNIT,
    Grid,
    discrete_gaussian_event,
    fitting_bits,
    rounded_sensitivity,
    skellam_event,
)
from polyeps.mechanisms.integer_noise import NoiseName

KINDS: list[NoiseName] = ["skellam", "discrete-gaussian"]
GOOD: dict[str, Any] = {
    "clip": 1.0,
    "granularity": 0.01,
    "size": 1000,
    "clients": 100,
    "honest": 80,
    "deviation": 1.5,
    "bits": 20,
}


@pytest.mark.parametrize(
    ("granularity", "dimension", "expected"), [(1e-3, 100_000, 1.012995), (1e-2, 10_000, 1.124722)]
)
def test_rounding_oracles(granularity: float, dimension: int, expected: float) -> None:
    assert rounded_sensitivity(1.0, granularity, dimension) == pytest.approx(expected, abs=1e-6)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32), dimension=st.integers(1, 200), granularity=st.floats(0.01, 2))
def test_rounding_stays_within_the_bound_often_enough(seed: int, dimension: int, granularity: float) -> None:
    """The bound must hold with probability 1 − e^(−1/2) ≈ 0.39; with 400 tries 0.28 is six deviations away."""
    rng = np.random.default_rng(seed)
    vector = rng.normal(size=dimension)
    vector /= np.linalg.norm(vector)
    low = np.floor(vector / granularity)
    up = rng.random((400, dimension)) < vector / granularity - low
    norms = np.linalg.norm((low + up) * granularity, axis=1)
    assert (norms <= rounded_sensitivity(1.0, granularity, dimension)).mean() > 0.28
    assert (norms <= 1 + granularity * np.sqrt(dimension) + 1e-9).all()


def test_events_are_in_grid_units() -> None:
    event = skellam_event(1.0, 0.01, 100, 0.5)
    assert event.l2_sensitivity == pytest.approx(100 * rounded_sensitivity(1.0, 0.01, 100))
    assert event.variance == pytest.approx(2500)
    assert event.l1_sensitivity <= event.l2_sensitivity * 10 + 1e-9
    assert discrete_gaussian_event(1.0, 0.01, 100, 0.05, 7).deviation == pytest.approx(5)


def test_a_grid_is_priced_in_padded_coordinates_and_steps() -> None:
    grid = Grid(**GOOD)
    assert grid.dimension == 1024
    assert grid.event == skellam_event(1.0, 0.01, 1024, 1.5)
    gaussian = Grid(**GOOD, noise="discrete-gaussian")
    assert gaussian.event == discrete_gaussian_event(1.0, 0.01, 1024, 1.5 / math.sqrt(80), 80)
    assert [Grid(**GOOD | {"size": size}).dimension for size in (1, 2, 3, 1024, 1025)] == [1, 2, 4, 1024, 2048]


@settings(max_examples=100, deadline=None)
@given(
    deviation=st.floats(0.6, 1e4),
    granularity=st.floats(1e-3, 0.9),
    honest=st.integers(1, 200),
    noise=st.sampled_from(KINDS),
)
def test_honest_agents_never_give_less_noise_than_is_priced(
    deviation: float, granularity: float, honest: int, noise: NoiseName
) -> None:
    deviation *= math.sqrt(honest)
    grid = Grid(1.0, granularity, 10, 200, honest, deviation, 40, noise=noise)
    share, event = Fraction(grid.client_variance), grid.event
    if isinstance(event, SkellamDpEvent):
        assert share * honest >= Fraction(event.variance)
    else:
        assert share >= Fraction(event.deviation) ** 2
    assert float(share * honest) == pytest.approx((deviation / granularity) ** 2, rel=1e-6, abs=float(honest * UNIT))
    assert share > 1e10 or (share / UNIT).denominator == 1  # so that variances add up exactly
    assert grid.largest_square <= Fraction(event.l2_sensitivity) ** 2 < grid.largest_square + 1


@pytest.mark.parametrize(("deviation", "expected"), [(0.5, 9.70), (1.0, 5.5e-4), (2.0, 7.2e-17)])
def test_what_a_sum_of_discrete_gaussians_lacks_to_be_one(deviation: float, expected: float) -> None:
    """τ of 100 clients in one coordinate: the price of a sum to which nobody contributes, at a huge order."""
    (gap,) = rdp.discrete_gaussian_sum_curve(DiscreteGaussianSumDpEvent(0.0, deviation, 100, 1), np.array([1e20]))
    assert gap == pytest.approx(expected, rel=0.01)


def test_the_skellam_price_is_above_the_exact_divergence() -> None:
    (bound,) = rdp.skellam_curve(SkellamDpEvent(2.0, 2.0, 16.0), np.array([4.0]))
    law = noise_law(Grid(2.0, 1.0, 1, 1, 1, 4.0, 30))
    p, q = np.append(law, [0, 0]), np.append([0, 0], law)
    both = (p > 0) & (q > 0)
    exact = math.log((p[both] ** 4 / q[both] ** 3).sum()) / 3
    assert exact == pytest.approx(0.481213, abs=1e-6)
    assert bound == pytest.approx(0.539062, abs=1e-6)


def noise_law(grid: Grid) -> NDArray[np.float64]:
    """Of the noise of the honest clients together, as their tables have it."""
    one = np.array([count / 2**128 for count in grid.table.counts()])
    law = np.ones(1)
    for _ in range(grid.honest):
        law = np.convolve(law, one)
    return law


def rounding_law(value: float, grid: Grid) -> dict[int, float]:
    """Of one rounded coordinate, given that it is short enough."""
    low = math.floor(value / grid.granularity)
    up = value / grid.granularity - low
    law = {low: 1 - up, low + 1: up}
    kept = {whole: chance for whole, chance in law.items() if whole**2 <= grid.largest_square and chance}
    return {whole: chance / sum(kept.values()) for whole, chance in kept.items()}


def release_law(value: float, grid: Grid) -> NDArray[np.float64]:
    """Of what is opened when one client has a value and all others have 0, over all 2^bits outputs."""
    noise, law = noise_law(grid), np.zeros(1 << grid.bits)
    first = grid.honest * grid.table.first
    for whole, chance in rounding_law(value, grid).items():
        np.add.at(law, (first + whole + np.arange(len(noise))) % len(law), chance * noise)
    return law


@pytest.mark.parametrize("noise", KINDS)
@pytest.mark.parametrize("granularity", [0.02, 0.3, 0.45])
@pytest.mark.parametrize("bits", [4, 12])
def test_every_output_in_one_dimension_costs_at_most_what_is_certified(
    noise: NoiseName, granularity: float, bits: int
) -> None:
    """The hockey-stick divergence by enumeration, of the very tables that noise is drawn from."""
    grid = Grid(1.0, granularity, 1, 3, 3, 1.5, bits, noise=noise)
    without = release_law(0.0, grid)
    longest = math.sqrt(grid.largest_square) * granularity
    worst = 0.0
    for delta in (1e-2, 1e-5):
        epsilon = rdp.rdp_epsilon({grid.event: 1}, delta, "add-remove")
        assert math.isfinite(epsilon)
        for moved in (release_law(value, grid) for value in (1.0, -1.0, 0.37, longest)):
            pairs = ((moved, without), (without, moved))
            spent = max(float(np.maximum(p - math.exp(epsilon) * q, 0).sum()) for p, q in pairs)
            assert spent <= delta
            worst = max(worst, spent / delta)
    if (granularity, bits) == (0.02, 12):  # a fine grid that holds the sum: the certificate is not much too large
        assert worst > 0.01


def test_bits_hold_as_many_deviations_as_asked() -> None:
    for clients, granularity, noise in ((1, 0.1, 0.5), (100, 1e-3, 0.15), (1000, 1e-4, 0.01)):
        bits = fitting_bits(1.0, granularity, 1 << 12, clients, noise)
        spread = math.sqrt(clients**2 / 4096 + clients * (granularity**2 / 4 + noise**2)) / granularity
        assert 2 ** (bits - 1) < 8 * spread <= 2**bits


@pytest.mark.parametrize(
    ("wrong", "word"),
    [
        ({"clip": 0.0}, "clip"),
        ({"clip": math.nan}, "clip"),
        ({"granularity": math.inf}, "granularity"),
        ({"deviation": -1.0}, "deviation"),
        ({"size": 0}, "size"),
        ({"honest": 0}, "honest"),
        ({"honest": 101}, "honest"),
        ({"bits": 0}, "bits"),
        ({"bits": 63}, "bits"),
        ({"rotation": -1}, "rotation"),
        ({"granularity": 1e-10}, "coarser"),
        ({"noise": "discrete-gaussian", "deviation": 0.04}, "finer"),
    ],
)
def test_grids_without_meaning_are_refused(wrong: dict[str, Any], word: str) -> None:
    with pytest.raises(InputError, match=word):
        Grid(**GOOD | wrong)
