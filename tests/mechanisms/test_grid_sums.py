"""Sums on a grid of integers: no row longer than what is paid for, noise of the law that is priced, full support."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from polyeps.accounting import epsilon
from polyeps.accounting.events import DiscreteGaussianSumDpEvent, Gaussian
from polyeps.errors import InputError
from polyeps.mechanisms.grid_sums import GridSum
from polyeps.mechanisms.integer_noise import table_for, wide_gaussian
from polyeps.mechanisms.random_words import SystemWords

WILD = st.floats(allow_nan=True, allow_infinity=True, width=32)


@given(
    rows=st.lists(st.lists(WILD, min_size=5, max_size=5), min_size=1, max_size=4),
    clip=st.floats(1e-20, 1e20),
    scale=st.floats(1e-3, 1e4),
)
def test_no_row_is_longer_than_what_is_paid_for(rows: list[list[float]], clip: float, scale: float) -> None:
    grid = GridSum(clip, 5, scale)
    steps = grid.rounded(torch.tensor(rows, dtype=torch.float32))
    assert torch.equal(steps, steps.round())
    for given_row, row in zip(rows, steps.tolist(), strict=True):
        assert sum(int(number) ** 2 for number in row) <= grid.longest**2  # in whole numbers of any size
        if not all(map(math.isfinite, given_row)):
            assert not any(row)


@pytest.mark.parametrize("size", [1, 2, 100, 7850, 1_663_370])
@pytest.mark.parametrize("scale", [0.001, 0.3, 1.5, 40.0, 1e5])
def test_the_noise_costs_no_more_than_the_gaussian_it_is_priced_as(size: int, scale: float) -> None:
    """Against the accountant's own event for discrete Gaussians, with the sensitivity that rows really have."""
    grid = GridSum(1.0, size, scale)
    event = DiscreteGaussianSumDpEvent(grid.longest, grid.deviation, 1, size)
    assert epsilon(event, 1e-6) <= epsilon(Gaussian(scale), 1e-6) * (1 + 1e-9)
    assert grid.deviation * grid.step <= scale * 1.003  # and hardly more noise is added than in simulation


@pytest.mark.parametrize("deviation", [5.0, 1024.0, 1025.0, 3e4, 7e5, 2.5e7, 4e11])
def test_wide_noise_has_the_variance_and_the_shape_it_says(deviation: float) -> None:
    wide = wide_gaussian(deviation**2)
    coarsest, total = wide.parts[0][0], 0.0
    for factor, table in wide.parts:
        counts = np.array([count / 2**128 for count in table.counts()])
        values = table.first + np.arange(len(counts))
        total += factor**2 * float((counts * values**2).sum())
    assert 1 - 1e-9 <= total / deviation**2 <= 1 + 1e-9
    finer = [factor for factor, _ in wide.parts[1:]]
    assert finer == sorted(finer, reverse=True)
    assert coarsest == 1 if not finer else finer[-1] == 1
    drawn = np.zeros((2, 20_000), np.int64)
    wide.add_to(drawn, SystemWords(2), [0, 1])
    assert stats.kstest(drawn.ravel() / deviation, "norm").pvalue > 1e-5 or deviation < 10
    assert abs(np.atleast_2d(np.corrcoef(drawn))[0, 1]) < 5 / math.sqrt(20_000)
    if deviation > 100:  # every residue of the coarser parts' factors is met: the grid has no holes
        assert stats.chisquare(np.bincount(drawn.ravel() % 16, minlength=16)).pvalue > 1e-6


def test_two_parts_are_a_discrete_gaussian_to_all_digits_of_a_float() -> None:
    """By enumeration, in small: a + k·b with a of deviation 4k."""
    k, fine, coarse = 3, 12.0, 25.0
    a, b = (table_for("discrete-gaussian", s * s) for s in (fine, coarse))
    law: dict[int, float] = {}
    for i, p in enumerate(b.counts()):
        for j, q in enumerate(a.counts()):
            x = k * (b.first + i) + a.first + j
            law[x] = law.get(x, 0.0) + (p / 2**128) * (q / 2**128)
    variance = fine**2 + (k * coarse) ** 2
    weights = {x: math.exp(-x * x / 2 / variance) for x in range(-800, 801)}
    total = sum(weights.values())
    for x in range(-400, 401):
        assert law[x] == pytest.approx(weights[x] / total, rel=1e-11)


def test_every_integer_can_be_released_whatever_the_data_are() -> None:
    """The support of a release: noise reaches all neighbours of a sum, so low digits tell nothing of the sum."""
    grid = GridSum(1.0, 4, 0.05)
    low = []
    for total in (torch.zeros(4).double(), torch.full((4,), 12345.0).double()):
        drawn = torch.stack([grid.release(total, SystemWords(1)) for _ in range(3000)]) / grid.step
        assert torch.equal(drawn, drawn.round())
        low.append(np.bincount(drawn.long().remainder(8).flatten().numpy(), minlength=8))
    assert stats.chi2_contingency(np.stack(low)).pvalue > 1e-6


@settings(max_examples=30)
@given(st.lists(st.floats(-1, 1), min_size=6, max_size=6), st.integers(0, 2**31))
def test_rounding_one_row_never_depends_on_the_others(values: list[float], seed: int) -> None:
    grid = GridSum(0.7, 6, 1.0)
    row = torch.tensor([values])
    others = torch.randn(5, 6, generator=torch.Generator().manual_seed(seed))
    assert torch.equal(grid.rounded(torch.cat([others, row]))[-1:], grid.rounded(row))


def test_what_cannot_be_drawn_is_refused() -> None:
    for scale in (math.nan, math.inf, -1.0, 1e-12, 1e18):
        with pytest.raises(InputError):
            GridSum(1.0, 10, scale)
    with pytest.raises(InputError):
        GridSum(0.0, 10, 1.0)
    silent = GridSum(1.0, 10, 0.0)
    assert silent.release(silent.rounded(torch.ones(3, 10)).sum(0), SystemWords(1)).norm() == pytest.approx(3, rel=1e-3)
