"""Principal component pursuit, against its definition and a plain ADMM with full singular value decompositions."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from reference.robust_pca import plain_admm

from polyeps.aggregation.robust_pca import principal_component_pursuit


def objective(low: NDArray[Any], sparse: NDArray[Any]) -> float:
    return float(np.linalg.norm(low, "nuc") + np.abs(sparse).sum() / math.sqrt(max(low.shape)))


def test_recovers_a_low_rank_matrix_under_sparse_errors() -> None:
    """The case in which recovery is proved: few large errors on a matrix of rank 2."""
    drawn = np.random.default_rng(1)
    low = drawn.normal(size=(60, 2)) @ drawn.normal(size=(2, 80))
    errors = np.where(drawn.random((60, 80)) < 0.05, drawn.choice([-8.0, 8.0], (60, 80)), 0.0)
    found, rest = principal_component_pursuit(torch.from_numpy(low + errors))
    np.testing.assert_allclose(found.numpy(), low, atol=0.02)
    np.testing.assert_allclose(rest.numpy(), errors, atol=0.02)


@pytest.mark.parametrize("shape", [(12, 200), (40, 30)])
def test_is_as_good_as_a_plain_solver(shape: tuple[int, int]) -> None:
    drawn = np.random.default_rng(2)
    noise = drawn.normal(size=shape) * np.where(np.arange(shape[0]) < 3, 0.05, 1.0)[:, None]
    matrix = noise + 0.3 * drawn.normal(size=shape[1])
    low, rest = principal_component_pursuit(torch.from_numpy(matrix))
    expected = plain_admm(matrix)
    assert objective(low.numpy(), rest.numpy()) == pytest.approx(objective(*expected), rel=0.01)
    energy = rest.square().sum(1)
    np.testing.assert_allclose(energy, (expected[1] ** 2).sum(1), rtol=0.2)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 6), st.integers(1, 9), st.floats(-200, 200), st.integers(0, 2**31))
def test_the_parts_add_up_whatever_the_matrix(clients: int, size: int, magnitude: float, seed: int) -> None:
    rows = torch.from_numpy(np.random.default_rng(seed).normal(size=(clients, size)) * 10.0 ** (magnitude / 2))
    low, rest = principal_component_pursuit(rows)
    torch.testing.assert_close(low + rest, rows, rtol=1e-9, atol=1e-9 * float(rows.abs().max()))
    assert torch.isfinite(rest).all()


def test_nothing_has_no_parts() -> None:
    for shape in ((3, 4), (0, 4)):
        low, rest = principal_component_pursuit(torch.zeros(shape))
        assert low.shape == rest.shape == shape
        assert not low.any()
        assert not rest.any()
