"""Figures 1 and 2 of FedHDP: simulations on the curves, optima at the bottom, files that hold all of it."""

import json
from pathlib import Path

import pytest
from polyeps_reproductions.fedhdp import STUDY
from polyeps_reproductions.fedhdp_theory import FEW, FIGURES
from polyeps_reproductions.presenting import write
from polyeps_reproductions.trials import Store


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("figures")
    files = []
    for figure in FIGURES:
        files += write(STUDY.summary(figure, Store(place), 1, True), place, quick=True)
    assert sorted(file.name for file in files) == sorted(
        f"fedhdp-figure-{number}-quick.{ending}" for number in "12" for ending in ("json", "md", "png", "svg")
    )
    assert all(file.stat().st_size > 1000 for file in files)
    return place


@pytest.mark.parametrize(("number", "axis"), [("1", "r"), ("2", "λ")])
def test_simulations_lie_on_the_curves_and_optima_at_the_bottom(folder: Path, number: str, axis: str) -> None:
    summary = json.loads((folder / f"fedhdp-figure-{number}-quick.json").read_text())
    assert summary["columns"][2] == axis
    curves: dict[tuple[str, str], list[list[float]]] = {}
    for panel, name, *values, optimum in summary["table"]:
        curves.setdefault((panel, name), []).append([*values, optimum == "yes"])
    assert len(curves) == 6
    for rows in curves.values():
        assert all(abs(expected - simulated) < 4.5 * error for _, expected, simulated, error, _ in rows)
        (best,) = (row for row in rows if row[-1])
        assert best[1] == min(row[1] for row in rows)
        assert best[2] <= min(row[2] for row in rows) + 4 * best[3]


def test_the_papers_statements_about_figure_two(folder: Path) -> None:
    """FedHDP is ahead of Ditto with FedAvg; a client that opts out errs less, but only as long as γ² stays."""
    table = json.loads((folder / "fedhdp-figure-2-quick.json").read_text())["table"]
    best = {(row[0], row[1]): (row[2], row[3]) for row in table if row[-1]}
    for panel in ("Ditto with FedAvg", "FedHDP"):
        stays, out, fair = (best[panel, name] for name in ("stays private", "opts out, γ² stays", "opts out, z stays"))
        assert out[0] >= stays[0]
        assert out[1] < stays[1] - 0.003
        assert stays[1] - 1e-3 * stays[1] < fair[1] <= stays[1]
    for name in ("stays private", "opts out, γ² stays", "opts out, z stays"):
        assert best["FedHDP", name][1] < 0.7 * best["Ditto with FedAvg", name][1]
    assert best["FedHDP", "stays private"][0] == pytest.approx(FEW.private_penalty, rel=1e-5)
