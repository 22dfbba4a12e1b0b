"""Rare draws, small noise, tiny δ: never below the truth, within 2 % of it, and quick. Truths by other means: closed
forms for one step, one integral for two, inverse Laplace transforms for many."""

import math
import random
import time

import dp_accounting as dp
import numpy as np
import pytest
from scipy.stats import norm
from support import oracles

from polyeps.accounting import epsilon, pld
from polyeps.accounting.events import Gaussian, Poisson
from polyeps.core import Adjacency


def price(rate: float, sigma: float, uses: int, delta: float, adjacency: Adjacency = "add-remove") -> float:
    return epsilon(dp.SelfComposedDpEvent(Poisson(rate, Gaussian(sigma)), uses), delta, adjacency=adjacency)


def settings(count: int, most: int, seed: int) -> list[tuple[float, float, int, float]]:
    """Rates, noise, uses and δ over all orders of magnitude that may occur."""
    draw = random.Random(seed)

    def log_uniform(low: float, high: float) -> float:
        return math.exp(draw.uniform(math.log(low), math.log(high)))

    return [
        (log_uniform(1e-7, 0.5), log_uniform(0.3, 100), round(log_uniform(1, most)), log_uniform(1e-30, 0.3))
        for _ in range(count)
    ]


def once_delta(rate: float, sigma: float, epsilon: float) -> float:
    """max of both hockey sticks of one sampled Gaussian, in closed form."""
    lead = (math.expm1(epsilon) + rate) / rate
    start = sigma**2 * math.log(lead) + 0.5  # where the loss is ε
    remove = (1 - rate - math.exp(epsilon)) * norm.sf(start / sigma) + rate * norm.sf((start - 1) / sigma)
    lead = (math.expm1(-epsilon) + rate) / rate
    if lead <= 0:
        return float(remove)
    end = sigma**2 * math.log(lead) + 0.5
    low, high = norm.cdf(end / sigma), norm.cdf((end - 1) / sigma)
    return float(max(remove, low - math.exp(epsilon) * ((1 - rate) * low + rate * high)))


@pytest.mark.parametrize("seed", range(3))
def test_one_step_has_its_closed_form(seed: int) -> None:
    for rate, sigma, _, delta in settings(40, 1, seed):
        found = price(rate, sigma, 1, delta)
        if found == 0:
            assert once_delta(rate, sigma, 0.0) <= delta * (1 + 1e-9)
        elif delta > 1e-13 * rate:  # where the closed form has digits left
            assert once_delta(rate, sigma, found) <= delta * (1 + 1e-6)
            assert once_delta(rate, sigma, found / 1.001) >= delta * (1 - 1e-6)


@pytest.mark.parametrize("seed", range(3))
def test_two_steps_agree_with_an_integral(seed: int) -> None:
    for rate, sigma, _, delta in settings(30, 1, 10 + seed):
        if delta < 1e-6 * rate:  # where the integral has digits left
            continue
        found = price(rate, sigma, 2, delta)
        if found == 0:
            assert oracles.twice_sampled_delta(rate, sigma, 0.0) <= delta * (1 + 1e-6)
            continue
        assert oracles.twice_sampled_delta(rate, sigma, found) <= delta * (1 + 1e-4)
        assert oracles.twice_sampled_delta(rate, sigma, found / 1.02) > delta


REPORTED = [
    (1.6e-5, 0.564, 5984, 1.1e-3),  # 0.0614 before, where 0.0034 holds
    (1e-3, 5.0, 100, 1e-20),  # as if draws were known, before
    (0.3, 20.0, 1000, 1e-30),
    (0.01, 1.0, 1000, 1e-5),
    (0.2, 1.0, 50, 0.2),
    (1e-3, 0.9, 20_000, 1e-12),
    (3e-5, 30.0, 10**6, 1e-4),
]


@pytest.mark.parametrize(("rate", "sigma", "uses", "delta"), REPORTED)
def test_many_steps_agree_with_an_inverse_transform(rate: float, sigma: float, uses: int, delta: float) -> None:
    found = price(rate, sigma, uses, delta)
    assert max(oracles.many_sampled_delta(rate, sigma, uses, found, add=add) for add in (False, True)) <= delta
    assert oracles.many_sampled_delta(rate, sigma, uses, found / 1.02) > delta


def test_a_finer_grid_hardly_lowers_any_price(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every grid is an upper bound, so what a finer one finds is nearer to the truth."""
    for setting in settings(25, 10**6, 3):
        found = price(*setting)
        with monkeypatch.context() as finer:
            finer.setattr(pld, "TOLERANCE", 1e-4)
            assert found <= 1.01 * price(*setting)


def test_reported_settings_in_numbers() -> None:
    assert price(*REPORTED[0]) < 0.0034
    assert price(1e-3, 5.0, 100, 1e-20) < 0.0187  # 0.0184 by the transform


@pytest.mark.parametrize("adjacency", ["add-remove", "replace-one"])
def test_no_setting_takes_long(adjacency: Adjacency) -> None:
    slowest = 0.0
    for setting in settings(40, 10**6, 7):
        start = time.process_time()
        assert price(*setting, adjacency) < math.inf
        slowest = max(slowest, time.process_time() - start)
    assert slowest < 2.0


def test_small_delta_never_costs_less() -> None:
    for rate, sigma, uses, _ in settings(10, 1000, 11):
        costs = [price(rate, sigma, uses, 10.0**-power) for power in range(1, 31, 4)]
        assert all(np.diff(costs) >= -1e-3 * np.array(costs[1:]))
