"""Tables, sentences and the picture of measured accuracy show the benchmark's results; the example is its recipe."""

from __future__ import annotations

import copy
import re
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from dp_accounting import GaussianDpEvent, SelfComposedDpEvent
from dp_accounting.pld import PLDAccountant
from matplotlib.container import ErrorbarContainer
from support.commands import run_json

from polyeps.experiment import config

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "recipe_mnist.toml"
GUIDE = ROOT / "docs" / "guides" / "better-recipe.md"
COLUMNS = {
    "FedAvg": "fedavg", "WeiAvg": "weiavg", "public-only": "public-only", "PFA": "pfa", "Robust-HDP": "robust-hdp",
    "balanced": "ours", "maximum": "maximum", "non-private": "non-private",
}  # fmt: skip
Results = dict[str, dict[str, dict[str, Any]]]


def program(name: str) -> ModuleType:
    """Load a program of benchmarks/, which is no package."""
    spec = spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look up their module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def picture() -> ModuleType:
    return program("accuracy_picture")


@pytest.fixture(scope="module")
def results(picture: ModuleType) -> Results:
    found: Results = picture.read()
    return found


def table(page: Path, name: str) -> list[dict[str, str]]:
    """Return the rows of a marked table, by the names of its columns."""
    (inside,) = re.findall(rf"<!-- accuracy {name} -->\n(.*?)<!-- end -->", page.read_text("utf-8"), re.DOTALL)
    first, _, *rows = [[cell.strip(" *") for cell in line.strip("|").split("|")] for line in inside.splitlines()]
    return [dict(zip(first, row, strict=True)) for row in rows]


def test_pages_and_picture_are_made_from_the_results(picture: ModuleType, results: Results) -> None:
    assert list(picture.outdated(results)) == [], "run python benchmarks/accuracy_picture.py"


@pytest.mark.parametrize(("name", "suffix"), [("recipe", ""), ("today", "/pixels")])
def test_every_number_in_the_tables_is_that_of_the_results(results: Results, name: str, suffix: str) -> None:
    rows = table(GUIDE, name)
    assert len(rows) == len(results)
    for row, (cell, methods) in zip(rows, results.items(), strict=True):
        heading = row.pop("data, partition, budgets").lower().replace(", ", "-").replace(" ", "-")
        assert heading.replace("fashion-mnist", "fashion").replace("adult-iid", "adult") == cell
        there = {method for method in methods if ("/pixels" in method) == bool(suffix)}
        for column, shown in row.items():
            result = methods.get(COLUMNS[column] + suffix)
            there.discard(COLUMNS[column] + suffix)
            if result is None:
                assert shown == "–"
                continue
            mean, deviation = map(float, shown.split(" ± "))
            assert mean == pytest.approx(100 * result["mean"], abs=0.0501)
            assert deviation == pytest.approx(100 * result["sd"], abs=0.0501)
        assert not there, f"{cell} has methods that the table lacks"


def test_the_readme_shows_the_best_rules(results: Results) -> None:
    own = list(COLUMNS.values())[:6]
    for row, methods in zip(table(ROOT / "README.md", "summary"), results.values(), strict=True):
        for column, suffix, names in (
            ("papers' training, best rule", "/pixels", own),
            ("recipe, best other rule", "", own[:5]),
        ):
            shown, _, rule = row[column].rstrip(")").partition(" (")
            highest = max(methods[name + suffix]["mean"] for name in names if name + suffix in methods)
            assert methods[COLUMNS[rule] + suffix]["mean"] == highest
            assert float(shown.split(" ± ")[0]) == pytest.approx(100 * highest, abs=0.0501)
        assert float(row["recipe, `balanced`"].split(" ± ")[0]) == pytest.approx(
            100 * methods["ours"]["mean"], abs=0.0501
        )


def test_the_sentences_beside_the_tables_hold(picture: ModuleType, results: Results) -> None:
    gains = picture.gains(results)
    assert abs(gains.pop("adult-mixgauss1")) < 0.5  # "What did not help: the recipe on Adult"
    assert min(gains.values()) > 5
    iid, shards = (results[f"mnist-{partition}-mixgauss1"]["fedavg"]["mean"] for partition in ("iid", "shards"))
    assert iid == pytest.approx(shards, abs=1e-3)  # "whatever the partition"
    assert all(one["spent"] <= 1 and len(one["seeds"]) == 5 for cell in results.values() for one in cell.values())


