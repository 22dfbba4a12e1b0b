import itertools
import math
from typing import Literal

import numpy as np
import pytest
from support.grid_piecewise import GridPiecewise
from support.scripted import at_most_exp
from support.selections import laws

from polyeps.audit import enumeration
from polyeps.cli.quick import quick_fedsel
from polyeps.mechanisms import selection
from polyeps.mechanisms.selection import WORD, SelectionForm, SelectName

SHAPES = [(1, 1), (2, 1), (2, 2), (3, 2), (5, 1), (7, 3), (10, 1), (12, 2), (12, 6), (12, 12)]
FORMS: list[tuple[SelectName, SelectionForm]] = [
    ("exp", "sound"),
    ("pe", "sound"),
    ("pe", "published"),
    ("ps", "sound"),
    ("ps", "published"),
    ("uniform", "sound"),
]


@pytest.mark.parametrize(("dimension", "top"), SHAPES)
@pytest.mark.parametrize(("select", "form"), FORMS)
def test_certificates_agree_with_enumeration(dimension: int, top: int, select: SelectName, form: SelectionForm) -> None:
    for epsilon in (0.1, 1.0, 4.0):
        method = quick_fedsel(select=select, dimension=dimension, top=top, value="none", form=form)
        certified = method.certificate(1 / epsilon, 0.0).certified
        found = enumeration.largest_log_ratio(laws(select, dimension, top, epsilon, form))
        assert certified == pytest.approx(found, abs=1e-9)
        if form == "sound" or select == "ps":
            assert certified <= epsilon
        ratio = enumeration.largest_ratio(enumeration.sampler_laws(select, dimension, top, epsilon, form))
        law = selection.selection_law(select, dimension, top, epsilon, form)
        if select == "uniform":
            assert ratio == 1
        elif math.isfinite(law.epsilon) and top < dimension:
            assert at_most_exp(ratio, law.epsilon)
            assert math.log(ratio) == pytest.approx(law.epsilon, rel=1e-8 if law.epsilon < 8 else 0.5)


@pytest.mark.parametrize("dimension", [2, 3, 4, 5])
def test_a_few_orders_stand_for_all_permutations(dimension: int) -> None:
    every = np.array(list(itertools.permutations(range(dimension))))
    weight = np.exp(1.7 * every / (dimension - 1))
    whole = enumeration.largest_log_ratio(weight / weight.sum(1, keepdims=True))
    assert whole == pytest.approx(enumeration.largest_log_ratio(laws("exp", dimension, 1, 1.7)))


@pytest.mark.parametrize(("select", "form"), FORMS)
def test_sampler_laws_are_laws_near_the_mechanisms(select: SelectName, form: SelectionForm) -> None:
    rows = enumeration.sampler_laws(select, 6, 2, 1.0, form)
    assert {sum(row) for row in rows} == {WORD}
    found = np.array(rows, dtype=float) / WORD
    assert found == pytest.approx(laws(select, 6, 2, 1.0, form), abs=1e-12)


@pytest.mark.parametrize(
    ("epsilon", "ranks", "expected"),
    [(1.0, "average", 1.041), (4.0, "average", 4.563), (1.0, "min", 1.525), (4.0, "min", 6.177)],
)
def test_tied_ranks_would_cost_more(epsilon: float, ranks: Literal["average", "min"], expected: float) -> None:
    """Why ties must be broken: with the same rank for all others the normaliser moves."""
    assert enumeration.largest_log_ratio(enumeration.tied_laws(100, epsilon, ranks)) == pytest.approx(
        expected, abs=1e-3
    )


@pytest.mark.parametrize("epsilon", [0.05, 1.0, 4.0, 20.0])
@pytest.mark.parametrize("mechanism", ["duchi", "grid-pm"])
def test_laws_of_values(mechanism: Literal["duchi", "grid-pm"], epsilon: float) -> None:
    rows = enumeration.value_laws(mechanism, epsilon)
    assert {sum(row) for row in rows} == {WORD}
    ratio = enumeration.largest_ratio(enumeration.value_laws(mechanism, epsilon))
    assert at_most_exp(ratio, epsilon)
    assert math.log(ratio) == pytest.approx(epsilon, rel=1e-6)


def test_the_law_of_grid_pm_is_that_of_its_formula() -> None:
    law = GridPiecewise(1.0)
    rows = np.array(enumeration.value_laws("grid-pm", 1.0)) / WORD
    assert rows[0] == pytest.approx(law.masses(-1.0), abs=1e-12)
    assert rows[-1] == pytest.approx(law.masses(1.0), abs=1e-12)
