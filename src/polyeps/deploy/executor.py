"""The long-lived process of a silo: acquires tasks of the SuperNode beside it, and answers them one after the other."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import httpx
from flwr.app import Error, Message
from flwr.common.constant import ErrorCode

from polyeps.deploy import flower_runtime as flower
from polyeps.deploy.keys import read_secret
from polyeps.deploy.patient_grid import restarted
from polyeps.deploy.policy import Policy
from polyeps.deploy.silo import Silo
from polyeps.ledger.head_file import replace_file
from polyeps.transport.client_files import only_one
from polyeps.transport.flower_client import DECLINED

_log = logging.getLogger(__name__)
_POLL = 0.5  # seconds between two looks for a task
_ROOM = 16 << 20  # bytes of an answer beside a message: Flower sends the bundle of the run along
_PAUSE = 2.0  # seconds to wait for a SuperNode that is not there


def run_silo(policy: Policy, stop: threading.Event) -> None:
    """Answer tasks until told to stop; the task at hand is finished first."""
    flower.check_flower()
    settings = policy.supernode
    most = policy.limits.message_bytes + _ROOM
    endpoint = flower.Endpoint(settings.address, read_secret(settings.secret), settings.root_certificates, most)
    policy.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    with only_one(policy.folder, f"another process is the silo {policy.name!r}; stop it first"):
        silo = Silo(policy)
        _log.info("silo %r is ready; its key is %s", policy.name, silo.public)
        _excuse(endpoint, policy.folder / "task")
        present = True
        with closing(endpoint.runtime()) as client:
            while not stop.is_set():
                try:
                    task = flower.acquire(endpoint, client)
                    if not present:
                        _log.info("the SuperNode at %s is back", settings.address)
                    present = True
                    if task is None:
                        stop.wait(_POLL)
                    while task is not None:
                        with closing(task.client):
                            task = _answer(silo, task, policy.folder / "task", lambda: _next(endpoint, client, stop))
                except httpx.HTTPError as problem:
                    if present:
                        _log.warning("waiting for the SuperNode at %s (%s)", settings.address, _words(problem))
                    present = False
                    stop.wait(_PAUSE)
                except Exception:  # of one task: the SuperNode gives it up, and the silo goes on
                    _log.exception("a task could not be answered")
                    stop.wait(_PAUSE)
        _log.info("silo %r has stopped", policy.name)


class _AbandonedError(Exception):
    """The task at hand is not to be waited for."""

    def __init__(self, instead: flower.Assignment | None) -> None:
        super().__init__()
        self.instead = instead


def _next(endpoint: flower.Endpoint, client: Any, stop: threading.Event) -> None:
    """Wait a moment; raise if there is another task, or the silo is to stop.

    A SuperNode handles one message at a time. If there is a second task, it has given up the first.
    """
    stop.wait(_POLL)
    other = None if stop.is_set() else flower.acquire(endpoint, client)
    if other is not None or stop.is_set():
        raise _AbandonedError(other)


def _answer(silo: Silo, task: flower.Assignment, note: Path, waiting: Callable[[], None]) -> flower.Assignment | None:
    """Answer one task; return another one that is to be answered instead, if this one is not waited for any more.

    What is needed to excuse ourselves is on the disk meanwhile.
    """
    with flower.heartbeats(task.client):
        bare = task.open()
        try:
            replace_file(note, task.note())
            message = task.content(silo.policy.limits.message_bytes, waiting)
        except httpx.HTTPError:
            raise
        except _AbandonedError as why:
            if why.instead is not None:
                _log.info("a task was given up: its run is over")
                task.give_up()
            note.unlink()
            return why.instead
        except Exception as problem:  # a full disk, or a message that cannot be read: declined like any other
            silo.refuse(problem)
            reply = Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, DECLINED), reply_to=bare)
        else:
            reply = silo.answer(message, task.node)
        task.push(reply)
    note.unlink(missing_ok=True)
    silo.write_figures()
    return None


def _excuse(endpoint: flower.Endpoint, note: Path) -> None:
    """Reply to a task that an earlier process of this silo was killed in, so that the server asks again at once."""
    if not note.exists():
        return
    try:
        task, message = flower.interrupted(endpoint, note.read_bytes())
        with closing(task.client):
            task.push(restarted(message))
        _log.info("a task was cut off; the server may ask again")
    except (httpx.HTTPError, ValueError, KeyError) as problem:  # it has been given up long ago
        _log.info("a task was cut off, and is over by now (%s)", _words(problem))
    note.unlink()


def _words(problem: Exception) -> str:
    if isinstance(problem, httpx.HTTPStatusError):
        return f"it answers {problem.response.status_code}: check the secret, and this machine's clock"
    return type(problem).__name__


@contextmanager
def stopping() -> Iterator[threading.Event]:
    """Return an event that SIGTERM and SIGINT set; a second signal ends the process as usual."""
    stop = threading.Event()

    def handle(number: int, _: object) -> None:
        stop.set()
        signal.signal(number, before[number])

    before = {int(number): signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield stop
    finally:
        for number, usual in before.items():
            signal.signal(number, usual)
