"""Outcomes in a notebook: frames that equal what the run wrote, pictures of the same numbers, escaped summaries."""

import csv
import sys
from pathlib import Path

import numpy as np
import pytest
from support.federations import EPSILONS, experiment

from polyeps.errors import InputError
from polyeps.experiment.outcome import Outcome, read
from polyeps.experiment.run import run
from polyeps.ledger import Ledger


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    wanted = experiment(["fedavg", "fedavg (none)"], seeds=[3, 4], evaluate_every=2)
    return run(wanted.model_copy(update={"name": "<b>a & b"}), tmp_path_factory.mktemp("outcome") / "run")


def test_a_frame_has_the_figures_of_the_csv_file(outcome: Outcome) -> None:
    frame = outcome.to_frame()
    with (outcome.folder / "metrics.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert list(frame.columns) == list(lines[0])
    assert len(frame) == len(lines) == 2 * 2 * 3
    for found, line in zip(frame.to_dict("records"), lines, strict=True):
        assert (found["method"], found["seed"], found["round"]) == (
            line["method"],
            int(line["seed"]),
            int(line["round"]) + 1,
        )
        for name in ("answered", "accuracy", "loss"):
            if line[name]:
                assert found[name] == float(line[name])
            else:
                assert np.isnan(found[name])


def test_a_frame_of_clients_has_what_their_ledgers_say(outcome: Outcome) -> None:
    frame = outcome.clients_frame()
    assert len(frame) == 4 * len(EPSILONS)
    for seed in (3, 4):
        ledger = Ledger(outcome.folder / "ledgers" / f"fedavg-{seed}.db")
        rows = frame[(frame.method == "fedavg") & (frame.seed == seed)].set_index("client")
        for client, epsilon in enumerate(EPSILONS):
            assert rows.loc[str(client), "spent"] == ledger.spent(str(client))
            assert rows.loc[str(client), "own_epsilon"] == rows.loc[str(client), "epsilon"] == epsilon
            assert rows.loc[str(client), "joined"] == 3
        ledger.close()
    free = frame[frame.method == "fedavg (none)"]
    assert free.spent.isna().all()
    assert free.epsilon.isna().all()


def test_a_picture_shows_the_mean_over_seeds_and_a_deviation(outcome: Outcome) -> None:
    figure = outcome.plot()
    (axes,) = figure.axes
    assert [line.get_label() for line in axes.get_lines()] == ["fedavg", "fedavg (none)"]
    for line in axes.get_lines():
        values = np.array([outcome.accuracy[str(line.get_label()), seed] for seed in (3, 4)])
        assert np.array_equal(np.asarray(line.get_xdata()), [2, 3])  # of 3 rounds, those that were evaluated
        assert np.allclose(np.asarray(line.get_ydata()), values.mean(axis=0))
    band = axes.collections[0].get_paths()[0].vertices
    values = np.array([outcome.accuracy["fedavg", seed] for seed in (3, 4)])
    edges = values.mean(axis=0) + values.std(axis=0, ddof=1), values.mean(axis=0) - values.std(axis=0, ddof=1)
    assert np.isclose(np.asarray(band)[:, 1].max(), edges[0].max())
    assert np.isclose(np.asarray(band)[:, 1].min(), edges[1].min())
    assert outcome.plot("loss", axes) is figure
    assert len(axes.get_lines()) == 4


def test_a_metric_that_is_not_there_is_refused(outcome: Outcome) -> None:
    with pytest.raises(InputError, match=r"no metric 'auc' in .*; it has accuracy, loss"):
        outcome.plot("auc")


def test_a_notebook_shows_a_table_without_markup_of_names(outcome: Outcome) -> None:
    shown = outcome._repr_html_()
    assert "&lt;b&gt;a &amp; b" in shown
    assert "<b>a" not in shown
    mean = np.mean([outcome.accuracy["fedavg", seed][-1] for seed in (3, 4)])
    assert f"<td>fedavg</td><td>2 of 2</td><td>{mean:.1%} ± " in shown
    assert shown.count(", kept<") == 1
    assert shown.count("no guarantee") == 1


def test_an_exceeded_budget_is_shouted(outcome: Outcome, tmp_path: Path) -> None:
    import shutil
    import sqlite3

    shutil.copytree(outcome.folder, tmp_path / "run")
    connection = sqlite3.connect(tmp_path / "run" / "journal.db")
    connection.execute("UPDATE clients SET spent = 2 * epsilon WHERE job = 'fedavg-3' AND client = '0'")
    connection.commit()
    connection.close()
    assert "200.0%, EXCEEDED" in read(tmp_path / "run")._repr_html_()


def test_frames_without_pandas_say_what_to_install(outcome: Outcome, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    for make in (outcome.to_frame, outcome.clients_frame):
        with pytest.raises(InputError, match=r"pip install 'polyeps\[notebook\]'"):
            make()
