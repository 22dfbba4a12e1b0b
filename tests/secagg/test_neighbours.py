"""Secure sums among neighbours: exact or none, refused where they protect less, and never parted by any server."""

from __future__ import annotations

import numpy as np
import pytest
from support.secure_rounds import Walk, plain_sum, secure_sum

from polyeps.errors import InputError, MessageRefused, SumAborted
from polyeps.secagg import neighbours
from polyeps.secagg.messages import Step, SumSetup, open_signed, pack_names, pack_table, unpack_table

CLIENTS, NEAR, OUT, COLLUDERS = 40, 8, 4, 2
NAMES = [f"{place:02}" for place in range(CLIENTS)]


def around(place: int, near: int = NEAR) -> set[int]:
    return {(place + step) % CLIENTS for step in range(-near // 2, near // 2 + 1) if step}


def test_every_client_has_as_many_neighbours_and_is_theirs() -> None:
    setup = walk_to(Step.ADVERTISE).setup
    for place, name in enumerate(NAMES):
        assert setup.around(name) == {NAMES[other] for other in {place, *around(place)}}
        assert len(setup.around(name)) == NEAR + 1
        assert all(name in setup.around(other) for other in setup.around(name))
        assert len({setup.point(name, other) for other in setup.around(name)}) == NEAR + 1


@pytest.mark.parametrize("step", [Step.SHARE, Step.MASK, Step.CONFIRM, Step.UNMASK])
def test_whoever_drops_out_the_sum_is_that_of_the_survivors(step: Step) -> None:
    """As many as may drop out, all of them neighbours of one client; and one more, with whom there is no sum."""
    rows = np.random.default_rng(3).integers(0, 2**24, (CLIENTS, 5), np.uint64)
    lost = sorted(around(7))[:OUT]
    total, survivors = secure_sum(
        rows, 24, CLIENTS - OUT, "run", 0, {step: {NAMES[place] for place in lost}}, NAMES, neighbours=NEAR
    )
    kept = [place for place in range(CLIENTS) if step > Step.MASK or place not in lost]
    assert survivors == tuple(NAMES[place] for place in kept)
    assert np.array_equal(total, plain_sum(rows[kept], 24))
    more = {step: {NAMES[place] for place in sorted(around(7))[: OUT + 1]}}
    with pytest.raises(SumAborted, match="are left of at least"):
        secure_sum(rows, 24, CLIENTS - OUT, "run", 0, more, NAMES, neighbours=NEAR)


def test_a_graph_that_protects_too_little_is_refused() -> None:
    public = {name: bytes([place]) * 32 for place, name in enumerate(NAMES)}
    SumSetup("run", 0, public, 8, 1, CLIENTS - OUT, neighbours=NEAR)
    for wrong in (2, 5, OUT, CLIENTS - 1, CLIENTS):
        with pytest.raises(InputError, match=f"{wrong} neighbours of 40 clients do not protect them"):
            SumSetup("run", 0, public, 8, 1, CLIENTS - OUT, neighbours=wrong)
    with pytest.raises(InputError, match="from 4 colluders"):
        SumSetup("run", 0, public, 8, 1, CLIENTS - OUT, colluders=4, neighbours=NEAR)


def walk_to(step: Step) -> Walk:
    return Walk(step, names=NAMES, threshold=CLIENTS - OUT, colluders=COLLUDERS, neighbours=NEAR)


def test_a_client_works_with_its_neighbours_alone() -> None:
    walk = walk_to(Step.SHARE)
    stranger = next(name for place, name in enumerate(NAMES) if place not in {0, *around(0)})
    keys = walk.up[Step.ADVERTISE]
    with pytest.raises(MessageRefused, match="who is not one of its neighbours"):
        walk.lie(Step.SHARE, "00", pack_table({name: keys[name] for name in ("00", stranger)}))
    near = sorted(NAMES[place] for place in {0, *around(0)})
    few = near[: walk.setup.shares - 1]
    with pytest.raises(MessageRefused, match="brings keys of"):
        walk.lie(Step.SHARE, "00", pack_table({name: keys[name] for name in sorted({"00", *few})[: len(few)]}))


def test_a_client_signs_no_list_that_leaves_it_few_neighbours_and_none_of_few_clients() -> None:
    walk = walk_to(Step.CONFIRM)
    near = around(0)
    rest = [name for place, name in enumerate(NAMES) if place not in near]
    with pytest.raises(MessageRefused, match="of at least 36"):
        walk.lie(Step.CONFIRM, "00", pack_names(rest))
    walk.lie(
        Step.CONFIRM, "00", pack_names([name for place, name in enumerate(NAMES) if place not in sorted(near)[:OUT]])
    )


def test_a_client_unmasks_only_what_as_many_have_signed_as_the_noise_needs() -> None:
    walk = walk_to(Step.UNMASK)
    signed = walk.up[Step.CONFIRM]
    few = {name: signed[name] for name in NAMES[: walk.setup.least - 1]}
    with pytest.raises(MessageRefused, match="brings 35 signatures of at least 36"):
        walk.lie(Step.UNMASK, "00", pack_table(few))
    sent = walk.lie(Step.UNMASK, "00", pack_table(signed))
    given = unpack_table(open_signed(walk.setup, Step.UNMASK, "00", sent))
    assert given.keys() == {NAMES[place] for place in {0, *around(0)}}


# What a server could do, whatever it says: the proof by trial


def parted(
    near: int, shares: int, colluders: set[int], listed: set[int], signers: set[int]
) -> list[tuple[set[int], set[int]]]:
    """Return each part of the honest clients whose sum comes out, with the honest signers that it lacks.

    Honest signers give the shares of their neighbours' own masks; a part comes out if these are enough for all in it.
    Two honest clients of the list have a mask in common if they are neighbours and one has signed.
    """
    honest = listed - colluders
    helping = signers & honest
    graph = {place: around(place, near) & honest for place in honest}
    graph = {place: {o for o in others if place in helping or o in helping} for place, others in graph.items()}
    found, left = [], set(honest)
    while left:
        part, new = set(), {left.pop()}
        while new:
            part |= new
            new = set().union(*(graph[place] for place in new)) - part
        left -= part
        everyone = [{place, *around(place, near)} for place in part]
        if all(len(some & (helping | colluders)) >= shares for some in everyone):
            found.append((part, helping - part))
    return found


def cuts(near: int, out: int, colluders: int, tries: int) -> bool:
    """Say whether some list, signers and colluders leave a part that comes out without some honest signer.

    A server tries to cut off a stretch of the circle, or a client with those around it, by calling out those between.
    """
    rng, shares = np.random.default_rng(5), near + 1 - out
    for trial in range(tries):
        first, size = rng.integers(CLIENTS), int(rng.integers(1, CLIENTS))
        inside = {int(first + step) % CLIENTS for step in range(size)}
        if trial % 2:
            inside = set(list(around(int(first), near) | {int(first)})[:size])
        edge = [place for place in range(CLIENTS) if place not in inside and around(place, near) & inside]
        lost = set(rng.permutation(edge)[:out].tolist())
        bad = set(rng.permutation([place for place in edge if place not in lost])[:colluders].tolist())
        listed = set(range(CLIENTS)) - (lost if trial % 3 else set())
        signers = listed - lost
        # Whoever has too few neighbours on the list does not sign it.
        signers -= {place for place in signers if len(listed & (around(place, near) | {place})) < shares}
        if any(missing for _, missing in parted(near, shares, bad, listed, signers)):
            return True
    return False


@pytest.mark.parametrize(("near", "out", "colluders"), [(8, 4, 2), (2, 0, 0), (4, 3, 0), (6, 2, 3)])
def test_no_part_comes_out_without_an_honest_signer(near: int, out: int, colluders: int) -> None:
    assert neighbours.holds(CLIENTS, near, CLIENTS - out, colluders)
    assert not cuts(near, out, colluders, 300)


def test_a_graph_that_does_not_hold_is_cut_by_the_same_trial() -> None:
    assert not neighbours.holds(CLIENTS, 4, CLIENTS - 4, 0)
    assert cuts(4, 4, 0, 300)
