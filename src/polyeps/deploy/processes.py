"""Flower's processes, started offline and without telemetry, and stopped without a rest."""

from __future__ import annotations

import contextlib
import os
import random
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from polyeps.errors import InputError
from polyeps.ledger.head_file import replace_file

# No telemetry, no update check, no installation of what a bundle asks for: nothing but the federation is contacted.
OFFLINE = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "FLWR_TRACING_ENABLED": "0",
}
_UNASSIGNED = range(10_000, 32_000)  # ports below those that systems give to outgoing connections


def superlink_command(folder: Path, host: str, port: int) -> list[str]:
    """Return the command of a SuperLink with the kit of a folder."""
    return polyeps_command("superlink", "--kit", str(folder), "--host", host, "--port", str(port))


def supernode_command(folder: Path, certificates: Path, superlink: str, port: int) -> list[str]:
    """Return the command of a silo's SuperNode: it executes nothing itself, and serves its Runtime API on loopback."""
    return [
        program("flower-supernode"),
        *("--root-certificates", str(certificates)),
        *("--superlink", superlink),
        *("--auth-supernode-private-key", str(folder / "node.key")),
        *("--isolation", "process"),
        *("--superexec-auth-secret-file", str(folder / "supernode.secret")),
        *("--host", "127.0.0.1"),
        *("--port", str(port)),
    ]


def polyeps_command(*arguments: str) -> list[str]:
    """Return a command of this very polyeps."""
    return [sys.executable, "-m", "polyeps", *arguments]


def program(name: str) -> str:
    """Return the path of a program that Flower installs beside the interpreter."""
    beside = Path(sys.executable).with_name(name)
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise InputError(f"{name} is not installed; pip install 'polyeps[flower]'")
    return found


def new_secret(path: Path) -> None:
    """Write a secret that a SuperNode or SuperLink shares with its executor."""
    replace_file(path, secrets.token_bytes(32))


def free_ports(count: int) -> list[int]:
    """Return ports of this machine that nobody listens on, nor is given by chance to an outgoing connection."""
    found: list[int] = []
    for port in random.SystemRandom().sample(_UNASSIGNED, len(_UNASSIGNED)):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            found.append(port)
        if len(found) == count:
            return found
    raise InputError(f"fewer than {count} ports of this machine are free; stop other programs")


def wait_for_port(port: int, process: subprocess.Popen[bytes], seconds: float = 60.0) -> None:
    """Wait until a process listens."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if process.poll() is not None:
            break
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            time.sleep(0.1)
    raise InputError(f"nothing listens on port {port}; look into the logs of the process that should")


@dataclass
class Processes:
    """Processes that are started together and end with the `with`, each in a session of its own with a log file."""

    folder: Path  # of the logs; Flower's own files are put here too
    environment: Mapping[str, str] = field(default_factory=dict)
    running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    _starting: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1))

    def start(self, name: str, command: Sequence[str], cwd: Path | None = None) -> subprocess.Popen[bytes]:
        """Start a process; its output is in NAME.log."""
        (self.folder / "logs").mkdir(parents=True, exist_ok=True)
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
        given = {**os.environ, **OFFLINE, "PATH": path, "FLWR_HOME": str(self.folder / "flwr"), **self.environment}

        def launch() -> subprocess.Popen[bytes]:
            with (self.folder / "logs" / f"{name}.log").open("ab") as log:
                self.running[name] = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=given,
                    cwd=cwd,
                    start_new_session=True,
                )
            return self.running[name]

        # Signals interrupt the main thread alone: in another one, no process is started without being noted.
        return self._starting.submit(launch).result()

    def log(self, name: str) -> str:
        """Return what a process has printed."""
        return (self.folder / "logs" / f"{name}.log").read_text(errors="replace")

    def stop(self, name: str, signal_: int = signal.SIGTERM, seconds: float = 15.0) -> int:
        """Stop one process and all that it started; return its exit status."""
        process = self.running[name]
        if process.poll() is None:
            os.killpg(process.pid, signal_)
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            status = process.wait()
        del self.running[name]
        return status

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        try:
            self._starting.shutdown()
            for process in self.running.values():  # all at once, then one after the other
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGTERM)
            for name in list(self.running):
                self.stop(name, seconds=10.0)
        finally:  # interrupted once more: nothing is left all the same
            self._starting.shutdown()
            for process in self.running.values():
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
