"""The figures and tables of PFA and PDP-FL as we have them."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from polyeps_reproductions import explanations, pdp_fl, pdp_fl_tables, pfa, pfa_tables, trials
from polyeps_reproductions.cells import GRID
from polyeps_reproductions.reference_algorithms import LANCZOS
from polyeps_reproductions.reference_models import SOFTMAX_TWICE
from polyeps_reproductions.studies import STUDIES, Part, find
from polyeps_reproductions.trials import Store

from polyeps.errors import InputError


@pytest.mark.parametrize("part", [*pfa.figures(False), *pfa.figures(True)], ids=lambda one: one.title)
def test_every_cell_of_a_figure_has_a_place_of_its_own(part: Part) -> None:
    places = [(one.labels["cell"], one.labels["method"], one.labels["form"]) for one in part.cells(False)]
    assert len(set(places)) == len(places) > 0


EXPERIMENTS = [
    "3-softmax-once",
    "3-softmax-fashion",
    "3-one-rate",
    "3-one-rate-cnn",
    "3-small-rate-cnn",
    "3-sharp-cnn",
    "3-not-granted",
]
EXPERIMENTS += ["3-not-granted-cnn", "6-lanczos", "6-code", "6-random-equal"]
RATE_GIVEN = ["3-small-rate-cnn"]  # not chosen


def printed(number: str) -> dict[tuple[str, str, int, str], float]:
    (part,) = pfa.STUDY.choose([number])
    labels = ("data", "model", "clients", "method")
    found = {tuple(one.labels[name] for name in labels): one.paper for one in part.cells(False)}
    return {key: value for key, value in found.items() if value is not None}  # type: ignore[misc]


def test_the_papers_numbers_are_where_they_belong() -> None:
    variants = [*EXPERIMENTS, "3-redrawn"]
    figures = ["3", "4", "5", "5-imdb", "6", "7", "8", "10", "11", "12"]
    assert [one.number for one in pfa.figures(False)] == [*figures, *variants]
    three = printed("3")
    assert len(three) == 4 * 4 * 7
    assert three["fashion-mnist", "logistic", 20, "pfa-plus"] == 0.70
    assert three["mnist", "cnn", 50, "non-private"] == 0.98
    assert len(printed("10")) == 2 * 4 * 7
    assert sorted(printed("6").values()) == [0.11, 0.14, 0.15, 0.42, 0.70, 0.73, 0.78]
    assert sorted(printed("7").values()) == [12, 40, 113, 377]
    assert not printed("8")
    assert not printed("11")
    assert {one.paper for one in pfa.STUDY.choose(["4"])[0].cells(False) if one.labels["method"] == "pfa"} == {
        None,
        0.81,
    }


def test_experiments_change_one_thing_and_take_rates_that_are_chosen() -> None:
    assert {f"figure-{number}" for number in EXPERIMENTS} == set(explanations.PFA)
    plain = {explanations.of_pfa(one.labels): one for name in ("6", "10", "3")
             for one in pfa.STUDY.choose([name])[0].cells(False) if one.labels["form"] == "published"}  # fmt: skip
    for number in EXPERIMENTS:
        for one in pfa.STUDY.choose([number])[0].cells(False):
            same = plain[explanations.of_pfa(one.labels)]
            assert one.paper == same.paper
            assert (one.trial.choice is None) == (number in RATE_GIVEN)
            assert number in RATE_GIVEN or one.trial.recorded is not None
            differs = one.trial.settings != same.trial.settings or one.trial.recorded != same.trial.recorded
            # WeiAvg takes PFA's rate under MixGauss3 anyway.
            assert differs or (number, one.labels["method"]) == ("3-one-rate-cnn", "weiavg")
    found = {
        number: [json.loads(one.trial.settings) for one in pfa.STUDY.choose([number])[0].cells(False)]
        for number in ("3-not-granted", "3-small-rate-cnn", "3-sharp-cnn", "6-lanczos", "6-code", "6-random-equal")
    }
    for number in ("6-code", "6-random-equal"):
        assert {(one["algorithm"]["weights"], one["model"]["name"]) for one in found[number]} == {
            ("count", SOFTMAX_TWICE)
        }
    assert {one["training"]["learning_rate"] for one in found["3-small-rate-cnn"]} == {GRID[-1]}
    assert {min(one["budgets"]["epsilons"]) for one in found["3-sharp-cnn"]} == {0.1, 1.0}
    assert max(max(one["budgets"]["epsilons"]) for one in found["3-sharp-cnn"]) == 10
    assert {one["participation"]["with_public"] for one in found["3-not-granted"]} == {False}
    assert [one["algorithm"] for one in found["6-lanczos"]] == [
        {"name": LANCZOS, "form": "published", "rank": rank} for rank in (1, 2, 5, 10, 50)
    ]


def test_variants_stand_beside_the_numbers_of_the_cells_they_vary() -> None:
    softmax, redrawn = (pfa.STUDY.choose([name])[0].cells(False) for name in ("3-softmax-once", "3-redrawn"))
    assert {one.labels["form"] for one in softmax} == {"published"}
    assert {one.labels["form"] for one in redrawn} == {"published", "sound"}
    fedavg = [one.paper for one in softmax if one.labels["method"] == "fedavg"]
    assert fedavg == [0.17, 0.16, 0.17, 0.15, 0.56, 0.64, 0.68, 0.69]
    assert all(one.paper is not None for one in (*softmax, *redrawn) if one.labels["method"] != "public-only")
    assert all("epsilons" not in json.loads(one.trial.settings)["budgets"] for one in redrawn)


def test_the_published_form_has_the_loss_of_the_papers_code_where_the_paper_has_values() -> None:
    def names(number: str, form: str, **labels: str) -> set[str]:
        cells = pfa.STUDY.choose([number])[0].cells(False)
        some = [one for one in cells if one.labels["form"] == form and labels.items() <= one.labels.items()]
        assert {one.labels["model"] for one in some} == {"logistic"}
        assert all("softmax" not in one.labels["cell"] for one in some)
        return {json.loads(one.trial.settings)["model"]["name"] for one in some}

    digits, clothes = ({"model": "logistic", "data": data} for data in ("mnist", "fashion-mnist"))
    assert names("3", "published", **digits) == names("10", "published", **digits) == {SOFTMAX_TWICE}
    assert names("3", "sound", **digits) == {"logistic"}
    # No learning rates are chosen for that loss on Fashion-MNIST.
    assert names("3", "published", **clothes) == names("10", "published", **clothes) == {"logistic"}
    assert names("3-softmax-once", "published") == names("3-redrawn", "published") == {"logistic"}


def test_figure_5_and_the_other_papers_pictures_are_cells() -> None:
    """What their texts say, and our assumptions: settings of IMDb and CIFAR10."""
    (reviews, pictures) = (pfa.STUDY.choose([number])[0].cells(False) for number in ("5-imdb", "5"))
    assert [len(some) for some in (reviews, pictures)] == [16, 16]
    settings = [json.loads(one.trial.settings) for one in reviews]
    assert {(one["data"]["clients"], one["data"]["size"], one["training"]["learning_rate"]) for one in settings} == {
        (50, 500, 0.1)
    }
    drawn = np.array(settings[0]["budgets"]["epsilons"])
    assert ((drawn > 50).sum(), round(np.median(drawn))) == (5, 10)
    assert {json.loads(one.trial.settings)["data"]["size"] for one in pictures} == {1000}
    counts = {number: [one.trial for one in pdp_fl.STUDY.choose([f"{number}-cifar10"])[0].cells(False)]
              for number in ("2", "3", "4")}  # fmt: skip
    assert {number: len(some) for number, some in counts.items()} == {"2": 12, "3": 6, "4": 24}
    every = [json.loads(one.settings) for some in counts.values() for one in some]
    assert {(one["data"]["name"], one["model"]["name"], one["training"]["learning_rate"]) for one in every} == {
        ("cifar10", "cifar_cnn", 0.01)
    }
    assert {(one["data"]["clients"], one["training"]["local_steps"]) for one in every} == {(10, 79), (30, 100)}
    assert not any(one.choice for some in counts.values() for one in some)
    assert not any("cifar" in part.number for part in pdp_fl.parts(True))


def test_recorded_choices_are_candidates_of_cells() -> None:
    """A name that no cell has any more would be dead weight; another rate than the grid's would be a slip."""
    recorded = set(trials.chosen_earlier())
    for name in STUDIES:
        for wanted in {cell.trial for part in find(name).parts(False) for cell in part.cells(False)}:
            if wanted.choice and wanted.recorded is not None:
                assert wanted.recorded in wanted.choice.candidates
                recorded.discard(wanted.choice_name)
    assert not recorded


