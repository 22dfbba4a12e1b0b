"""The folder that `polyeps new` makes: what it holds, that it can be read, and that nothing is overwritten."""

import os
import re
import tomllib
from pathlib import Path

import pytest
from support.commands import refused, run, run_json

from polyeps.data.hospitals import PATIENTS, hospitals_csv
from polyeps.errors import InputError
from polyeps.experiment import config
from polyeps.experiment.scaffold import scaffold

NAMED = "Mapping" in str(config.BudgetSettings.model_fields["epsilon"].annotation) or "dict" in str(
    config.BudgetSettings.model_fields["epsilon"].annotation
)


def test_the_experiment_says_all_there_is_to_say(tmp_path: Path) -> None:
    files = scaffold(tmp_path / "hospitals")
    assert [file.name for file in files] == ["experiment.toml", "patients.csv", "README.md"]
    assert files[1].read_text() == hospitals_csv()
    values = tomllib.loads(files[0].read_text())
    assert set(values["budgets"]["epsilon"]) == set(PATIENTS)
    header = files[1].read_text().partition("\n")[0].split(",")
    data = values["data"]
    assert {data["client"], data["label"], data["unit"], *data["columns"]} == set(header)
    changes = [] if NAMED else ["budgets.epsilon=1.0"]  # a version without named budgets reads all the rest
    found = config.read_experiment(files[0], changes)
    assert found.name == "hospitals"
    assert found.data.file == tmp_path.absolute() / "hospitals" / "patients.csv"
    assert found.data.unit == "patient"


@pytest.mark.skipif(not NAMED, reason="budgets by name are not in this version")
def test_the_commands_of_the_page_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("POLYEPS_CACHE", str(tmp_path / "cache"))
    shown = run_json("new", "hospitals")
    monkeypatch.chdir(tmp_path / "hospitals")
    page = Path("README.md").read_text()
    listed = re.findall(r"^\$ polyeps (.*)$", page, re.MULTILINE)
    assert [f"polyeps {line}" for line in listed] == shown["commands"]
    for line in listed:
        run(*line.split())
    estimate = run_json("plan", "experiment.toml", "--accuracy")["accuracy"]
    (method,) = estimate["methods"]
    assert estimate["source"] == "drawn"
    assert method["majority"] + 0.1 < method["accuracy"] < method["without_privacy"] + 0.05
    assert Path("report.html").exists()


def test_nothing_is_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name in ("mine", "file", "link"):
        refused("new", name, naming=(name, "exists already"))
    assert list((tmp_path / "mine").iterdir()) == []
    assert (tmp_path / "file").read_text() == "mine"
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize("name", ["..", ".", "", "a:b", "-x", ".hidden", "a/..", 'a"b', "a\\b", "a\nb", "x" * 101])
def test_bad_names_are_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    refused("new", "--", name, naming=("name: becomes part of file names",))
    assert list(tmp_path.iterdir()) == []


def test_a_folder_in_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    refused("new", str(tmp_path / "a" / "b"), naming=("does not exist; make it first",))


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = Path.write_text

    def full(self: Path, *arguments: str, **options: str) -> int:
        if self.suffix == ".md":
            raise OSError(28, os.strerror(28))
        return write(self, *arguments, **options)

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(InputError, match=r"README.md cannot be written: No space left"):
        scaffold(tmp_path / "hospitals")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["six hospitals", "it's", "{name}", "größe"])
def test_unusual_names_are_names(name: str, tmp_path: Path) -> None:
    files = scaffold(tmp_path / name)
    assert tomllib.loads(files[0].read_text())["name"] == name
