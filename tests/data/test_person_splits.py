"""Persons in data sets: kept together by every split, and never confused between clients."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from polyeps.data.dataset import Dataset, hold_out, take, validation
from polyeps.data.partition import by_owner, persons_of, set_apart, single_records, to_records, unit_sizes
from polyeps.errors import DataError, InputError


def visits(owners: list[tuple[int, int]]) -> Dataset:
    """Records of (client, person); the feature is the number of the record."""
    rows = len(owners)
    groups, persons = np.array(owners, dtype=np.int64).reshape(-1, 2).T
    features = np.arange(rows, dtype=np.float32)[:, None]
    labels = np.zeros(rows, np.int64)
    names = tuple("abc"[: int(groups.max()) + 1])
    return Dataset(
        "visits", features, labels, features[:0], labels[:0], ("no", "yes"), groups, names, None, persons, "patient"
    )


OWNERS = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 5)), min_size=6, max_size=60).map(
    lambda some: [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1), *some]
)


@settings(max_examples=50, deadline=None)
@given(OWNERS)
def test_records_by_person_against_a_dictionary(owners: list[tuple[int, int]]) -> None:
    dataset = visits(owners)
    partition = by_owner(dataset)
    records = to_records(dataset, partition)
    expected: dict[tuple[int, int], list[int]] = {}
    for row, owner in enumerate(owners):
        expected.setdefault(owner, []).append(row)
    assert records.units is not None
    found = [records.features[first:end, 0].int().tolist() for first, end in records.units.tolist()]
    assert found == [expected[owner] for owner in sorted(expected)]
    counts = [len([owner for owner in expected if owner[0] == client]) for client in range(3)]
    assert records.counts.tolist() == counts == unit_sizes(dataset, partition).tolist()
    assert single_records(dataset, partition).counts.tolist() == partition.sizes.tolist()


@settings(max_examples=50, deadline=None)
@given(OWNERS, st.floats(0.1, 0.6), st.integers(0, 9))
def test_splits_keep_persons_whole(owners: list[tuple[int, int]], share: float, seed: int) -> None:
    dataset = visits(owners)

    def whose(rows: list[int]) -> set[tuple[int, int]]:
        return {owners[row] for row in rows}

    for split in (hold_out, validation):
        held = split(dataset, share, np.random.default_rng(seed))
        trained, tested = (part[:, 0].astype(int).tolist() for part in (held.features, held.test_features))
        assert sorted(trained + tested) == list(range(len(owners)))
        assert trained
        assert tested
        assert not whose(trained) & whose(tested)
        assert held.persons is not None
        assert [owners[row][1] for row in trained] == held.persons.tolist()
    kept, apart = set_apart(by_owner(dataset), 0.3, np.random.default_rng(seed), dataset)
    assert sorted([*kept.rows, *apart.rows]) == list(range(len(owners)))
    assert not whose(kept.rows.tolist()) & whose(apart.rows.tolist())
    for part in (kept, apart):
        assert len(part.rows) == part.offsets[-1]
        for client in range(3):
            mine = part.rows[part.offsets[client] : part.offsets[client + 1]].tolist()
            assert {owners[row][0] for row in mine} == {client}


def test_a_share_of_persons_is_near_the_share_of_records() -> None:
    rng = np.random.default_rng(0)
    dataset = visits([(0, person) for person, count in enumerate(rng.integers(1, 9, 200)) for _ in range(count)])
    held = hold_out(dataset, 0.2, rng)
    assert len(held.test_labels) == pytest.approx(0.2 * len(dataset.labels), abs=5)


def test_what_cannot_be_split() -> None:
    with pytest.raises(
        InputError, match="visits has no client with two patients, so nothing can be held out; add records"
    ):
        hold_out(visits([(0, 0)] * 5), 0.2, np.random.default_rng(0))
    dataset = visits([(0, 0)] * 5)
    with pytest.raises(InputError, match="client 'a' has 1 patients, which a share of"):
        set_apart(by_owner(dataset), 0.5, np.random.default_rng(0), dataset)


def test_persons_are_checked() -> None:
    dataset = visits([(0, 0), (0, 1), (1, 0)])
    with pytest.raises(DataError, match="visits has 3 records but 2 person numbers"):
        replace(dataset, persons=np.zeros(2, np.int64))
    with pytest.raises(InputError, match="must be 1 to 30 letters"):
        replace(dataset, person="<b>patient</b>")
    some = take(dataset, np.array([2, 0]))
    assert some.persons is not None
    assert some.persons.tolist() == [0, 0]
    assert len(persons_of(some, by_owner(some)).edges) == 3  # two persons of the same number, one at each client


def test_a_device_gets_one_padded_block(monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = visits([(0, 0), (0, 0), (0, 1), (1, 0), (1, 0), (1, 0)])
    block = to_records(dataset, by_owner(dataset), "meta")
    assert block.features.shape == (3, 3, 1)
    assert block.labels.shape == (3, 3)
    assert block.of_persons
    assert torch.equal(block.offsets, torch.tensor([0, 2, 3]))
    monkeypatch.setattr("polyeps.data.partition._PADDED", 10)
    with pytest.raises(InputError, match="3 patients padded to 3 records, the most of one, take"):
        to_records(dataset, by_owner(dataset), "meta")
