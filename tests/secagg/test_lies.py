"""A server that lies: about keys, about who dropped out, about who is in the sum. It gets no vector of anybody."""

import os

import pytest
from support.secure_rounds import Walk, seat

from polyeps.errors import MessageRefused
from polyeps.secagg import masks
from polyeps.secagg.client import LETTER_BYTES, SumClient
from polyeps.secagg.messages import (
    Step,
    fingerprint,
    open_signed,
    open_stamped,
    pack,
    pack_table,
    sign,
    unpack_table,
)
from polyeps.secagg.shamir import SHARE_BYTES, join, split, weights


def names(listed: str) -> bytes:
    return pack(name.encode() for name in listed)


def told(walk: Walk, step: Step, name: str) -> dict[str, bytes]:
    """What an honest server would have told a client, for a lying one to change."""
    return unpack_table(open_stamped(walk.setup, step, name, walk.asked[name]))


BAD_LISTS = {
    "all dropped out": ("", "lists other clients than those that sent shares"),
    "all but the client": ("a", "lists 1 clients of at least 3"),
    "too few": ("ab", "lists 2 clients of at least 3"),
    "all others": ("bcd", "lists other clients than those that sent shares"),
    "a stranger": ("abcx", "lists other clients than those that sent shares"),
    "one twice": ("abbc", "cannot be read"),
    "disorder": ("acb", "cannot be read"),
}


@pytest.mark.parametrize("kind", BAD_LISTS)
def test_a_client_signs_no_list_that_would_expose_somebody(kind: str) -> None:
    listed, why = BAD_LISTS[kind]
    walk = Walk(Step.CONFIRM)
    with pytest.raises(MessageRefused, match=f"step confirm: the message of the server to 'a' {why}"):
        walk.lie(Step.CONFIRM, "a", names(listed))


def test_a_list_must_leave_enough_beside_the_colluders() -> None:
    walk = Walk(Step.CONFIRM, names="abcdef", threshold=5, colluders=2)
    with pytest.raises(MessageRefused, match="lists 4 clients of at least 5"):
        walk.lie(Step.CONFIRM, "a", names("abcd"))


def test_two_lists_for_two_halves_give_nothing() -> None:
    """The attack that self-masks and thresholds are there for: d is in the sum for some, dropped out for others."""
    walk = Walk(Step.CONFIRM)
    signed = {name: walk.lie(Step.CONFIRM, name, names("abcd" if name in "ab" else "abc")) for name in "abc"}
    for name in "abc":
        for chosen in ("abc", "ab", "c"):
            some = pack_table({other: signed[other] for other in chosen})
            with pytest.raises(MessageRefused, match=r"lists other clients|signatures of at least 3"):
                walk.lie(Step.UNMASK, name, some)


def test_a_client_signs_one_list_only() -> None:
    walk = Walk(Step.CONFIRM)
    walk.lie(Step.CONFIRM, "a", names("abcd"))
    with pytest.raises(MessageRefused, match="once and in order"):
        walk.lie(Step.CONFIRM, "a", names("abc"))


def test_a_client_never_gives_both_shares_of_a_peer() -> None:
    """For each other one share, of the kind the list calls for; and no second answer, whatever it is asked with."""
    walk = Walk(Step.UNMASK, late="d")
    given = unpack_table(open_signed(walk.setup, Step.UNMASK, "a", walk.answer("a", Step.UNMASK)))
    held = walk.past["a"][-2].shares
    assert given.keys() == held.keys() == set("abcd")
    for name, share in given.items():
        of_key, of_seed = held[name][:SHARE_BYTES], held[name][SHARE_BYTES:]
        assert share == (of_key if name == "d" else of_seed)
    for message in (walk.asked["a"], walk.asked["b"]):
        with pytest.raises(MessageRefused, match="once and in order"):
            walk.answer("a", Step.UNMASK, message)
    assert not walk.past["a"][-1].shares


