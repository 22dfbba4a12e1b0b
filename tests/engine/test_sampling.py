"""Batches, Poisson and of fixed size: the right distribution, from each client's own stream."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from reference.local_training import sets_of
from scipy import stats

from polyeps.engine.noise import SeededStreams
from polyeps.engine.sampling import Batches, fixed_batches, poisson_batches
from polyeps.errors import InputError


def draw(counts: list[int], rates: list[float], steps: list[int], ids: list[int] | None = None) -> Batches:
    ends = np.cumsum(counts)
    spans = np.stack([ends - counts, ends], axis=1)
    streams = SeededStreams(11, ids if ids is not None else range(len(counts)), 0)
    return poisson_batches(streams, spans, np.array(rates), np.array(steps))


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


def test_a_client_draws_the_same_in_any_cohort() -> None:
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


def draw_fixed(counts: list[int], sizes: list[int], steps: list[int], ids: list[int] | None = None) -> Batches:
    ends = np.cumsum(counts)
    spans = np.stack([ends - counts, ends], axis=1)
    streams = SeededStreams(11, ids if ids is not None else range(len(counts)), 0)
    return fixed_batches(streams, spans, np.array(sizes), np.array(steps))


def test_fixed_batches_have_their_exact_size_and_no_record_twice_or_of_another_client() -> None:
    batches = draw_fixed([30, 7, 1, 400], [8, 7, 1, 128], [40, 12, 0, 25])
    assert batches.sizes.shape == (40, 4)
    edges = [0, 30, 37, 38, 438]
    for client, (size, steps) in enumerate([(8, 40), (7, 12), (1, 0), (128, 25)]):
        found = members(batches, client)
        assert [len(batch) for batch in found] == [size] * steps + [0] * (40 - steps)
        for batch in found:
            assert batch == sorted(set(batch))
            assert all(edges[client] <= record < edges[client + 1] for record in batch)
    assert members(batches, 1)[:12] == [list(range(30, 37))] * 12  # a batch of all records


@pytest.mark.parametrize(("count", "size"), [(6, 1), (6, 3), (7, 2), (6, 5)])
def test_all_sets_are_equally_likely_in_a_batch_and_the_next(count: int, size: int) -> None:
    steps = 40_000
    found = members(draw_fixed([count], [size], [steps]), 0)
    number = {chosen: i for i, chosen in enumerate(combinations(range(count), size))}
    drawn = np.array([number[tuple(batch)] for batch in found])
    assert stats.chisquare(np.bincount(drawn, minlength=len(number))).pvalue > 1e-4
    # Pairs of neighbouring batches: independent batches make every pair equally likely.
    pairs = np.bincount(drawn[::2] * len(number) + drawn[1::2], minlength=len(number) ** 2)
    assert stats.chisquare(pairs).pvalue > 1e-4


def test_a_large_clients_records_are_equally_likely() -> None:
    batches = draw_fixed([100_000], [128], [400])
    assert stats.kstest(batches.records / 100_000, "uniform").pvalue > 1e-4


def test_fixed_batches_are_the_slow_loops() -> None:
    counts, sizes, steps = [40, 90, 10], [4, 33, 10], [9, 30, 2]
    together = draw_fixed(counts, sizes, steps, ids=[5, 6, 7])
    for client, offset in enumerate([0, 40, 130]):
        wanted = sets_of(SeededStreams(11, [5 + client], 0), counts[client], sizes[client], steps[client])
        found = members(together, client)[: steps[client]]
        assert [[record - offset for record in batch] for batch in found] == wanted


def test_a_client_draws_the_same_fixed_batches_in_any_cohort() -> None:
    together = draw_fixed([40, 90, 10], [4, 33, 10], [9, 30, 2], ids=[5, 6, 7])
    alone = draw_fixed([40], [4], [9], ids=[5])
    moved = draw_fixed([10, 40], [10, 4], [2, 9], ids=[7, 5])
    assert members(together, 0)[:9] == members(alone, 0)
    assert [[record - 10 for record in batch] for batch in members(moved, 1)] == members(alone, 0)


def test_no_steps_and_no_clients_are_no_batches() -> None:
    assert draw_fixed([5, 3], [2, 1], [0, 0]).sizes.shape == (0, 2)
    assert len(draw_fixed([5, 3], [2, 1], [0, 0]).records) == 0


@pytest.mark.parametrize("size", [0, 6])
def test_a_batch_larger_than_its_client_is_refused(size: int) -> None:
    with pytest.raises(InputError, match="at least 1 and at most all"):
        draw_fixed([5], [size], [1])
