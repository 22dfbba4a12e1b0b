"""Sweeps on the command line: the table of what differed, what it says about choosing, and resuming."""

import json
from pathlib import Path

import pytest
from support.commands import refused, run, run_json

from polyeps.experiment.journal import Journal

FILE = """
rounds = 2
algorithm = ["fedavg", { name = "fedavg", budgets = "none" }]
[data]
clients = 3
size = 60
[budgets]
epsilon = 2.0
[training]
batch = 6
local_steps = 2
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    work = tmp_path / "work"
    work.mkdir()
    (work / "wards.toml").write_text(FILE)
    monkeypatch.chdir(work)
    monkeypatch.setenv("POLYEPS_CACHE", str(tmp_path / "cache"))
    return work


def test_a_sweep_ends_with_a_table_and_says_what_it_costs(here: Path) -> None:
    spoken = run("run", "wards.toml", "--set", "training.learning_rate=0.1,0.3")
    rows = [line.split() for line in spoken.stdout.splitlines() if " fedavg" in line]
    assert [(row[0], row[1]) for row in rows] == [
        ("0.1", "fedavg"),
        ("0.1", "fedavg"),
        ("0.3", "fedavg"),
        ("0.3", "fedavg"),
    ]
    assert "selection on them" in spoken.stdout
    assert "data.validation=0.2" in spoken.stdout
    assert "would spend 2 times each client's budget" in spoken.stdout
    assert "run 1 of 2: learning_rate=0.1" in spoken.stderr
    names = sorted(path.name for path in (here / "runs" / "wards").iterdir())
    assert names == ["learning_rate=0.1", "learning_rate=0.3", "sweep.json"]
    shown = run_json("report", "runs/wards")["methods"]
    assert [row["label"] for row in shown if row["budgets"] == "own"] == [
        f"fedavg (wards, learning_rate={rate})" for rate in (0.1, 0.3)
    ]
    assert (here / "report.html").exists()
    for command in (["export", "runs/wards", "-o", "x.pt"], ["certificate", "runs/wards", "0"]):
        refused(*command, naming=("runs/wards is a sweep", "give the folder of one of its runs"))


def test_programs_hear_of_every_run(here: Path) -> None:
    shown = run_json(
        "run", "wards.toml", "--set", "training.clip=1,2", "--set", "data.validation=0.2", "--seeds", "2", "-o", "out"
    )
    assert shown["differs"] == ["training.clip"]
    assert [one["values"] for one in shown["runs"]] == [{"training.clip": 1}, {"training.clip": 2}]
    assert [one["folder"] for one in shown["runs"]] == ["out/clip=1", "out/clip=2"]
    assert all(row["seeds"] == row["finished"] == 2 for one in shown["runs"] for row in one["methods"])
    assert [note for note in shown["notes"] if "test records" in note] == []  # validation records are for choosing
    for one in shown["runs"]:
        journal = Journal(Path(one["folder"]) / "journal.db")
        values = [
            row["value"]
            for row in journal.query("SELECT value FROM metrics WHERE job LIKE 'fedavg-%' AND name = 'accuracy'")
        ]
        journal.close()
        assert one["methods"][0]["final_accuracy"] == pytest.approx(sum(values) / 4)


def test_an_interrupted_sweep_is_resumed(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from polyeps.experiment import sweep

    whole, count = sweep.do_run, 0

    def interrupted(*arguments: object, **options: object) -> None:
        nonlocal count
        count += 1
        if count == 2:
            raise KeyboardInterrupt
        whole(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(sweep, "do_run", interrupted)
    spoken = run("run", "wards.toml", "--set", "training.clip=1,2,3", "-o", "my sweep", status=130)
    assert "stopped; continue with: polyeps run --resume 'my sweep'" in spoken.stderr
    assert spoken.stdout == ""
    begun = (here / "my sweep" / "clip=1" / "models" / "fedavg-1.safetensors").stat().st_mtime_ns
    monkeypatch.undo()
    monkeypatch.chdir(here)
    shown = run_json("run", "--resume", "my sweep")
    assert [one["values"] for one in shown["runs"]] == [{"training.clip": clip} for clip in (1, 2, 3)]
    assert (here / "my sweep" / "clip=1" / "models" / "fedavg-1.safetensors").stat().st_mtime_ns == begun
    refused("run", "--resume", "my sweep", "--set", "training.clip=4", naming=("leave out --set",))
    refused("run", "--resume", "my sweep", "--track", "wandb", naming=("--track",))


@pytest.mark.parametrize(
    ("changes", "naming"),
    [
        (["training.batch=6,61"], ("batch=61", "61")),
        (["training.clip=1,-2"], ("training.clip", "-2")),
        (["training.clip=1,,2"], ("empty",)),
        (["training.clipp=1,2"], ("training.clipp", "did you mean 'clip'?")),
        (["training.clip=1,1"], ("twice",)),
    ],
)
def test_a_bad_value_leaves_nothing_behind(changes: list[str], naming: tuple[str, ...], here: Path) -> None:
    refused("run", "wards.toml", *(word for one in changes for word in ("--set", one)), naming=naming)
    assert [path.name for path in here.iterdir()] == ["wards.toml"]


@pytest.mark.parametrize("command", ["plan", "certify", "calibrate"])
def test_other_commands_take_one_value(command: str) -> None:
    refused(command, "wards.toml", "--set", "training.clip=1,2", naming=("several values are a sweep",))


def test_a_list_or_a_quoted_text_is_one_value(here: Path) -> None:
    run("run", "wards.toml", "--set", "seeds=[1,2]", "--set", 'name="a,b"')
    assert sorted(path.name for path in (here / "runs" / "a,b" / "models").iterdir())[-1] == "fedavg-2.safetensors"
    journal = Journal(here / "runs" / "a,b" / "journal.db")
    assert json.dumps(journal.about()["experiment"]["seeds"]) == "[1, 2]"
    journal.close()


def test_a_run_is_tracked_by_one_option(here: Path) -> None:
    run("run", "wards.toml", "--track", "tensorboard", "-o", "out")
    assert list((here / "out" / "tensorboard" / "fedavg-1").iterdir())
    refused("run", "wards.toml", "--track", "tensorbord", naming=("did you mean 'tensorboard'?",))