def test_without_enough_signatures_nothing_is_unmasked() -> None:
    walk = Walk(Step.UNMASK)
    signed = told(walk, Step.UNMASK, "a")
    few = {name: signed[name] for name in "ab"}
    with pytest.raises(MessageRefused, match="brings 2 signatures of at least 3"):
        walk.lie(Step.UNMASK, "a", pack_table(few))
    made_up = sign(walk.setup, Step.CONFIRM, "c", walk.clients["d"].identity, fingerprint(names("abcd")))
    with pytest.raises(MessageRefused, match="step confirm: the message of client 'c' is not signed by its identity"):
        walk.lie(Step.UNMASK, "a", pack_table({**few, "c": made_up}))
    with pytest.raises(MessageRefused, match="step confirm: the message of client 'c'"):
        walk.lie(Step.UNMASK, "a", pack_table({**few, "c": signed["d"]}))
    with pytest.raises(MessageRefused, match="step confirm: the message of client 'c' belongs to another run, round"):
        walk.lie(Step.UNMASK, "a", pack_table({**few, "c": told(Walk(Step.UNMASK, round=2), Step.UNMASK, "a")["c"]}))
    with pytest.raises(MessageRefused, match="'mallory', who is not in the roster"):
        walk.lie(Step.UNMASK, "a", pack_table({**signed, "mallory": signed["b"]}))


def test_keys_of_the_servers_own_making_are_refused() -> None:
    walk = Walk(Step.SHARE)
    signed = told(walk, Step.SHARE, "a")
    keys = open_signed(walk.setup, Step.ADVERTISE, "b", signed["b"])
    forged = {**signed, "b": sign(walk.setup, Step.ADVERTISE, "b", walk.clients["c"].identity, keys)}
    with pytest.raises(MessageRefused, match="step advertise: the message of client 'b' is not signed by its identity"):
        walk.lie(Step.SHARE, "a", pack_table(forged))
    replayed = told(Walk(Step.SHARE, round=2), Step.SHARE, "a")
    with pytest.raises(MessageRefused, match="step advertise: the message of client 'b' belongs to another run, round"):
        walk.lie(Step.SHARE, "a", pack_table({**signed, "b": replayed["b"]}))
    with pytest.raises(MessageRefused, match="'mallory', who is not in the roster"):
        walk.lie(Step.SHARE, "a", pack_table({**signed, "mallory": signed["b"]}))


def test_a_client_knows_its_own_keys_and_counts_the_others() -> None:
    walk = Walk(Step.SHARE)
    signed = told(walk, Step.SHARE, "a")
    _, again = walk.clients["a"].advertise()  # as if it had begun the round twice
    with pytest.raises(MessageRefused, match="brings other keys for this client than its own"):
        walk.lie(Step.SHARE, "a", pack_table({**signed, "a": again}))
    for some in ("ab", "bcd"):
        with pytest.raises(MessageRefused, match=f"brings keys of {len(some)} clients"):
            walk.lie(Step.SHARE, "a", pack_table({name: signed[name] for name in some}))


@pytest.mark.parametrize("part", [0, 1])
def test_keys_that_agree_with_everybody_are_refused_by_clients_too(part: int) -> None:
    """Of small order: whoever sees one knows what it agrees on. A lying server may pass on what it should refuse."""
    walk = Walk(Step.SHARE)
    signed = told(walk, Step.SHARE, "a")
    keys = open_signed(walk.setup, Step.ADVERTISE, "b", signed["b"])
    bad = keys[: 32 * part] + bytes(32) + keys[32 * (part + 1) :]
    signed["b"] = sign(walk.setup, Step.ADVERTISE, "b", walk.clients["b"].identity, bad)
    match = "step advertise: the message of client 'b' holds a key that is none"
    if part == 0:
        with pytest.raises(MessageRefused, match=match):
            walk.lie(Step.SHARE, "a", pack_table(signed))
        return
    others = {name: walk.answer(name, Step.SHARE) for name in "bcd"}
    walk.lie(Step.SHARE, "a", pack_table(signed))
    letters = {
        name: unpack_table(open_signed(walk.setup, Step.SHARE, name, sent))["a"] for name, sent in others.items()
    }
    with pytest.raises(MessageRefused, match=match):
        walk.lie(Step.MASK, "a", pack_table(letters))


