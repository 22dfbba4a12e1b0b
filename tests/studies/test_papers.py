"""The papers' figures and tables as we have them."""

from pathlib import Path

import numpy as np
import pytest

from polyeps.errors import DataError, InputError
from polyeps.population import datasets
from polyeps.studies import pdp_fl, pfa, pfa_tables, reproducing
from polyeps.studies.figures import Figure, trials_of
from polyeps.studies.tabulated import tabulate
from polyeps.studies.trials import Store


@pytest.mark.parametrize("figure", [*pfa.FIGURES.values(), *pfa.quick_figures().values()], ids=lambda one: one.title)
def test_every_reading_belongs_to_a_cell_and_a_method(figure: Figure) -> None:
    shown = {(cell, method.title) for cell in figure.cells for method in figure.methods}
    assert set(figure.paper) <= shown
    assert len(set(figure.cells)) == len(figure.cells)


def test_the_papers_numbers_are_where_they_belong() -> None:
    assert list(pfa.FIGURES) == ["3", "4", "5", "6", "7", "8", "10", "11", "12"]
    three = {(c.data, c.model, c.clients, title): v for (c, title), v in pfa.FIGURES["3"].paper.items()}
    assert len(three) == 4 * 4 * 7
    assert three["fashion-mnist", "logistic", 20, "pfa-plus"] == 0.70
    assert three["mnist", "cnn", 50, "non-private"] == 0.98
    assert len(pfa.FIGURES["10"].paper) == 2 * 4 * 7
    assert sorted(pfa.FIGURES["7"].paper.values()) == [12, 40, 113, 377]


def test_the_quick_set_is_small() -> None:
    figures = pfa.quick_figures().values()
    assert max(cell.clients for one in figures for cell in one.cells) == 20
    assert sum(cell.model == "cnn" for one in figures for cell in one.cells) == 1
    assert len({trial for one in figures for trial in trials_of(one, 1)}) < 150


def test_a_figure_of_no_such_number_is_refused() -> None:
    with pytest.raises(InputError, match="pfa has no figure 9 here; choose one of 3, 4"):
        reproducing.choose("pfa", figures=["9"])
    with pytest.raises(InputError, match="no table 2"):
        reproducing.choose("pfa", tables=["2"])
    with pytest.raises(InputError, match="choose one of pfa, fedsel, pdp-fl"):
        reproducing.choose("nothing")


def test_cells_without_data_are_skipped_with_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str, **_: object) -> None:
        if name != "mnist":
            raise DataError(f"{name} is not here; fetch it")

    monkeypatch.setattr(datasets, "load", load)
    wanted = reproducing.choose("pfa", figures=["3", "5"])
    assert {cell.data for figure in wanted.figures for cell in figure.cells} == {"mnist"}
    assert [figure.number for figure in wanted.figures] == ["3"]
    assert wanted.skipped == (
        "figure 3: cells on fashion-mnist are skipped: fashion-mnist is not here; fetch it",
        "figure 5: cells on cifar10 are skipped: cifar10 is not here; fetch it",
    )


def test_table_1_shows_budgets_as_printed_and_as_drawn() -> None:
    content = pfa_tables.budgets([], False)
    assert [row[0] for row in content.rows] == list(pfa_tables.BUDGETS)
    assert "N(10, 0.1)" in content.rows[5][1]
    assert "N(10, 1)" in content.rows[5][2]


def test_table_5_takes_milliseconds() -> None:
    content = pfa_tables.seconds([], True)
    assert [row[1] for row in content.rows] == [7850, 26010, 160306]
    assert all(float(row[3]) < 1 for row in content.rows)


def test_a_table_waits_for_its_trials(tmp_path: Path) -> None:
    found = tabulate(pdp_fl.TABULATED[1], Store(tmp_path), True)
    assert (found["missing"], found["table"]) == (6, [])


def test_groups_by_epsilon_are_the_parts_of_the_mixture() -> None:
    assert pdp_fl.truth_of(np.array([0.1, 10.1, 0.11, 1.0, 9.9])).tolist() == [2, 0, 2, 1, 0]
    assert pdp_fl.truth_of(np.array([0.1, 10.1])).tolist() == [1, 0]
    assert pdp_fl.agreement(np.array([1, 1, 0]), np.array([0, 0, 1])) == 1


def test_noise_is_as_long_as_the_formula_says() -> None:
    sound, published = (pdp_fl.noise_norms(np.array([0.1, 3.0]), form, 7850) for form in ("sound", "published"))
    assert sound == pytest.approx([2.0, 0.13], rel=0.1)  # PAPERS 3.3, with a tighter accountant
    assert published[0] / published[1] == pytest.approx(30)
    lengths = pdp_fl.simulated(np.full((4, 20), 0.3), np.array([2.0]), 7850, np.random.default_rng(1))
    assert lengths == pytest.approx(np.full((1, 20), np.hypot(0.3, 2.0)), rel=0.05)
    assert pdp_fl.signals_of(np.array([[0.5, 0.1]]), 0.3).tolist() == [[pytest.approx(0.4), 0.0]]


def test_far_apart_budgets_are_recovered_and_near_ones_are_not() -> None:
    norms = {str(client): [0.35 + 0.01 * client] * 20 for client in range(10)}
    content = pdp_fl.recovery([{"norms": norms, "parameters": 7850}], True)
    found = {(row[0], row[2], row[3], row[4]): row[5] for row in content.rows}
    assert len(content.rows) == 2 * 3 * 3 * 2
    assert found["pdp-fl-mixgauss1", 10, "sound", "all rounds, robust"] == "100.0%"
    assert float(found["pdp-fl-mixgauss2", 50, "sound", "one round, as published"].rstrip("%")) < 50


def test_groups_are_compared_round_by_round() -> None:
    loud, quiet = [2.0, 2.1], [0.3, 0.32]
    norms = {str(client): quiet if client == 3 else loud for client in range(10)}
    cell = {"budgets": "pdp-fl-mixgauss1"}
    epsilons = [10.0 if client == 3 else 0.1 for client in range(10)]
    told = {"trial": {"cell": cell, "form": "sound"}, "norms": norms, "epsilons": epsilons, "parameters": 7850}
    content = pdp_fl.groups([told], False)
    assert [row[-1] for row in content.rows] == ["2 of 2", "2 of 2"]
