import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.integrate import quad
from scipy.optimize import brentq
from support.grid_piecewise import GridPiecewise

from polyeps.errors import InputError
from polyeps.mechanisms import values

EPSILONS = (0.5, 1.0, 2.0, 4.0)


def test_closed_form_oracles() -> None:
    largest = values.piecewise(np.ones(4), np.array(EPSILONS), np.zeros(4), np.ones(4))
    assert largest == pytest.approx([8.041623, 4.082988, 2.163953, 1.313035], abs=1e-6)
    bounds = [math.sqrt(values.duchi_variance(e, 0)) for e in EPSILONS]
    assert bounds == pytest.approx([4.082988, 2.163953, 1.313035, 1.037315], abs=1e-6)
    at_0 = [values.piecewise_variance(e, 0) for e in EPSILONS]
    at_1 = [values.piecewise_variance(e, 1) for e in EPSILONS]
    assert at_0 == pytest.approx([17.701757, 3.682103, 0.645588, 0.084836], abs=1e-6)
    assert at_1 == pytest.approx([21.222569, 5.223597, 1.227565, 0.241354], abs=1e-6)
    for t in (0.0, 0.3, 1.0):  # the hybrid's variance is flat
        hybrid = [values.hybrid_variance(e, t) for e in EPSILONS[1:]]
        assert hybrid == pytest.approx([4.288992, 1.042336, 0.218979], abs=1e-6)


@pytest.mark.parametrize("epsilon", EPSILONS)
@pytest.mark.parametrize("t", [-1.0, -0.4, 0.0, 0.7, 1.0])
def test_piecewise_moments_agree_with_its_density(epsilon: float, t: float) -> None:
    bound, half = 1 / math.tanh(epsilon / 4), math.exp(epsilon / 2)
    left = (bound + 1) * t / 2 - (bound - 1) / 2
    right = left + bound - 1
    high = (math.exp(epsilon) - half) / (2 * half + 2)

    def moment(power: int) -> float:
        inside = quad(lambda x: high * x**power, left, right)[0]
        low = high / math.exp(epsilon)
        return float(
            inside + quad(lambda x: low * x**power, -bound, left)[0] + quad(lambda x: low * x**power, right, bound)[0]
        )

    assert moment(0) == pytest.approx(1)
    assert moment(1) == pytest.approx(t, abs=1e-9)
    assert moment(2) - t**2 == pytest.approx(values.piecewise_variance(epsilon, t))


def test_hybrid_threshold_is_where_duchi_stops_being_better() -> None:
    def gap(epsilon: float) -> float:
        share = 1 - math.exp(-epsilon / 2)
        mixed = share * values.piecewise_variance(epsilon, 1) + (1 - share) * values.duchi_variance(epsilon, 1)
        worst_mixed = max(
            mixed, share * values.piecewise_variance(epsilon, 0) + (1 - share) * values.duchi_variance(epsilon, 0)
        )
        return worst_mixed - 1 / math.tanh(epsilon / 2) ** 2

    assert brentq(gap, 0.3, 1.0) == pytest.approx(values.HYBRID_THRESHOLD, abs=1e-8)


@given(epsilon=st.floats(0.05, 8), t=st.floats(-1, 1), other=st.floats(-1, 1))
def test_grid_piecewise_is_unbiased_and_exactly_private(epsilon: float, t: float, other: float) -> None:
    grid = GridPiecewise(epsilon)
    mass = grid.masses(t)
    assert mass.sum() == pytest.approx(1)
    assert mass @ grid.outputs == pytest.approx(t, abs=1e-9)
    assert (mass > 0).all()  # every output is possible under every input
    assert np.log(mass / grid.masses(other)).max() <= epsilon + 1e-9


def test_grid_piecewise_loses_next_to_nothing() -> None:
    grid = GridPiecewise(1.0)
    assert grid.variance(1.0) == pytest.approx(5.221, abs=1e-3)
    assert grid.variance(0.0) == pytest.approx(3.682, abs=1e-3)


@pytest.mark.parametrize("epsilon", [0.0, -1.0, 40.0, math.nan])
def test_undefined_budgets_are_refused(epsilon: float) -> None:
    with pytest.raises(InputError):
        values.check_epsilon_value(epsilon)
