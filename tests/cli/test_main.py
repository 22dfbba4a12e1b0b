import os
import subprocess
import sys
from pathlib import Path

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


def commands() -> list[tuple[list[str], object]]:
    """Every command that does something, with the words that call it."""
    leaves: list[tuple[list[str], object]] = []

    def walk(command: object, path: list[str]) -> None:
        for name, child in getattr(command, "commands", {}).items():
            walk(child, [*path, name])
        if not hasattr(command, "commands"):
            leaves.append((path, command))

    walk(typer.main.get_command(cli.app), [])
    assert len(leaves) >= 18
    return leaves


def test_every_command_has_help_json_and_quiet() -> None:
    for path, command in commands():
        assert command.help, path  # type: ignore[attr-defined]
        options = {name for parameter in command.params for name in parameter.opts}  # type: ignore[attr-defined]
        figures = set() if "superlink" in path else {"--json"}  # Flower's server writes Flower's log, and no figures
        assert {"--quiet", "-q", *figures} <= options, path


@pytest.mark.parametrize("path", [[], ["ledger"], ["ledger", "show"], ["certify", "dp-sgd"], ["new"]])
def test_a_short_question_has_the_same_answer(path: list[str]) -> None:
    assert run(*path, "-h").stdout == run(*path, "--help").stdout


def test_quiet_commands_make_no_remarks_but_say_what_is_wrong(tmp_path: Path) -> None:
    options = ["--distribution", "uniform", "--clients", "2", "--records", "100", "--seed", "1"]
    plan = ["plan", *options, "--batch", "8", "--local-steps", "1", "--rounds", "2"]
    assert "budgets drawn from uniform" in run(*plan).stderr
    quiet = run(*plan, "--quiet")
    assert quiet.stderr == ""
    assert quiet.stdout == run(*plan).stdout
    assert "budgets drawn from uniform" in run(*plan).stderr  # it is not remembered
    assert "cannot be read" in run("run", str(tmp_path / "none.toml"), "-q", status=2).stderr


@pytest.mark.parametrize(
    ("words", "completed"), [("polyeps re", {"report", "reproduce"}), ("polyeps ledger sh", {"show"})]
)
def test_shells_complete_commands(words: str, completed: set[str]) -> None:
    asked = {"_POLYEPS_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1)}
    ran = subprocess.run(
        [sys.executable, "-c", "from polyeps.cli import main; main()"],
        env={**os.environ, **asked}, capture_output=True, text=True,
    )  # fmt: skip
    assert set(ran.stdout.split()) & {"report", "reproduce", "show", "run"} <= completed
    assert completed & set(ran.stdout.split())


def test_the_completion_of_a_shell_can_be_shown() -> None:
    script = "import sys; sys.argv = ['polyeps', '--show-completion', 'bash']; from polyeps.cli import main; main()"
    ran = subprocess.run(
        [sys.executable, "-c", script], env={**os.environ, "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"},
        capture_output=True, text=True,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert "_POLYEPS_COMPLETE=complete_bash" in ran.stdout


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


@pytest.mark.parametrize(("command", "what"), [("run", "A TOML file."), ("report", "Folders of runs or of sweeps.")])
def test_help_says_what_arguments_are(command: str, what: str) -> None:
    assert what in run(command, "--help").stdout


def test_python_dash_m() -> None:
    ran = subprocess.run([sys.executable, "-m", "polyeps", "--version"], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == polyeps.__version__


def test_a_command_of_another_package_that_is_missing_or_broken_is_named() -> None:
    script = (
        "import importlib.metadata as metadata\n"
        "broken = metadata.EntryPoint('gone', 'no_such_module:command', 'polyeps.commands')\n"
        "ours = metadata.EntryPoint('run', 'os:system', 'polyeps.commands')\n"
        "metadata.entry_points = lambda **_: [broken, ours]\n"
        "from polyeps import cli\n"
        "assert cli.execute(['reproduce', 'pfa']) == 2\n"
        "assert cli.execute(['run', '--help']) == 0\n"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert "'gone' of no_such_module:command cannot be loaded" in ran.stderr
    assert "pip install ./reproductions" in ran.stderr
    assert "Train every method" in ran.stdout
