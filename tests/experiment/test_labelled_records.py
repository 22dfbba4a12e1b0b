"""Records and labels as scikit-learn has them: any labels are numbered rightly, or refused."""

from typing import Any

import numpy as np
import polars
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from polyeps.data.cells import as_text
from polyeps.errors import InputError
from polyeps.experiment.labelled_records import LabelledRecords, is_table, read_records

CELLS = st.one_of(st.text(max_size=4), st.integers(-3, 300), st.floats(), st.booleans(), st.none())


def read(records: Any, y: Any, **changes: Any) -> LabelledRecords:
    rest = {"client": None, "unit": None, "test": None, "classes": None, "columns": None, "kind": "float32"}
    return read_records(records, y, **(rest | changes))


@settings(max_examples=150, deadline=None)
@given(st.one_of(st.lists(CELLS), st.lists(st.sampled_from(["a", "b", "B", "ß", "1", "1.0", "yes"]), min_size=2)))
def test_any_labels_are_numbered_or_refused(labels: list[Any]) -> None:
    try:
        found = read(np.zeros((len(labels), 2)), labels)
    except InputError:
        return
    for given_label, number in zip(np.asarray(labels).tolist(), found.dataset.labels.tolist(), strict=True):
        assert found.classes.tolist()[number] == given_label
        assert found.dataset.classes[number] == as_text(given_label)


def test_tensors_and_frames() -> None:
    found = read(torch.ones(4, 2, 3), torch.tensor([3, 1, 3, 1]))
    assert found.dataset.features.shape == (4, 2, 3)
    assert found.dataset.labels.tolist() == [1, 0, 1, 0]
    frame = polars.DataFrame({"age": [1.0, 2.0], "size": [3.0, 4.0]})
    assert is_table(frame)
    found = read(frame, ["a", "b"], client=["x", "y"])
    assert found.names == ("age", "size")
    assert found.dataset.group_names == ("x", "y")


@pytest.mark.parametrize(
    ("labels", "said"),
    [
        ([1.5, 2.0], "continuous"),
        ([1.0, float("nan")], "NaN"),
        (["a", None], "empty"),
        (["a", 1], None),
        ([True, "a"], None),
        ([["a", "b"], ["c", "d"]], "1d array"),
        (["a", "a"], "one class only"),
        (["1", "1.0"], "two labels that are written '1'"),
        (list(range(101)), "declare them as classes"),
    ],
)
def test_labels_that_are_no_classes(labels: list[Any], said: str | None) -> None:
    X = np.zeros((len(labels), 1))
    if said is None:  # numpy makes texts of them
        assert read(X, labels).classes.dtype.kind == "U"
        return
    with pytest.raises(InputError, match=said) as refused:
        read(X, labels)
    assert "\n" not in str(refused.value)
