"""`polyeps run` and `polyeps demo`: what they print and leave behind, how they are stopped, and what they refuse."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from support.commands import Spoken, refused, run, run_json

from polyeps.experiment import config
from polyeps.experiment.journal import Journal
from polyeps.experiment.outcome import read
from polyeps.ledger import Ledger

FILE = """
rounds = 3

[data]
clients = 4
size = 60

[budgets]
epsilons = [0.5, 8.0, 0.6, 9.0]
delta = 1e-3

[training]
batch = 6
local_steps = 2

[[algorithm]]
name = "fedavg"

[[algorithm]]
name = "fedavg"
budgets = "none"
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An experiment in an empty folder, with a cache of its own."""
    work = tmp_path / "work"
    work.mkdir()
    (work / "wards.toml").write_text(FILE)
    monkeypatch.chdir(work)
    monkeypatch.setenv("POLYEPS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("POLYEPS_DATA", raising=False)
    return work


def test_a_run_prints_methods_and_clients_and_says_where_everything_is(here: Path) -> None:
    spoken = run("run", "wards.toml")
    assert "fedavg" in spoken.stdout
    assert "fedavg (none)" in spoken.stdout
    assert "Every client stayed within its effective budget" in spoken.stdout
    assert "Everything is in runs/wards; see it with: polyeps report runs/wards" in spoken.stdout
    assert [line.split(",")[0] for line in spoken.stderr.splitlines()] == [
        "polyeps: fedavg-1 is done",
        "polyeps: fedavg (none)-1 is done",
    ]
    found = sorted(str(path.relative_to(here / "runs/wards")) for path in (here / "runs/wards").rglob("*"))
    assert found == [
        "journal.db",
        "ledgers",
        "ledgers/fedavg-1.db",
        "ledgers/fedavg-1.db.head",
        "metrics.csv",
        "models",
        "models/fedavg (none)-1.safetensors",
        "models/fedavg-1.safetensors",
    ]
    run("report", "runs/wards")
    assert (here / "report.html").exists()


def test_a_second_run_takes_a_new_folder_and_changes_nothing_about_the_first(here: Path) -> None:
    run("run", "wards.toml")
    before = (here / "runs/wards/journal.db").read_bytes()
    run("run", "wards.toml", "--set", "training.clip=0.5")
    assert sorted(path.name for path in (here / "runs").iterdir()) == ["wards", "wards-2"]
    assert (here / "runs/wards/journal.db").read_bytes() == before
    one, other = read(here / "runs/wards"), read(here / "runs/wards-2")
    assert not torch.equal(one.models["fedavg", 1], other.models["fedavg", 1])


def test_settings_seeds_and_output_from_the_command_line(here: Path) -> None:
    spoken = run(
        "run", "wards.toml", "--set", "rounds=2", "--set", "algorithm.training.batch=5", "--seeds", "2", "-o", "x"
    )
    assert "Everything is in x;" in spoken.stdout
    assert set(read(here / "x").accuracy) == {(name, seed) for name in ("fedavg", "fedavg (none)") for seed in (1, 2)}
    about = Journal(here / "x/journal.db").about()
    assert about["experiment"]["rounds"] == 2
    assert [method["training"] for method in about["experiment"]["algorithm"]] == [{"batch": 5}] * 2


def test_figures_for_programs(here: Path) -> None:
    shown = run_json("run", "wards.toml", "-o", "x")
    assert shown["folder"] == "x"
    assert [row["label"] for row in shown["methods"]] == ["fedavg", "fedavg (none)"]
    spent = {row["client"]: row["spent"] for row in shown["clients"]["fedavg-1"]}
    assert spent == read(here / "x").spent["fedavg", 1]
    assert 0.95 * 8 < spent["1"] <= 8


def test_labels_are_readable_names_of_files(here: Path) -> None:
    (here / "wards.toml").write_text(FILE.replace('name = "fedavg"', 'name = "fedavg"\nlabel = "plain, ε (own)"', 1))
    assert "plain, ε (own)" in run("run", "wards.toml").stdout
    assert (here / "runs/wards/models/plain, ε (own)-1.safetensors").exists()


def test_a_run_that_is_done_is_resumed_by_doing_nothing(here: Path) -> None:
    run("run", "wards.toml")
    first = run_json("run", "--resume", "runs/wards")
    assert first["methods"] == run_json("run", "--resume", "runs/wards")["methods"]


def start(*arguments: str, **more: Any) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "polyeps", *arguments]
    return subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=_hear_ctrl_c,
        **more,
    )


def _hear_ctrl_c() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # which a shell takes from what it starts in the background


def test_ctrl_c_says_how_to_go_on_and_going_on_ends_the_same(here: Path) -> None:
    changes = ["--set", "rounds=200", "--set", "training.local_steps=10"]
    child = start("run", "wards.toml", *changes, "-o", "a run")
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not rounds_written(here / "a run"):
        time.sleep(0.01)
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=60)
    assert child.returncode == 130, err
    assert out == ""
    message = err.strip().splitlines()[-1]
    assert message == "polyeps: stopped; continue with: polyeps run --resume 'a run'"
    assert 0 < rounds_written(here / "a run") < 600
    done = run_json(*shlex.split(message.partition("with: polyeps ")[2]))
    whole = run_json("run", "wards.toml", *changes, "-o", "whole")
    assert done["clients"] == whole["clients"]
    for key, model in read(here / "whole").models.items():
        assert torch.equal(model, read(here / "a run").models[key])


def rounds_written(folder: Path) -> int:
    if not (folder / "journal.db").exists():
        return 0
    journal = Journal(folder / "journal.db")
    (row,) = journal.query("SELECT count(*) AS rounds FROM rounds")
    journal.close()
    return int(row["rounds"])


def test_stopped_before_anything_had_begun(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("polyeps.experiment.run.populate", interrupted)
    spoken = run("run", "wards.toml", status=130)
    assert spoken == Spoken(130, "", "polyeps: stopped before anything had begun\n")
    assert not (here / "runs").exists()


@pytest.mark.parametrize(
    ("changes", "naming"),
    [
        (["budgets.noise_multiplier=0.3"], ("client '0' cannot afford a single round", "raise it")),
        (["budgets.delta=0"], ("client '0' cannot afford the plan", "delta above 0")),
        (["training.batch=61"], ("client '0' has 60 records", "training.batch = 61", "make the batch 60 or less")),
        (["algorithm.training.batch=61"], ("client '0' has 60 records", "60 or less")),
        (["trainng.batch=6"], ("'trainng'", "did you mean 'training'?")),
        (["training.bach=6"], ("'training.bach'", "did you mean 'batch'?")),
        (["data.name=mnist"], ("mnist is not here", "polyeps data fetch mnist")),
        (["data.file=absent.csv"], ("absent.csv", "does not exist")),
        (["model.name=cnn"], ("model.name", "choose logistic or mlp")),
        (["budgets.epsilons=[1, 2]"], ("budgets.epsilons names 2 budgets for 4 clients",)),
        (["budgets.epsilons=[1, 2, 0, 1]"], ("client '2'", "above 0")),
        (["algorithm.label=one"], ("two are called 'one'", "label")),
        (["algorithm=fedavgg"], ("fedavgg", "did you mean 'fedavg'?")),
        (["algorithm=weiavg", "budgets.disclosed=false"], ("client '0' does not disclose its epsilon", "pdp-fl")),
        (["rounds=many"], ("rounds", "not 'many'")),
        (["name=../elsewhere"], ("name: becomes part of file names",)),
    ],
)
def test_bad_settings_are_one_sentence_and_leave_nothing_behind(
    here: Path, changes: list[str], naming: tuple[str, ...]
) -> None:
    refused("run", "wards.toml", *(part for change in changes for part in ("--set", change)), naming=naming)
    assert [path.name for path in here.iterdir()] == ["wards.toml"]


def test_bad_arguments_are_one_sentence_and_leave_nothing_behind(here: Path) -> None:
    refused("run", naming=("either an experiment to run, or --resume",))
    refused("run", "absent.toml", naming=("absent.toml cannot be read", "give the path of a TOML file"))
    refused("run", "wards.toml", "--seeds", "0", naming=("seeds", "at least one"))
    refused("run", "wards.toml", "--device", "tpu", naming=("--device tpu", "use cpu"))
    refused("run", "--resume", "nowhere", naming=("there is no run at nowhere", "give the folder of a run"))
    refused("run", "--resume", "nowhere", "--seeds", "2", naming=("settings it began with", "leave out"))
    refused("run", "wards.toml", "--resume", "nowhere", naming=("either",))
    refused("report", "nowhere", naming=("nowhere", "give the folder of a run"))
    refused("demo", "--page", "no/where.html", naming=("--page no/where.html", "does not exist"))
    (here / "wards.toml").write_text("rounds = [")
    refused("run", "wards.toml", naming=("wards.toml is not TOML",))
    assert [path.name for path in here.iterdir()] == ["wards.toml"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_a_device_that_is_not_there(here: Path) -> None:
    refused("run", "wards.toml", "--device", "cuda", naming=("--device cuda", "no such device; use cpu"))
    assert [path.name for path in here.iterdir()] == ["wards.toml"]


def test_a_folder_that_holds_a_run_is_not_touched(here: Path) -> None:
    run("run", "wards.toml", "-o", "x")
    spent = Ledger(here / "x/ledgers/fedavg-1.db").spent("0")
    refused("run", "wards.toml", "-o", "x", naming=("x holds a run already", "resume it, or choose another folder"))
    assert Ledger(here / "x/ledgers/fedavg-1.db").spent("0") == spent
    (here / "file").touch()
    refused("run", "wards.toml", "-o", "file/x", naming=("file/x cannot be made", "choose another folder"))


def test_the_demo_tells_its_story(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = config.read_experiment
    monkeypatch.setattr(config, "read_experiment", lambda path: whole(path, ["seeds=1"]))  # three take half a minute
    shown = json.loads(run("demo", "--json").stdout)
    accuracy = {row["label"]: row["final_accuracy"] for row in shown["methods"]}
    assert len(accuracy) == 10
    for name in ("weiavg", "pfa", "pdp-fl", "weiavg (recipe)", "balanced (recipe)"):
        assert accuracy["fedavg (minimum)"] + 0.1 < accuracy["fedavg"] < accuracy[name] - 0.1
        assert accuracy[name] < accuracy["fedavg (maximum)"] < accuracy["fedavg (none)"]
    clients = {job: rows for job, rows in shown["clients"].items() if not job.startswith("fedavg (none)")}
    assert len(clients) == 9
    for rows in clients.values():
        assert len(rows) == 24
        assert all(row["spent"] <= row["epsilon"] for row in rows)
    assert "</html>" in (here / "demo.html").read_text()


def test_a_run_that_ends_early_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_json("run", "wards.toml")["stopped"]["fedavg-1"] == "all rounds were run"
    monkeypatch.setattr("polyeps.messages.LARGEST", 1e-3)
    spoken = run("run", "wards.toml", "--output", "one")
    assert "ended early: clients refuse the task: 'model' must lie between" in spoken.stdout
    printed = run_json("run", "wards.toml", "--output", "two")
    assert any(why.startswith("clients refuse the task: 'model'") for why in printed["stopped"].values())
    assert set(printed["stopped"]) == {"fedavg-1", "fedavg (none)-1"}


def test_too_many_seeds_are_refused_in_one_sentence() -> None:
    refused("run", "wards.toml", "--set", "seeds=99999999999", naming=("seeds", "at most 10000", "list them"))
