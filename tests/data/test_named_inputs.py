"""Several inputs of a record in one block: packed, cut out again exactly, or refused in a sentence."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from torch import Tensor, nn

from polyeps.data.named_inputs import Inputs, NamedInput, by_name, inputs_of
from polyeps.data.own_tables import from_arrays, from_torch
from polyeps.engine.adapters import Adapted
from polyeps.errors import InputError

KINDS = ["float32", "int64", "int32", "int16", "int8", "uint8", "bool"]


class Keep(nn.Module):
    """Return the inputs it is called with, to be looked at."""

    def forward(self, *places: Tensor, **named: Tensor) -> Tensor:
        self.seen = named or by_name(places)
        return torch.zeros(1)


@st.composite
def records(draw: st.DrawFn) -> dict[str, Any]:
    count = draw(st.integers(1, 4))
    found = {}
    for number in range(draw(st.integers(1, 4))):
        kind, shape = draw(st.sampled_from(KINDS)), draw(st.lists(st.integers(1, 3), max_size=3))
        floats = st.floats(width=32, allow_nan=False, allow_infinity=False)
        low, high = (0, 1) if kind in ("bool", "float32") else (np.iinfo(kind).min, np.iinfo(kind).max)
        whole = st.integers(max(low, -(1 << 24)), min(high, 1 << 24))
        values = {"float32": floats, "bool": st.booleans()}.get(kind, whole)
        found[f"input_{number}"] = draw(arrays.arrays(kind, (count, *shape), elements=values))
    return found


@settings(max_examples=60, deadline=None)
@given(records())
def test_a_module_gets_every_number_as_it_was(given: dict[str, Any]) -> None:
    inputs = inputs_of(given)
    for named in (given, tuple(given.values())):
        inputs = inputs_of(named)
        module = Keep()
        Adapted(module, inputs)(torch.from_numpy(inputs.pack(by_name(named))))
        for seen, array in zip(module.seen.values(), given.values(), strict=True):
            assert seen.shape == array.shape
            assert str(seen.dtype) == f"torch.{array.dtype.name}"
            assert np.array_equal(seen.numpy(), array)


def test_whole_numbers_alone_may_be_as_large_as_they_are() -> None:
    large = {"a": np.array([2**62, -(2**62)]), "b": np.array([True, False])}
    assert inputs_of(large).kind == "int64"
    assert inputs_of(large).pack(large)[0].tolist() == [2**62, 1]
    with pytest.raises(InputError, match=r"a holds .* may not exceed 2\^24"):
        inputs_of({**large, "c": np.zeros(2, np.float32)}).pack({**large, "c": np.zeros(2, np.float32)})


@pytest.mark.parametrize(
    ("arrays", "sentence"),
    [
        ({"a": np.zeros((3, 2)), "b": np.zeros((2, 2))}, r"b has shape \(2, 2\), and \(3, 2\)"),
        ({"a b": np.zeros(3)}, "cannot be the name of an argument"),
        ({"a": np.array(["x", "y"])}, "not numbers"),
        ({"a": np.float32(3)}, "a single number"),
        ({"a": np.zeros(3, np.uint32)}, "is uint32; a model takes float32 or whole numbers"),
        ({"a": np.zeros((3, 0))}, "holds nothing"),
        ({}, "at least one input"),
        ({"1": np.zeros(3), "x": np.zeros(3)}, "all inputs by name"),
    ],
)
def test_what_cannot_be_packed_is_refused(arrays: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        inputs_of(arrays).pack(arrays)


def test_other_inputs_than_those_described_are_refused() -> None:
    inputs = Inputs((NamedInput("a", (2,)), NamedInput("b", (), "int64")))
    with pytest.raises(InputError, match="'b' is missing; give exactly a, b"):
        inputs.pack({"a": np.zeros((1, 2))})
    with pytest.raises(InputError, match="'c' is unknown"):
        inputs.pack({"a": np.zeros((1, 2)), "b": np.zeros(1), "c": np.zeros(1)})
    with pytest.raises(InputError, match="b must be whole numbers"):
        inputs.pack({"a": np.zeros((1, 2)), "b": np.array([0.5])})


class Items(torch.utils.data.Dataset[Any]):
    def __init__(self, make: Any) -> None:
        self.make = make

    def __len__(self) -> int:
        return 6

    def __getitem__(self, place: int) -> Any:
        return self.make(place)


def test_torch_data_sets_of_dictionaries() -> None:
    def inputs(i: int) -> dict[str, Tensor]:
        return {"ids": torch.tensor([i, 2 * i]), "x": torch.tensor(0.5 * i)}

    ids = np.arange(6)[:, None] * [1, 2]
    pairs = from_torch(Items(lambda i: (inputs(i), i % 2)))
    keyed = from_torch(Items(lambda i: {**inputs(i), "labels": torch.tensor(i % 2)}))
    for found in (pairs, keyed):
        assert found.inputs is not None
        assert found.inputs.shapes == {"ids": (2,), "x": ()}
        assert np.array_equal(found.features, np.column_stack([ids, 0.5 * np.arange(6)]))
        assert found.labels.tolist() == [0, 1, 0, 1, 0, 1]
    placed = from_torch(Items(lambda i: (tuple(inputs(i).values()), torch.tensor([i, -100]))), target="sequence",
                        classes=range(6))  # fmt: skip
    assert placed.inputs is not None
    assert list(placed.inputs.shapes) == ["0", "1"]
    assert placed.labels.tolist() == [[i, -100] for i in range(6)]


@pytest.mark.parametrize(
    ("labels", "target", "sentence"),
    [
        (np.array([[0, 4], [1, 0]]), "sequence", "label 4 of record 0 is outside 0 to 2 and not -100"),
        (np.array([[0, -1], [1, 0]]), "sequence", "label -1 of record 0"),
        (np.array([0, 1]), "sequence", r"targets have shape \(2,\)"),
        (np.array([[0.5, 0.5, 0.5], [1, 0, 0]]), "soft", "do not add up to 1"),
        (np.array([[0, 1, 2], [1, 0, 0]]), "labels", "label 2.0 of record 0 is neither 0 nor 1"),
        (np.array([[0, 1], [1, 0]]), "labels", r"have \(records, 3\)"),
        (np.array([[1.0, np.inf, 0], [1, 0, 0]]), "number", "label inf of record 0 is no finite number"),
        (np.array([["a", "b"]] * 2), "sequence", "targets are <U1"),
        (np.array([[0.5], [1.0]]), "sequence", "must be whole numbers"),
    ],
)
def test_targets_that_are_not_what_they_are_said_to_be_are_refused(labels: Any, target: Any, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        from_arrays(np.zeros((2, 3)), labels, classes=["a", "b", "c"], target=target)


def test_classes_of_positions_are_declared() -> None:
    with pytest.raises(InputError, match=r"declare them as data\.classes"):
        from_arrays(np.zeros((2, 3)), np.zeros((2, 2), int), target="sequence")
