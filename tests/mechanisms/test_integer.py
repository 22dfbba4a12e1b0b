import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyeps.errors import InputError
from polyeps.mechanisms.integer import discrete_gaussian_event, rounded_sensitivity, skellam_event


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
    with pytest.raises(InputError):
        rounded_sensitivity(1.0, 0.1, 10, bias=1.5)
