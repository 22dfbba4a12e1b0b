"""FedSel's study, in tiny."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from polyeps_reproductions import fedsel, fedsel_tables
from polyeps_reproductions.fedsel import DECAY, DEFAULTS, PARTS, STUDY
from polyeps_reproductions.fedsel_folds import fold_of, gradients, split
from polyeps_reproductions.presenting import write
from polyeps_reproductions.running import Machines, run_all
from polyeps_reproductions.studies import Cell, Part
from polyeps_reproductions.trials import Store, Trial, perform

from polyeps.core import Records
from polyeps.engine.noise import SeededStreams
from polyeps.errors import InputError
from polyeps.models import binary_logistic, binary_svm
from polyeps.training import sgd

DATA = "syn-l-0.01-0.9"


def labels(**changes: Any) -> dict[str, Any]:
    return {**DEFAULTS, "data": DATA, "model": "logistic", "method": "ps-pm", **changes}


def tiny(rate: float = 1.0, curve: bool = False, **changes: Any) -> Trial:
    made = fedsel.cell(labels(**changes), True, curve).trial
    settings = made.settings.replace('"learning_rate": 1.0', f'"learning_rate": {rate}')
    return replace(made, settings=settings, choice=None, records=600)


@pytest.mark.parametrize("model", [binary_logistic, binary_svm])
def test_gradients_in_closed_form_are_those_of_the_engine(model: type) -> None:
    chance = torch.Generator().manual_seed(1)
    records = Records(torch.randn(5, 7, generator=chance), torch.tensor([0, 1, 1, 0, 1]), torch.arange(6))
    weights = torch.randn(7, generator=chance)
    engine = sgd(model(7), rate=1.0, steps=1, learning_rate=1.0, decay=DECAY)
    expected = engine.run(weights, records, SeededStreams(1, range(5), 0), None)
    found = gradients(model(7), DECAY).run(weights, records, SeededStreams(1, range(5), 0), None)
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
    result = perform(tiny(method=method, form=form, epochs=epochs))
    assert least <= result["spent"] <= most
    assert 0.3 < result["final"] < 0.8
    assert result["clients"] == 480


def test_exact_methods_guarantee_nothing_and_curves_have_every_round() -> None:
    result = perform(tiny(method="np-k", curve=True))
    assert result["spent"] is None
    assert len(result["accuracy"]) == 96  # batches of 5 of 480 clients


def test_the_control_is_the_flat_method_at_another_learning_rate() -> None:
    """A random coordinate enlarged by d at α is the same coordinate at d·α."""
    flat, control = perform(tiny(0.125, method="pm")), perform(tiny(12.5, method="random-pm"))
    assert control["final"] == pytest.approx(flat["final"], abs=0.01)


def test_a_fold_is_the_same_for_all_methods_and_choices_do_not_see_it() -> None:
    assert [fold_of(seed) for seed in (1, 5, 6, 12)] == [(1, 1), (1, 5), (2, 1), (3, 2)]
    one, choosing = split(DATA, 600, 1, 2, False), split(DATA, 600, 1, 2, True)
    tested = {tuple(row) for row in one.test_features[:, :4].tolist()}
    assert len(tested) == 120
    assert not tested & {tuple(row) for row in choosing.features[:, :4].tolist()}
    assert not tested & {tuple(row) for row in choosing.test_features[:, :4].tolist()}
    assert len(choosing.labels) == 384


def test_one_rate_for_all_is_that_of_the_non_private() -> None:
    shared = fedsel.cell(labels(rate="shared", method="exp-pm"), False).trial
    assert shared.choices() == fedsel.cell(labels(method="np"), False).trial.choices()
    assert {choice.seed for choice in shared.choices()} == {1, 2}
    assert fedsel.cell(labels(method="exp-pm", form="published"), False).trial.choices() == tuple(
        fedsel.cell(labels(method="exp-pm"), False).trial.choices()
    )


def test_a_part_runs_settles_and_is_drawn(tmp_path: Path) -> None:
    def cells(_: bool) -> list[Cell]:
        made = [fedsel.cell(labels(method=name, epsilon=e), True) for name in ("pm", "ps-pm") for e in (1.0, 4.0)]
        return [replace(one, trial=replace(one.trial, records=600)) for one in made]

    part = Part("figure", "0", "tiny", fedsel_tables.by_axis("epsilon", (("ps-pm", "pm"),)), cells)
    store = Store(tmp_path / "work")
    before = STUDY.summary(part, store, 1, True)
    assert (before["missing"], before["table"]) == (8, [])
    run_all([one for cell in cells(True) for one in STUDY.trials(part, cell, 1, True)], store, Machines())
    after = STUDY.summary(part, store, 1, True, "polyeps reproduce fedsel")
    assert after["missing"] == 0
    assert len(after["table"]) == 4
    assert "ps-pm over pm holds in" in after["findings"][0]
    assert all(set(one["finals"]) == {"1", "2"} for one in after["records"])
    assert write(after, tmp_path)[-1].stat().st_size > 1000


def test_gains_and_losses_are_paired_by_fold() -> None:
    records = []
    for method, accuracy in {"np": 0.9, "pm": 0.7, "random-pm": 0.75, "exp-pm": 0.78, "exp-pm-c": 0.8}.items():
        finals = {str(fold): accuracy + fold / 100 for fold in (1, 2)}
        record = {**labels(data="bank", method=method), "finals": finals, "mean": accuracy, "count": 2, "spent": 2.0}
        records.append(record)
    (row,) = fedsel_tables.gains(records, True).rows
    assert row[4:10] == [
        "2.42 / -0.16",
        "+10.00 ± 0.00",
        "+2.00 ± 0.00",
        "+8.00 ± 0.00",
        "+5.00 ± 0.00",
        "+3.00 ± 0.00",
    ]


def test_one_rate_for_all_may_be_another_than_the_best() -> None:
    some = fedsel.other_rates(False)
    assert {one.trial.experiment().training.learning_rate for one in some} == {*fedsel.OTHER_RATES, fedsel.LARGEST_RATE}
    assert all(one.trial.choice is None for one in some)
    records = []
    for method, accuracy in {"pm": 0.7, "ps-pm": 0.78, "ps-pm-c": 0.8}.items():
        finals = {str(fold): accuracy + fold / 100 for fold in (1, 2)}
        record = labels(data="bank", method=method, rate=1.0)
        records.append({**record, "finals": finals, "mean": accuracy, "count": 2})
    (row,) = fedsel_tables.by_rate(records, True).rows
    assert row == [1.0, "bank", "logistic", "ps", "2.55 / 0.15", "+10.00 ± 0.00", "+2.00 ± 0.00", "78.0", "70.0", 2]


def test_tables_without_trials() -> None:
    assert len(fedsel_tables.bounds([], True).rows) == 15
    costs = {(row[0], row[1]): row[2] for row in fedsel_tables.variants([], True).rows}
    assert costs["ps-pm", "sound"] == "2"
    assert float(costs["pe-pm", "published"]) > 2
    assert costs["np", "sound"] == "∞"


def test_the_study_is_all_of_the_paper_and_small_when_quick() -> None:
    assert [part.number for part in PARTS] == [
        *(f"2{x}" for x in "abcdefghi"),
        "3a",
        "3b",
        "3c",
        "1",
        "2",
        "synthetic",
        "3",
        "3-rates",
    ]
    assert len(STUDY.choose(figures=["2e"], tables=["3"])) == 2
    quick = {one for part in PARTS for cell in part.cells(True) for one in STUDY.trials(part, cell, 1, True)}
    assert len(quick) < 1000
    assert set(fedsel_tables.PAPER) == {(one.labels["data"], one.labels["model"]) for one in fedsel.table_three(False)}
    assert STUDY.trial_seeds(2, True) == [1, 2, 6, 7]
    assert STUDY.trial_seeds(2, False) == list(range(1, 11))
    with pytest.raises(InputError, match="no figure 4"):
        STUDY.choose(figures=["4"])
