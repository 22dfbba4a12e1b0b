"""Shards: workers that hold slices of the clients' records and train them, each on its own cores or device.

Everything that decides stays with `client.answer` in one place: validation, charges, noise multipliers and what clients
keep. A worker is sent the work of clients that have paid, and gives back their replies or, for a secure sum, their sum.
Random streams depend on (seed, client, round) alone, so work that is done again, by whichever worker, has the same
result: a worker that is lost is started anew and sent the same work.
"""

from __future__ import annotations

import io
import logging
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Pipe
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from polyeps.core import Action, Payload, Records, Streams, Task, Work
from polyeps.errors import InputError, PolyepsError, ShardLost

_log = logging.getLogger(__name__)
_STARTS = 3  # times that a worker is started anew for one piece of work
_Rows = NDArray[np.int64]
Done = tuple[Payload, Payload]  # replies and memory of some clients, a row each


@dataclass(frozen=True)
class ShardWork:
    """The work of some clients of one shard; all that it needs beside the shard's records."""

    action: str
    round: int
    ids: tuple[str, ...]
    places: _Rows  # in the shard
    summed: bool  # whether the sum of their replies is enough
    payload: Payload
    noise_multiplier: NDArray[np.float64]
    settings: Mapping[str, NDArray[Any]]
    groups: tuple[str, ...]
    memory: Payload


@dataclass
class Worker:
    """The records of a slice of the clients, and what is done with them."""

    data: Records
    actions: Mapping[str, Action]
    streams: Callable[[Sequence[str], int], Streams]

    def work(self, piece: ShardWork) -> Done:
        """Do an action for some clients."""
        device = self.data.features.device
        replies, memory = self.actions[piece.action].run(
            Work(
                payload={name: tensor.to(device) for name, tensor in piece.payload.items()},
                data=self.data.select(piece.places),
                noise_multiplier=piece.noise_multiplier,
                streams=self.streams(piece.ids, piece.round),
                settings=piece.settings,
                groups=piece.groups,
                memory={name: tensor.to(device) for name, tensor in piece.memory.items()},
            )
        )
        return (row_of_sums(replies) if piece.summed else replies), memory


def row_of_sums(payload: Payload) -> Payload:
    """Return the sums of replies, as one row."""
    return {name: tensor.sum(0, keepdim=True) for name, tensor in payload.items()}


class Host(Protocol):
    """Where one worker lives."""

    def send(self, piece: ShardWork) -> None:
        """Begin some work."""

    def receive(self) -> Done:
        """Return the result of the work that was begun; raise WorkerLost if the worker is gone."""

    def close(self) -> None:
        """End the worker."""


class WorkerLost(Exception):  # noqa: N818
    """A worker ended before its work was done."""


class InProcess:
    """A worker in this process, for tests."""

    def __init__(self, make: Callable[[], Worker]) -> None:
        self.worker = make()
        self._piece: ShardWork | None = None

    def send(self, piece: ShardWork) -> None:
        self._piece = piece

    def receive(self) -> Done:
        assert self._piece is not None
        return self.worker.work(self._piece)

    def close(self) -> None:
        """A worker in this process ends with it."""


class InOtherProcess:
    """A worker in a process of its own on this machine."""

    def __init__(self, make: Callable[[], Worker], threads: int = 1) -> None:
        self._pipe, theirs = Pipe()
        # -P: no module of the present folder is imported by mistake.
        command = [sys.executable, "-P", "-m", "polyeps.transport.shard_process", str(theirs.fileno())]
        # Threads that wait for work would spin, and take the time of the other workers.
        quiet = {**os.environ, "OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "passive"}
        self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=quiet)
        theirs.close()
        self._send(make)

    def send(self, piece: ShardWork) -> None:
        self._send(piece)

    def _send(self, thing: Any) -> None:
        with suppress(OSError):  # a worker that is gone is noticed when its result is awaited
            self._pipe.send_bytes(packed(thing))

    def receive(self) -> Done:
        try:
            found = pickle.loads(self._pipe.recv_bytes())
        except (EOFError, OSError) as gone:
            raise WorkerLost(f"its process ended with {self.process.wait()}") from gone
        if isinstance(found, Exception):
            raise found
        done: Done = found
        return done

    def close(self) -> None:
        self._pipe.close()  # which ends the process
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class _Packer(pickle.Pickler):
    """Pickles tensors as arrays, which is quick."""

    def reducer_override(self, thing: Any) -> Any:
        if isinstance(thing, Tensor):
            return torch.from_numpy, (thing.detach().cpu().numpy(),)
        return NotImplemented


