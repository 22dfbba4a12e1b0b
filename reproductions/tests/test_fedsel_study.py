"""Paper 001's study, in tiny."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from polyeps_reproductions import fedsel, fedsel_running, fedsel_tables, reproducing
from polyeps_reproductions.fedsel_trials import DECAY, MODELS, Trial, _people, algorithm_of, gradients, perform
from polyeps_reproductions.pictures import draw
from polyeps_reproductions.running import Means
from polyeps_reproductions.tabulated import Tabulated
from polyeps_reproductions.trials import Store

from polyeps.algorithms._averaging import Course
from polyeps.core import Records
from polyeps.engine.noise import SeededStreams
from polyeps.errors import InputError
from polyeps.models import binary_logistic, binary_svm
from polyeps.training import sgd

TINY = Trial("syn-l-0.01-0.9", "logistic", "ps-pm", records=600, learning_rate=1.0)


@pytest.mark.parametrize("model", [binary_logistic, binary_svm])
def test_gradients_in_closed_form_are_those_of_the_engine(model: type) -> None:
    chance = torch.Generator().manual_seed(1)
    records = Records(torch.randn(5, 7, generator=chance), torch.tensor([0, 1, 1, 0, 1]), torch.arange(6))
    weights = torch.randn(7, generator=chance)
    engine = sgd(model(7), rate=1.0, steps=1, learning_rate=1.0, decay=DECAY)
    expected = engine.run(weights, records, SeededStreams(1, range(5), 0), None)
    found = gradients(model(7)).run(weights, records, SeededStreams(1, range(5), 0), None)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    ("method", "form", "epochs", "least", "most"),
    [
        ("ps-pm", "sound", 1, 1.999, 2.0001),
        ("exp-hm", "sound", 2, 1.999, 2.0001),
        ("random-pm", "sound", 1, 1.999, 2.0001),
        ("pm", "published", 1, 1.999, 2.0001),
        ("pm-rp", "sound", 1, 1.999, 2.0001),
        ("pe-pm", "published", 1, 2.001, 2.01),
        ("ps-pm-c", "sound", 1, 2.199, 2.2001),
        ("pe-pm-o", "sound", 2, 1.99, 2.0001),
    ],
)
def test_a_trial_pays_what_its_method_costs(method: str, form: str, epochs: int, least: float, most: float) -> None:
    result = perform(replace(TINY, method=method, form=form, epochs=epochs))  # type: ignore[arg-type]
    assert least <= result["spent"] <= most
    assert 0.3 < result["final"] < 0.8
    assert result["clients"] == 480


def test_exact_methods_promise_nothing_and_curves_have_every_round() -> None:
    result = perform(replace(TINY, method="np-k", curve=True))
    assert result["spent"] is None
    assert len(result["accuracy"]) == 96  # batches of 5 of 480 clients


def test_the_control_is_the_flat_method_at_another_learning_rate() -> None:
    """A random coordinate enlarged by d at α is the same coordinate at d·α: what scaling alone does, α can do."""
    flat = perform(replace(TINY, method="pm", learning_rate=0.125))
    control = perform(replace(TINY, method="random-pm", learning_rate=12.5))
    assert control["final"] == pytest.approx(flat["final"], abs=0.01)


def test_a_fold_is_the_same_for_all_methods_and_choices_do_not_see_it() -> None:
    one = _people(TINY.data, 600, 1, 2, False)
    choosing = _people(TINY.data, 600, 1, 2, True)
    tested = {tuple(row) for row in one.test_features[:, :4].tolist()}
    assert len(tested) == 120
    assert not tested & {tuple(row) for row in choosing.features[:, :4].tolist()}
    assert not tested & {tuple(row) for row in choosing.test_features[:, :4].tolist()}
    assert len(choosing.labels) == 384


def test_a_method_of_another_name_is_refused() -> None:
    with pytest.raises(InputError, match="no method 'best-pm'"):
        algorithm_of(replace(TINY, method="best-pm"), gradients(MODELS["svm"](4)), Course(1.0, 1.0, 1, 1, 1))


def test_one_rate_for_all_is_that_of_the_non_private() -> None:
    shared = replace(TINY, rate="shared", method="exp-pm", learning_rate=0.0, fold=3)
    assert shared.row == replace(TINY, method="np", learning_rate=0.0).row
    assert {choice.fold for choice in shared.choices((0.1, 1.0), 2)} == {1, 2}


def test_a_part_runs_settles_and_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fedsel_running, "QUICK_GRID", (0.1, 10.0))
    trials = tuple(replace(TINY, method=name, epsilon=e, learning_rate=0.0) for name in ("pm", "ps-pm") for e in (1, 4))
    make = fedsel_tables.comparison("epsilon", (("ps-pm", "pm"),))
    part = Tabulated("fedsel", "figure", "0", "tiny", make, lambda _: trials)
    store = Store(tmp_path / "work")
    before = fedsel.outcome(part, store, 1, True, "")
    assert before["missing"] == 8
    fedsel.run([part], store, Means(), 1, True, lambda *_: None)
    after = fedsel.outcome(part, store, 1, True, "polyeps reproduce fedsel")
    assert after["missing"] == 0
    assert len(after["table"]) == 4
    assert "ps-pm over pm holds in" in after["note"]
    (picture,) = draw(after, tmp_path / "tiny")
    assert picture.stat().st_size > 1000


def test_gains_and_losses_are_paired_by_fold(tmp_path: Path) -> None:
    results = []
    for method, accuracy in {"np": 0.9, "pm": 0.7, "random-pm": 0.75, "exp-pm": 0.78, "exp-pm-c": 0.8}.items():
        for fold in (1, 2):
            trial = {**vars(replace(TINY, data="bank", method=method, fold=fold))}
            results.append({"trial": trial, "final": accuracy + fold / 100, "spent": 2.0})
    content = fedsel_tables.gains(results, True)
    (row,) = content.rows
    assert row[4:10] == [
        "2.42 / -0.16",
        "+10.00 ± 0.00",
        "+2.00 ± 0.00",
        "+8.00 ± 0.00",
        "+5.00 ± 0.00",
        "+3.00 ± 0.00",
    ]


def test_tables_without_trials() -> None:
    assert len(fedsel_tables.bounds([], True).rows) == 15
    costs = {(row[0], row[1]): row[2] for row in fedsel_tables.variants([], True).rows}
    assert costs["ps-pm", "sound"] == "2"
    assert float(costs["pe-pm", "published"]) > 2
    assert costs["np", "sound"] == "∞"


def test_the_study_is_all_of_the_paper_and_small_when_quick() -> None:
    wanted = reproducing.choose("fedsel")
    assert [part.number for part in wanted.own] == [
        *(f"2{x}" for x in "abcdefghi"),
        "3a",
        "3b",
        "3c",
        "1",
        "2",
        "3",
    ]
    assert len(reproducing.choose("fedsel", figures=["2e"], tables=["3"]).own) == 2
    assert len(set(fedsel.all_trials(fedsel.PARTS, True, 1))) < 1000
    assert set(fedsel_tables.PAPER) == {(one.data, one.model) for one in fedsel.table_three(False)}
    with pytest.raises(InputError, match="no figure 4"):
        reproducing.choose("fedsel", figures=["4"])