def test_other_results_are_noticed_and_missing_ones_shown(
    picture: ModuleType, results: Results, tmp_path: Path
) -> None:
    changed = copy.deepcopy(results)
    changed["adult-mixgauss1"]["ours"]["mean"] -= 0.05
    assert set(picture.outdated(changed)) == {*picture.PAGES, picture.PICTURE}
    for methods in changed.values():
        for name in ("ours", "weiavg/pixels"):
            methods.pop(name, None)
    changed["adult-mixgauss1"] = {"fedavg": {"mean": 0.5, "sd": None}}
    page = picture.filled("<!-- accuracy recipe -->\n<!-- end -->", changed)
    assert page.splitlines()[-2] == "| Adult, IID, MixGauss1 |" + " **50.0** |" + " – |" * 6
    for name in picture.PARTS:
        assert picture.PARTS[name](changed)
    picture.save(changed, tmp_path / "one.svg")
    picture.save(changed, tmp_path / "two.svg")
    assert "not run" in (tmp_path / "one.svg").read_text("utf-8")


def test_the_picture_has_a_point_for_every_result(picture: ModuleType, results: Results) -> None:
    panels = [axes for axes in picture.draw(results).axes if axes.get_title()]
    for axes, methods in zip(panels, results.values(), strict=True):
        bars = [one for one in axes.containers if isinstance(one, ErrorbarContainer)]
        points = [tuple(np.asarray(bar.lines[0].get_xydata()).ravel().tolist()) for bar in bars]
        assert sorted(x for x, _ in points) == pytest.approx(sorted(100 * one["mean"] for one in methods.values()))
        assert len({y for _, y in points}) == len(points)  # a height of its own: none hides another


def test_the_example_is_the_recipe_of_the_benchmark(results: Results) -> None:
    cell = "mnist-shards-mixgauss3"
    recipe = program("accuracy").Recipe().experiment(cell, "ours", results[cell]["ours"]["learning_rate"])
    expected, found = config.experiment(recipe), config.read_experiment(EXAMPLE)
    for part in ("rounds", "data", "budgets", "model", "training"):
        assert getattr(found, part) == getattr(expected, part)
    assert found.server.model_dump() == pytest.approx(expected.server.model_dump()), "copy it to example and guide"
    assert found.algorithm[0] == expected.algorithm[0]
    shown = re.search(r"```toml\n(name = .*?)```", GUIDE.read_text("utf-8"), re.DOTALL)
    assert shown is not None
    assert shown[1] in EXAMPLE.read_text("utf-8")


def test_the_example_spends_what_the_accountant_says() -> None:
    """Digits take MNIST's place, which need not be there: budgets, rounds and releases are the same."""
    shown = run_json("certify", str(EXAMPLE), "--set", 'data.name="digits"', "--set", "seeds=1")["methods"]
    assert [method["method"] for method in shown] == ["balanced", "weiavg", "fedavg"]
    clients = shown[0]["clients"]
    assert len(clients) == 50
    assert all(0.95 * one["epsilon"] < one["certified"] <= one["epsilon"] for one in clients)
    for one in (clients[0], max(clients, key=lambda one: float(one["epsilon"]))):
        accountant = PLDAccountant().compose(SelfComposedDpEvent(GaussianDpEvent(one["sigma"]), one["rounds"]))
        assert one["certified"] == pytest.approx(accountant.get_epsilon(1e-5), rel=5e-3)


# Speed


def test_tables_of_speed_are_those_of_the_results() -> None:
    tables = program("speed_tables")
    assert [*tables.outdated()] == []
    shown = (ROOT / "README.md").read_text("utf-8")
    measured = tables.engine()[tables.CPU]["logistic"]
    assert f"| {tables.number(measured['polyeps'])} |" in shown
    changed = shown.replace(tables.number(measured["polyeps"]), "99 999")
    assert tables.filled(changed) == shown
