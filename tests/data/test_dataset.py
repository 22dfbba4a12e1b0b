from __future__ import annotations

import numpy as np
import pytest

from polyeps.data.dataset import Dataset, hold_out, pooled, subsample, take, without_test
from polyeps.errors import InputError


def numbered(records: int) -> Dataset:
    """Record i has feature i, so that it can be followed."""
    return without_test("toy", np.arange(records, dtype=np.float32)[:, None], np.arange(records) % 3, ("a", "b", "c"))


def followed(dataset: Dataset) -> tuple[list[int], list[int]]:
    for features, labels in (
        (dataset.features, dataset.labels),
        (dataset.test_features, dataset.test_labels),
    ):
        np.testing.assert_array_equal(features[:, 0] % 3, labels)
    return dataset.features[:, 0].astype(int).tolist(), dataset.test_features[:, 0].astype(int).tolist()


def test_hold_out_keeps_every_record_once() -> None:
    train, test = followed(hold_out(numbered(50), 0.2, np.random.default_rng(1)))
    assert len(test) == 10
    assert sorted(train + test) == list(range(50))


def test_pooling_undoes_a_split() -> None:
    split = hold_out(numbered(30), 0.5, np.random.default_rng(1))
    train, test = followed(pooled(split))
    assert sorted(train) == list(range(30))
    assert test == []


def test_a_subsample_has_no_repeats_and_follows_its_seed() -> None:
    train, _ = followed(subsample(numbered(100), 70, np.random.default_rng(1)))
    assert len(set(train)) == 70
    assert train == followed(subsample(numbered(100), 70, np.random.default_rng(1)))[0]
    assert train != followed(subsample(numbered(100), 70, np.random.default_rng(2)))[0]


def test_groups_follow_their_records() -> None:
    base = numbered(6)
    grouped = Dataset(
        "toy",
        base.features,
        base.labels,
        base.test_features,
        base.test_labels,
        base.classes,
        groups=np.array([0, 0, 1, 1, 2, 2]),
        group_names=("x", "y", "z"),
    )
    taken = take(grouped, np.array([5, 0]))
    assert taken.groups is not None
    assert taken.groups.tolist() == [2, 0]
    with pytest.raises(InputError, match="cannot be pooled"):
        pooled(grouped)


def test_impossible_wishes_are_refused() -> None:
    generator = np.random.default_rng(1)
    with pytest.raises(InputError, match="take 1 to that many, not 11"):
        subsample(numbered(10), 11, generator)
    with pytest.raises(InputError, match="leaves nothing to test or to train on"):
        hold_out(numbered(10), 0.01, generator)
    split = hold_out(numbered(10), 0.5, generator)
    with pytest.raises(InputError, match="has a published test split"):
        hold_out(split, 0.5, generator)
