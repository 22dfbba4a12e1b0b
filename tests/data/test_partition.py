from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from polyeps.data.dataset import Dataset, without_test
from polyeps.data.partition import (
    KINDS,
    Indices,
    Partition,
    by_owner,
    dirichlet,
    divide,
    few_labels,
    iid,
    label_shards,
    one_label,
    to_records,
)
from polyeps.errors import InputError

Way = Callable[[Indices, int, np.random.Generator], Partition]
WAYS: dict[str, Way] = {
    "iid": lambda labels, clients, generator: iid(labels, clients=clients, generator=generator),
    "shards": lambda labels, clients, generator: label_shards(
        labels, clients=clients, shards_per_client=2, generator=generator
    ),
    "labels": lambda labels, clients, generator: few_labels(labels, clients=clients, count=2, generator=generator),
    "dirichlet": lambda labels, clients, generator: dirichlet(labels, clients=clients, alpha=1.0, generator=generator),
    "one-label": lambda labels, clients, generator: one_label(labels, clients=clients, generator=generator),
}

label_arrays = st.lists(st.integers(0, 4), min_size=1, max_size=120).map(lambda labels: np.array(labels))
seeds = st.integers(0, 2**32)


def hands(partition: Partition) -> list[list[int]]:
    bounds = zip(partition.offsets, partition.offsets[1:], strict=False)
    return [partition.rows[start:end].tolist() for start, end in bounds]


def possible(name: str, labels: Indices, clients: int) -> bool | None:
    """Whether the wish can be met; None where chance decides."""
    sizes = np.unique(labels, return_counts=True)[1]
    if clients > len(labels):
        return False
    match name:
        case "shards":
            return 2 * clients <= len(labels)
        case "labels":
            if len(sizes) < 2 or 2 * clients < len(sizes):
                return False
            return True if sizes.min() >= clients else None
        case "dirichlet":
            return True if clients == 1 else None
        case "one-label":
            return clients >= len(sizes)
        case _:
            return True


@pytest.mark.parametrize("name", WAYS)
@settings(max_examples=60, deadline=None)
@given(labels=label_arrays, clients=st.integers(1, 12), seed=seeds)
def test_every_row_goes_to_exactly_one_client(name: str, labels: Indices, clients: int, seed: int) -> None:
    can = possible(name, labels, clients)
    try:
        partition = WAYS[name](labels, clients, np.random.default_rng(seed))
    except InputError:
        assert not can
        return
    assert can is not False
    assert sorted(partition.rows.tolist()) == list(range(len(labels)))
    assert len(partition.ids) == clients
    assert partition.sizes.min() >= 1
    assert partition.offsets[0] == 0
    again = WAYS[name](labels, clients, np.random.default_rng(seed))
    np.testing.assert_array_equal(partition.rows, again.rows)
    np.testing.assert_array_equal(partition.offsets, again.offsets)


@pytest.mark.parametrize("name", WAYS)
def test_another_seed_is_another_partition(name: str) -> None:
    labels = np.arange(200) % 5
    one, other = (WAYS[name](labels, 10, np.random.default_rng(seed)) for seed in (1, 2))
    assert not np.array_equal(one.rows, other.rows)


@pytest.mark.parametrize("name", WAYS)
def test_the_global_generator_is_left_alone(name: str) -> None:
    before = np.random.get_state()[1].tolist()  # type: ignore[index]  # noqa: NPY002
    WAYS[name](np.arange(200) % 5, 10, np.random.default_rng(1))
    assert np.random.get_state()[1].tolist() == before  # type: ignore[index]  # noqa: NPY002


@given(labels=label_arrays, clients=st.integers(1, 12), seed=seeds)
@settings(max_examples=60, deadline=None)
def test_equal_sizes_where_they_are_promised(labels: Indices, clients: int, seed: int) -> None:
    assume(clients <= len(labels))
    sizes = iid(labels, clients=clients, generator=np.random.default_rng(seed)).sizes
    assert sizes.max() - sizes.min() <= 1
    size = len(labels) // clients
    fixed = iid(labels, clients=clients, size=size, generator=np.random.default_rng(seed))
    assert set(fixed.sizes.tolist()) == {size}
    assert len(set(fixed.rows.tolist())) == clients * size


def test_pfas_iid_clients_leave_the_rest_of_mnist() -> None:
    partition = iid(np.zeros(60_000, dtype=np.int64), clients=20, size=1200, generator=np.random.default_rng(1))
    assert partition.sizes.tolist() == [1200] * 20


def test_pfas_shards_use_every_record() -> None:
    labels = np.repeat(np.arange(10), 6000)
    partition = label_shards(labels, clients=20, shards_per_client=10, generator=np.random.default_rng(1))
    assert partition.sizes.tolist() == [3000] * 20


def test_two_shards_hold_few_labels() -> None:
    labels = np.repeat(np.arange(10), 100)
    partition = label_shards(labels, clients=10, shards_per_client=2, generator=np.random.default_rng(1))
    assert ((partition.counts(labels, 10) > 0).sum(axis=1) <= 2).all()


def test_few_labels_gives_each_client_that_many_and_each_label_its_share() -> None:
    labels = np.repeat(np.arange(10), 6000)
    partition = few_labels(labels, clients=6000, count=5, generator=np.random.default_rng(1))
    held = partition.counts(labels, 10)
    assert ((held > 0).sum(axis=1) == 5).all()
    assert set((held > 0).sum(axis=0).tolist()) == {3000}
    assert set(partition.sizes.tolist()) == {10}  # CMP-Fed's 6000 clients of 10 records and 5 labels


