import math

import numpy as np
import pytest
from dp_accounting import ComposedDpEvent, SelfComposedDpEvent
from scipy.stats import binom, norm
from support import oracles

from polyeps.accounting import epsilon, known_cohorts
from polyeps.accounting.events import FixedSize, Gaussian, Poisson
from polyeps.accounting.known_cohorts import known_draws_epsilon
from polyeps.accounting.privacy_profiles import gaussian_delta, gaussian_epsilon
from polyeps.core import Adjacency


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


@pytest.mark.parametrize("adjacency", ["add-remove", "replace-one"])
@pytest.mark.parametrize("sigma", [1e-150, 1e-9, 1e-5, 1e-4, 1e-3, 0.014, 0.02, 0.1, 1.0, 1e6])
def test_secret_draws_never_cost_more_than_known_ones(sigma: float, adjacency: Adjacency) -> None:
    for event, rate in ((Poisson(1 / 60, Gaussian(sigma)), 1 / 60), (FixedSize(6000, 100, Gaussian(sigma)), 1.0)):
        if isinstance(event, FixedSize) and adjacency == "add-remove":
            continue
        found = epsilon(SelfComposedDpEvent(event, 180), 1e-4, adjacency=adjacency)
        assert found <= known_draws_epsilon(sigma, rate, 180, 1e-4, adjacency)
        assert (found < math.inf) == (sigma > 1e-100)


def test_losses_beyond_what_e_to_the_epsilon_can_be_are_still_told_apart() -> None:
    """About 12 000, where sampling is worth another 48; e^700 is near the largest double.

    With so little noise it is plain which rounds were draws: the loss is normal, given how many they were.
    """
    sigma, rate, rounds = 0.03 / math.sqrt(2), 1 / 60, 180
    draws = np.arange(1, 60)
    mean = draws * (math.log(rate) + sigma**-2 / 2) + (rounds - draws) * math.log1p(-rate)
    deviation = np.sqrt(draws) / sigma

    def delta(epsilon: float) -> float:
        a = (mean - epsilon) / deviation
        rest = np.exp(epsilon - mean + deviation**2 / 2 + norm.logcdf(a - deviation))
        return float(np.sum(binom.pmf(draws, rounds, rate) * (norm.cdf(a) - rest)))

    found = epsilon_of_secret_draws(sigma, rate, rounds, 1e-4)
    assert delta(found) <= 1e-4 < delta(found / 1.0005)
    assert known_draws_epsilon(sigma, rate, rounds, 1e-4) == pytest.approx(12340.4, abs=0.1)


def test_steps_of_several_kinds_cost_no_more_than_without_sampling() -> None:
    steps = ComposedDpEvent([Poisson(0.5, Gaussian(1e-4)), Poisson(0.1, Gaussian(1e-3)), Gaussian(1e-2)])
    plain = gaussian_epsilon(math.sqrt(1e8 + 1e6 + 1e4), 1e-5)
    assert 0.9 * plain < epsilon(steps, 1e-5) <= plain


def test_far_tails_are_known() -> None:
    sigma, rate, rounds, delta = 1.0, 0.01, 100, 1e-15
    found = known_draws_epsilon(sigma, rate, rounds, delta)
    assert epsilon_of_secret_draws(sigma, rate, rounds, delta) < 0.75 * found
    chances = binom.pmf(np.arange(rounds + 1), rounds, rate)
    mean = sum(chances[k] * oracles.gaussian_delta(math.sqrt(k) / sigma, found) for k in range(1, rounds + 1))
    assert mean == pytest.approx(delta, rel=1e-6)


@pytest.mark.parametrize(("rate", "rounds"), [(0.01, 20_000), (0.5, 3000)])
def test_many_counts_as_few_cost_little_more(rate: float, rounds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    exact = known_draws_epsilon(30.0, rate, rounds, 1e-5)
    monkeypatch.setattr(known_cohorts, "_MOST_COUNTS", 150)
    known_cohorts._draws.cache_clear()
    assert exact <= known_draws_epsilon(30.0, rate, rounds, 1e-5) < 1.01 * exact
    known_cohorts._draws.cache_clear()


def test_any_number_of_rounds_has_an_answer() -> None:
    shift = math.sqrt(1e11 / 60) / 1e6  # the number of draws hardly varies
    assert known_draws_epsilon(1e6, 1 / 60, 10**11, 1e-5) == pytest.approx(gaussian_epsilon(shift, 1e-5), rel=1e-3)
    assert known_draws_epsilon(1e6, 1.0, 10**11, 1e-5) == gaussian_epsilon(math.sqrt(1e11) / 1e6, 1e-5)


@pytest.mark.parametrize("rate", [1e-9, 1 / 60, 0.3, 0.999])
@pytest.mark.parametrize("rounds", [1, 180, 5000])
def test_likely_draws_alone_never_claim_a_cost_that_is_not_there(rate: float, rounds: int) -> None:
    known, claimed = known_cohorts.KnownDraws(rate, 0.9, rounds), 0
    for delta in (1e-3, 1e-6, 1e-12):
        exact = known.epsilon(delta)
        for epsilon_ in (0.0, exact / 2, exact * (1 - 1e-3), exact, exact * (1 + 1e-9), 2 * exact + 1, math.inf):
            assert known.costs_more(epsilon_, delta) == (known.delta(epsilon_) > delta)
            draws, chances = known_cohorts._likely_draws(rate, rounds)
            least = float(np.sum(chances * gaussian_delta(np.multiply(0.9, np.sqrt(draws)), epsilon_)))
            assert least <= (1 + 1e-9) * known.delta(epsilon_)
            claimed += bool(least > (1 + 1e-6) * delta)
    assert claimed >= (0 if rate < 1e-6 else 5)
