"""Poisson batches: the right distribution, from each client's own stream."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from polyeps.engine.noise import SeededStreams
from polyeps.engine.sampling import Batches, poisson_batches
from polyeps.errors import InputError


def draw(counts: list[int], rates: list[float], steps: list[int], ids: list[int] | None = None) -> Batches:
    offsets = np.concatenate([[0], np.cumsum(counts)])
    streams = SeededStreams(11, ids if ids is not None else range(len(counts)), 0)
    return poisson_batches(streams, offsets, np.array(rates), np.array(steps))


def members(batches: Batches, client: int) -> list[list[int]]:
    """Client's records in each step."""
    ends = np.cumsum(batches.sizes.ravel()).reshape(batches.sizes.shape)[:, client]
    return [
        batches.records[end - size : end].tolist() for end, size in zip(ends, batches.sizes[:, client], strict=True)
    ]


def test_batch_sizes_are_binomial_and_independent_of_the_step_before() -> None:
    sizes = draw([1200], [8 / 1200], [20_000]).sizes[:, 0]
    values = np.arange(3, 15)
    law = stats.binom(1200, 8 / 1200)
    seen = [np.sum(sizes <= 2), *(np.sum(sizes == v) for v in values), np.sum(sizes > 14)]
    wanted = [law.cdf(2), *law.pmf(values), law.sf(14)]
    assert stats.chisquare(seen, np.array(wanted) * len(sizes)).pvalue > 1e-4
    assert abs(np.corrcoef(sizes[:-1], sizes[1:])[0, 1]) < 4 / np.sqrt(len(sizes))


def test_records_are_equally_likely_and_independent() -> None:
    batches = draw([50], [0.2], [20_000])
    chosen = np.zeros((20_000, 50), bool)
    chosen[np.repeat(np.arange(20_000), batches.sizes[:, 0]), batches.records] = True
    hits = chosen.sum(0)
    assert stats.chisquare(hits).pvalue > 1e-4
    pairs = np.corrcoef(chosen.T)[np.triu_indices(50, 1)]
    assert np.abs(pairs).max() < 6 / np.sqrt(20_000)


def test_no_record_twice_in_a_batch_and_none_of_another_client() -> None:
    batches = draw([30, 7], [0.5, 0.9], [40, 40])
    for client, (low, high) in enumerate([(0, 30), (30, 37)]):
        for batch in members(batches, client):
            assert batch == sorted(set(batch))
            assert all(low <= record < high for record in batch)


def test_rate_one_takes_every_record_every_time() -> None:
    assert members(draw([3, 1], [1.0, 1.0], [4, 2]), 0) == [[0, 1, 2]] * 4


def test_empty_batches_are_batches_and_steps_end_per_client() -> None:
    batches = draw([1, 1, 5], [1e-3, 1.0, 0.5], [5, 3, 0])
    assert batches.sizes.shape == (5, 3)
    assert batches.sizes[:, 0].sum() == 0
    assert batches.sizes[:, 1].tolist() == [1, 1, 1, 0, 0]
    assert batches.sizes[:, 2].sum() == 0


def test_a_client_draws_the_same_whoever_is_beside_it() -> None:
    together = draw([40, 90, 10], [0.1, 0.5, 1.0], [9, 30, 2], ids=[5, 6, 7])
    alone = draw([40], [0.1], [9], ids=[5])
    moved = draw([10, 40], [1.0, 0.1], [2, 9], ids=[7, 5])
    assert members(together, 0)[:9] == members(alone, 0)
    assert [[record - 10 for record in batch] for batch in members(moved, 1)] == members(alone, 0)


def test_few_draws_are_topped_up() -> None:
    # 1e5 tosses at a tiny rate: the first guess of how many gaps are needed must not cut the sequence short
    sizes = np.stack([draw([1000], [0.003], [100], ids=[i]).sizes[:, 0] for i in range(200)])
    assert abs(sizes.mean() - 3) < 5 * np.sqrt(3 / sizes.size)
    assert abs(sizes[:, -1].mean() - 3) < 5 * np.sqrt(3 / 200)


@pytest.mark.parametrize("rate", [0.0, -0.1, 1.1, float("nan")])
def test_rates_outside_zero_to_one_are_refused(rate: float) -> None:
    with pytest.raises(InputError, match="sampling rate"):
        draw([5], [rate], [1])
