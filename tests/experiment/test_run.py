"""Run folders: what they hold, and that whatever stops a run, resuming it ends as if nothing had happened."""

import csv
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support.commands import run
from support.federations import EPSILONS, METHODS, experiment, local
from support.killing import wanted

from polyeps.clients import RoundMemory
from polyeps.core import Replies, Task
from polyeps.errors import InputError, JournalError
from polyeps.experiment import run as runs
from polyeps.experiment.journal import Journal
from polyeps.experiment.outcome import read
from polyeps.experiment.progress import Watch
from polyeps.ledger import Ledger
from polyeps.server import Round
from polyeps.transport.memory import InMemory


def contents(folder: Path) -> dict[str, Any]:
    """All that must be equal between two runs of one experiment: models, ledgers, journal; not times and names."""
    ledgers = {
        path.name: [(row.kind, row.content) for row in Ledger(path).rows() if row.kind != "opened"]
        for path in sorted((folder / "ledgers").glob("*.db"))
    }
    models = {path.name: path.read_bytes() for path in sorted((folder / "models").glob("*"))}
    journal = Journal(folder / "journal.db")
    tables = {
        "rounds": "SELECT job, round, invited, answered, declined, active FROM rounds ORDER BY job, round",
        "metrics": "SELECT * FROM metrics ORDER BY job, round, name",
        "answers": "SELECT * FROM answers ORDER BY job, round, client",
        "clients": "SELECT * FROM clients ORDER BY job, client",
        "jobs": "SELECT job, status FROM jobs",
        "checkpoints": "SELECT job FROM checkpoints",
    }
    rows = {name: journal.query(statement) for name, statement in tables.items()}
    journal.close()
    return {"ledgers": ledgers, "models": models, **rows}


