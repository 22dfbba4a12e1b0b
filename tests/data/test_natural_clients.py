"""Clients by a column of categories."""

import numpy as np
import pytest

from polyeps.data.dataset import Dataset, validation
from polyeps.data.natural_clients import by_column
from polyeps.data.partition import by_owner
from polyeps.errors import InputError

COLUMNS = ("age>=30", "work=farm", "work=shop", "work=mine", "sex=f")


def table() -> Dataset:
    """Sixty farmers, seventy sellers, three miners, seven without work."""
    generator = np.random.default_rng(3)
    kinds = generator.permutation(np.repeat([0, 1, 2, 3], [60, 70, 3, 7]))
    rows = np.hstack([generator.random((140, 1)), np.eye(4)[kinds][:, :3], generator.random((140, 1))])
    features, labels = rows.astype(np.float32), generator.integers(0, 2, 140)
    return Dataset("people", features, labels, features[:40], labels[:40], ("0", "1"), columns=COLUMNS)


def test_values_become_clients_and_rare_ones_are_one_client_together() -> None:
    plain, found = table(), by_column(table(), "work")
    assert found.group_names == ("farm", "shop", "other")
    assert found.columns == ("age>=30", "sex=f")
    assert found.groups is not None
    assert found.test_groups is not None
    for row in range(140):
        name = found.group_names[found.groups[row]]
        expected = {"farm": plain.features[row, 1], "shop": plain.features[row, 2]}
        assert expected.get(name, not plain.features[row, 1:3].any()) == 1
        assert np.array_equal(found.features[row], plain.features[row, [0, 4]])
    assert np.array_equal(found.test_groups, found.groups[:40])
    assert dict(zip(by_owner(found).ids, by_owner(found).sizes.tolist(), strict=True)) == {
        "farm": 60,
        "shop": 70,
        "other": 10,
    }


def test_validation_records_keep_their_clients() -> None:
    split = validation(by_column(table(), "work"), 0.25, np.random.default_rng(1))
    assert split.groups is not None
    assert split.test_groups is not None
    together = np.bincount(np.concatenate([split.groups, split.test_groups]))
    assert together.tolist() == [60, 70, 10]
    assert len(split.test_groups) == len(split.test_labels) == 35


@pytest.mark.parametrize("column", ["age", "wor", "client"])
def test_a_column_without_categories_is_refused(column: str) -> None:
    with pytest.raises(InputError, match=f"data.client = '{column}' is no column of categories of people; it has sex"):
        by_column(table(), column)
