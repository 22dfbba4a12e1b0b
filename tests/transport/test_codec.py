"""Payloads as bytes: the same tensors come back, and damaged bytes are refused."""

import contextlib
import json
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.federations import experiment, job_of
from support.transports import AsBytes, alone

from polyeps.core import Payload, Replies, Spec, Work
from polyeps.errors import InputError
from polyeps.participation import Participation
from polyeps.server import Round, serve
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


def reply(client: str, **payload: torch.Tensor) -> Replies:
    return Replies((client,), payload, (True,), 10, 3)


ODD: dict[str, Replies] = {
    "another shape": reply("d", x=torch.ones(1, 3)),
    "a scalar": reply("d", x=torch.tensor(1.0)),
    "another name": reply("d", y=torch.ones(1, 2)),
    "one more": reply("d", x=torch.ones(1, 2), y=torch.ones(1, 2)),
    "nothing": reply("d"),
    "another kind": reply("d", x=torch.ones(1, 2, dtype=torch.float64)),
    "complex": reply("d", x=torch.ones(1, 2, dtype=torch.complex64)),
    "two rows": reply("d", x=torch.ones(2, 2)),
    "NaN": reply("d", x=torch.full((1, 2), float("nan"))),
}


@pytest.mark.parametrize("case", ODD)
@pytest.mark.parametrize("known", [True, False])
def test_an_answer_unlike_the_others_is_left_out(case: str, known: bool) -> None:
    others = [reply("a", x=torch.ones(1, 2)), reply("b", x=torch.zeros(1, 2))]
    gives = {"x": Spec((2,), "float32", 0, 1)} if known else None
    for answers in ([ODD[case], *others], [*others, ODD[case]]):
        together = codec.stack(answers, gives)
        assert together.ids == ("a", "b")
        assert together.malformed == ("d",)
        assert together.payload["x"].shape == (2, 2)
    alone = codec.stack([ODD[case], others[0]], gives) if known else None
    assert alone is None or (alone.ids, alone.malformed) == (("a",), ("d",))  # where it is known, one is enough


def test_who_is_exhausted_is_not_malformed() -> None:
    poor = Replies((), {}, (), exhausted=("c",))
    together = codec.stack([poor, reply("a", x=torch.ones(1, 2))])
    assert (together.ids, together.exhausted, together.malformed) == (("a",), ("c",), ())


@pytest.mark.parametrize("kind", [RuntimeError, KeyError, ValueError])
@pytest.mark.parametrize("wrong", ["raises", "shape", "name", "rows"])
def test_one_client_that_fails_does_not_keep_others_from_answering(kind: type[Exception], wrong: str) -> None:
    job = job_of(experiment("fedavg (none)"))
    real, third = job.algorithm.actions["train"].run, alone(job.clients(None), "3")

    def run(work: Work) -> tuple[Payload, Payload]:
        found, kept = real(work)
        if not torch.equal(work.data.spans, third.data.spans):
            return found, kept
        if wrong == "raises":
            raise kind("it broke")
        rows = found["update"]
        return {
            "shape": ({"update": rows[:, :-1]}, kept),
            "name": ({"other": rows}, kept),
            "rows": ({"update": rows[:0]}, kept),
        }[wrong]

    algorithm = replace(job.algorithm, actions={"train": replace(job.algorithm.actions["train"], run=run)})
    seen: list[Round] = []
    state = serve(
        algorithm,
        AsBytes(job.clients(None), algorithm),
        job.state,
        rounds=2,
        participation=Participation(),
        seed=1,
        observe=lambda round, _: seen.append(round),
    )
    assert [(set(round.traffic), round.discarded) for round in seen] == [(set("01245"), ("3",))] * 2
    assert state.model.any()