def test_a_folder_holds_everything(tmp_path: Path) -> None:
    wanted = experiment(["fedavg", "fedavg (none)"], seeds=[3, 4], evaluate_every=2)
    outcome = runs.run(wanted, tmp_path / "run")
    assert set(outcome.accuracy) == {(m, s) for m in ("fedavg", "fedavg (none)") for s in (3, 4)}
    assert all(len(values) == 2 for values in outcome.accuracy.values())  # rounds 2 and 3 of 3
    spent = outcome.spent["fedavg", 3]
    assert all(0.95 * e <= spent[str(i)] <= e for i, e in enumerate(EPSILONS))
    assert outcome.spent["fedavg (none)", 3] == {}
    assert outcome.models["fedavg", 3].shape == (650,)
    assert not torch.equal(outcome.models["fedavg", 3], outcome.models["fedavg", 4])
    with (tmp_path / "run" / "metrics.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == 4 * 3
    assert lines[0]["method"] == "fedavg"
    assert lines[0]["accuracy"] == ""
    assert float(lines[2]["accuracy"]) == outcome.accuracy["fedavg", 3][-1]


def test_methods_of_a_comparison_draw_the_same_cohorts(tmp_path: Path) -> None:
    wanted = experiment(
        ["fedavg", "fedavg (minimum)", "fedavg (maximum)"], participation={"kind": "uniform", "share": 0.5}, rounds=4
    )
    runs.run(wanted, tmp_path / "run")
    journal = Journal(tmp_path / "run" / "journal.db")
    invited = [
        journal.query("SELECT round, client FROM answers WHERE job = ? ORDER BY round, client", (f"{name}-1",))
        for name in ("fedavg", "fedavg (minimum)", "fedavg (maximum)")
    ]
    assert invited[0] == invited[1] == invited[2]


class StoppedError(Exception):
    pass


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("after", [1, 2])
def test_stop_and_resume_is_never_stopped(name: str, after: int, tmp_path: Path) -> None:
    kind = "poisson" if local(name) == "sums" else "uniform"
    settings = experiment(name, rounds=4, participation={"kind": kind, "share": 0.8})
    runs.run(settings, tmp_path / "whole")
    heard = 0

    def stop(_: str, __: Round, ___: int, ____: Any) -> None:
        nonlocal heard
        heard += 1
        if heard == after:
            raise StoppedError

    with pytest.raises(StoppedError):
        runs.run(settings, tmp_path / "parts", watch=Watch(round_done=stop))
    runs.resume(tmp_path / "parts")
    assert contents(tmp_path / "parts") == contents(tmp_path / "whole")
    again = contents(tmp_path / "whole")
    runs.resume(tmp_path / "whole")  # of a run that is done: nothing happens
    assert contents(tmp_path / "whole") == again


@pytest.mark.parametrize("noise", ["gaussian", "skellam"])
def test_stopped_between_the_two_releases_of_a_round(
    noise: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients hold updates from one release to the next, and lose them with the process: the round is done anew."""
    method = {"name": "cmp-fed", "noise": noise, "dropouts": 0.5}
    settings = experiment(method, rounds=4, participation={"kind": "poisson", "share": 0.8})
    runs.run(settings, tmp_path / "whole")
    real, calls = RoundMemory.take, 0

    def take(self: RoundMemory, name: str, clients: Sequence[str]) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise StoppedError
        return real(self, name, clients)

    monkeypatch.setattr(RoundMemory, "take", take)
    with pytest.raises(StoppedError):
        runs.run(settings, tmp_path / "parts")
    runs.resume(tmp_path / "parts")
    assert calls > 3
    assert contents(tmp_path / "parts") == contents(tmp_path / "whole")


def test_stopped_between_the_charge_and_the_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = experiment("fedavg", rounds=4)
    runs.run(settings, tmp_path / "whole")

    def full(*_: Any) -> None:
        raise JournalError("no room")

    real = Journal.write_round
    calls = 0

    def write(self: Journal, *arguments: Any) -> None:
        nonlocal calls
        calls += 1
        full() if calls == 3 else real(self, *arguments)

    monkeypatch.setattr(Journal, "write_round", write)
    with pytest.raises(JournalError):
        runs.run(settings, tmp_path / "parts")
    before = len(Ledger(tmp_path / "parts" / "ledgers" / "fedavg-1.db").rows())
    runs.resume(tmp_path / "parts")
    assert contents(tmp_path / "parts") == contents(tmp_path / "whole")
    assert before > 0


def killed(folder: Path, kills: int, *file: str) -> None:
    """Run in a child that is killed so many times."""
    script = Path(__file__).parents[1] / "support" / "killing.py"
    ran = subprocess.run(
        [sys.executable, str(script), str(folder), str(kills), "7", *file],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(script.parents[1]), os.environ.get("PYTHONPATH", "")])},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    assert int(ran.stdout.split()[-1]) == kills


def test_twenty_kills_change_nothing(tmp_path: Path) -> None:
    runs.run(wanted(), tmp_path / "whole")
    killed(tmp_path / "parts", 20)
    assert contents(tmp_path / "parts") == contents(tmp_path / "whole")


LEVELS = """
name = "levels"
rounds = 60
data = { clients = 12, size = 40, own_test = 0.2 }
training = { batch = 5, local_steps = 4 }
participation = { kind = "poisson", share = 0.5 }
algorithm = [{ name = "fedhdp", pull = 0.1 }]
[budgets]
delta = 1e-3
levels = [{ name = "private", epsilon = 3.0 }, { name = "open", share = 0.25 }]
"""


def test_kills_change_no_personal_model(tmp_path: Path) -> None:
    """What clients keep is written client by client by those who are killed, and whole by the one who is not."""
    file = tmp_path / "levels.toml"
    file.write_text(LEVELS)
    run("run", str(file), "--output", str(tmp_path / "whole"))
    killed(tmp_path / "parts", 8, str(file))
    whole = contents(tmp_path / "whole")
    assert contents(tmp_path / "parts") == whole
    evaluated = {row["name"]: row["value"] for row in whole["metrics"] if row["name"].startswith("personal")}
    assert {"personal accuracy", "personal accuracy (open)", "personal accuracy (private)"} <= set(evaluated)


def test_early_leavers_under_one_scale(tmp_path: Path) -> None:
    wanted = experiment(
        "fedavg", rounds=40, budgets={"epsilons": (1.0, 1.6, 9.0, 1.3, 8.0, 2.0), "noise_multiplier": 1.2}
    )
    outcome = runs.run(wanted, tmp_path / "run")
    journal = Journal(tmp_path / "run" / "journal.db")
    left = {r["own_epsilon"]: r["left_after"] for r in journal.query("SELECT own_epsilon, left_after FROM clients")}
    leavers = [left[epsilon] for epsilon in (1.0, 1.3, 1.6, 2.0)]
    assert leavers == sorted(leavers)
    assert leavers[0] < leavers[-1]
    assert left[8.0] is None
    budgets = dict(zip(outcome.spent["fedavg", 1], (1.0, 1.6, 9.0, 1.3, 8.0, 2.0), strict=True))
    assert all(spent <= budgets[client] for client, spent in outcome.spent["fedavg", 1].items())
    assert [r["noise_multiplier"] for r in journal.query("SELECT DISTINCT noise_multiplier FROM clients")] == [1.2]


def test_nothing_begins_when_a_plan_cannot_be_afforded(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"client '0' cannot afford a single round.*raise it"):
        runs.run(experiment("fedavg", budgets={"noise_multiplier": 0.4}), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_folder_is_never_overwritten(tmp_path: Path) -> None:
    runs.run(experiment(), tmp_path / "run")
    with pytest.raises(InputError, match="holds a run already"):
        runs.run(experiment(), tmp_path / "run")
    with pytest.raises(InputError, match="there is no run at"):
        runs.resume(tmp_path / "nowhere")


def test_a_folder_is_one_processs_at_a_time(tmp_path: Path) -> None:
    def meanwhile(*_: Any) -> None:
        # A lock of `flock` belongs to the opened file: a second opening stands for another process.
        with pytest.raises(InputError, match=f"another process is running {tmp_path / 'run'}; wait for it, or stop it"):
            runs.resume(tmp_path / "run")
        read(tmp_path / "run")  # looking on is free
        raise StoppedError

    with pytest.raises(StoppedError):
        runs.run(experiment(), tmp_path / "run", watch=Watch(round_done=meanwhile))
    assert len(runs.resume(tmp_path / "run").models) == 1  # the lock went with who held it


def test_a_model_that_left_the_bounds_ends_its_job_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("polyeps.messages.LARGEST", 1e-3)
    runs.run(experiment(["fedavg (none)", "fedavg"]), tmp_path / "run")
    journal = Journal(tmp_path / "run" / "journal.db")
    facts = {row["label"]: row["facts"] for row in journal.jobs()}
    assert {row["status"] for row in journal.jobs()} == {"done"}
    early = [fact["reason"] for fact in facts.values() if fact["stopped"] == "early"]
    assert early
    assert all(why.startswith("clients refuse the task: 'model' must lie between -0.001 and 0.001") for why in early)
    spoken = run("report", str(tmp_path / "run"), "--output", str(tmp_path / "page.html"))
    assert spoken.status == 0


def test_discarded_replies_are_in_the_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = InMemory.__call__

    def spoilt(self: InMemory, task: Task) -> Replies:
        replies = real(self, task)
        if task.round == 1:
            replies.payload["update"][0] = float("nan")
        return replies

    monkeypatch.setattr(InMemory, "__call__", spoilt)
    runs.run(experiment(), tmp_path / "run")
    journal = Journal(tmp_path / "run" / "journal.db")
    found = journal.query("SELECT round, value FROM metrics WHERE name = 'discarded replies'")
    assert found == [{"round": 1, "value": 1.0}]
    assert [row["answered"] for row in journal.query("SELECT answered FROM rounds")] == [6, 6, 6]


def test_replies_of_a_training_that_diverged_are_discarded_and_the_run_goes_on(tmp_path: Path) -> None:
    wanted = experiment(["fedavg (none)", "fedavg"], rounds=4, training={"learning_rate": 1e9, "decay": 0.9})
    outcome = runs.run(wanted, tmp_path / "run")
    assert all(torch.isfinite(model).all() for model in outcome.models.values())
    journal = Journal(tmp_path / "run" / "journal.db")
    found = journal.query("SELECT value FROM metrics WHERE name = 'discarded replies'")
    assert [row["value"] for row in found] == [6.0] * 8
