"""The tutorial's commands, as they stand on the page, run one after another as a reader would."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[1] / "docs" / "tutorial" / "six-hospitals.md"


def commands() -> list[str]:
    blocks = re.findall(r"```console\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    return [line.removeprefix("$ ") for block in blocks for line in block.splitlines() if line.startswith("$ ")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The reader's folder after the last command; the output of each is in a file of its own."""
    here = tmp_path_factory.mktemp("reader")
    for number, command in enumerate(commands()):
        words = shlex.split(command)
        if words[0] == "cd":
            here /= words[1]
            continue
        if words[0] == "polyeps":
            words[:1] = [sys.executable, "-m", "polyeps"]
        done = subprocess.run(words, cwd=here, capture_output=True, text=True, env=os.environ, check=False)
        assert done.returncode == 0, f"{command}: {done.stderr}"
        assert "Traceback" not in done.stderr
        (here / f"{number}.out").write_text(done.stdout, encoding="utf-8")
    return here


def said(folder: Path, beginning: str) -> str:
    number = next(number for number, command in enumerate(commands()) if command.startswith(beginning))
    return (folder / f"{number}.out").read_text(encoding="utf-8")


def test_it_ends_with_a_model_a_certificate_and_a_report(folder: Path) -> None:
    for name in ("schema.toml", "report.html", "cedar.html", "predictions.csv", "model.onnx"):
        assert (folder / name).stat().st_size > 0
    page = (folder / "cedar.html").read_text(encoding="utf-8")
    assert "A strong guarantee." in page
    assert "all records of one patient" in page
    assert len((folder / "predictions.csv").read_text().splitlines()) == len(
        (folder / "patients.csv").read_text().splitlines()
    )


def test_it_shows_what_the_page_says(folder: Path) -> None:
    joining = said(folder, "polyeps run")
    assert "Is joining weiavg worth it?" in joining
    for client in ("cedar", "alder"):
        line = next(line for line in joining.splitlines() if line.strip().startswith(client) and "±" in line)
        joint, alone = (float(line.split()[place]) for place in (1, 3))
        assert joint > alone
        assert "cannot be told apart (+" in line
    against_home = [line.rsplit("  ", 2)[1].strip() for line in joining.splitlines() if "cannot be told apart" in line]
    assert len(against_home) == 6
    drafted = (folder / "schema.toml").read_text(encoding="utf-8")
    assert "age = { range = [10, 90]" in drafted
    shown = (folder / "experiment.toml").read_text(encoding="utf-8")
    for block in re.findall(r"```toml\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL):
        for line in filter(None, block.splitlines()):
            assert line in shown, line


def test_every_ledger_holds_its_hospitals_budget(folder: Path) -> None:
    file = folder / "runs" / "hospitals" / "ledgers" / "weiavg-1.db"
    words = [sys.executable, "-m", "polyeps", "ledger", "show", "--file", str(file), "--json"]
    rows = json.loads(subprocess.run(words, capture_output=True, text=True, check=True).stdout)["clients"]
    budgets = {"elm": 4.0, "alder": 1.0, "cedar": 0.5, "fir": 8.0, "oak": 8.0, "birch": 2.0}
    assert {row["client"]: row["epsilon"] for row in rows} == budgets
    assert all(0 < row["spent"] <= row["epsilon"] and "patient" in row["unit"] for row in rows)
