import math
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays
from numpy.typing import NDArray
from scipy.linalg import hadamard
from scipy.stats import norm as normal

from polyeps.engine.noise import SeededStreams
from polyeps.errors import InputError
from polyeps.mechanisms import integer_encoding
from polyeps.mechanisms.integer import Grid
from polyeps.mechanisms.integer_encoding import decode_sum, encode_rows, rotated, rounded, walsh_hadamard
from polyeps.mechanisms.integer_noise import NoiseName
from polyeps.mechanisms.random_words import SeededWords, SystemWords

WILD = st.one_of(
    st.floats(-3, 3),
    st.floats(allow_nan=True, allow_infinity=True),
    st.sampled_from([0.0, -0.0, 5e-324, 1e-310, 1.7e308, -1.7e308, math.nan, math.inf, -math.inf]),
)


def words(clients: int, seed: int = 1) -> SeededWords:
    return SeededWords(SeededStreams(seed, range(clients), 0), "test")


def norms(whole: NDArray[np.int64]) -> list[int]:
    return [sum(int(value) ** 2 for value in row) for row in whole]


def small_grid(size: int, granularity: float = 0.1, clip: float = 1.0, rotation: int = 0) -> Grid:
    return Grid.fitting(clip, granularity, size, clients=8, honest=1, deviation=granularity, rotation=rotation)


class Largest:
    """Words that always round up."""

    clients = 1

    def fill(self, out: NDArray[np.uint64], rows: Sequence[int]) -> None:
        out[:] = [[2**64 - 1]] * len(rows)


@pytest.mark.parametrize("bits", range(13))
def test_the_transform_is_the_hadamard_matrix(bits: int) -> None:
    rows = torch.from_numpy(np.random.default_rng(bits).normal(size=(3, 1 << bits)))
    assert np.allclose(walsh_hadamard(rows).numpy(), rows.numpy() @ hadamard(1 << bits).T, atol=1e-9)


@settings(max_examples=40, deadline=None)
@given(size=st.integers(1, 300), seed=st.integers(0, 2**63))
def test_the_rotation_keeps_lengths_and_angles_and_can_be_undone(size: int, seed: int) -> None:
    grid = small_grid(size, clip=100.0, rotation=seed)
    vectors = torch.from_numpy(np.random.default_rng(1).normal(size=(2, size)))
    turned = rotated(grid, vectors) * grid.granularity
    assert turned.shape == (2, grid.dimension)
    assert np.allclose(turned @ turned.T, (vectors @ vectors.T).numpy(), rtol=1e-12)
    signs = integer_encoding._signs(seed, grid.dimension)
    back = walsh_hadamard(torch.from_numpy(turned)) * signs / math.sqrt(grid.dimension)
    assert np.allclose(back[:, :size], vectors, atol=1e-12)


@settings(max_examples=200, deadline=None)
@given(
    values=arrays(np.float64, array_shapes(min_dims=2, max_dims=2, max_side=9), elements=WILD),
    granularity=st.sampled_from([1e-6, 0.01, 0.3, 1.0, 2.0]),
    clip=st.sampled_from([1e-3, 1.0, 50.0]),
    seed=st.integers(0, 1000),
)
def test_no_input_is_ever_rounded_beyond_the_bound(
    values: NDArray[np.float64], granularity: float, clip: float, seed: int
) -> None:
    grid = small_grid(values.shape[1], granularity * clip, clip, rotation=seed)
    steps = rotated(grid, torch.from_numpy(values))
    whole = rounded(steps, grid.largest_square, words(len(values), seed), range(len(values)))
    assert np.isfinite(steps).all()
    assert max(norms(whole)) <= Fraction(grid.event.l2_sensitivity) ** 2
    assert np.abs(whole - steps).max() < 1
    bad = ~np.isfinite(values).all(1)
    assert not steps[bad].any()
    assert (np.linalg.norm(steps * grid.granularity, axis=1) <= clip).all()
    sent = encode_rows(grid, torch.from_numpy(values), words(len(values), seed))
    assert ((sent >= 0) & (sent < 1 << grid.bits)).all()


@settings(max_examples=60, deadline=None)
@given(values=arrays(np.float64, (3, 5), elements=st.floats(-4, 4)))
def test_only_what_is_too_long_is_shortened(values: NDArray[np.float64]) -> None:
    grid = small_grid(5)
    steps = rotated(grid, torch.from_numpy(values)) * grid.granularity
    lengths = np.linalg.norm(values, axis=1)
    assert np.allclose(np.linalg.norm(steps, axis=1), np.minimum(lengths, 1.0), rtol=2e-6, atol=1e-12)


def test_float32_and_single_rows_are_taken_too() -> None:
    grid = small_grid(6)
    rows = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
    assert np.array_equal(encode_rows(grid, rows, words(4))[:1], encode_rows(grid, rows[:1], words(1)))