def test_fedhdps_clients_hold_one_digit_and_30_records() -> None:
    mnist = np.repeat(np.arange(10), [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949])
    partition = one_label(mnist, clients=2000, generator=np.random.default_rng(1))
    assert ((partition.counts(mnist, 10) > 0).sum(axis=1) == 1).all()
    assert (partition.sizes.min(), partition.sizes.max()) == (29, 31)
    assert partition.counts(mnist, 10)[:20].argmax(axis=1).tolist() != sorted(
        partition.counts(mnist, 10)[:20].argmax(axis=1).tolist()
    )


@pytest.mark.parametrize("name", ["shards", "dirichlet", "one-label"])
def test_records_of_one_label_are_dealt_in_random_order(name: str) -> None:
    first = hands(WAYS[name](np.zeros(100, dtype=np.int64), 2, np.random.default_rng(1)))[0]
    assert max(first) - min(first) >= len(first)  # not a run of neighbours


def test_a_low_alpha_is_more_uneven() -> None:
    labels = np.repeat(np.arange(10), 500)

    def largest_share(alpha: float) -> float:
        counts = dirichlet(labels, clients=10, alpha=alpha, generator=np.random.default_rng(1)).counts(labels, 10)
        return float((counts.max(axis=1) / counts.sum(axis=1)).mean())

    assert largest_share(0.1) > 0.4 > 0.15 > largest_share(100)


def refused(match: str, way: Callable[[], object]) -> None:
    with pytest.raises(InputError, match=match):
        way()


def test_impossible_wishes_name_the_client_and_the_remedy() -> None:
    labels, generator = np.arange(10) % 5, np.random.default_rng(1)
    for name, way in WAYS.items():
        refused("at least one (client|shard)", lambda way=way: way(labels, 0, generator))  # type: ignore[misc]
        if name != "shards":
            refused("client 10 would have no records.*at most 10", lambda way=way: way(labels, 11, generator))  # type: ignore[misc]
    refused(
        "client 3 would have fewer than 3 records.*at most 3 clients or a size of at most 2",
        lambda: iid(labels, clients=4, size=3, generator=generator),
    )
    refused(
        "client 3 would have fewer than 3 records.*at most 3 clients$",
        lambda: iid(labels, clients=40, size=3, generator=generator),
    )
    refused("size must be at least 1", lambda: iid(labels, clients=4, size=0, generator=generator))
    refused("one shard, not 0", lambda: label_shards(labels, clients=2, shards_per_client=0, generator=generator))
    refused("1 to 5 labels.*not 6", lambda: few_labels(labels, clients=5, count=6, generator=generator))
    refused("at least 3 clients", lambda: few_labels(labels, clients=2, count=2, generator=generator))
    refused(
        r"client \d would miss one of its 4 labels.*fewer clients",
        lambda: few_labels(labels, clients=9, count=4, generator=generator),
    )
    refused("4 clients of one label cannot hold all 5", lambda: one_label(labels, clients=4, generator=generator))
    refused("alpha must be", lambda: dirichlet(labels, clients=2, alpha=0, generator=generator))
    refused("alpha must be", lambda: dirichlet(labels, clients=2, alpha=float("nan"), generator=generator))
    refused(
        r"client \d still had 0 records.*raise alpha above 0.001, or ask for fewer clients than 8",
        lambda: dirichlet(labels, clients=8, alpha=0.001, generator=generator),
    )


def grouped(groups: list[int], names: tuple[str, ...]) -> Dataset:
    rows = np.arange(len(groups), dtype=np.float32)[:, None]
    labels = np.zeros(len(groups), dtype=np.int64)
    return replace(without_test("toy", rows, labels, ("only",)), groups=np.array(groups), group_names=names)


def test_the_clients_of_the_file_are_kept() -> None:
    partition = by_owner(grouped([1, 0, 1, 2], ("ann", "bob", "cy")))
    assert partition.ids == ("ann", "bob", "cy")
    assert hands(partition) == [[1], [0, 2], [3]]


def test_an_empty_client_of_the_file_is_named() -> None:
    refused("client bob would have no records: remove", lambda: by_owner(grouped([0, 2], ("ann", "bob", "cy"))))


def test_a_set_without_groups_cannot_be_divided_by_them() -> None:
    refused("does not name the owners", lambda: by_owner(replace(grouped([0], ("a",)), groups=None)))


def test_records_are_the_clients_rows_in_order() -> None:
    dataset = grouped([1, 0, 1, 2], ("ann", "bob", "cy"))
    records = to_records(dataset, by_owner(dataset))
    assert records.clients == 3
    assert records.offsets.tolist() == [0, 1, 3, 4]
    assert records.features.tolist() == [[1], [0], [2], [3]]
    assert (records.features.dtype, records.labels.dtype) == (torch.float32, torch.int64)


def test_names_become_partitions() -> None:
    dataset = replace(grouped([0, 1] * 50, ("a", "b")), labels=np.arange(100) % 4, classes=("0", "1", "2", "3"))
    for kind in KINDS:
        partition = divide(dataset, kind, clients=4, generator=np.random.default_rng(1))
        assert len(partition.ids) == (2 if kind in ("by-writer", "by-column", "as-in-file") else 4)
    refused("no partition 'iit'", lambda: divide(dataset, "iit", clients=4, generator=None))
    refused("how many clients, and give a seed", lambda: divide(dataset, "iid", clients=4, generator=None))
