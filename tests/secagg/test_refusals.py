"""Everything that is damaged, forged, replayed, out of turn or not allowed is refused, and by name."""

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.secure_rounds import Walk, seeded

from polyeps.errors import InputError, MessageRefused, SumAborted
from polyeps.secagg.client import ADVERTISED, SumClient, SumState
from polyeps.secagg.messages import (
    Step,
    fingerprint,
    open_signed,
    pack,
    pack_names,
    pack_table,
    sign,
    split_body,
    unpack_table,
)
from polyeps.secagg.protocol import take_step
from polyeps.secagg.shamir import SHARE_BYTES

ASKING = [step for step in Step if step is not Step.ADVERTISE]  # steps the server sends a message for
LOW_ORDER = bytes(32)


def sent(step: Step, name: str = "a", **setup: int | str) -> bytes:
    return Walk(step, **setup).answer(name, step)  # type: ignore[arg-type]


def forged(step: Step) -> bytes:
    """Right in every way, but signed by another client."""
    walk = Walk(step)
    body = open_signed(walk.setup, step, "a", walk.answer("a", step))
    return sign(walk.setup, step, "a", walk.clients["b"].identity, body)


BAD_UPLINKS: dict[str, Callable[[Step], bytes]] = {
    "empty": lambda _: b"",
    "truncated": lambda step: sent(step)[:-1],
    "cut in half": lambda step: sent(step)[: len(sent(step)) // 2],
    "longer": lambda step: sent(step) + b"\0",
    "of another round": lambda step: sent(step, round=2),
    "of another run": lambda step: sent(step, run="another"),
    "of another roster": lambda step: sent(step, names="abcde"),
    "of another step": lambda step: sent(Step((step + 1) % len(Step))),
    "of another client": lambda step: sent(step, "b"),
    "forged": forged,
}


@pytest.mark.parametrize("kind", BAD_UPLINKS)
@pytest.mark.parametrize("step", Step)
def test_the_server_refuses_what_is_not_that_clients_answer(step: Step, kind: str) -> None:
    walk = Walk(step)
    with pytest.raises(MessageRefused, match=f"step {step.name.lower()}: the message of client 'a' .*; .*"):
        walk.server.receive("a", BAD_UPLINKS[kind](step))
    walk.answer_all(step)  # and takes the right one after it


@pytest.mark.parametrize("step", Step)
@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_no_bit_of_a_message_may_change(step: Step, data: st.DataObject) -> None:
    walk = Walk(step)
    up = bytearray(walk.answer("a", step))
    place = data.draw(st.integers(0, 8 * len(up) - 1))
    up[place // 8] ^= 1 << place % 8
    with pytest.raises(MessageRefused, match="client 'a'"):
        walk.server.receive("a", bytes(up))
    if step is not Step.ADVERTISE:
        down = bytearray(walk.asked["b"])
        place = data.draw(st.integers(0, 8 * len(down) - 1))
        down[place // 8] ^= 1 << place % 8
        with pytest.raises(MessageRefused, match="the server"):
            walk.answer("b", step, bytes(down))


@pytest.mark.parametrize("step", Step)
def test_a_message_comes_once_and_from_somebody_asked(step: Step) -> None:
    walk = Walk(step)
    content = walk.answer("a", step)
    walk.server.receive("a", content)
    with pytest.raises(MessageRefused, match="client 'a' comes twice"):
        walk.server.receive("a", content)
    with pytest.raises(MessageRefused, match="client 'mallory' is from a client that was not asked"):
        walk.server.receive("mallory", content)


def test_a_sum_ends_once() -> None:
    walk = Walk(Step.UNMASK)
    with pytest.raises(SumAborted, match="no step after this one"):
        walk.server.advance()
    walk.answer_all(Step.UNMASK)
    walk.server.finish()
    with pytest.raises(SumAborted, match="the steps are not all done"):
        walk.server.finish()
    with pytest.raises(MessageRefused, match="client 'a' comes after the end"):
        walk.server.receive("a", walk.up[Step.UNMASK]["a"])


def test_who_dropped_out_is_out() -> None:
    walk = Walk(Step.CONFIRM, late="d")
    with pytest.raises(MessageRefused, match="client 'd' is from a client that was not asked"):
        walk.server.receive("d", walk.up[Step.MASK]["d"])


BAD_DOWNLINKS: dict[str, Callable[[Step], bytes]] = {
    "empty": lambda _: b"",
    "truncated": lambda step: Walk(step).asked["a"][:-1],
    "of another round": lambda step: Walk(step, round=2).asked["a"],
    "of another run": lambda step: Walk(step, run="another").asked["a"],
    "for another client": lambda step: Walk(step).asked["b"],
    "of another step": lambda step: Walk(Step(step % 4 + 1)).asked["a"],
}


@pytest.mark.parametrize("kind", BAD_DOWNLINKS)
@pytest.mark.parametrize("step", ASKING)
def test_a_client_refuses_what_is_not_for_it_and_now(step: Step, kind: str) -> None:
    walk = Walk(step)
    with pytest.raises(MessageRefused, match=f"step {step.name.lower()}: the message of the server .*; .*"):
        walk.answer("a", step, BAD_DOWNLINKS[kind](step))
    walk.answer("a", step)


@pytest.mark.parametrize("step", ASKING)
def test_a_client_answers_each_step_once_and_in_order(step: Step) -> None:
    walk = Walk(step)
    for other in ASKING:
        if other != step:
            with pytest.raises(MessageRefused, match=f"step {other.name.lower()}.* once and in order"):
                walk.answer("a", other)
    walk.answer("a", step)
    with pytest.raises(MessageRefused, match="once and in order"):
        walk.answer("a", step)


def test_a_round_is_entered_once() -> None:
    walk = Walk(Step.UNMASK)
    before = walk.past["a"][-1]
    with pytest.raises(MessageRefused, match="'a' has already taken part in round 1 of run 'run'"):
        walk.clients["a"].advertise(before)
    with pytest.raises(MessageRefused, match="start a later round"):
        Walk(Step.ADVERTISE, round=0).clients["a"].advertise(before)
    Walk(Step.ADVERTISE, round=2).clients["a"].advertise(before)
    Walk(Step.ADVERTISE, run="another").clients["a"].advertise(before)


@pytest.mark.parametrize("step", ASKING)
def test_what_was_kept_serves_its_own_round_only(step: Step) -> None:
    old, new = Walk(step), Walk(step, round=2)
    with pytest.raises(MessageRefused, match="a sum that this client has no state of"):
        take_step(new.clients["a"], step, old.past["a"][-1], new.asked["a"], new.vector)


def test_a_client_needs_its_identity_and_a_beginning() -> None:
    walk = Walk(Step.SHARE)
    with pytest.raises(InputError, match="does not list client 'a' with this identity"):
        SumClient(walk.setup, "a", walk.clients["b"].identity)
    with pytest.raises(InputError, match="before it advertised"):
        take_step(walk.clients["a"], Step.SHARE, None, walk.asked["a"], walk.vector)


def test_what_is_kept_comes_back_and_secrets_are_forgotten() -> None:
    walk = Walk(Step.UNMASK)
    walk.answer("a", Step.UNMASK)
    for kept in walk.past["a"]:
        assert SumState.decode(kept.encode()) == kept
        for secret in (kept.mask_key, kept.seed, kept.letter_key):
            assert not secret or repr(secret) not in repr(kept)
    first, shared, masked, _, last = walk.past["a"]
    assert first.mask_key
    assert not shared.letter_key
    assert not masked.mask_key + masked.seed
    assert not last.shares
    for content in (b"", b"nonsense", first.encode()[:-1]):
        with pytest.raises(InputError, match="is damaged; sit this round out"):
            SumState.decode(content)


def signed_by(walk: Walk, step: Step, body: bytes, name: str = "a") -> bytes:
    """A message of a client that does not keep to the rules."""
    return sign(walk.setup, step, name, walk.clients[name].identity, body)


BAD_BODIES: dict[str, tuple[Step, Callable[[bytes], bytes]]] = {
    "short keys": (Step.ADVERTISE, lambda body: body[:-1]),
    "a key of small order": (Step.ADVERTISE, lambda body: LOW_ORDER + body[32:]),
    "a mask key of small order": (Step.ADVERTISE, lambda body: body[:32] + LOW_ORDER + body[64:]),
    "no letters": (Step.SHARE, lambda _: b""),
    "a letter less": (Step.SHARE, lambda body: pack_table({"b": unpack_table(body)["b"]})),
    "short letters": (Step.SHARE, lambda body: pack_table({k: v[1:] for k, v in unpack_table(body).items()})),
    "a table in disorder": (Step.SHARE, lambda _: pack([b"c", b"", b"b", b""])),
    "an odd table": (Step.SHARE, lambda _: pack([b"c"])),
    "a name that is none": (Step.SHARE, lambda _: pack([b"\xff", b""])),
    "a coordinate less": (Step.MASK, lambda body: body[:-2]),
    "a coordinate more": (Step.MASK, lambda body: body + b"\0\0"),
    "too large a number": (Step.MASK, lambda body: b"\xff" * len(body)),
    "another list": (Step.CONFIRM, lambda _: fingerprint(pack_names("abc"))),
    "a share less": (Step.UNMASK, lambda body: pack_table({"a": unpack_table(body)["a"]})),
    "short shares": (Step.UNMASK, lambda body: pack_table({k: v[1:] for k, v in unpack_table(body).items()})),
}


@pytest.mark.parametrize("kind", BAD_BODIES)
def test_the_server_refuses_what_a_client_may_not_say(kind: str) -> None:
    step, change = BAD_BODIES[kind]
    walk = Walk(step, bits=12)
    body = open_signed(walk.setup, step, "a", walk.answer("a", step))
    with pytest.raises(MessageRefused, match=f"step {step.name.lower()}: the message of client 'a' does not hold"):
        walk.server.receive("a", signed_by(walk, step, change(body)))


def test_a_letter_that_cannot_be_read_is_its_writers_fault() -> None:
    walk = Walk(Step.SHARE)
    letters = unpack_table(open_signed(walk.setup, Step.SHARE, "a", walk.answer("a", Step.SHARE)))
    letters["b"], letters["c"] = letters["c"], letters["b"]  # right size, wrong reader
    walk.server.receive("a", signed_by(walk, Step.SHARE, pack_table(letters)))
    for name in "bcd":
        walk.server.receive(name, walk.answer(name, Step.SHARE))
    walk.asked = walk.server.advance()
    with pytest.raises(MessageRefused, match="step share: the message of client 'a' holds a letter that cannot be"):
        walk.answer("b", Step.MASK)
    walk.answer("d", Step.MASK)


@pytest.mark.parametrize(("late", "whose"), [("", "b"), ("d", "d")])
def test_wrong_shares_are_noticed_and_there_is_no_sum(late: str, whose: str) -> None:
    """Of a seed by its commitment, of a key by its public half."""
    walk = Walk(Step.UNMASK, late=late)
    for name in walk.asked:
        content = walk.answer(name, Step.UNMASK)
        if name == "a":
            shares = unpack_table(open_signed(walk.setup, Step.UNMASK, "a", content))
            content = signed_by(walk, Step.UNMASK, pack_table({**shares, whose: seeded(9)(SHARE_BYTES)}))
        walk.server.receive(name, content)
    with pytest.raises(SumAborted, match=f"secret of client '{whose}' do not fit"):
        walk.server.finish()
    assert not any(walk.server._total)


def test_parts_have_fixed_sizes() -> None:
    with pytest.raises(ValueError, match="95 bytes instead of 96"):
        split_body(bytes(95), ADVERTISED)