def test_the_quick_set_is_small() -> None:
    cells = [cell for part in pfa.figures(True) for cell in part.cells(True)]
    assert max(cell.labels["clients"] for cell in cells) == 20
    assert len({cell.labels["cell"] for cell in cells if cell.labels["model"] == "cnn"}) == 1
    assert len({cell.trial for cell in cells}) < 150


def test_a_figure_of_no_such_number_is_refused() -> None:
    with pytest.raises(InputError, match="pfa has no figure 14 here; choose one of 3, 4"):
        pfa.STUDY.choose(figures=["14"])
    with pytest.raises(InputError, match="no table 2"):
        pfa.STUDY.choose(tables=["2"])


@pytest.mark.parametrize("name", STUDIES)
@pytest.mark.parametrize("quick", [True, False])
def test_every_cell_of_every_study_is_an_experiment(name: str, quick: bool) -> None:
    study = find(name)
    assert study.name == name
    cells = [cell for part in study.parts(quick) for cell in part.cells(quick)]
    assert cells
    for cell in cells:
        assert len(cell.trial.experiment().algorithm) == 1
        for choice in cell.trial.choices()[:1]:
            choice.experiment()


def test_table_1_shows_budgets_as_printed_and_as_drawn() -> None:
    content = pfa_tables.budgets([], False)
    assert [row[0] for row in content.rows] == list(pfa_tables.BUDGETS)
    assert "N(10, 0.1)" in content.rows[5][1]
    assert "N(10, 1)" in content.rows[5][2]


