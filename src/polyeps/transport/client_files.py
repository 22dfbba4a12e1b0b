"""A deployed client's memory as files of its own: written before a reply is sent, read when the client opens.

    FOLDER                locked while a task is answered
    FOLDER/RUN.memory     of one run: memory, what is passed on within its round, and the replies of that round
    FOLDER/RUN.attempt    the task that was begun and not yet answered, with the name of the attempt it is charged under

A file holds everything about a run, and is replaced as a whole: memory and reply are on the disk together or not at
all. So a client asked twice for the same task sends the same bytes twice and pays once, despite crashes in between: an
attempt is written before it is charged and removed after its reply is kept, so a task whose attempt is found was never
answered.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import secrets
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polyeps.client import digest
from polyeps.clients import Clients
from polyeps.core import Payload, Replies, Task
from polyeps.errors import InputError
from polyeps.ledger.head_file import replace_file, sync_folder
from polyeps.transport import codec

MOST_REPLIES = 16  # kept of one round: a server that asks for more of them pays the client's price again
_ABOUT = "about"  # a JSON text, as bytes: run, round, and whether the client was ready after each reply


@dataclass(frozen=True)
class Keeping:
    """The folder of one client; `polyeps.clients.Clients(keeper=Keeping(folder))`."""

    folder: Path

    def locked(self) -> AbstractContextManager[None]:
        """Wait until no other process of this client answers, and keep others waiting."""
        return locked(self.folder)

    def recall(self, clients: Clients, task: Task) -> Replies | None:
        """Restore what the client kept of a run; return its reply, if it has answered this very task."""
        clients.memory.clear()
        clients.passed_on.begin(task.run, -1)
        about, held = self._read(task.run)
        if not about:
            return None
        device = clients.data.features.device
        clients.memory |= {name: kept.to(device) for name, kept in _under("memory", held).items()}
        if about["round"] != task.round:
            return None
        clients.passed_on.begin(task.run, task.round)
        for name, kept in _under("passed on", held).items():
            clients.passed_on.keep(name, clients.ids, kept.to(device))
        key = _key(task)
        if key not in about["ready"]:
            return None
        return Replies(clients.ids, _under(f"reply/{key}", held), (bool(about["ready"][key]),))

    def begin(self, task: Task) -> str:
        """Return the name of the attempt at a task: that of an attempt which was cut off, or a new one."""
        path, key = self._path(task.run, "attempt"), f"{task.round}/{_key(task)}"
        try:
            begun: dict[str, str] = json.loads(path.read_bytes())
        except FileNotFoundError:
            begun = {}
        except ValueError as problem:
            raise InputError(f"{path} is damaged ({problem}); remove it: the task is charged once more") from None
        if begun.get("task") == key:
            return begun["attempt"]
        attempt = secrets.token_hex(8)
        replace_file(path, json.dumps({"task": key, "attempt": attempt}).encode())
        return attempt

    def keep(self, clients: Clients, task: Task, replies: Replies) -> None:
        """Write memory, what is passed on, and the replies of the present round to the disk."""
        about, held = self._read(task.run)
        same = bool(about) and about["round"] == task.round
        kept = {name: tensor for name, tensor in held.items() if same and name.startswith("reply/")}
        kept |= {f"memory/{name}": tensor for name, tensor in clients.memory.items()}
        for name in clients.passed_on.rows:
            for tensor, row in clients.passed_on.rows[name].values():
                kept[f"passed on/{name}"] = tensor[row : row + 1]
        kept |= {f"reply/{_key(task)}/{name}": tensor for name, tensor in replies.payload.items()}
        ready = {**(about["ready"] if same else {}), _key(task): replies.ready[0]}
        for old in list(ready)[:-MOST_REPLIES]:
            del ready[old]
            kept = {name: tensor for name, tensor in kept.items() if not name.startswith(f"reply/{old}/")}
        self._write(task.run, {"run": task.run, "round": task.round, "ready": ready}, kept)
        self._path(task.run, "attempt").unlink(missing_ok=True)
        sync_folder(self.folder)

    def forget(self, task: Task) -> None:
        """Keep of a reply only that it was given: what was in it is kept elsewhere."""
        with self.locked():
            about, held = self._read(task.run)
            left = {name: kept for name, kept in held.items() if not name.startswith(f"reply/{_key(task)}/")}
            if len(left) < len(held):
                self._write(task.run, about, left)

    def _write(self, run: str, about: dict[str, Any], held: dict[str, Tensor]) -> None:
        text = torch.from_numpy(np.frombuffer(json.dumps(about).encode(), np.uint8).copy())
        replace_file(self._path(run), codec.encode({**held, _ABOUT: text}))

    def _read(self, run: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
        try:
            content = self._path(run).read_bytes()
        except FileNotFoundError:
            return {}, {}
        try:
            held = dict(codec.decode(content))
            about: dict[str, Any] = json.loads(bytes(held.pop(_ABOUT).numpy()))
        except (InputError, KeyError, ValueError) as problem:
            raise InputError(f"{self._path(run)} is damaged ({problem}); put back a copy of it") from None
        return about, held

    def _path(self, run: str, kind: str = "memory") -> Path:
        return self.folder / f"{hashlib.blake2b(run.encode(), digest_size=16).hexdigest()}.{kind}"


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock a folder, which is made if needed: others wait for it, in this process or another."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    held = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield
    finally:
        os.close(held)


def only_one(folder: Path, otherwise: str) -> AbstractContextManager[None]:
    """Refuse to go on, with this sentence, while another process is in the same `with` of a folder."""
    return alone_with(os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600), otherwise)


@contextmanager
def alone_with(held: int, otherwise: str) -> Iterator[None]:
    """Lock an open file, which is closed afterwards; refuse to go on while another process has locked it."""
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise InputError(otherwise) from None
    else:
        yield
    finally:
        os.close(held)


def _key(task: Task) -> str:
    """Return the key of a task within its round: the same task, with the same payload, has one answer."""
    return f"{task.action}/{digest(task.payload)}"


def _under(prefix: str, held: Payload) -> dict[str, Tensor]:
    return {name.removeprefix(f"{prefix}/"): kept for name, kept in held.items() if name.startswith(f"{prefix}/")}
