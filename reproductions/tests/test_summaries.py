import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from polyeps_reproductions import presenting
from polyeps_reproductions.choosing import choice_of
from polyeps_reproductions.figures import Figure, trials_of
from polyeps_reproductions.running import settle
from polyeps_reproductions.summaries import orderings, sentences, summarise, table_rows, verdict
from polyeps_reproductions.trials import Store
from small_studies import CELL, figure, result

GRID = (0.2,)
FINAL = {"pfa": 0.53, "fedavg": 0.2, "public-only": 0.55}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Two seeds of the figure, two points apart."""
    kept = Store(tmp_path / "work")
    wanted = list(trials_of(figure(), seeds=2))
    for choice in {choice for one in wanted for choice in choice_of(one, GRID)}:
        kept.write(kept.path(choice).name, result(choice, 0.5))
    for one in settle(wanted, kept, GRID):
        kept.write(kept.path(one).name, result(one, FINAL[one.method.name] + 0.02 * (one.seed - 1)))
    return kept


def test_values_are_means_over_seeds_with_their_spread(store: Store) -> None:
    summary = summarise(figure(), store, 2, GRID, "polyeps reproduce")
    (cell,) = summary["cells"]
    found = cell["methods"]["pfa"]["sound"]
    assert found["mean"] == pytest.approx(0.54)
    assert found["deviation"] == pytest.approx(0.02 / 2**0.5, abs=1e-5)
    assert (found["seeds"], found["learning_rate"]) == (2, 0.2)
    assert summary["missing"] == 0
    assert (summary["reproduced"], summary["compared"]) == (1, 1)
    assert json.loads(json.dumps(summary)) == summary


@pytest.mark.parametrize(("mean", "holds"), [(0.54, True), (0.46, True), (0.55, False), (0.3, False)])
def test_four_points_are_near_enough(mean: float, holds: bool) -> None:
    found = verdict(figure(), 0.5, {"mean": mean})
    assert found == {"off": pytest.approx(mean - 0.5), "holds": holds}
    assert verdict(figure(judged=False), 0.5, {"mean": mean}) is None
    assert verdict(figure(), None, {"mean": mean}) is None


def test_traffic_is_judged_in_mebibytes() -> None:
    shown = figure(shows="traffic")
    assert [verdict(shown, 40, {"mean": mean})["holds"] for mean in (41.3, 42.0)] == [True, False]  # type: ignore[index]


def test_orders_hold_or_do_not(store: Store) -> None:
    (cell,) = summarise(figure(), store, 2, GRID)["cells"]
    found = {(row["higher"], row["lower"]): (row["paper"], row["published"]) for row in cell["orderings"]}
    assert found == {("pfa", "fedavg"): (None, True), ("pfa", "public-only"): (None, False)}
    assert orderings({}) == []


def test_the_table_says_paper_forms_control_and_verdict(store: Store) -> None:
    columns, rows = table_rows(summarise(figure(), store, 2, GRID))
    assert len({len(row) for row in [columns, *rows]}) == 1
    assert rows[0][1:] == ["pfa", "50.0", "54.0 ± 1.4", "54.0 ± 1.4", "56.0 ± 1.4 · 56.0 ± 1.4", "within"]
    assert rows[1][2] == "–"
    far = table_rows(summarise(figure(paper={(CELL, "pfa"): 0.4}), store, 2, GRID))[1]
    assert far[0][-1] == "off by +14.0"


def test_what_projection_buys_is_said(store: Store) -> None:
    said = sentences(summarise(figure(), store, 2, GRID))
    assert said[0] == "1 of 1 values are within 4 points of the paper's."
    assert said[1].startswith("PFA over the public clients alone, in points, ± the standard error over paired seeds")
    assert "-2.0 to -2.0 in the published form (digits" in said[1]
    single = sentences(summarise(figure(), store, 1, GRID))[1]
    assert single.startswith("PFA over the public clients alone, in points: -2.0 to -2.0 in the published form, ")
    alone = sentences(summarise(figure(methods=figure().methods[:2]), store, 2, GRID))
    assert not any("public clients alone" in sentence for sentence in alone)


def test_the_gain_is_that_of_pairs(store: Store) -> None:
    (late,) = (
        one
        for one in settle(trials_of(figure(), seeds=2), store, GRID)
        if (one.method.name, one.form, one.seed) == ("pfa", "sound", 2)
    )
    store.write(store.path(late).name, result(late, 0.63))
    (cell,) = summarise(figure(), store, 2, GRID)["cells"]
    assert cell["gain"]["published"] == {"mean": pytest.approx(-0.02), "error": pytest.approx(0), "seeds": 2}
    assert cell["gain"]["sound"] == {"mean": pytest.approx(0.02), "error": pytest.approx(0.04), "seeds": 2}
    (first,) = summarise(figure(), store, 1, GRID)["cells"]
    assert first["gain"]["sound"] == {"mean": pytest.approx(-0.02), "error": None, "seeds": 1}
    (traffic,) = summarise(figure(shows="traffic"), store, 2, GRID)["cells"]
    assert traffic["gain"] == {}


def test_methods_are_compared_over_the_seeds_they_share(store: Store) -> None:
    (late,) = (
        one
        for one in settle(trials_of(figure(), seeds=2), store, GRID)
        if (one.method.name, one.form, one.seed) == ("fedavg", "sound", 2)
    )
    store.path(late).unlink()
    (cell,) = summarise(figure(), store, 2, GRID)["cells"]
    counts = {form: {method[form]["seeds"] for method in cell["methods"].values()} for form in ("published", "sound")}
    assert counts == {"published": {2}, "sound": {1}}


def test_cells_without_a_finished_trial_are_left_out(store: Store) -> None:
    other = replace(CELL, rounds=4)
    summary = summarise(figure(cells=(CELL, other)), store, 2, GRID)
    assert [cell["cell"]["rounds"] for cell in summary["cells"]] == [3]
    assert "1 of the figure's 2 cells have no finished training yet and are left out." in sentences(summary)


def test_missing_trials_are_counted(store: Store) -> None:
    summary = summarise(figure(), store, 3, GRID)
    assert summary["missing"] == 6
    assert sentences(summary)[-1].startswith("6 trainings are missing")


@pytest.mark.parametrize("axis", ["clients", "budgets", "method"])
def test_files_are_written(store: Store, tmp_path: Path, axis: str) -> None:
    summary = summarise(figure(axis=axis), store, 2, GRID, "polyeps reproduce test")
    files = presenting.write(summary, tmp_path / "results", "test-figure-1")
    assert [file.suffix for file in files] == [".json", ".md", ".svg"]
    assert json.loads(files[0].read_text())["command"] == "polyeps reproduce test"
    assert "| pfa | 50.0 | 54.0 ± 1.4 |" in files[1].read_text()
    first = files[2].read_bytes()
    presenting.write(summary, tmp_path / "results", "test-figure-1")
    assert files[2].read_bytes() == first


def test_a_form_that_was_not_run_says_so(store: Store, tmp_path: Path) -> None:
    summary = summarise(figure(), store, 2, GRID)
    (cell,) = summary["cells"]
    assert "not run" not in presenting.draw(summary, tmp_path / "both")[0].read_text()
    for method in cell["methods"].values():
        method["sound"] = None
    assert presenting.draw(summary, tmp_path / "one")[0].read_text().count(">not run<") == 1


def test_a_bar_that_was_not_run_says_so(store: Store, tmp_path: Path) -> None:
    summary = summarise(figure(axis="method"), store, 2, GRID)
    (cell,) = summary["cells"]
    assert "not run" not in presenting.draw(summary, tmp_path / "all")[0].read_text()
    cell["methods"]["pfa"]["sound"] = None
    assert presenting.draw(summary, tmp_path / "fewer")[0].read_text().count(">not run<") == 1


def test_equal_values_lie_beside_each_other(store: Store, tmp_path: Path) -> None:
    from matplotlib.container import ErrorbarContainer
    from matplotlib.figure import Figure as Picture

    summary = summarise(figure(), store, 2, GRID)
    summary["cells"] *= 2
    axes = Picture().subplots()
    presenting._draw_panel(axes, summary, summary["cells"], "sound")
    drawn = [container for container in axes.containers if isinstance(container, ErrorbarContainer)]
    first = [round(float(np.asarray(bars.lines[0].get_xdata())[0]), 3) for bars in drawn]
    assert len(set(first)) == len(summary["cells"][0]["methods"])
    assert first == sorted(first)
    assert max(map(abs, first)) < 0.2


def test_nothing_is_drawn_of_nothing(tmp_path: Path) -> None:
    empty: Figure = figure()
    summary = summarise(empty, Store(tmp_path / "empty"), 2, GRID)
    assert [file.suffix for file in presenting.write(summary, tmp_path, "empty")] == [".json", ".md"]


def test_lines_over_rounds_are_drawn(tmp_path: Path) -> None:
    told = {"study": "test", "kind": "figure", "figure": "2", "title": "Lines", "note": "a note", "version": "0"}
    lines = {"left": {"one": [0.1, 0.2], "other": [0.3, 0.1]}, "right": {"one": [1.0, 2.0]}}
    summary = {**told, "command": "", "missing": 0, "columns": ["a"], "table": [[1], ["x|y"]], "lines": lines}
    files = presenting.write(summary, tmp_path, "lines")
    assert [file.suffix for file in files] == [".json", ".md", ".svg"]
    assert files[1].read_text() == "# test, figure 2: Lines\n\n| a |\n|---|\n| 1 |\n| x\\|y |\n\nNote: a note.\n"
