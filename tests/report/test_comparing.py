"""Which method is the best: named only where all others are ruled out, against a second way to compute it."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import ttest_rel
from support.journals import ABOUT, new_journal, write_job
from support.pages import page, words

from polyeps.report.comparing import in_a_sentence, one_sided, ranking, verdict
from polyeps.report.overview import differences
from polyeps.report.tables import MethodRuns, read_methods


def methods(folder: Path, finals: dict[str, list[float]], **facts: str) -> tuple[MethodRuns, ...]:
    journal = new_journal(folder)
    for label, values in finals.items():
        for seed, value in enumerate(values):
            write_job(journal, label, seed, accuracies=[value], facts=facts)
    return read_methods([journal])


def test_the_chance_is_that_of_a_paired_t_test() -> None:
    drawn = np.random.default_rng(1).normal(0.7, 0.02, size=(2, 6))
    _, chance = one_sided((drawn[0] - drawn[1]).tolist())
    assert chance == pytest.approx(ttest_rel(drawn[0], drawn[1]).pvalue / 2)
    assert one_sided([0.1, 0.1, 0.1])[1] == 0.0
    assert one_sided([0.0, 0.0, 0.0])[1] == 1.0


def test_the_best_method_is_ruled_out_in_five_per_cent_at_most(tmp_path: Path) -> None:
    """Eight methods as good as each other: the one called first is ruled out no more often than is said."""
    chance, out = np.random.default_rng(2), 0
    for _ in range(400):
        drawn = chance.normal(size=(8, 4))
        out += any(
            one > 0 and 7 * one_sided((other - drawn[0]).tolist())[1] < 0.05
            for other in drawn[1:]
            if (one := float((other - drawn[0]).mean()))
        )
    assert out / 400 < 0.075


def test_a_method_is_named_best_only_where_others_are_ruled_out(tmp_path: Path) -> None:
    far = {"good": [0.90, 0.91, 0.92], "bad": [0.50, 0.52, 0.51], "worse": [0.3, 0.31, 0.30]}
    found = ranking(methods(tmp_path / "far", far))
    assert found is not None
    assert found.leading == ("good",)
    assert "good is more accurate than each of the 2 other methods" in verdict(found)
    near = {"one": [0.70, 0.71, 0.69], "two": [0.71, 0.70, 0.695], "bad": [0.50, 0.51, 0.49]}
    found = ranking(methods(tmp_path / "near", near))
    assert found is not None
    assert found.leading == ("two", "one")
    assert verdict(found).startswith("two and one cannot be told apart; bad is less accurate (paired t-tests over 3")
    said = words(page(tmp_path / "near"))
    assert "two and one cannot be told apart" in said
    assert "highest" not in said  # nobody is crowned
    assert "70.0 to 70.2 %" in said
    alike = {"one": [0.70, 0.71, 0.69], "two": [0.71, 0.70, 0.695]}
    assert "cannot be told apart" in verdict(ranking(methods(tmp_path / "alike", alike)))


def test_few_seeds_and_controls_say_nothing(tmp_path: Path) -> None:
    found = ranking(methods(tmp_path / "few", {"one": [0.9, 0.9], "two": [0.1, 0.1]}))
    assert found is not None
    assert found.leading == ("one", "two")
    assert "share 2 seeds, too few to tell them apart; run 3 or more" in verdict(found)
    assert ranking(methods(tmp_path / "controls", {"one": [0.9] * 3, "two": [0.1] * 3}, budgets="maximum")) is None
    assert ranking(methods(tmp_path / "one", {"one": [0.9] * 3})) is None
    undefined = ranking(methods(tmp_path / "nan", {"one": [0.9] * 3, "two": [math.nan] * 3, "three": [0.5] * 3}))
    assert undefined is not None
    assert undefined.labels == ("one", "three")
    assert in_a_sentence(["a"]) == "a"


def test_what_differs_between_runs_stands_on_top(tmp_path: Path) -> None:
    for name, clip in (("first", 1.0), ("second", 2.0)):
        about = {**ABOUT, "name": name, "experiment": {"rounds": 3, "training": {"clip": clip, "batch": 8}}}
        journal = new_journal(tmp_path / name, about)
        write_job(journal)
        journal.close()
    said = words(page(tmp_path / "first", tmp_path / "second"))
    assert "What differs between the runs setting first second training.clip 1.0 2.0" in said
    assert "2 other settings are the same." in said
    assert said.index("training.clip") < said.index("Methods method")
    same = differences({"a": {"x": "1"}, "b": {"x": "1"}})
    assert same is not None
    assert (same.rows, same.same) == ((), "All settings are the same.")
    many = differences({name: {"x": name, "y": "1"} for name in "abcdef"})
    assert many is not None
    assert many.columns == ("run", "x")  # a run a row, where they are many
    assert differences({"a": {"x": "1"}}) is None


def test_an_algorithm_that_a_run_lacks_is_one_difference() -> None:
    one = {"algorithm.0.name": "pfa", "algorithm.0.form": "sound", "algorithm.0.rank": "2"}
    more = {"algorithm.1.name": "alone", "algorithm.1.form": "sound", "algorithm.1.budgets": "none"}
    table = differences({"a": {**one, **more}, "b": {**one, "algorithm.0.rank": "3"}})
    assert table is not None
    assert [row.cells for row in table.rows] == [
        ("algorithm.0.rank", "2", "3"),
        ("algorithm.1", "alone, budgets none", "–"),
    ]
    assert table.same == "2 other settings are the same."
