"""The papers' figures and tables as we have them."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from polyeps_reproductions import pdp_fl, pdp_fl_tables, pfa, pfa_tables, reproducing
from polyeps_reproductions.figures import Figure, trials_of
from polyeps_reproductions.tabulated import tabulate
from polyeps_reproductions.trials import Store

from polyeps.data import public_loaders
from polyeps.errors import DataError, InputError


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

    monkeypatch.setattr(public_loaders, "load_dataset", load)
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
    sound, published = (pdp_fl_tables.noise_norms(np.array([0.1, 3.0]), form, 7850) for form in ("sound", "published"))
    assert sound == pytest.approx([2.0, 0.13], rel=0.1)  # PAPERS 3.3, with a tighter accountant
    assert published[0] / published[1] == pytest.approx(30)
    noise = torch.Generator().manual_seed(1)
    rows = pdp_fl_tables.noisy(torch.zeros(2, 3, 7850), np.array([0.1, 3.0]), "sound", noise)
    np.testing.assert_allclose(rows.norm(dim=2), np.tile(sound[:, None], 3), rtol=0.05)


def test_noise_tells_groups_that_norms_do_not() -> None:
    """Signals of their own in few coordinates, longer than the noise, as with two labels a client."""
    drawn = torch.Generator().manual_seed(2)
    signals = torch.zeros(20, 3, 4000)
    for row in signals:
        row[:, torch.randperm(4000, generator=drawn)[:800]] = 0.015 * torch.randn(800, generator=drawn)
    epsilons = np.array([1.0] * 18 + [10.0] * 2)
    labels = pdp_fl_tables.grouped(pdp_fl_tables.noisy(signals, epsilons, "sound", drawn), 2)
    truth = pdp_fl.truth_of(epsilons)
    assert pdp_fl.agreement(truth, labels["three rounds, noise"]) == 1
    assert pdp_fl.agreement(truth, labels["three rounds, robust"]) < 1


@pytest.fixture
def digits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The two tables on small data: 64 pixels, 60 or 140 records a client."""
    cell = pdp_fl.cell_of
    monkeypatch.setattr(pdp_fl_tables, "cell_of", lambda *told: replace(cell(*told), data="digits", batch_sound=8))
    for name, value in {"BATCH": 8, "STEPS": 10, "SIGNALS": 50, "RECORDS": 143, "RATE": 0.1}.items():
        monkeypatch.setattr(pdp_fl_tables, name, value)
    pdp_fl_tables._scales.cache_clear()


@pytest.mark.usefixtures("digits")
def test_an_observer_finds_budgets() -> None:
    content = pdp_fl_tables.observed([], True)
    assert [row[:3] for row in content.rows][:2] == [["IID", "known", 1], ["IID", "known", 4]]
    assert len(content.rows) == 8
    found = {tuple(row[:3]): float(row[3]) for row in content.rows}
    assert found["IID", "known", 4] > 0.9


@pytest.mark.usefixtures("digits")
def test_recovery_is_a_share_of_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pdp_fl_tables, "MIXTURES", {"pdp-fl-mixgauss1": 2})
    content = pdp_fl_tables.recovery([], True)
    pdp_fl_tables._scales.cache_clear()
    assert len(content.rows) == 2 * 1 * 3 * 3
    found = {(row[2], row[3], row[4]): row[5] for row in content.rows}
    assert found[20, "published", "three rounds, noise"] == "100.0%"


def test_groups_are_compared_round_by_round() -> None:
    loud, quiet = [2.0, 2.1], [0.3, 0.32]
    norms = {str(client): quiet if client == 3 else loud for client in range(10)}
    cell = {"budgets": "pdp-fl-mixgauss1"}
    epsilons = [10.0 if client == 3 else 0.1 for client in range(10)]
    told = {"trial": {"cell": cell, "form": "sound"}, "norms": norms, "epsilons": epsilons, "parameters": 7850}
    content = pdp_fl.groups([told], False)
    assert [row[-1] for row in content.rows] == ["2 of 2", "2 of 2"]
