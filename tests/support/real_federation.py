"""A federation of real processes on loopback that tests can break; what dies is started again, as services are."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from polyeps.deploy.demo import DemoFederation
from polyeps.deploy.flower_runtime import register_node
from polyeps.deploy.kits import ServerTerms
from polyeps.deploy.processes import free_ports, polyeps_command, supernode_command
from polyeps.deploy.serving import JOURNAL
from polyeps.ledger import Ledger
from support.namespaces import Namespace, can_separate

# Flower's SuperNode as it is, but for its pauses of 3 s: a sum takes seven exchanges, and more
HASTY_SUPERNODE = """
import time
pause = time.sleep
time.sleep = lambda seconds: pause(min(seconds, 0.3))
from flwr.supernode.cli.flower_supernode import flower_supernode
flower_supernode()
"""
PATIENCE = 150.0  # seconds that a condition may take on a busy machine; on a quiet one all of them take a few


def wait(
    condition: Callable[[], Any],
    what: str,
    seconds: float = PATIENCE,
    pause: float = 0.2,
    said: Callable[[], str] = lambda: "",
) -> Any:
    """Wait until a condition holds, and return its value; if that takes too long, show what was said meanwhile."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, f"this takes too long: {what}\n{said()}"
        time.sleep(pause)
    return found


