import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.stats import chisquare
from support.scripted import Scripted, at_most_exp

from polyeps.engine.noise import SeededStreams, SystemStreams
from polyeps.errors import InputError
from polyeps.mechanisms import selection
from polyeps.mechanisms.selection import NONE, WORD, SelectionForm, SelectName, pick

SELECTIONS: list[tuple[SelectName, SelectionForm]] = [
    ("exp", "sound"),
    ("pe", "sound"),
    ("pe", "published"),
    ("ps", "sound"),
    ("ps", "published"),
    ("uniform", "sound"),
]
every_selection = pytest.mark.parametrize(("select", "form"), SELECTIONS)


def pieces(select: SelectName, dimension: int, top: int, epsilon: float, form: SelectionForm) -> list[tuple[int, int]]:
    """How many of the 2⁵³ whole numbers lead to what: (count, rank), −1 none, −2 left over."""
    if select == "exp":
        found = [(int(count), rank) for rank, count in enumerate(selection.rank_counts(dimension, epsilon))]
    else:
        law = selection.selection_counts(select, dimension, top, epsilon, form)
        found = [(law.top, dimension - 1 - place) for place in range(top)]
        found += [(law.rest, rank) for rank in range(dimension - top)]
        found += [(law.none, -1)]
    return [*found, (WORD - sum(count for count, _ in found), -2)]


@pytest.mark.parametrize(("select", "form"), SELECTIONS[:-1])
@pytest.mark.parametrize(("dimension", "top"), [(2, 1), (5, 2), (12, 3)])
def test_every_number_leads_where_the_exact_law_says(
    select: SelectName, form: SelectionForm, dimension: int, top: int
) -> None:
    """First and last number of each piece: the law of the sampler is then known for all 2⁵³ of them."""
    values = torch.randn(dimension, generator=torch.Generator().manual_seed(3))
    ranks = values.abs().argsort().argsort().tolist()
    draws, expected = [], []
    start = 0
    for count, rank in pieces(select, dimension, top, 1.3, form):
        if count:
            draws += [start, start + count - 1]
            expected += [rank, rank]
        start += count
    assert start == WORD
    assert min(draws) == 0
    assert max(draws) == WORD - 1
    streams = Scripted([[draw, 123456789 * (place + 1)] for place, draw in enumerate(draws)])
    found = pick(select, values.expand(len(draws), -1), top, np.full(len(draws), 1.3), streams, form)
    for index, rank in zip(found.tolist(), expected, strict=True):
        if rank == -1:
            assert index == NONE
        elif rank == -2:
            assert 0 <= index < dimension
        elif select == "exp":
            assert ranks[index] == rank
        else:
            assert (ranks[index] >= dimension - top) == (rank >= dimension - top)


