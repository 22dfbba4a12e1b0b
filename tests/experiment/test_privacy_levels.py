"""Privacy levels: clients that choose none have the strictest."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyeps.data.partition import Partition, set_apart
from polyeps.errors import InputError
from polyeps.experiment.client_budgets import choose_levels, strictest_level
from polyeps.experiment.config import LevelSettings as Level

HELD = np.eye(10, dtype=np.int64)[np.arange(200) % 10] * 30  # clients of one class each


def as_levels(*levels: dict[str, Any]) -> tuple[Level, ...]:
    return tuple(Level(**level) for level in levels)


PRIVATE, CAREFUL = {"name": "private", "epsilon": 1.0}, {"name": "careful", "epsilon": 4.0, "share": 0.2}
OPEN = {"name": "open", "share": 0.05}


def chosen(*levels: dict[str, Any], seed: int = 1) -> list[str]:
    offered = as_levels(*levels)
    return [offered[place].name for place in choose_levels(offered, HELD, np.random.default_rng(seed))]


@pytest.mark.parametrize("levels", [(PRIVATE, CAREFUL, OPEN), (OPEN, PRIVATE, CAREFUL), (CAREFUL, OPEN, PRIVATE)])
def test_shares_are_exact_and_the_rest_has_the_strictest(levels: tuple[dict[str, Any], ...]) -> None:
    assert Counter(chosen(*levels)) == {"private": 150, "careful": 40, "open": 10}
    assert as_levels(*levels)[strictest_level(as_levels(*levels))].name == "private"


def test_other_seeds_choose_other_clients() -> None:
    assert chosen(PRIVATE, OPEN, seed=1) == chosen(PRIVATE, OPEN, seed=1)
    assert chosen(PRIVATE, OPEN, seed=1) != chosen(PRIVATE, OPEN, seed=2)


def test_only_clients_that_hold_a_label_choose_a_level_for_it() -> None:
    found = chosen(PRIVATE, {**OPEN, "labels": [7, 3]})
    who = [place % 10 for place, name in enumerate(found) if name == "open"]
    assert len(who) == 10
    assert set(who) <= {3, 7}


@settings(max_examples=50, deadline=None)
@given(st.floats(0, 0.5), st.floats(0, 0.5), st.integers(0, 1000))
def test_any_shares(first: float, second: float, seed: int) -> None:
    found = Counter(chosen(PRIVATE, {**CAREFUL, "share": first}, {**OPEN, "share": second}, seed=seed))
    assert found["careful"] == round(200 * first)
    assert found["open"] == round(200 * second)
    assert found.total() == 200


@pytest.mark.parametrize(
    ("levels", "said"),
    [
        ((OPEN,), "guarantees nothing"),
        ((PRIVATE, {**OPEN, "name": "private"}), "same name"),
        ((PRIVATE, {**CAREFUL, "epsilon": 1.0}), "same epsilon"),
        (({**PRIVATE, "share": 0.5}, OPEN), "leave out its share"),
        ((PRIVATE, {"name": "open"}), "say which share"),
        ((PRIVATE, {**OPEN, "labels": [10]}), "labels are numbers from 0 to 9"),
        ((PRIVATE, {**OPEN, "share": 0.2, "labels": [7]}), "only 20 can"),
        ((PRIVATE, {**CAREFUL, "share": 0.7}, {**OPEN, "share": 0.5}), "make its share smaller"),
    ],
)
def test_bad_levels_are_refused(levels: tuple[dict[str, Any], ...], said: str) -> None:
    with pytest.raises(InputError, match=said):
        chosen(*levels)


# Records that clients hold back to judge models by


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(2, 40), min_size=1, max_size=12), st.floats(0.01, 0.45), st.integers(0, 1000))
def test_every_client_sets_some_of_its_own_records_apart(sizes: list[int], share: float, seed: int) -> None:
    rows = np.random.default_rng(seed).permutation(sum(sizes))
    whole = Partition(tuple(map(str, range(len(sizes)))), rows, np.concatenate([[0], np.cumsum(sizes)]))
    kept, held = set_apart(whole, share, np.random.default_rng(seed))
    assert kept.ids == held.ids == whole.ids
    assert held.sizes.tolist() == [max(1, round(share * size)) for size in sizes]
    for place in range(len(sizes)):
        parts = [part.rows[part.offsets[place] : part.offsets[place + 1]].tolist() for part in (whole, kept, held)]
        assert sorted(parts[1] + parts[2]) == sorted(parts[0])


def test_records_are_set_apart_by_chance() -> None:
    whole = Partition(("a",), np.arange(30), np.array([0, 30]))
    held = [set_apart(whole, 1 / 6, np.random.default_rng(seed))[1].rows.tolist() for seed in range(400)]
    counts = Counter(row for rows in held for row in rows)
    assert set(counts) == set(range(30))
    assert max(counts.values()) < 2 * min(counts.values()) + 20


def test_a_client_must_have_some_left() -> None:
    whole = Partition(("a", "b"), np.arange(5), np.array([0, 4, 5]))
    with pytest.raises(InputError, match=r"client 'b' has 1 records, which a share of 0\.2 set apart uses up"):
        set_apart(whole, 0.2, np.random.default_rng(0))