def left_running(folder: Path) -> list[str]:
    """Return the command lines of all processes that name a folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            found.append(path.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
    return [line for line in found if str(folder) in line]


class Link:
    """A line between two machines: bytes pass until it is cut, and those under way then wait until it is mended."""

    def __init__(self, port: int) -> None:
        self._whole = threading.Event()
        self._whole.set()
        self._to = port
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listening.getsockname()[1])
        self._closed = False
        self._ends: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._begin(self._accept)

    def _begin(self, what: Callable[..., None], *given: Any) -> threading.Thread:
        thread = threading.Thread(target=what, args=given, daemon=True)
        self._threads.append(thread)
        thread.start()
        return thread

    def _accept(self) -> None:
        with self._listening, contextlib.suppress(OSError):
            while True:
                self._begin(self._join, self._listening.accept()[0])

    def _join(self, near: socket.socket) -> None:
        with near, contextlib.suppress(OSError):
            self._ends.append(near)
            self._whole.wait()
            with self._connected() as far:
                self._ends.append(far)
                back = self._begin(self._carry, far, near)
                self._carry(near, far)
                back.join()

    def _connected(self) -> socket.socket:
        """Connect to the other end; while nobody listens there, packets get lost."""
        while not self._closed:
            with contextlib.suppress(OSError):
                return socket.create_connection(("127.0.0.1", self._to))
            time.sleep(0.2)
        raise OSError

    def _carry(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while content := source.recv(65536):
                self._whole.wait()
                target.sendall(content)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def cut(self) -> None:
        self._whole.clear()

    def mend(self) -> None:
        self._whole.set()

    def close(self) -> None:
        self._closed = True
        self.mend()
        for end in (self._listening, *self._ends):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(10)


class RealFederation(DemoFederation):
    """The demonstration's federation, broken and mended by tests."""

    def __init__(
        self, folder: Path, terms: ServerTerms, budgets: Mapping[str, tuple[float, float]], lines: Iterable[str] = ()
    ) -> None:
        super().__init__(folder, terms, {"OMP_NUM_THREADS": "1"}, budgets)
        self.hasty = False  # whether SuperNodes pause for a moment only
        # Of silos whose line can be cut: with a network of its own, or where that is not allowed, through a relay.
        self.links: dict[str, Link | Namespace] = {
            name: Namespace() if can_separate() else Link(self.port) for name in lines
        }
        self._kept: dict[str, threading.Thread] = {}
        self._over, self._starting = threading.Event(), threading.Lock()
        self._let_go: set[str] = set()
        self.exits: dict[str, list[int]] = {}

    @contextlib.contextmanager
    def running(self) -> Iterator[RealFederation]:
        """Run the body; end all processes after it, and check that none is left."""
        try:
            with self.processes:
                try:
                    yield self
                finally:
                    with self._starting:
                        self._over.set()
                    for name in list(self.processes.running):
                        with contextlib.suppress(ProcessLookupError):
                            os.killpg(self.processes.running[name].pid, signal.SIGCONT)
        finally:
            for thread in self._kept.values():
                thread.join(30)
            for link in self.links.values():
                link.close()
        assert left_running(self.folder) == []

    # Contracts

    def draft(self, name: str, *changes: tuple[str, str]) -> Path:
        """Write and sign a contract of this name, with changes to the template; return its path."""
        path = self.server / f"{name}.toml"
        text = (self.server / "contract.toml").read_text().replace('name = "demo"', f'name = "{name}"')
        for old, new in changes:
            assert old in text
            text = text.replace(old, new)
        path.write_text(text)
        done = subprocess.run(
            polyeps_command("deploy", "sign", str(path), "--key", str(self.server / "signer.key")),
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return path

    # Processes

    def restart_superlink(self) -> None:
        """Kill the SuperLink, and start it again on its database."""
        self.kill("superlink")
        self.processes.running["superlink"].wait()
        self.start_superlink()

    def start_superlink(self, host: str = "127.0.0.1") -> None:
        others = any(isinstance(link, Namespace) for link in self.links.values())
        super().start_superlink("0.0.0.0" if others else host)

    def start_supernode(self, name: str) -> None:
        link = self.links.get(name)
        address = f"localhost:{self.port}" if isinstance(link, Namespace) else f"127.0.0.1:{(link or self).port}"
        command = supernode_command(self.silo(name), self.server / "ca.crt", address, self.ports[name])
        if self.hasty:
            command = [sys.executable, "-c", HASTY_SUPERNODE, *command[1:]]
        self.keep(f"supernode-{name}", [*self._where(name), *command])

    def start_silo(self, name: str) -> None:
        command = polyeps_command("silo", "--policy", str(self.silo(name) / "policy.toml"))
        self.keep(f"silo-{name}", [*self._where(name), *command])

    def _where(self, name: str) -> list[str]:
        link = self.links.get(name)
        return link.inside if isinstance(link, Namespace) else []

    def keep(self, name: str, command: list[str], *, while_failing: bool = False, pause: float = 1.0) -> None:
        """Start a process, and start it again whenever it ends: always, or while it fails."""
        self._let_go.discard(name)
        process = self.processes.start(name, command)
        over = self._over

        def watch() -> None:
            nonlocal process
            while True:
                status = process.wait()
                self.exits.setdefault(name, []).append(status)
                over.wait(pause)
                with self._starting:
                    if over.is_set() or name in self._let_go or (while_failing and status == 0):
                        return
                    process = self.processes.start(name, command)

        self._kept[name] = threading.Thread(target=watch, daemon=True)
        self._kept[name].start()

    def release(self, name: str) -> None:
        """Start a process no more when it ends."""
        with self._starting:
            self._let_go.add(name)

    def serving(self, contract: Path, folder: str, *, again: bool = True) -> None:
        """Serve a contract in a process of its own; start it again while it fails."""
        address, test = f"127.0.0.1:{self.port}", self.server / "test.csv"
        command = polyeps_command(
            *("serve", str(contract), "--superlink", address, "--kit", str(self.server)),
            *("-o", str(self.folder / folder), "--test", str(test)),
        )
        name = f"serve-{folder}"
        if again:
            self.keep(name, command, while_failing=True)
        else:
            self.processes.start(name, command)

    def kill(self, name: str, signal_: int = signal.SIGKILL) -> None:
        """Send a signal to a process; who keeps it starts it again."""
        os.kill(self.processes.running[name].pid, signal_)

    def finished(self, folder: str, seconds: float = 2 * PATIENCE) -> int:
        """Wait until a run is served to its end, or once if it is not served again; return the last exit status."""
        name = f"serve-{folder}"
        if name in self._kept:
            wait(lambda: not self._kept[name].is_alive(), f"{name} ends", seconds)
        else:
            wait(lambda: self.processes.running[name].poll() is not None, f"{name} ends", seconds)
        return int(self.processes.running[name].wait())

    def register(self, folder: Path) -> int:
        return register_node(self.endpoint, folder / "node.pub")

    def another_port(self) -> int:
        return free_ports(1)[0]

    # What happened

    def rounds(self, folder: str) -> int:
        """Return the number of rounds that a run has completed."""
        return len(self.answers(folder))

    def answers(self, folder: str) -> list[set[str]]:
        """Return who answered each completed round of a run, as its journal says."""
        path = self.folder / folder / JOURNAL
        if not path.exists():
            return []
        with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=60)) as journal:
            rows = journal.execute(
                "SELECT round, group_concat(client) FROM rounds LEFT JOIN "
                "(SELECT round AS of, client FROM answers WHERE answered) ON round = of GROUP BY round ORDER BY round"
            )
            return [set((names or "").split(",")) - {""} for _, names in rows]

    def wait_rounds(self, folder: str, count: int) -> None:
        said = partial(self.tail, f"serve-{folder}")
        wait(lambda: self.rounds(folder) >= count, f"round {count} of {folder}", said=said)

    def wait_ready(self, *names: str) -> None:
        """Wait until silos look for tasks."""
        for name in names:
            wait(partial(self.says, f"silo-{name}", "is ready"), f"{name} is ready")

    def says(self, name: str, words: str) -> bool:
        """Return whether a process has printed some words."""
        return words in self.processes.log(name)

    def wait_task(self, name: str) -> None:
        """Wait until a silo is at a task."""
        wait((self.silo(name) / "state" / "task").exists, f"a task for {name}", pause=0.001)

    def tail(self, name: str) -> str:
        return self.processes.log(name)[-2000:]

    def events(self, name: str) -> list[dict[str, Any]]:
        path = self.silo(name) / "state" / "events.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def refusals(self, name: str) -> list[str]:
        return [event["reason"] for event in self.events(name) if event["event"] == "refused"]

    def answered(self, name: str, run: str) -> set[int]:
        """Return the rounds of a run that a silo has answered."""
        return {one["round"] for one in self.events(name) if one["event"] == "answered" and one["run"].startswith(run)}

    def charges(self, name: str, run: str = "") -> int:
        """Return how often a silo was charged, in all or for a run."""
        with contextlib.closing(Ledger(self.silo(name) / "ledger.db")) as ledger:
            ledger.verify()
            rows = [row.content for row in ledger.rows() if row.kind == "charge"]
            assert ledger.account(name).spent(ledger.account(name).committed) <= self.budgets[name][1]
        return sum(str(row.get("run", "")).startswith(run) for row in rows)


def can_mount() -> bool:
    """Return whether a small disk can be made here."""
    with tempfile.TemporaryDirectory() as folder:
        made = subprocess.run(["mount", "-t", "tmpfs", "none", folder], capture_output=True, check=False)
        if not made.returncode:
            subprocess.run(["umount", folder], check=True)
    return not made.returncode


@contextlib.contextmanager
def small_disk(folder: Path, size: str) -> Iterator[None]:
    """Make a folder a disk of its own, so small that it can be filled."""
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size},mode=700", "none", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(folder: Path) -> Path:
    """Fill the disk of a folder to the last byte; remove the file that is returned to make room."""
    place = folder / "filling"
    with contextlib.suppress(OSError), place.open("ab", buffering=0) as file:
        for size in (1 << 16, 1 << 12, 1):
            with contextlib.suppress(OSError):
                while True:
                    file.write(b"0" * size)
    return place
