"""The runbooks: their commands, off the pages, from empty folders to a model; and what somebody on the wire sees.

Commands that begin with `sudo` need another machine and are not run; the files that they name must exist.
"""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import shutil
import subprocess
from functools import partial
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="needs Flower: pip install 'polyeps[flower]'")

import yaml  # type: ignore[import-untyped]
from support.capture import Capture, can_capture, capturing
from support.real_federation import left_running, wait

from polyeps.data.hospitals import hospitals_csv
from polyeps.deploy.processes import Processes, free_ports, polyeps_command, program
from polyeps.ledger import Ledger
from polyeps.model_files import read_model_file
from polyeps.transport import codec

pytestmark = pytest.mark.processes
ROOT = Path(__file__).parents[2]
GUIDES = ROOT / "docs" / "guides"
# Commands that keep running, and what they print when they are ready.
STAYING = {"polyeps superlink": "running on", "flower-supernode": "SuperNode ID", "polyeps silo": "is ready"}
ROUNDS = 2


def sections(page: str) -> dict[int, list[str]]:
    """Return the commands of each numbered section of a page."""
    text = (GUIDES / page).read_text(encoding="utf-8")
    found = {}
    for number, body in re.findall(r"^## (\d)\. .*?$(.*?)(?=^## |\Z)", text, re.DOTALL | re.MULTILINE):
        blocks = re.findall(r"```console\n(.*?)```", body, re.DOTALL)
        found[int(number)] = [line.removeprefix("$ ") for block in blocks for line in block.splitlines()]
    return found


