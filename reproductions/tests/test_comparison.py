"""Records of seeds, and figures that compare methods in two forms with the paper's numbers."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from polyeps_reproductions import presenting
from polyeps_reproductions.comparison import orderings, within
from polyeps_reproductions.running import settle
from polyeps_reproductions.studies import Part, Summary, difference, line, panel
from polyeps_reproductions.trials import Store, Trial
from small_studies import METHODS, SETTING, STUDY, figure, result

FINAL = {"pfa": 0.53, "fedavg": 0.2, "public-only": 0.55}


def trials_of(part: Part, seeds: int) -> list[tuple[str, str, Trial]]:
    return [
        (cell.labels["method"], cell.labels["form"], one)
        for cell in part.cells(True)
        for one in STUDY.trials(part, cell, seeds, True)
    ]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Two seeds of the figure, two points apart."""
    kept = Store(tmp_path / "work")
    for method, _, one in trials_of(figure(), 2):
        for choice in one.choices():
            kept.write(choice, result(choice, 0.5))
        (settled,) = settle([one], kept)
        kept.write(settled, result(settled, FINAL[method] + 0.02 * (one.seed - 1)))
    return kept


def settled(store: Store, method: str, form: str, seed: int) -> Trial:
    (found,) = (one for m, f, one in trials_of(figure(), 2) if (m, f, one.seed) == (method, form, seed))
    return settle([found], store)[0]


def summary(store: Store, part: Part | None = None, seeds: int = 2, quick: bool = False) -> Summary:
    return STUDY.summary(part or figure(), store, seeds, quick, "polyeps reproduce test")


def test_records_have_means_over_seeds_and_every_seed(store: Store) -> None:
    found = summary(store)
    one = next(one for one in found["records"] if (one["method"], one["form"]) == ("pfa", "sound"))
    assert one["mean"] == pytest.approx(0.54)
    assert one["deviation"] == pytest.approx(0.02 / 2**0.5, abs=1e-5)
    assert (one["count"], one["learning_rate"]) == (2, 0.05)
    assert one["finals"] == {"1": 0.53, "2": 0.55}
    assert one["curves"] == {"1": {"1": 0.53}, "2": {"1": 0.55}}
    assert found["missing"] == 0
    assert found["findings"][0] == "1 of 1 values are within 4 points of the paper's"
    assert json.loads(presenting.as_text(found)) == found


@pytest.mark.parametrize(("away", "holds"), [(0.04, True), (-0.04, True), (0.05, False), (-0.2, False)])
def test_four_points_are_near_enough(away: float, holds: bool) -> None:
    assert within(away, uplink=False) == holds


def test_traffic_is_compared_in_mebibytes(store: Store) -> None:
    assert [within(away, uplink=True) for away in (1.3, 2.0)] == [True, False]
    rows = summary(store, figure(uplink=True))["table"]
    assert rows[0][2:4] == ["0.5", "0.5 ± 0.0"]


def test_quick_runs_are_not_compared_with_the_paper(store: Store) -> None:
    found = summary(store, quick=True)
    assert found["table"][0][-1] == ""
    assert "within" not in " ".join(found["findings"])


def test_orders_hold_or_do_not() -> None:
    sides: dict[str, Any] = {
        name: {"paper": None, **{form: {"mean": FINAL[name]} for form in ("published", "sound")}} for name in METHODS
    }
    assert orderings(sides) == {("pfa", "fedavg"): {"published": True, "sound": True}}
    sides["pfa"]["sound"] = {"mean": 0.1}
    assert orderings(sides) == {("pfa", "fedavg"): {"published": True, "sound": False}}
    assert orderings({}) == {}


def test_the_table_shows_paper_forms_control_and_verdict(store: Store) -> None:
    found = summary(store)
    assert len({len(row) for row in [found["columns"], *found["table"]]}) == 1
    assert found["table"][0][1:] == ["pfa", "50.0", "54.0 ± 1.4", "54.0 ± 1.4", "56.0 ± 1.4 · 56.0 ± 1.4", "within"]
    assert found["table"][1][2] == "–"
    assert summary(store, figure(paper=0.4))["table"][0][-1] == "off by +14.0"


