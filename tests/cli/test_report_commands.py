import subprocess
import sys
from pathlib import Path

import pytest
from support.commands import refused, run, run_json
from support.journals import new_journal, write_job


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    journal = new_journal(tmp_path / "run")
    write_job(journal)
    journal.close()
    return tmp_path / "run"


def test_a_page_is_written(folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "page.html"
    spoken = run("report", str(folder), "-o", str(output))
    assert (spoken.stdout, spoken.stderr) == ("", f"polyeps: wrote {output}\n")
    assert output.read_text(encoding="utf-8").startswith("<!doctype html>")
    output.write_text("an older page")
    run("report", str(folder), "--output", str(output))
    assert "fedavg" in output.read_text(encoding="utf-8")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["page.html", "run"]


def test_the_page_lies_here_unless_told_otherwise(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run("report", str(folder))
    assert (tmp_path / "report.html").is_file()


def test_figures_for_programs(folder: Path, tmp_path: Path) -> None:
    shown = run_json("report", str(folder), "-o", str(tmp_path / "page.html"))
    (method,) = shown["methods"]
    assert (method["label"], method["final_accuracy"], method["largest_ratio"]) == ("fedavg", pytest.approx(0.6), 0.5)
    assert [(row["client"], row["seed"], row["spent"]) for row in shown["clients"]] == [
        ("ward-a", 0, 0.25),
        ("ward-b", 0, 1.0),
    ]


def test_bad_input_is_one_sentence(folder: Path, tmp_path: Path) -> None:
    absent = tmp_path / "absent"
    refused("report", str(absent), "-o", str(tmp_path / "page.html"), naming=(str(absent), "give the folder of a run"))
    refused("report", str(folder), str(absent), "-o", str(tmp_path / "page.html"), naming=(str(absent),))
    refused("report", str(folder), "-o", str(tmp_path / "no" / "page.html"), naming=("does not exist", "report.html"))
    refused("report", naming=("RUN",))
    assert [file.name for file in tmp_path.iterdir()] == ["run"]


def test_the_help_needs_no_pictures() -> None:
    script = (
        "import sys; from polyeps.cli import execute; execute(['report', '--help']); "
        "assert not {'matplotlib', 'jinja2', 'torch'} & set(sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "RUN..." in ran.stdout
