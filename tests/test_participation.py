"""Who takes part, when every client is to be asked once an epoch."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some

from polyeps.errors import InputError
from polyeps.participation import Participation, cohort_size

EVERYONE = tuple(map(str, range(103)))


def test_an_epoch_asks_every_client_once() -> None:
    draws = Participation("epoch", 0.1)
    batches = draws.batches(len(EVERYONE))
    assert batches == 10
    for epoch in range(3):
        cohorts = [draws.draw(EVERYONE, EVERYONE, 5, epoch * batches + batch) for batch in range(batches)]
        assert sorted(client for cohort in cohorts for client in cohort) == sorted(EVERYONE)
        assert {len(cohort) for cohort in cohorts} == {10, 11}
    assert draws.draw(EVERYONE, EVERYONE, 5, 0) != draws.draw(EVERYONE, EVERYONE, 5, batches)
    assert draws.draw(EVERYONE, EVERYONE, 5, 0) != draws.draw(EVERYONE, EVERYONE, 6, 0)


def test_the_order_of_clients_and_who_has_left_change_nobody_elses_turn() -> None:
    draws = Participation("epoch", 0.25)
    whole = draws.draw(EVERYONE, EVERYONE, 1, 2)
    assert set(draws.draw(EVERYONE[::-1], EVERYONE[::-1], 1, 2)) == set(whole)
    left = EVERYONE[::3]
    assert draws.draw(EVERYONE, left, 1, 2) == tuple(client for client in left if client in whole)


def test_a_share_of_all_is_an_epoch_a_round_and_chance_has_none() -> None:
    assert Participation("epoch").batches(7) == 1
    assert Participation("epoch").draw(EVERYONE, EVERYONE, 1, 0) == EVERYONE
    assert Participation("uniform", 0.1).batches(100) == 1
    assert Participation("epoch", 1e-6).batches(7) == 7
    with pytest.raises(InputError, match="once"):
        Participation("epoch", 0.5, including=frozenset({"1"}))


@given(
    some.sampled_from(["uniform", "poisson"]),
    some.floats(0.001, 1),
    some.sets(some.sampled_from(EVERYONE)),
    some.sets(some.sampled_from(EVERYONE), max_size=3),
    some.integers(0, 5),
)
def test_cohorts_are_those_of_a_sort_by_lot(
    kind: str, share: float, left: set[str], including: set[str], round: int
) -> None:
    """As a plain loop draws: each client's lot is that of its place among the sorted names."""
    active = [client for client in EVERYONE if client in left]
    names = sorted(EVERYONE)
    lots = dict(zip(names, np.random.default_rng([3, round]).random(len(names)).tolist(), strict=True))
    ordered = sorted(active, key=lots.__getitem__)
    size = cohort_size(share, len(names))
    chosen = {client for client in ordered if lots[client] < share} if kind == "poisson" else set(ordered[:size])
    wanted = [client for client in ordered if client in including]
    if wanted and chosen.isdisjoint(wanted):
        if kind == "uniform" and chosen:
            chosen.remove(max(chosen, key=lots.__getitem__))
        chosen.add(wanted[0])

    draws = Participation(kind, share, including=frozenset(including))  # type: ignore[arg-type]
    assert draws.draw(EVERYONE, active, 3, round) == tuple(client for client in active if client in chosen)


def test_a_servers_secret_draws_the_same_cohort_again_whoever_else_is_there() -> None:
    names = tuple(f"silo {place}" for place in range(300))
    participation, secret = Participation("poisson", 0.3), bytes(range(32))
    cohort = participation.draw(names, names, secret, 4)
    assert cohort == participation.draw(names, names, secret, 4)
    assert set(participation.draw(names[:100], names[:100], secret, 4)) == set(cohort) & set(names[:100])
    assert 60 < len(cohort) < 120
    others = [participation.draw(names, names, secret, 5), participation.draw(names, names, bytes(32), 4)]
    assert len({cohort, *others}) == 3