class Reader:
    """Somebody who follows one of the pages, in a folder that was empty."""

    def __init__(self, folder: Path, page: str, changes: dict[str, str]) -> None:
        self.folder, self.commands, self.changes = folder, sections(page), changes
        self.processes, self.said = Processes(folder), dict[str, str]()
        folder.mkdir()

    def follow(self, number: int) -> str:
        """Run the commands of a section; return what the last one printed."""
        printed = ""
        for command in self.commands.pop(number):
            if command.startswith("sudo "):
                for name in re.findall(r"\bexamples/deploy/\S+", command):
                    assert (ROOT / name).exists(), name
                continue
            for old, new in self.changes.items():
                command = command.replace(old, new)
            if not command.startswith(tuple(STAYING)):
                printed = self.run(command)
                continue
            name = next(one for one in STAYING if command.startswith(one))
            words = shlex.split(command)
            words[:1] = polyeps_command() if words[0] == "polyeps" else [program(words[0])]
            process = self.processes.start(name, words, cwd=self.folder)
            wait(partial(self.is_ready, name, process), f"{name} starts")
        return printed

    def is_ready(self, name: str, process: subprocess.Popen[bytes]) -> bool:
        assert process.poll() is None, self.processes.log(name)
        return STAYING[name] in self.processes.log(name)

    def run(self, command: str) -> str:
        words = shlex.split(command)
        if words[0] == "polyeps":
            words[:1] = polyeps_command()
        done = subprocess.run(words, cwd=self.folder, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout


def test_from_empty_folders_to_a_model(tmp_path: Path) -> None:
    link, node = free_ports(2)
    address = {"fl.example.org:8000": f"127.0.0.1:{link}", "fl.example.org": "127.0.0.1"}
    address |= {"0.0.0.0": "127.0.0.1", "--port 8000": f"--port {link}", "--port 9094": f"--port {node}"}
    server = Reader(tmp_path / "server", "runbook-server.md", address)
    with contextlib.ExitStack() as running:
        capture = running.enter_context(capturing()) if can_capture() else Capture()
        running.enter_context(server.processes)

        server.follow(1)
        signer = server.follow(2).rsplit(maxsplit=1)[1]
        silo = Reader(tmp_path / "silo", "runbook-silo.md", {**address, "4f0c...": signer})
        running.enter_context(silo.processes)
        silo.follow(1)
        key = silo.follow(2).rsplit(maxsplit=1)[1]

        draft = server.folder / "server" / "contract.toml"
        text = draft.read_text().replace('# aspen = "..."', f'aspen = "{key}"')
        draft.write_text(text.replace("rounds = 10", f"rounds = {ROUNDS}"))
        server.follow(3)
        (server.folder / "nodes").mkdir()
        shutil.copy(silo.folder / "aspen" / "node.pub", server.folder / "nodes" / "aspen.pub")
        own, test = records("elm"), records("oak")
        (server.folder / "test.csv").write_text(test)
        server.follow(4)

        shutil.copy(server.folder / "server" / "ca.crt", silo.folder)
        shutil.copy(server.folder / "server" / "contract.toml.signed", silo.folder)
        (silo.folder / "aspen" / "records.csv").write_text(own)
        policy = silo.folder / "aspen" / "policy.toml"
        policy.write_text(policy.read_text().replace(":9094", f":{node}"))
        silo.follow(3)
        assert "would be left" in silo.follow(4)

        assert f"done, {ROUNDS} of {ROUNDS} rounds" in server.follow(5)
        silo.follow(5)
        assert "aspen" in (silo.folder / "ledger.html").read_text(encoding="utf-8")
        assert silo.commands == {6: []}
        assert server.commands == {6: []}
    assert left_running(tmp_path) == []
    (model,) = (server.folder / "runs" / "readmission" / "models").iterdir()
    assert read_model_file(model)[0].rounds == ROUNDS
    with contextlib.closing(Ledger(silo.folder / "aspen" / "ledger.db")) as ledger:
        assert ledger.account("aspen").charges == ROUNDS
    if not can_capture():
        pytest.skip("all ran; that no update crosses in the clear was not seen: needs the right to capture packets")
    no_update_crosses(capture, silo.folder / "aspen" / "state" / "runs", link, node)


def records(hospital: str) -> str:
    """Return the records of an invented hospital."""
    header, *rows = hospitals_csv().splitlines()
    own = [row for row in rows if row.startswith(f"{hospital},")]
    return "".join(f"{row.partition(',')[2]}\n" for row in [header, *own])


def no_update_crosses(capture: Capture, kept: Path, link: int, node: int) -> None:
    """Between SuperNode and SuperLink no part of the last update is in the clear; on the silo's own machine it is."""
    (memory,) = kept.glob("*.memory")
    replies = {name: tensor for name, tensor in codec.decode(memory.read_bytes()).items() if name.startswith("reply/")}
    assert replies
    outside, inside = capture.crossed(link), capture.crossed(node)
    assert len(outside) > 10_000
    for tensor in replies.values():
        content = tensor.numpy().tobytes()
        assert content in inside  # the control: what is in the clear is found
        for start in range(0, len(content) - 7, 4):
            assert content[start : start + 8] not in outside
    for word in (b"polyeps", b"config_records", b"ConfigRecord", b"update", b'"clip"'):
        assert word not in outside, word
    assert b"update" in inside


# Units, containers


def commands_of_examples() -> dict[str, list[str]]:
    """Return every command of the examples, by file and service."""
    found = {}
    for unit in sorted((ROOT / "examples" / "deploy" / "systemd").iterdir()):
        text = unit.read_text().replace("\\\n", " ")
        (line,) = re.findall(r"^ExecStart=(.*)$", text, re.MULTILINE)
        found[unit.name] = shlex.split(line)
    for compose in sorted((ROOT / "examples" / "deploy").glob("*.yaml")):
        for name, service in yaml.safe_load(compose.read_text())["services"].items():
            found[f"{compose.name}: {name}"] = service["command"]
    return found


@pytest.mark.parametrize("name", commands_of_examples())
def test_the_examples_use_what_the_programs_take(name: str, tmp_path: Path) -> None:
    """The options are those of the commands that run in tests, or of our own command line."""
    import click
    import typer

    from polyeps.cli import app
    from polyeps.deploy.processes import supernode_command

    words = [part for word in commands_of_examples()[name] for part in word.split("=", 1)]
    program_name = Path(words[0]).name
    options = [word for word in words if word.startswith("--")]
    if program_name == "polyeps":
        command = typer.main.get_command(app)
        assert isinstance(command, click.Group)
        chosen = command.get_command(click.Context(command), words[1])
        assert chosen is not None
        known = {option for parameter in chosen.params for option in parameter.opts}
    else:
        assert program_name == "flower-supernode"
        used = supernode_command(tmp_path, tmp_path, "", 0)
        known = {word for word in used if word.startswith("--")}
        assert set(options) == known  # none is missing either: TLS, authentication, no installation
    assert set(options) <= known


def test_the_examples_are_offline_and_secure() -> None:
    from polyeps.deploy.processes import OFFLINE

    folder = ROOT / "examples" / "deploy"
    settings = {f"{name}={value}" for name, value in OFFLINE.items()}
    assert settings <= set((folder / "offline.env").read_text().splitlines())
    assert settings <= set((folder / "Containerfile").read_text().replace("ENV ", " ").split())
    for unit in (folder / "systemd").iterdir():
        text = unit.read_text()
        assert "EnvironmentFile=/etc/polyeps/offline.env" in text
        assert "User=polyeps-" in text
        assert "\nRestart=" in text
    for compose in folder.glob("*.yaml"):
        for service in yaml.safe_load(compose.read_text())["services"].values():
            assert service["read_only"]
            assert service["restart"] in ("always", "on-failure")
    node = (folder / "systemd" / "polyeps-supernode.service").read_text()
    assert "Restart=always" in node  # it exits with 305 until the SuperLink lets it in again
    assert "StartLimitIntervalSec=0" in node


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_accepts_the_units(tmp_path: Path) -> None:
    for unit in (ROOT / "examples" / "deploy" / "systemd").iterdir():
        text = unit.read_text()
        for name in ("flower-supernode", "polyeps"):
            text = text.replace(f"/opt/polyeps/bin/{name} ", f"{shutil.which('true')} ")
        (tmp_path / unit.name).write_text(text)
    names = [str(path).replace("@", "@contract") for path in sorted(tmp_path.iterdir())]
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *names], capture_output=True, text=True, check=False
    )
    ours = [line for line in (done.stdout + done.stderr).splitlines() if "polyeps" in line]
    assert ours == []
    assert done.returncode == 0, json.dumps(done.stderr)
