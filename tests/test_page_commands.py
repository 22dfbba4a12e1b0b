"""Every command in README and docs: run as it stands, page by page, or listed here with the reason why not.

Commands of a page run one after another in a folder of its own, as a reader would; the examples there are shorter.
`test_tutorial` runs those of the six hospitals, in full.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from support.commands import run

ROOT = Path(__file__).parent.parent
PAGES = {
    str(page.relative_to(ROOT)): page
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/**/*.md")))
    if page.name != "six-hospitals.md"
}
SHORT = {"rounds": 2, "seeds": [1]}  # of the examples, so that all pages together take seconds

# Commands that are not run here: how they begin, and why.
NOT_RUN = {
    "make ": "sets the project up; that the target exists is checked",
    "pip install": "installs packages",
    "python3 -m venv": "sets up an environment",
    ".venv/bin/": "of the environment that a page has set up",
    "source .venv": "for an interactive shell",
    "git clone": "needs the network",
    "export FLWR": "settings of Flower's programs, below",
    "flower-su": "runs until it is stopped; tests/deploy starts it",
    "flwr ": "needs a running SuperLink; tests/deploy has one",
    "polyeps silo": "runs until it is stopped; tests/deploy starts it",
    "polyeps superlink": "runs until it is stopped; tests/deploy starts it",
    "polyeps serve": "runs until silos answer; tests/deploy starts it",
    "polyeps watch": "runs until it is stopped; tests/report starts it",
    "polyeps ledger page --policy": "needs a silo; tests/report has one",
    "polyeps deploy sign": "signs what several machines have agreed on; tests/deploy signs",
    "polyeps deploy init": "needs the signer's key; tests/cli and tests/deploy make kits",
    "polyeps deploy doctor": "checks machines that are not here; tests/deploy has some",
    "polyeps deploy status": "shows a served run; tests/deploy has one",
    "polyeps deploy register": "needs a running SuperLink; tests/deploy has one",
    "polyeps deploy withdraw": "leaves a contract; tests/deploy has one",
    "tensorboard ": "runs until it is stopped",
    "polyeps data fetch": "needs the network",
    "polyeps --install-completion": "changes the reader's shell; tests/cli/test_completion.py asks for the script",
    "polyeps reproduce": "minutes to hours; reproductions/tests runs small ones",
    "polyeps audit": "minutes; tests/audit runs the attacks",
    "polyeps demo": "a minute; CI runs it",
    "polyeps run examples/recipe_mnist.toml": "minutes, and MNIST",
    "polyeps model check nets:": "of the reader's own module; tests/cli/test_model_check_command.py checks such ones",
    **dict.fromkeys(("sudo ", "docker ", "podman ", "systemctl ", "openssl ", "chmod "), "administers a machine"),
}
TABLES = ("elm.csv", "h.csv", "new-patients.csv", "aspen/records.csv")  # that pages take for granted
HARMLESS = {"head", "cat", "ls", "python"}  # programs beside polyeps that are run


def commands(page: Path) -> list[str]:
    """Return the commands of a page's console and sh blocks, in order."""
    found: list[str] = []
    for kind, block in re.findall(r"^ *```(console|sh)\n(.*?)^ *```", page.read_text(), re.DOTALL | re.MULTILINE):
        lines = textwrap.dedent(block).replace("\\\n", " ").splitlines()
        shown = [line.removeprefix("$ ") for line in lines if kind == "sh" or line.startswith("$ ")]
        found += [re.sub(r"\s+#.*$", "", line).strip() for line in shown if line and not line.startswith("#")]
    return found


def reason(command: str) -> str | None:
    """Return why a command is not run here; None if it is."""
    for name in ("adult", "mnist"):
        if name in command and not Path(os.environ.get("POLYEPS_DATA", ""), name).is_dir():
            return f"POLYEPS_DATA names no folder with the files of {name}"
    return next((why for beginning, why in NOT_RUN.items() if command.startswith(beginning)), None)


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a reader, with examples of few rounds."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("POLYEPS_CACHE", str(tmp_path / "cache"))
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    for file in tmp_path.glob("examples/**/*.toml"):
        text = file.read_text()
        for key, value in SHORT.items():
            text = re.sub(rf"^{key} *=.*$", f"{key} = {value}", text, flags=re.MULTILINE)
        file.write_text(text)
    return tmp_path


