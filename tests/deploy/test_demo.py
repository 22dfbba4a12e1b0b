"""The demonstration leaves no process behind: not when it is interrupted at any time, nor when a start fails."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="needs Flower: pip install 'polyeps[flower]'")

from support.real_federation import left_running, wait

from polyeps.deploy import demo, processes
from polyeps.deploy.processes import Processes, polyeps_command
from polyeps.errors import InputError

pytestmark = pytest.mark.processes


@pytest.mark.parametrize(
    ("when", "number", "again"),
    [("logs/superlink.log", signal.SIGTERM, False), ("logs/silo-oak.log", signal.SIGINT, True)],
)
def test_an_interrupted_demonstration_leaves_nothing(when: str, number: int, again: bool, tmp_path: Path) -> None:
    """Interrupted while the SuperLink starts, or when all have been started; by Ctrl-C twice."""
    folder = tmp_path / "demo"
    with subprocess.Popen(
        polyeps_command("deploy", "demo", "-o", str(folder), "--rounds", "50"), stderr=subprocess.PIPE
    ) as process:
        wait((folder / when).exists, f"{when} is there; {process.poll()}", pause=0.01)
        assert len(left_running(folder)) > 1
        process.send_signal(number)
        if again:
            wait(lambda: process.poll() is not None or len(left_running(folder)) < 6, "it stops", pause=0.01)
            process.send_signal(number)
        assert process.wait(60) != 0
    assert left_running(folder) == []


def test_a_demonstration_from_its_command_to_its_figures(tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    command = polyeps_command("deploy", "demo", "-o", str(folder), "--rounds", "2", "--json")
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert (figures["rounds"], figures["reason"]) == (2, "all rounds were run")
    assert Path(figures["model"]).is_file()
    assert 0.5 < figures["metrics"]["accuracy"] < 1
    assert figures["seconds"] < 180  # two quiet cores take half a minute
    for name, (in_a_run, in_all) in demo.BUDGETS.items():
        silo = figures["silos"][name]
        assert silo["charges"] == 2
        assert 0 < silo["this run"] <= in_a_run
        assert 0 < silo["spent in all"] <= in_all
    assert left_running(folder) == []


def test_a_start_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> list[str]:
        return [sys.executable, "-c", "raise SystemExit(3)"]

    monkeypatch.setattr(demo, "superlink_command", broken)
    with pytest.raises(InputError, match=r"nothing listens on port \d+; look into the logs"):
        demo.run_demo(tmp_path / "demo", 1, print)
    assert left_running(tmp_path) == []


def test_processes_that_do_not_listen_to_signals_are_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deaf = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(99)"
    )
    usual = Processes.stop

    def impatient(self: Processes, name: str, **_: Any) -> int:
        return usual(self, name, seconds=0.1)

    def interrupted(*_: Any, **__: Any) -> int:
        raise KeyboardInterrupt

    for stop in (impatient, interrupted):
        with pytest.raises(KeyboardInterrupt), Processes(tmp_path) as some:  # noqa: PT012
            for name in ("one", "two"):
                some.start(f"{name}{stop is interrupted}", [sys.executable, "-c", deaf, str(tmp_path)])
            wait(lambda: all("deaf" in some.log(name) for name in some.running), "they run")
            monkeypatch.setattr(processes.Processes, "stop", stop)
            raise KeyboardInterrupt
        assert left_running(tmp_path) == []