@pytest.mark.parametrize("select", ["pe", "ps"])
def test_within_the_top_and_the_rest_all_are_alike(select: SelectName) -> None:
    """One number from the middle of each piece: every coordinate is found exactly once."""
    values = torch.tensor([[0.0, 5, 5, 1, 0, 0, 2, 9]])
    found, start = [], 0
    for count, rank in pieces(select, 8, 3, 1.0, "sound"):
        if rank >= 0:
            found += pick(select, values, 3, np.array([1.0]), Scripted([[start + count // 2, 77]])).tolist()
        start += count
    assert sorted(found[:3]) == [1, 2, 7]
    assert sorted(found) == list(range(8))


@settings(max_examples=300, deadline=None)
@given(
    data=st.data(),
    chosen=st.sampled_from(SELECTIONS),
    dimension=st.integers(1, 40),
    epsilon=st.one_of(st.just(0.0), st.floats(1e-18, 1e-9), st.floats(0, 8), st.floats(8, 60)),
)
def test_whole_numbers_keep_the_certified_ratio(
    data: st.DataObject, chosen: tuple[SelectName, SelectionForm], dimension: int, epsilon: float
) -> None:
    select, form = chosen
    top = data.draw(st.integers(1, dimension))
    certified = selection.selection_law(select, dimension, top, epsilon, form).epsilon
    if select == "exp":
        counts = selection.rank_counts(dimension, epsilon).tolist()
        assert sum(counts) <= WORD
        assert min(counts) >= 1
        assert at_most_exp(Fraction(max(counts), min(counts)), certified)
        return
    law = selection.selection_counts(select, dimension, top, epsilon, form)
    assert law.top * top + law.rest * (dimension - top) + law.none <= WORD
    assert min(law.top, law.rest) >= 1
    assert law.none >= 0
    if top < dimension and math.isfinite(certified):
        assert at_most_exp(Fraction(max(law.top, law.rest), min(law.top, law.rest)), certified)


@every_selection
@pytest.mark.parametrize(("dimension", "top", "epsilon"), [(10, 1, 1.0), (123, 12, 0.2), (300, 30, 4.0)])
def test_rounding_hardly_changes_the_law(
    select: SelectName, form: SelectionForm, dimension: int, top: int, epsilon: float
) -> None:
    exact = selection.selection_law(select, dimension, top, epsilon, form)
    if select == "exp":
        by_rank = selection.rank_counts(dimension, epsilon)
        found = (by_rank[-1] / WORD, by_rank[0] / WORD)
    else:
        law = selection.selection_counts(select, dimension, top, epsilon, form)
        found = (law.top / WORD, law.rest / WORD)
        assert law.none / WORD == pytest.approx(exact.none, abs=1e-15)
    assert found == pytest.approx((exact.top, exact.rest), rel=1e-9)


@every_selection
def test_equal_magnitudes_have_equal_chances(select: SelectName, form: SelectionForm) -> None:
    trials = 20_000
    nothing = torch.zeros(trials, 9)
    found = pick(select, nothing, 2, np.full(trials, 3.0), SeededStreams(4, range(trials), 0), form)
    assert chisquare(np.bincount(found[found >= 0], minlength=9)).pvalue > 1e-4
    # two large ones, the third of the top by lot among the rest
    some = nothing.clone()
    some[:, [1, 4]] = -7.0
    found = pick(select, some, 3, np.full(trials, 3.0), SeededStreams(5, range(trials), 0), form)
    tallies = np.bincount(found[found >= 0], minlength=9)
    assert chisquare(np.delete(tallies, [1, 4])).pvalue > 1e-4


@every_selection
def test_one_client_alone_as_among_many_and_as_in_chunks(
    select: SelectName, form: SelectionForm, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = torch.randn(40, 7, generator=torch.Generator().manual_seed(1)).round(decimals=0)
    epsilon = np.tile([0.5, 2.0, 1.0, 0.5], 10)
    together = pick(select, values, 2, epsilon, SeededStreams(1, range(40), 3), form)
    for row in range(40):
        alone = pick(select, values[[row]], 2, epsilon[[row]], SeededStreams(1, [row], 3), form)
        assert alone[0] == together[row]
    monkeypatch.setattr("polyeps.mechanisms.selection._AT_ONCE", 20)
    assert np.array_equal(pick(select, values, 2, epsilon, SeededStreams(1, range(40), 3), form), together)


@every_selection
def test_strange_numbers_are_numbers(select: SelectName, form: SelectionForm) -> None:
    for odd in (math.nan, math.inf, -math.inf, 1e300, 0.0):
        found = pick(
            select, torch.full((500, 4), odd, dtype=torch.float64), 2, np.full(500, 1.0), SystemStreams(500), form
        )
        assert set(found.tolist()) <= {NONE, 0, 1, 2, 3}
        assert len(set(found.tolist())) >= 4


def test_infinite_is_largest_and_nan_is_zero() -> None:
    values = torch.tensor([[1.0, -math.inf, math.nan, 3.0]]).expand(200, -1)
    found = pick("ps", values, 1, np.full(200, 30.0), SeededStreams(1, range(200), 0))
    assert set(found.tolist()) == {1}
    smallest = pick("exp", values[:1], 1, np.ones(1), Scripted([[0, 5]]))
    assert smallest.tolist() == [2]


@every_selection
def test_one_dimension_and_a_top_of_all(select: SelectName, form: SelectionForm) -> None:
    one = pick(select, torch.ones(50, 1), 1, np.full(50, 1.0), SeededStreams(1, range(50), 0), form)
    assert set(one.tolist()) <= {0, NONE}
    assert 0 in one
    assert select == "pe" or NONE not in one
    trials = 6000
    values = torch.arange(3.0).expand(trials, -1)
    found = pick(select, values, 3, np.full(trials, 1.0), SeededStreams(2, range(trials), 0), form)
    if select != "exp":
        assert chisquare(np.bincount(found[found >= 0], minlength=3)).pvalue > 1e-4


def test_rows_without_epsilon_or_stream_are_refused() -> None:
    with pytest.raises(InputError, match="as many"):
        pick("ps", torch.ones(3, 4), 1, np.ones(2), SeededStreams(1, range(3), 0))
    with pytest.raises(InputError, match="as many"):
        pick("ps", torch.ones(3, 4), 1, np.ones(3), SeededStreams(1, range(2), 0))


@pytest.mark.parametrize("select", ["ps", "pe"])
def test_a_choice_does_not_depend_on_how_a_machine_orders_halves(
    select: SelectName, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What numpy's partition does within its halves differs between processors."""
    values = torch.randn(80, 40, generator=torch.Generator().manual_seed(1)).round(decimals=1)
    epsilon = np.linspace(0.5, 4.0, 80)
    here = pick(select, values, 7, epsilon, SeededStreams(3, range(80), 0))

    def elsewhere(words: NDArray[np.int64], place: int, axis: int) -> NDArray[np.int64]:
        ordered = np.sort(words, axis=axis)
        return np.concatenate([ordered[:, :place][:, ::-1], ordered[:, place : place + 1], ordered[:, :place:-1]], 1)

    monkeypatch.setattr(np, "partition", elsewhere)
    assert np.array_equal(pick(select, values, 7, epsilon, SeededStreams(3, range(80), 0)), here)