def test_the_gain_is_that_of_pairs(store: Store) -> None:
    late = settled(store, "pfa", "sound", 2)
    store.write(late, result(late, 0.63))
    found = summary(store)
    records = {(one["method"], one["form"]): one for one in found["records"]}
    pair = [records[name, "published"] for name in ("pfa", "public-only")]
    assert difference(*pair) == pytest.approx((-2, 0, 2), abs=1e-9)
    pair = [records[name, "sound"] for name in ("pfa", "public-only")]
    assert difference(*pair) == pytest.approx((2, 4, 2), abs=1e-9)
    title = SETTING.title
    said = (
        f"PFA over public-only, in points, ± the standard error over paired seeds: -2.0 to -2.0 in the published form "
        f"({title} -2.0 ± 0.0), +2.0 to +2.0 in the sound form ({title} +2.0 ± 4.0)"
    )
    assert said in found["findings"]
    assert "-2.0 to -2.0 in the sound form" in " ".join(summary(store, seeds=1)["findings"])
    alone = summary(store, figure(methods=METHODS[:2]))["findings"]
    assert not any("public-only" in sentence for sentence in alone)


def test_methods_are_compared_over_the_seeds_they_share(store: Store) -> None:
    store.path(settled(store, "fedavg", "sound", 2)).unlink()
    found = summary(store)
    assert found["table"][0][3:5] == ["54.0 ± 1.4", "53.0"]
    assert found["findings"][-1].endswith("seeds: 2 in the published form, 1 in the sound form")
    assert (found["missing"], found["records"][3]["count"]) == (1, 2)  # records keep all seeds


def test_cells_without_a_finished_trial_are_left_out(store: Store) -> None:
    found = summary(store, figure(settings=(SETTING, replace(SETTING, clients=5, epsilons=SETTING.epsilons))))
    assert {row[0] for row in found["table"]} == {SETTING.title}
    assert "1 of 2 cells have no finished trial and are left out" in found["findings"]


def test_a_cell_whose_trials_are_gone_keeps_its_earlier_record(store: Store) -> None:
    earlier = {**summary(store), "version": "0.1"}
    for one in earlier["records"]:
        del one["version"]  # as in files of version 0.1
        one |= {"finals": None, "curves": None}
    for seed in (1, 2):
        store.path(settled(store, "pfa", "published", seed)).unlink()
    found = STUDY.summary(figure(paper=0.4), store, 2, False, earlier=earlier)
    kept = {(one["method"], one["form"]): one for one in found["records"]}["pfa", "published"]
    assert (kept["mean"], kept["version"], kept["finals"], kept["paper"]) == (0.54, "0.1", None, 0.4)
    assert [one["version"] for one in found["records"]].count("0.1") == 1
    assert f"1 of {len(found['records'])} records are kept from version 0.1" in found["findings"]
    assert found["missing"] == 2
    for one in earlier["records"]:
        one["setting"] = "another choice than today's"
    assert len(STUDY.summary(figure(), store, 2, False, earlier=earlier)["records"]) == len(found["records"]) - 1
    for one in earlier["records"]:
        del one["setting"]  # version 0.1 knew rates alone
        one["learning_rate"] = 0.01
    assert len(STUDY.summary(figure(), store, 2, False, earlier=earlier)["records"]) == len(found["records"]) - 1


def test_seeds_of_earlier_results_are_neither_run_again_nor_lost(store: Store, tmp_path: Path) -> None:
    earlier = summary(store)  # seeds 1 and 2
    (cell, *_) = [one for one in figure().cells(False) if one.labels["method"] == "pfa"]
    assert [one.seed for one in STUDY.lacking(figure(), cell, 3, False, earlier)] == [3]
    assert [one.seed for one in STUDY.lacking(figure(), cell, 3, False, None)] == [1, 2, 3]
    elsewhere = Store(tmp_path / "elsewhere")
    for choice in cell.trial.choices():
        elsewhere.write(choice, result(choice, 0.5))
    (third,) = settle([replace(cell.trial, seed=3)], elsewhere)
    elsewhere.write(third, result(third, 0.9))
    found = STUDY.summary(figure(), elsewhere, 3, False, earlier=earlier)
    one = next(one for one in found["records"] if one["method"] == "pfa" and one["form"] == cell.labels["form"])
    before = next(one for one in earlier["records"] if one["method"] == "pfa" and one["form"] == cell.labels["form"])
    assert one["finals"] == {**before["finals"], "3": 0.9}
    assert set(one["curves"]) == {"1", "2", "3"}
    assert one["count"] == 3
    assert one["mean"] == pytest.approx(sum(one["finals"].values()) / 3)
    assert found["missing"] == len(figure().cells(False)) - 1


def test_missing_trials_are_counted(store: Store) -> None:
    found = summary(store, seeds=3)
    assert found["missing"] == 6
    assert presenting.sentences(found)[-1] == "6 trials are missing; the same command runs them."


