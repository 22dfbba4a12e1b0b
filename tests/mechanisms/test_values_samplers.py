import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from support.grid_piecewise import GridPiecewise
from support.scripted import Scripted, at_most_exp

from polyeps.engine.noise import SeededStreams, SystemStreams
from polyeps.errors import InputError
from polyeps.mechanisms import values
from polyeps.mechanisms.selection import WORD
from polyeps.mechanisms.values import CELLS, ValueMechanism, perturb

MECHANISMS: list[ValueMechanism] = ["duchi", "pm", "hm", "grid-pm"]
every_mechanism = pytest.mark.parametrize("mechanism", MECHANISMS)


def filled(count: int, value: float) -> NDArray[np.float64]:
    return np.full(count, value)


@every_mechanism
@pytest.mark.parametrize("epsilon", [0.4, 1.0, 3.0])
@pytest.mark.parametrize("value", [-1.0, 0.0, 0.35, 1.0])
def test_answers_have_the_mean_and_variance_they_should(
    mechanism: ValueMechanism, epsilon: float, value: float
) -> None:
    trials = 40_000
    found = perturb(mechanism, filled(trials, value), filled(trials, epsilon), SeededStreams(3, range(trials), 0))
    variance = values.variance(mechanism, epsilon, value)
    assert abs(found.mean() - value) < 4.5 * math.sqrt(variance / trials)
    assert found.var() == pytest.approx(variance, rel=0.05)


@settings(max_examples=200, deadline=None)
@given(epsilon=st.one_of(st.floats(1e-12, 1e-3), st.floats(1e-3, 36.0)))
def test_whole_numbers_keep_the_ratio(epsilon: float) -> None:
    law = values.cell_counts(np.array([epsilon]), CELLS)
    inside, outside, band = int(law.inside[0]), int(law.outside[0]), int(law.band[0])
    assert band * inside + (CELLS - band) * outside <= WORD
    assert outside >= 1
    assert at_most_exp(Fraction(inside, outside), epsilon)
    lead = int(values.duchi_lead(np.array([epsilon]))[0])
    assert 0 <= lead < WORD // 2
    assert at_most_exp(Fraction(WORD // 2 + lead, WORD // 2 - lead), epsilon)


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 4.0])
@pytest.mark.parametrize("value", [-1.0, -0.3, 0.0, 0.7, 1.0])
def test_grid_sampler_has_exactly_the_masses_of_its_law(epsilon: float, value: float) -> None:
    """First and last of the whole numbers of every piece, once rounded down and once up."""
    law, exact = values.cell_counts(np.array([epsilon]), CELLS), GridPiecewise(epsilon)
    inside, outside, band = int(law.inside[0]), int(law.outside[0]), int(law.band[0])
    assert band == exact.band
    assert law.step[0] == pytest.approx(exact.step, rel=1e-12)
    pieces = [inside] * band + [outside] * (CELLS - band)
    place = (value + 1) * (CELLS - band) / 2
    up = place - min(math.floor(place), CELLS - band - 1)
    mass = np.zeros(CELLS)
    for rounding, weight in ((0, up), (WORD - 1, 1 - up)):
        starts = np.concatenate([[0], np.cumsum(pieces)]).tolist()
        draws = [edge for a, b in itertools.pairwise(starts) for edge in (a, b - 1)]
        count = len(draws)
        streams = Scripted([[draw, rounding] for draw in draws])
        found = perturb("grid-pm", filled(count, value), filled(count, epsilon), streams)
        cells = np.round(found / law.step[0] + (CELLS - 1) / 2).astype(int)
        assert np.array_equal(cells[::2], cells[1::2])  # a piece is one cell
        assert sorted(cells[::2].tolist()) == list(range(CELLS))  # and every cell has one
        mass[cells[::2]] += weight * np.array(pieces) / WORD
    assert mass == pytest.approx(exact.masses(value), abs=1e-13)


@every_mechanism
def test_strange_values(mechanism: ValueMechanism) -> None:
    streams = [SeededStreams(1, range(50), 0) for _ in range(6)]
    epsilon = filled(50, 1.0)
    for odd, same in ((math.nan, 0.0), (math.inf, 1.0), (-math.inf, -1.0)):
        found = perturb(mechanism, filled(50, odd), epsilon, streams.pop())
        assert np.array_equal(found, perturb(mechanism, filled(50, same), epsilon, streams.pop()))


@every_mechanism
def test_one_client_alone_as_among_many(mechanism: ValueMechanism) -> None:
    given_values, epsilon = np.linspace(-1, 1, 20), np.linspace(0.1, 5, 20)
    together = perturb(mechanism, given_values, epsilon, SeededStreams(1, range(20), 3))
    for row in range(20):
        alone = perturb(mechanism, given_values[[row]], epsilon[[row]], SeededStreams(1, [row], 3))
        assert alone[0] == together[row]


@pytest.mark.parametrize("mechanism", ["duchi", "grid-pm"])
def test_finite_mechanisms_answer_the_same_few_numbers_whatever_the_value(mechanism: ValueMechanism) -> None:
    outputs = set()
    for value in (-1.0, 0.0, 1e-9, 1 / 3, 1.0):
        outputs |= set(perturb(mechanism, filled(3000, value), filled(3000, 1.0), SystemStreams(3000)).tolist())
    assert len(outputs) <= (2 if mechanism == "duchi" else CELLS)


def test_what_is_undefined_is_refused() -> None:
    with pytest.raises(InputError, match="epsilon-value"):
        perturb("grid-pm", np.zeros(2), np.array([1.0, 0.0]), SeededStreams(1, range(2), 0))
    with pytest.raises(InputError, match="as many"):
        perturb("pm", np.zeros(2), np.ones(3), SeededStreams(1, range(2), 0))
    assert len(perturb("pm", np.zeros(0), np.zeros(0), SeededStreams(1, [], 0))) == 0