def test_rounding_without_noise_is_unbiased_and_within_a_step() -> None:
    grid = Grid.fitting(1.0, 0.05, 11, clients=40_000, honest=1, deviation=1.0, rotation=5)
    vector = np.random.default_rng(2).normal(size=11)
    vector *= 0.9 / np.linalg.norm(vector)
    steps = rotated(grid, torch.from_numpy(vector).expand(40_000, 11))
    whole = rounded(steps, 10**9, words(40_000), range(40_000))
    assert np.abs(whole - steps).max() < 1
    deviation = grid.granularity / 2 / math.sqrt(40_000)
    assert np.abs(decode_sum(grid, whole.sum(0)).numpy() / 40_000 - vector).max() < 5 * deviation
    single = decode_sum(grid, whole[0]).numpy()
    assert np.linalg.norm(single - vector) <= grid.granularity * math.sqrt(grid.dimension)


def test_a_row_that_is_never_short_enough_is_cut_towards_zero() -> None:
    steps = np.array([[3.9, -2.5, 0.1, 0.0]])
    assert rounded(steps, 13, Largest(), range(1)).tolist() == [[3, -2, 0, 0]]
    assert rounded(steps, 12, Largest(), range(1)).tolist() == [[0, 0, 0, 0]]
    assert rounded(steps, 21, Largest(), range(1)).tolist() == [[4, -2, 1, 0]]


def test_long_rows_are_rounded_again_and_others_left() -> None:
    """All halves: most first tries are too long for this bound, and nothing is cut."""
    steps = np.full((200, 16), 0.5)
    steps[::2] = 0.0
    whole = rounded(steps, 7, words(200), range(200))
    assert max(norms(whole)) == 7
    assert not whole[::2].any()
    assert (whole[1::2].sum(1) > 0).all()


@pytest.mark.parametrize("noise", ["skellam", "discrete-gaussian"])
def test_sums_come_back_with_the_noise_that_was_asked_for(noise: NoiseName) -> None:
    grid = Grid.fitting(1.0, 1e-2, 3000, clients=50, honest=40, deviation=0.8, rotation=9, noise=noise)
    vectors = torch.from_numpy(np.random.default_rng(3).normal(size=(50, 3000)))
    vectors /= vectors.norm(dim=1, keepdim=True) * 1.1
    total = encode_rows(grid, vectors, words(50)).sum(0) % (1 << grid.bits)
    error = (decode_sum(grid, total) - vectors.sum(0)).numpy()
    expected = math.sqrt(50 * (grid.granularity**2 / 6 + grid.client_deviation**2))
    assert error.std() == pytest.approx(expected, rel=5 / math.sqrt(2 * 3000))
    assert abs(error.mean()) < 5 * expected / math.sqrt(3000)


def test_chunks_do_not_change_what_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    grid = small_grid(20)
    rows = torch.randn(7, 20, generator=torch.Generator().manual_seed(4))
    whole = encode_rows(grid, rows, words(7))
    monkeypatch.setattr(integer_encoding, "_AT_ONCE", 64)
    assert np.array_equal(encode_rows(grid, rows, words(7)), whole)


def test_deployed_noise_differs_every_time() -> None:
    grid = small_grid(64)
    zeros = torch.zeros(2, 64)
    sent = np.concatenate([encode_rows(grid, zeros, SystemWords(2)) for _ in range(2)])
    assert len({tuple(row) for row in sent.tolist()}) == 4


@pytest.mark.parametrize("signal", [0.0, 1.0])
def test_sums_wrap_as_often_as_predicted(signal: float) -> None:
    """With bits for about 2 deviations; what does not fit is counted on the same sums with bits to spare."""
    narrow = Grid(1.0, 0.01, 1 << 10, clients=20, honest=20, deviation=0.3, bits=7 if signal == 0 else 8)
    rows = torch.full((20, narrow.size), signal * (1 - 2.0**-19) / math.sqrt(narrow.size))
    half, wrapped, rounds = 1 << (narrow.bits - 1), 0, 40
    for seed in range(rounds):
        kept = encode_rows(replace(narrow, rotation=seed), rows, words(20, seed)).sum(0) % (2 * half)
        whole = encode_rows(replace(narrow, rotation=seed, bits=40), rows, words(20, seed)).sum(0) % (1 << 40)
        signed = (whole + (1 << 39)) % (1 << 40) - (1 << 39)
        outside = (signed < -half) | (signed >= half)
        assert np.array_equal((kept + half) % (2 * half) - half != signed, outside)
        wrapped += int(outside.sum())
    noise = 20 * (narrow.granularity**2 / 4 + narrow.client_deviation**2)
    spread = math.sqrt((20 * signal) ** 2 / narrow.dimension + noise) / narrow.granularity
    predicted = 2 * normal.sf(half / spread)
    assert 0.005 < predicted < 0.3
    deviation = math.sqrt(predicted / (rounds * narrow.size))
    assert wrapped / (rounds * narrow.size) == pytest.approx(predicted, abs=5 * deviation + 0.05 * predicted)


def test_what_does_not_fit_the_grid_is_refused() -> None:
    grid = Grid.fitting(1.0, 0.1, 5, clients=8, honest=3, deviation=1.0)
    with pytest.raises(InputError, match="5 coordinates"):
        encode_rows(grid, torch.zeros(2, 6), words(2))
    with pytest.raises(InputError, match="streams of words"):
        encode_rows(grid, torch.zeros(2, 5), words(3))
    with pytest.raises(InputError, match="shape"):
        decode_sum(grid, np.zeros(5, np.int64))