def provide(command: str, folder: Path) -> None:
    """Make the files that a page takes for granted."""
    if "runs/digits" in command and not Path("runs/digits").exists():
        run("run", "examples/digits.toml")
    made_here = command.startswith("polyeps run ") and "--output runs/other" in command
    if "runs/other" in command and not made_here and not Path("runs/other").exists():
        run("run", "examples/digits.toml", "--output", "runs/other")
    if "--resume" not in command and command.startswith("polyeps run examples/"):
        shutil.rmtree(f"runs/{Path(command.split()[2]).stem}", ignore_errors=True)
    words = shlex.split(command)
    for word in words:
        if word in ("ward.ledger", "aspen/ledger.db") and "set-budget" not in words and not Path(word).exists():
            Path(word).parent.mkdir(exist_ok=True)
            run("ledger", "set-budget", "--file", word, "--client", "ward", "--epsilon", "2")
    here = not (folder / "hospitals").exists()
    hospitals = [word for word in words if here and word in (*TABLES, "runs/hospitals")]
    if hospitals:
        run("new", "hospitals")
        for name in TABLES:
            Path(name).parent.mkdir(exist_ok=True)
            shutil.copy("hospitals/patients.csv", name)
        run("run", "hospitals/experiment.toml", "--set", "rounds=2", "--output", "runs/hospitals")
    written = next((Path(words[place + 1]) for place, word in enumerate(words) if word in ("--write", "-o")), None)
    if written is not None:
        written.unlink(missing_ok=True)


def save_settings(page: Path, command: str) -> None:
    """Save the page's settings under the name that a command asks for, as the page tells its reader to."""
    for name in re.findall(r"Save this as `(\w+\.toml)`", page.read_text()):
        if name in command and not Path(name).exists():
            (block,) = re.findall(r"```toml\n(.*?)```", page.read_text(), re.DOTALL)
            Path(name).write_text(re.sub(r"^rounds = .*$", f"rounds = {SHORT['rounds']}", block, flags=re.MULTILINE))


def perform(command: str) -> None:
    """Run one command of a page; it must end well."""
    words = shlex.split(command.removesuffix("&"))
    if words[0] == "cd":
        os.chdir(words[1])
        return
    if words[:3] == ["polyeps", "deploy", "demo"]:  # it starts other programs
        pytest.importorskip("flwr")
        words[0:1] = [sys.executable, "-m", "polyeps"]
        subprocess.run(words, check=True, capture_output=True, timeout=300)
        return
    if words[0] != "polyeps":
        assert words[0] in HARMLESS, f"{command}: list it in NOT_RUN, with the reason"
        subprocess.run(command, shell=True, check=True, capture_output=True)
        return
    target = None
    if ">" in words:
        words, target = words[: words.index(">")], words[words.index(">") + 1]
    spoken = run(*words[1:])
    if target:
        Path(target).write_text(spoken.stdout)


@pytest.mark.parametrize("name", [name for name, page in PAGES.items() if commands(page)])
def test_commands_of_a_page_run(name: str, reader: Path) -> None:
    for command in commands(PAGES[name]):
        if command.startswith("make "):
            assert re.search(rf"^{command.split()[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE), command
        if reason(command) is None:
            provide(command, reader)
            save_settings(PAGES[name], command)
            perform(command)


def test_what_is_not_run_has_a_reason_and_is_less_than_what_is_run() -> None:
    shown = [command for page in PAGES.values() for command in commands(page)]
    assert len(shown) > 80
    assert sum(reason(command) is not None for command in shown) < 0.6 * len(shown)


def test_a_command_that_fails_or_is_unknown_is_found(reader: Path) -> None:
    with pytest.raises(AssertionError, match="No such file"):
        perform("polyeps certify examples/nothing.toml")
    with pytest.raises(AssertionError, match="list it in NOT_RUN"):
        perform("curl example.org")