def packed(thing: Any) -> bytes:
    """Return bytes for another process of ours."""
    content = io.BytesIO()
    _Packer(content, protocol=5).dump(thing)
    return content.getvalue()


def conveyed(problem: Exception) -> Exception:
    """Return an exception as another process can raise it: our own ones as they are."""
    if isinstance(problem, PolyepsError):
        return problem
    return RuntimeError(f"{type(problem).__name__}: {problem}")


@dataclass
class Shards:
    """Workers, each for a slice of the clients, that do what paid clients were asked for."""

    edges: _Rows  # (k + 1,) worker i has the clients from edges[i] up to edges[i + 1]
    start: Callable[[int], Host]
    hosts: list[Host] = field(init=False)

    def __post_init__(self) -> None:
        self.hosts = [self.start(shard) for shard in range(len(self.edges) - 1)]

    def work(self, task: Task, ids: Sequence[str], places: _Rows, work: Work) -> Done:
        """Return what `Action.run` would return for this work; of a task to be summed, a row of sums a shard."""
        owner = np.searchsorted(self.edges, places, side="right") - 1
        order, pieces = np.argsort(owner, kind="stable"), dict[int, ShardWork]()
        for shard in np.unique(owner).tolist():
            rows = order[owner[order] == shard]
            where = torch.from_numpy(rows)
            pieces[shard] = ShardWork(
                task.action,
                task.round,
                tuple(ids[row] for row in rows.tolist()),
                places[rows] - self.edges[shard],
                task.summed,
                work.payload,
                work.noise_multiplier[rows],
                {name: own[rows] for name, own in work.settings.items()},
                tuple(work.groups[row] for row in rows.tolist()) if work.groups else (),
                {name: kept[where.to(kept.device)] for name, kept in work.memory.items()},
            )
        for shard, piece in pieces.items():
            self.hosts[shard].send(piece)
        done = [self._received(shard, piece) for shard, piece in pieces.items()]
        back, device = torch.from_numpy(np.argsort(order)), work.data.features.device
        replies, memory = (_together(parts) for parts in zip(*done, strict=True))
        if not task.summed:
            replies = {name: rows[back] for name, rows in replies.items()}
        return (
            {name: rows.to(device) for name, rows in replies.items()},
            {name: rows[back].to(device) for name, rows in memory.items()},
        )

    def _received(self, shard: int, piece: ShardWork) -> Done:
        """Return a worker's result; start a worker that was lost anew, which changes nothing."""
        for attempt in range(_STARTS):
            try:
                return self.hosts[shard].receive()
            except WorkerLost as gone:
                if attempt == _STARTS - 1:
                    break
                _log.warning("round %d: the worker of shard %d is lost (%s); it starts anew", piece.round, shard, gone)
                self.hosts[shard].close()
                self.hosts[shard] = self.start(shard)
                self.hosts[shard].send(piece)
        raise ShardLost(
            f"the worker of shard {shard} ended {_STARTS} times in round {piece.round}; look at its messages above, "
            "give it more memory or take more shards, then resume the run"
        )

    def close(self) -> None:
        """End all workers."""
        for host in self.hosts:
            host.close()


def _together(parts: Sequence[Payload]) -> Payload:
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def even_edges(clients: int, shards: int) -> _Rows:
    """Return where slices of equal size, up to one, begin and end."""
    if not 1 <= shards <= clients:
        raise InputError(f"--shards is {shards}; it must be from 1 to the number of clients, {clients}")
    return np.arange(shards + 1) * clients // shards
