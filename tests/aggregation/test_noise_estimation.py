"""Noise estimates."""

import math

import numpy as np
import pytest
import torch
from sklearn.decomposition import FactorAnalysis

from polyeps.aggregation.noise_estimation import estimate_noise_variances, low_rank_noise_variances


def updates(deviations: list[float], rounds: int, shared: float, own: float, size: int = 4000) -> torch.Tensor:
    drawn = np.random.default_rng(3)
    rows = drawn.normal(size=(len(deviations), rounds, size)) * np.array(deviations)[:, None, None]
    rows += shared * drawn.normal(size=size) + own * drawn.normal(size=(len(deviations), 1, size))
    return torch.from_numpy(rows)


def deviations(rows: torch.Tensor) -> list[float]:
    return estimate_noise_variances(rows).sqrt().tolist()


def test_what_all_share_cancels() -> None:
    true = [0.1, 0.2, 0.5, 1.0, 2.0]
    np.testing.assert_allclose(
        deviations(updates(true, 1, shared=1.0, own=0.0)), true, rtol=0.25
    )  # read against louder ones


def test_what_stays_cancels() -> None:
    true = [0.1, 0.2, 0.5, 1.0, 2.0]
    np.testing.assert_allclose(deviations(updates(true, 4, shared=0.0, own=1.0)), true, rtol=0.1)


def test_what_remains_of_the_signal_counts_as_noise() -> None:
    true = [0.1, 0.2, 0.5]
    found = deviations(updates(true, 1, shared=0.0, own=1.0))
    assert all(guess > deviation for guess, deviation in zip(found, true, strict=True))


def test_few_rounds_few_clients_none() -> None:
    rows = updates([0.5, 0.5], 2, shared=0.0, own=0.0)
    rows[1] = math.nan
    first, second = estimate_noise_variances(rows).tolist()
    assert abs(math.sqrt(first) - 0.5) < 0.05
    assert math.isnan(second)
    assert estimate_noise_variances(torch.zeros(3, 1, 5)).tolist() == [0.0, 0.0, 0.0]


# One round, by factor analysis


def low_rank(deviations: list[float], shared: float, rank: int = 2, size: int = 4000, seed: int = 5) -> torch.Tensor:
    drawn = np.random.default_rng(seed)
    loadings = 1 + 0.3 * drawn.normal(size=(len(deviations), rank))
    signal = shared * loadings @ drawn.normal(size=(rank, size)) / math.sqrt(rank)
    return torch.from_numpy(signal + np.array(deviations)[:, None] * drawn.normal(size=(len(deviations), size)))


@pytest.mark.parametrize("shared", [0.0, 0.1, 1.0])
def test_a_low_rank_signal_is_no_noise(shared: float) -> None:
    true = [0.1] * 6 + [1.0] * 20
    found = low_rank_noise_variances(low_rank(true, shared)).sqrt()
    np.testing.assert_allclose(found, true, rtol=0.08)


def test_agrees_with_maximum_likelihood() -> None:
    rows = low_rank([0.1, 0.2, 0.3, 0.5, 0.5, 1.0, 1.0, 2.0], 0.3, rank=1)
    fitted = FactorAnalysis(1, tol=1e-8, max_iter=5000, svd_method="lapack").fit(rows.T.numpy())
    np.testing.assert_allclose(low_rank_noise_variances(rows), fitted.noise_variance_, rtol=0.05)


def test_levels_a_thousand_times_apart() -> None:
    """As ε = 0.1 and 10 give: the strict clients' noise is what the others' signal drowns in."""
    true = [1.0] * 5 + [1000.0] * 45
    found = low_rank_noise_variances(low_rank(true, 0.5).float()).sqrt()
    np.testing.assert_allclose(found, true, rtol=0.15)


def test_a_signal_of_ones_own_counts_as_noise() -> None:
    drawn = np.random.default_rng(1)
    rows = torch.from_numpy(drawn.normal(size=(6, 3000)) * 0.1)
    rows[0] += torch.from_numpy(drawn.normal(size=3000))
    assert low_rank_noise_variances(rows)[0] > 0.9


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e15])
def test_updates_of_every_size(scale: float) -> None:
    rows = (low_rank([1.0, 1.0, 2.0], 0.0) * scale).float()
    np.testing.assert_allclose(low_rank_noise_variances(rows).sqrt() / scale, [1, 1, 2], rtol=0.1)


def test_equal_zero_and_few_updates() -> None:
    same = torch.ones(1, 50).expand(4, 50)
    assert (low_rank_noise_variances(same) < 0.1).all()
    assert low_rank_noise_variances(torch.zeros(3, 5)).tolist() == pytest.approx([0.0] * 3, abs=1e-60)
    assert low_rank_noise_variances(torch.full((1, 4), 2.0)).tolist() == [4.0]