def test_figure_9_shows_every_client_of_the_draws_that_are_used() -> None:
    content = pfa_tables.drawn([], False)
    assert [row[:2] for row in content.rows[::7]] == [
        [20, "uniform"],
        [30, "uniform"],
        [40, "uniform"],
        [50, "uniform"],
    ]
    assert [row[-1] for row in content.rows if row[1] == "mixgauss1"] == [2, 4, 4, 5]  # as in the paper's draw
    assert [len(one["series"][0]["x"]) for one in content.panels] == [20, 30, 40, 50]


def test_table_5_takes_milliseconds() -> None:
    content = pfa_tables.seconds([], True)
    assert [row[1] for row in content.rows] == [7850, 26010, 160306]
    assert all(float(row[3]) < 1 for row in content.rows)


def test_a_table_waits_for_its_trials(tmp_path: Path) -> None:
    (part,) = pdp_fl.STUDY.choose(["3"])
    found = pdp_fl.STUDY.summary(replace(part, cells=lambda _: part.cells(True)[:2]), Store(tmp_path), 5, True)
    assert found["table"] == []


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
def digits(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The two tables on small data: 64 pixels, 60 or 140 records a client."""
    ten = pdp_fl.ten_clients
    monkeypatch.setattr(pdp_fl_tables, "ten_clients", lambda *some: replace(ten(*some), data="digits", batch_sound=8))
    for name, value in {"BATCH": 8, "STEPS": 10, "SIGNALS": 50, "RECORDS": 143, "RATE": 0.1}.items():
        monkeypatch.setattr(pdp_fl_tables, name, value)
    pdp_fl_tables._noise_multipliers.cache_clear()
    yield
    pdp_fl_tables._noise_multipliers.cache_clear()


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
    assert len(content.rows) == 2 * 1 * 3 * 3
    found = {(row[2], row[3], row[4]): row[5] for row in content.rows}
    assert found[20, "published", "three rounds, noise"] == "100.0%"


def test_groups_are_compared_round_by_round() -> None:
    noisy, quiet = [2.0, 2.1], [0.3, 0.32]
    norms = {str(client): quiet if client == 3 else noisy for client in range(10)}
    epsilons = [10.0 if client == 3 else 0.1 for client in range(10)]
    record = {"budgets": "pdp-fl-mixgauss1", "form": "sound", "norms": norms, "epsilons": epsilons, "parameters": 7850}
    content = pdp_fl.groups([record], False)
    assert [row[-1] for row in content.rows] == ["2 of 2", "2 of 2"]
    assert [series["y"] for series in content.panels[0]["series"]] == [[1.0, 1.0], [1.0 + pdp_fl.BESIDE] * 2]
    levels = {str(client): [0.01, 0.011] if client == 3 else [0.1, 0.11] for client in range(10)}
    ours = pdp_fl.groups([{**record, "noise": levels}], False).rows[-1]
    assert (ours[2], ours[-1]) == ("rounds so far, noise (ours)", "2 of 2")


def test_norms_are_shown_by_partition_and_budget() -> None:
    record = {
        "method": "fedavg",
        "partition": "iid",
        "epsilons": [3.0],
        "norms": {"0": [1.0, 2.0], "1": [3.0, 4.0, 5.0]},
    }
    content = pdp_fl.norms([record, {**record, "method": "non-private"}], False)
    assert content.rows[0] == ["IID", "ε = 3", "2.0000", "3.0000", "2.5000", "1.0000"]
    assert [one["title"] for one in content.panels] == [
        f"{name}; bands: deviation over clients" for name in ("ε = 3", "no noise")
    ]
    assert content.panels[0]["series"][0]["error"] == [1.0, 1.0]
    assert content.alike