def test_keys_of_the_wrong_length_are_refused() -> None:
    walk = Walk(Step.SHARE)
    signed = told(walk, Step.SHARE, "a")
    signed["b"] = sign(walk.setup, Step.ADVERTISE, "b", walk.clients["b"].identity, bytes(95))
    with pytest.raises(MessageRefused, match="client 'b' is not of the right length"):
        walk.lie(Step.SHARE, "a", pack_table(signed))


def test_letters_reach_only_whom_they_are_for() -> None:
    walk = Walk(Step.MASK)
    letters = told(walk, Step.MASK, "a")
    assert {len(letter) for letter in letters.values()} == {LETTER_BYTES}
    wrong = {
        "another's": told(walk, Step.MASK, "c")["b"],
        "from another": letters["c"],
        "of another round": told(Walk(Step.MASK, round=2), Step.MASK, "a")["b"],
        "changed": bytes([letters["b"][0] ^ 1]) + letters["b"][1:],
        "short": letters["b"][:-1],
        "nothing": b"",
    }
    for letter in wrong.values():
        with pytest.raises(MessageRefused, match="step share: the message of client 'b' holds a letter that cannot be"):
            walk.lie(Step.MASK, "a", pack_table({**letters, "b": letter}))
    for listed in ("b", "abcd"):
        with pytest.raises(MessageRefused, match="brings letters of"):
            walk.lie(Step.MASK, "a", pack_table(dict.fromkeys(listed, letters["b"])))


def test_letters_held_back_split_nobody_off() -> None:
    """Who had no letter of d signs no list with d, and who masked with d is not bare without it."""
    walk = Walk(Step.MASK)
    letters = told(walk, Step.MASK, "a")
    walk.lie(Step.MASK, "a", pack_table({name: letters[name] for name in "bc"}))
    with pytest.raises(MessageRefused, match="lists other clients than those that sent shares"):
        walk.lie(Step.CONFIRM, "a", names("abcd"))
    walk.lie(Step.CONFIRM, "a", names("abc"))


def test_shares_below_the_threshold_restore_no_secret() -> None:
    """What colluders hold of an honest client is worth nothing without honest shares."""
    walk = Walk(Step.CONFIRM, names="abcde", threshold=4, colluders=2)
    secret = walk.past["a"][0].seed
    held = {walk.setup.point("a", name): walk.past[name][-1].shares["a"][SHARE_BYTES:] for name in "bcde"}
    assert join(held, weights(list(held))) == secret
    few = dict(list(held.items())[:3])
    assert join(few, weights(list(few))) != secret


def test_a_key_is_bound_to_its_round_its_purpose_and_its_pair() -> None:
    setup = [Walk(Step.ADVERTISE, run=run, round=round).setup for run in ("one", "two") for round in (1, 2)]
    secret = bytes(range(32))
    keys = [masks.pair_mask_key(each, one, other, secret) for each in setup for one, other in ("ab", "ac", "bc")]
    keys += [derived(each, "a", secret) for each in setup for derived in (masks.self_mask_key, masks.commitment)]
    assert len(set(keys)) == len(keys)
    assert masks.pair_mask_key(setup[0], "b", "a", secret) == keys[0]


def test_entropy_is_the_systems_own_unless_told() -> None:
    _, clients = seat(["a", "b"], os.urandom, "run", 0, 8, 1, 2)
    client = clients["a"]
    assert SumClient(client.setup, "a", client.identity).entropy is os.urandom
    assert split(bytes(32), [1, 2], 2, os.urandom) != split(bytes(32), [1, 2], 2, os.urandom)