@pytest.mark.parametrize("axis", ["clients", "budgets", "method"])
def test_files_are_written_and_read_again(store: Store, tmp_path: Path, axis: str) -> None:
    found = summary(store, figure(axis=axis))
    files = presenting.write(found, tmp_path / "results")
    assert [file.name for file in files] == [f"test-figure-1{ending}" for ending in (".json", ".md", ".svg", ".png")]
    assert presenting.read(tmp_path / "results", "test", "figure-1") == found
    assert "| pfa | 50.0 | 54.0 ± 1.4 |" in files[1].read_text()
    first = files[2].read_bytes()
    presenting.write(presenting.read(tmp_path / "results", "test", "figure-1"), tmp_path / "results")
    assert files[2].read_bytes() == first


def test_a_form_that_was_not_run_says_so(store: Store, tmp_path: Path) -> None:
    assert "not run" not in presenting.draw(summary(store), tmp_path / "both.svg")[0].read_text()
    for method in METHODS:
        for seed in (1, 2):
            store.path(settled(store, method, "sound", seed)).unlink()
    assert presenting.draw(summary(store), tmp_path / "one.svg")[0].read_text().count(">not run<") == 1


def test_a_bar_that_was_not_run_says_so(store: Store, tmp_path: Path) -> None:
    assert "not run" not in presenting.draw(summary(store, figure(axis="method")), tmp_path / "all.svg")[0].read_text()
    for seed in (1, 2):
        store.path(settled(store, "pfa", "sound", seed)).unlink()
    found = summary(store, figure(axis="method"))
    assert presenting.draw(found, tmp_path / "fewer.svg")[0].read_text().count(">not run<") == 1
    assert found["table"][0][4] == "–"


def test_equal_values_lie_beside_each_other(store: Store) -> None:
    other = replace(SETTING, clients=5, epsilons=(SETTING.epsilons or ())[:5])
    part = figure(settings=(SETTING, other))
    records = list(summary(store)["records"])
    records += [{**one, "cell": other.title, "clients": 5} for one in records]
    drawn = part.show(records, False).panels[1]
    first = [series["x"][0] for series in drawn["series"]]
    assert drawn["ticks"] == ["6", "5"]
    assert len(set(first)) == len(METHODS)
    assert first == sorted(first)
    assert max(map(abs, np.array(first))) < 0.2


def test_nothing_is_drawn_of_nothing(tmp_path: Path) -> None:
    found = summary(Store(tmp_path / "empty"))
    assert (found["table"], found["records"], found["missing"]) == ([], [], 12)
    assert [file.suffix for file in presenting.write(found, tmp_path)] == [".json", ".md"]


@pytest.mark.parametrize(("x", "shown"), [((1.0, 4.0), "3"), ((0.5, 8.0), "0.5"), ((0.001, 1.0), "0.01")])
def test_logarithmic_axes_have_plain_numbers(x: tuple[float, float], shown: str, tmp_path: Path) -> None:
    panels = [panel("left", "epsilon", "y", [line("one", [(at, 2.0, 0.1) for at in x])], log="x")]
    found: Any = {"study": "s", "kind": "figure", "number": "1", "title": "t", "pairs": False, "panels": panels}
    text = presenting.draw(found, tmp_path / "one.svg")[0].read_text()
    assert f">{shown}</text>" in text
    assert ">ε</text>" in text
    assert "mathdefault" not in text


def test_all_looks_are_drawn(tmp_path: Path) -> None:
    points = [(1.0, 2.0), (2.0, 3.0)]
    series = [
        line("one", points, dashed=True),
        line("one", points, look="circles", error=[0.1, 0.1]),
        line("one", points[:1], look="star"),
        line("one", points, look="paper"),
        line("flat", points[:1], look="level"),
    ]
    panels = [panel("left", "round", "y", series), panel("right", "r", "y", series, log="xy")]
    named = {"study": "test", "kind": "figure", "number": "2", "title": "Lines", "note": "a note", "version": "0"}
    found = {**named, "command": "", "missing": 0, "columns": ["a"], "table": [[1], ["x|y"]], "findings": ["So."]}
    files = presenting.write({**found, "pairs": False, "panels": panels, "records": None}, tmp_path)
    assert [file.suffix for file in files] == [".json", ".md", ".svg", ".png"]
    assert files[3].read_bytes().startswith(b"\x89PNG")
    shown = "# test, figure 2: Lines\n\n| a |\n|---|\n| 1 |\n| x\\|y |\n\nSo.\nNote: a note.\n"
    assert files[1].read_text() == shown
    assert "the paper's value" in files[2].read_text()
