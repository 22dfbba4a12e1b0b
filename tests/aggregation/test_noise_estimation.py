"""Noise estimates."""

import math

import numpy as np
import torch

from polyeps.aggregation.noise_estimation import estimate_noise_variances


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
