import os
import subprocess
import sys

import pytest
import typer
from support.commands import run

import polyeps
from polyeps import cli


def test_version_and_help() -> None:
    assert run("--version").stdout.strip() == polyeps.__version__
    assert "ledger" in run("--help").stdout
    assert "certify" in run(status=2).stdout


@pytest.mark.parametrize(("typed", "meant"), [(["certify", "cmpfed"], "cmp-fed"), (["certfy"], "certify")])
def test_what_may_be_meant_is_said_once(typed: list[str], meant: str) -> None:
    spoken = run(*typed, status=2)
    assert spoken.stderr.count(f"Did you mean '{meant}'?") == 1
    assert spoken.stderr.startswith(f"polyeps: No such command '{typed[-1]}'.")


def test_every_command_has_help_and_json() -> None:
    group = typer.main.get_command(cli.app)
    leaves = []

    def walk(command: object, path: list[str]) -> None:
        for name, child in getattr(command, "commands", {}).items():
            walk(child, [*path, name])
        if not hasattr(command, "commands"):
            leaves.append((path, command))

    walk(group, [])
    assert len(leaves) >= 18
    for path, command in leaves:
        assert command.help, path  # type: ignore[attr-defined]
        options = {name for parameter in command.params for name in parameter.opts}  # type: ignore[attr-defined]
        assert "--json" in options, path


def test_help_comes_at_once_and_without_heavy_imports() -> None:
    heavy = "sorted({'torch', 'numpy', 'scipy'} & set(sys.modules))"
    script = f"import sys; from polyeps.cli import execute; execute(['--help']); print({heavy})"
    best = float("inf")
    for _ in range(3):
        before = os.times()
        ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
        after = os.times()  # of the processor, not of the clock: others work here too
        best = min(best, after.children_user + after.children_system - before.children_user - before.children_system)
    assert ran.stdout.endswith("[]\n")
    assert 0 < best < 0.4


@pytest.mark.parametrize(("command", "what"), [("run", "A TOML file."), ("report", "Folders of runs.")])
def test_help_says_what_arguments_are(command: str, what: str) -> None:
    assert what in run(command, "--help").stdout


def test_python_dash_m() -> None:
    ran = subprocess.run([sys.executable, "-m", "polyeps", "--version"], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == polyeps.__version__
