"""Is joining worth it: differences, intervals and verdicts, and their place on the page."""

from __future__ import annotations

import base64
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import binomtest
from support.journals import ABOUT, CLIENTS, new_journal, write_job
from support.pages import Balance, page, words

from polyeps.experiment.journal import ClientRow, Journal
from polyeps.report.client_figures import Spread, client_figures
from polyeps.report.joining import best_table, joining_tables, margin_of, paired_variance
from polyeps.report.tables import read_methods

HOME = tuple(ClientRow(row.client, None, None, row.own_epsilon, row.records, None) for row in CLIENTS)
PICTURES: dict[str, Any] = {
    "classes": ["well", "<ill>"],
    "confusion": [[50, 10], [20, 30]],
    "reliability": [[0, 0.0, 0.0]] * 5
    + [[60, 0.55, 0.5], [0, 0.0, 0.0], [0, 0.0, 0.0], [0, 0.0, 0.0], [50, 0.95, 0.9]],
}


def encoded(values: Any) -> str:
    return base64.b64encode(np.asarray(values, np.float32).tobytes()).decode()


def facts(right: list[list[int]], **others: Any) -> dict[str, Any]:
    """Facts of a job whose clients' own test records were recognised (1) or not (0)."""
    clients = {
        "ids": ["ward-a", "ward-b"],
        "personal": False,
        "test_records": [len(one) for one in right],
        "rarest": [len(one) // 2 for one in right],
        "majority": [0.5, None],
        "values": {"accuracy": [float(np.mean(one)) for one in right], "auc": [0.75, None]},
        "undefined": {"auc": {"ward-b": "no test record of class 'ill'"}},
        "left_out": 0,
        "comparing": "accuracy",
        "contributions": encoded(np.concatenate(right)),
    }
    return {"majority": 0.5, "clients": clients, **PICTURES, **others}


def row(right: int, wrong: int) -> list[int]:
    return [1] * right + [0] * wrong


def run(folder: Path, seeds: int = 1) -> Path:
    """A joint method, better than ward-a alone at home and not to be told from ward-b."""
    journal = new_journal(folder, {**ABOUT, "metrics": ["auc"]})
    for seed in range(seeds):
        write_job(journal, "weiavg", seed, facts=facts([row(90, 10), row(10, 10)]))
        for label, clients, budgets in (("alone", CLIENTS, "own"), ("alone at home", HOME, "none")):
            found = facts([row(60, 40), row(9, 11)], budgets=budgets)
            write_job(journal, label, seed, clients=clients, facts=found)
    journal._connection.execute("UPDATE jobs SET method = 'alone' WHERE label LIKE 'alone%'")
    journal.close()
    return folder


def test_verdicts_say_what_can_be_told(tmp_path: Path) -> None:
    folder = run(tmp_path / "run")
    methods = read_methods([Journal(folder / "journal.db")])
    (table,) = joining_tables(methods)
    assert (table.label, table.metric, table.own_records, table.control) == ("weiavg", "accuracy", True, False)
    first, second = table.rows
    assert first.joint == Spread(0.9)
    assert first.joint_on_all == Spread(0.7)  # the last accuracy of the journal
    assert first.alone == first.at_home == Spread(0.6)
    assert first.majority == Spread(0.5)
    assert first.against_home is not None
    assert second.against_home is not None
    # 1.96 · √(30 + 1 - 30² / 102) / 102, by hand
    assert first.against_home.text == "gains 30.0\u00a0±\u00a09.0 points"
    assert second.against_home.text == "too few test records (20)"
    assert best_table([table]) is table
    assert best_table([]) is None


@pytest.mark.parametrize(("better", "worse"), [(5, 5), (9, 2), (14, 3), (2, 14), (30, 30), (40, 20), (8, 2), (0, 0)])
def test_accuracies_are_told_apart_about_when_an_exact_test_does(better: int, worse: int) -> None:
    """The exact McNemar test, which is somewhat stricter for few records that differ."""
    apart = np.array([1.0] * better + [-1.0] * worse + [0.0] * 200)
    told = abs(apart.mean()) > margin_of([apart.mean()], [paired_variance(apart, "accuracy")])
    chance = binomtest(better, better + worse).pvalue if better + worse else 1.0
    assert told == (chance < 0.05) or 0.02 < chance < 0.08


def test_margins_cover_as_often_as_they_say() -> None:
    generator = np.random.default_rng(0)
    covered = 0
    for _ in range(400):
        seeds = 0.03 + 0.02 * generator.normal(size=3)  # differences of three trainings, around 0.03
        drawn = [mean + 0.5 * generator.normal(size=300) for mean in seeds]
        means = [float(one.mean()) for one in drawn]
        covered += int(abs(np.mean(means) - 0.03) <= margin_of(means, [paired_variance(one, "auc") for one in drawn]))
    assert covered / 400 > 0.94


def test_figures_of_clients_are_means_over_seeds(tmp_path: Path) -> None:
    journal = new_journal(tmp_path / "run")
    write_job(journal, "fedavg", 0, facts=facts([row(60, 40), row(10, 10)]))
    write_job(journal, "fedavg", 1, facts=facts([row(70, 30), row(10, 10)]))
    (method,) = read_methods([journal])
    first, second = client_figures(method)
    accuracy = first.metrics["accuracy"]
    assert accuracy is not None
    assert accuracy.mean == pytest.approx(0.65)
    assert accuracy.deviation == pytest.approx(0.1 / 2**0.5)
    assert accuracy.text("accuracy") == "65.0 ± 7.1\u00a0%"
    assert (second.metrics["auc"], second.undefined["auc"]) == (None, "no test record of class 'ill'")
    assert (second.majority, first.spent) == (None, 0.25)


def test_the_page_shows_what_each_client_gets(tmp_path: Path) -> None:
    text = page(run(tmp_path / "run", seeds=2))
    said = words(text)
    titles = re.findall(r"<h2>(.*?)</h2>", text)
    assert [titles[2], *titles[5:8]] == [
        "Is joining worth it?",
        "Each client's own test records",
        "Confusion",
        "Calibration",
    ]
    assert "against training alone at home, 1 gains, 1 not judged" in said
    assert "gains 30.0 ± 9.0 points" in said
    assert "too few test records (20)" in said
    assert "Always guessing the class with most training records: 50.0 %." in said
    assert "Undefined: auc of 1 client, no test record of class &#39;ill&#39;." in text
    assert "Such figures are releases of test records: known in simulation only" in said
    assert "its model must stay at home" in said
    assert "&lt;ill&gt;" in text
    assert "<ill>" not in text
    assert "Share of right predictions by probability: 50.0\u00a0% at 55.0\u00a0%; 90.0\u00a0% at 95.0\u00a0%." in text
    Balance().feed(text)
    assert text == page(tmp_path / "run")


def test_runs_without_such_figures_have_no_such_sections(tmp_path: Path) -> None:
    journal = new_journal(tmp_path / "run")
    write_job(journal)
    journal.close()
    said = words(page(tmp_path / "run"))
    for title in ("Is joining worth it?", "own test records", "Confusion", "Calibration", "Always guessing"):
        assert title not in said


@pytest.mark.parametrize("metric", ["accuracy", "auc"])
def test_records_of_one_person_are_not_so_many_observations(metric: str) -> None:
    chance = np.random.default_rng(4)
    told = {"by record": 0, "by person": 0}
    for _ in range(1000):
        visits = chance.integers(1, 13, 40)
        kind = chance.integers(-1, 2, 40) if metric == "accuracy" else chance.normal(size=40)
        apart, persons = np.repeat(kind, visits).astype(float), np.repeat(np.arange(40.0), visits)
        for name, known in (("by record", None), ("by person", persons)):
            told[name] += int(abs(apart.mean()) > margin_of([0.0], [paired_variance(apart, metric, known)]))
    assert told["by record"] > 300  # of models that do not differ, where 50 may be told apart by chance
    assert told["by person"] < 100
    alone = np.arange(200.0)
    drawn = chance.integers(-1, 2, 200).astype(float)
    assert paired_variance(drawn, metric, alone) == pytest.approx(paired_variance(drawn, metric), rel=0.02)


def test_few_persons_with_many_records_are_not_compared(tmp_path: Path) -> None:
    journal = new_journal(tmp_path / "run", {**ABOUT, "metrics": ["auc"]})
    for label, right in (("weiavg", [row(90, 10), row(90, 10)]), ("alone", [row(60, 40), row(60, 40)])):
        found = facts(right, person="patient")
        found["clients"]["persons"] = encoded([*(np.arange(100) // 20), *(np.arange(100) // 2)])
        write_job(journal, label, 0, facts=found)
    journal._connection.execute("UPDATE jobs SET method = 'alone' WHERE label LIKE 'alone%'")
    journal.close()
    (table,) = joining_tables(read_methods([Journal(tmp_path / "run" / "journal.db")]))
    few, enough = (line.against_alone for line in table.rows)
    assert few is not None
    assert few.text == "too few test records (of 5 patients)"
    assert enough is not None
    assert enough.outcome == "gains"
