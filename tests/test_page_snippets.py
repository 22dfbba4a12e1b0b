"""Every snippet of Python and TOML in README and docs: Python runs, settings are those of an experiment."""

from __future__ import annotations

import re
import shutil
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import BaseModel
from support.commands import run

from polyeps.data.own_tables import from_arrays
from polyeps.experiment.config import Experiment

ROOT = Path(__file__).parent.parent
PAGES = {str(page.relative_to(ROOT)): page for page in (ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md")))}
ELSEWHERE = {  # pages whose Python another test runs
    "README.md": "tests/test_package.py",
    "docs/guides/use-the-model.md": "tests/experiment/test_model_export.py",
    "docs/guides/own-algorithm.md": "tests/test_own_parts.py",
    "docs/guides/own-encoder.md": "tests/test_own_parts.py",
    "docs/guides/own-metric.md": "tests/test_own_parts.py",
    "docs/guides/own-tracker.md": "tests/test_own_parts.py",
}


def blocks(name: str, kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```", PAGES[name].read_text(), re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("name", [name for name in PAGES if blocks(name, "python") and name not in ELSEWHERE])
def test_python_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks(name, "python"):
        exec(compile(block, name, "exec"), names)


@pytest.mark.parametrize(("name", "test"), ELSEWHERE.items())
def test_python_that_is_run_elsewhere(name: str, test: str) -> None:
    assert blocks(name, "python")
    assert Path(name).stem in (ROOT / test).read_text()


def own_table() -> dict[str, Any]:
    run("new", "hospitals")
    shutil.copy("hospitals/patients.csv", "elm.csv")
    columns = Path("hospitals/experiment.toml").read_text().partition("[data.columns]")[2].partition("\n\n")[0]
    Path("schema.toml").write_text(f'label = "outcome"\nclasses = ["well", "ill"]\n[columns]{columns}\n')
    chance = np.random.default_rng(0)
    clients, labels = np.repeat(["elm", "cedar"], 40), chance.integers(0, 2, 80)
    frame = {"hospital": clients, "bp": chance.uniform(60, 200, 80), "outcome": labels}
    features = chance.normal(size=(80, 3)).astype("float32")
    dataset = torch.utils.data.TensorDataset(torch.tensor(features), torch.tensor(labels))
    return {
        "Path": Path,
        "frame": frame,
        "features": features,
        "labels": labels,
        "clients": clients,
        "dataset": dataset,
    }


def targets() -> dict[str, Any]:
    chance = np.random.default_rng(0)
    return {
        "from_arrays": from_arrays,
        "features": chance.normal(size=(12, 3)).astype("float32"),
        "clients": np.repeat(["elm", "cedar"], 6),
        "lengths": chance.uniform(size=12).astype("float32"),
        "zeros_and_ones": chance.integers(0, 2, (12, 4)),
        "tokens": chance.integers(0, 9, (12, 5)),
        "tags": chance.integers(0, 5, (12, 5)),
    }


# Fragments (blocks marked `py`) and the names that their text takes for granted.
FRAGMENTS: dict[str, Callable[[], dict[str, Any]]] = {
    "docs/guides/own-data.md": own_table,
    "docs/guides/inputs-and-targets.md": targets,
}


@pytest.mark.parametrize("name", [name for name in PAGES if blocks(name, "py")])
def test_fragments_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = FRAGMENTS[name]()
    for block in blocks(name, "py"):
        exec(compile(block, name, "exec"), names)


def sections(kind: type[BaseModel]) -> dict[str, Any]:
    return {name: field.annotation for name, field in kind.model_fields.items()}


def unknown(settings: dict[str, Any]) -> list[str]:
    """Return the settings that no experiment has."""
    known = sections(Experiment)
    found = [key for key in settings if key not in known]
    for key in settings.keys() & known.keys():
        if isinstance(known[key], type) and issubclass(known[key], BaseModel):
            found += settings[key].keys() - sections(known[key]).keys() - ({"schema"} if key == "data" else set())
    return found


@pytest.mark.parametrize("name", [name for name in PAGES if blocks(name, "toml") and "deploy" not in name])
def test_settings_exist(name: str) -> None:
    for block in blocks(name, "toml"):
        assert unknown(tomllib.loads(block)) == [], name


def test_a_setting_that_does_not_exist_is_found() -> None:
    assert unknown({"rounds": 3, "training": {"clip": 1.0, "clap": 1}, "budget": {}}) == ["budget", "clap"]
