"""Who takes part, when every client is to be asked once an epoch."""

import pytest

from polyeps.errors import InputError
from polyeps.participation import Participation

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
