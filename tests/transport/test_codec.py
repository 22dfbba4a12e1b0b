"""Payloads as bytes: the same tensors come back, and damaged bytes are refused."""

import contextlib
import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from polyeps.core import Payload, Replies
from polyeps.errors import InputError
from polyeps.transport import codec

DTYPES = [torch.float32, torch.float64, torch.float16, torch.int64, torch.int32, torch.uint8, torch.bool]
SHAPES = st.lists(st.integers(0, 4), max_size=3).map(tuple)


@st.composite
def payloads(draw: st.DrawFn) -> Payload:
    def tensor() -> torch.Tensor:
        shape, dtype = draw(SHAPES), draw(st.sampled_from(DTYPES))
        made = torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(draw(st.integers(0, 99)))).to(dtype)
        return made.T if draw(st.booleans()) and made.ndim == 2 else made  # not contiguous

    names = draw(st.sets(st.text("abc/_é", min_size=1, max_size=5), max_size=3))
    return {name: tensor() for name in names}


@given(payloads())
def test_what_is_sent_arrives(payload: Payload) -> None:
    content = codec.encode(payload)
    assert len(content) == codec.size(payload)
    arrived = codec.decode(content)
    assert set(arrived) == set(payload)
    for name, tensor in payload.items():
        assert (arrived[name].dtype, arrived[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(arrived[name], tensor)


def test_numbers_that_are_none_arrive_too() -> None:
    odd = torch.tensor([float("nan"), float("inf"), -0.0, 1e-45])
    arrived = codec.decode(codec.encode({"odd": odd}))["odd"]
    assert arrived.view(torch.int32).tolist() == odd.view(torch.int32).tolist()


@pytest.mark.parametrize("size", [0, 1000])
def test_a_payload_is_little_more_than_its_numbers(size: int) -> None:
    assert 4 * size < codec.size({"update": torch.zeros(size)}) <= 4 * size + 100


CONTENT = codec.encode({"update": torch.arange(6.0).reshape(2, 3), "count": torch.tensor(3)})


@given(st.integers(0, len(CONTENT) - 1))
def test_a_message_cut_short_is_refused(length: int) -> None:
    with pytest.raises(InputError, match=rf"a message of {length} bytes is damaged .*ask for it again"):
        codec.decode(CONTENT[:length])


@given(st.binary(max_size=60))
def test_noise_is_refused(content: bytes) -> None:
    with pytest.raises(InputError, match="is damaged"):
        codec.decode(content)


@given(st.integers(0, len(CONTENT) - 1), st.integers(1, 255))
@settings(max_examples=300)
def test_a_changed_byte_is_refused_or_changes_values_only(place: int, change: int) -> None:
    """Nothing else may happen: no crash, and no error but ours."""
    damaged = bytearray(CONTENT)
    damaged[place] ^= change
    with contextlib.suppress(InputError):
        assert sum(tensor.numel() for tensor in codec.decode(bytes(damaged)).values()) <= len(CONTENT)


def test_a_header_that_promises_more_than_there_is_is_refused() -> None:
    header = json.dumps({"x": {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 1 << 42]}}).encode()
    with pytest.raises(InputError, match="is damaged"):
        codec.decode(len(header).to_bytes(8, "little") + header)


def test_answers_of_single_clients_are_stacked_in_order() -> None:
    one = Replies(("a",), {"x": torch.ones(1, 2)}, (True,), 10, 3)
    none = Replies((), {}, ())
    two = Replies(("b",), {"x": torch.zeros(1, 2)}, (False,), 10, 3)
    both = codec.stack([two, none, one])
    assert (both.ids, both.ready, both.received, both.sent) == (("b", "a"), (False, True), 10, 3)
    assert both.payload["x"].tolist() == [[0, 0], [1, 1]]
    assert codec.stack([none, none]) == none
    assert codec.row(both.payload, 1)["x"].tolist() == [1, 1]
