import math

import numpy as np
import oracles
import pytest
from dp_accounting import SelfComposedDpEvent
from scipy.stats import binom

from polyeps.accounting import epsilon
from polyeps.accounting.events import Gaussian, Poisson
from polyeps.accounting.open_cohorts import known_draws_epsilon
from polyeps.accounting.pld import gaussian_epsilon


@pytest.mark.parametrize("adjacency", ["add-remove", "replace-one"])
def test_always_drawn_is_plain_composition(adjacency: str) -> None:
    reach = 1 if adjacency == "add-remove" else 2
    found = known_draws_epsilon(3.0, 1.0, 9, 1e-5, adjacency)  # type: ignore[arg-type]
    assert found == pytest.approx(gaussian_epsilon(reach * math.sqrt(9) / 3.0, 1e-5), rel=1e-9)


def test_it_is_the_mean_over_draws() -> None:
    sigma, rate, rounds, delta = 1.07, 1 / 60, 180, 1e-4
    found = known_draws_epsilon(sigma, rate, rounds, delta)
    chances = binom.pmf(np.arange(rounds + 1), rounds, rate)
    mean = sum(chances[k] * oracles.gaussian_delta(math.sqrt(k) / sigma, found) for k in range(1, 40))
    assert mean == pytest.approx(delta, rel=1e-6)
    assert found > 9 * epsilon_of_secret_draws(sigma, rate, rounds, delta)


def epsilon_of_secret_draws(sigma: float, rate: float, rounds: int, delta: float) -> float:
    return epsilon(SelfComposedDpEvent(Poisson(rate, Gaussian(sigma)), rounds), delta)


def test_rarely_drawn_may_cost_nothing_and_no_delta_everything() -> None:
    assert known_draws_epsilon(5.0, 1e-9, 10, 1e-5) < 1e-9
    assert known_draws_epsilon(5.0, 0.5, 10, 0.0) == math.inf
