"""Workers of shards as Ray actors, on this machine or a cluster (the extra `ray`)."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from polyeps.errors import InputError
from polyeps.transport.sharded import Done, ShardWork, Worker, WorkerLost, conveyed, packed


class _Actor:
    """A worker in an actor; what it raises travels as a value, so that only a lost actor is an error of Ray."""

    def __init__(self, make: bytes) -> None:
        self.worker: Worker | None = None
        try:
            self.worker = pickle.loads(make)()
        except Exception as problem:
            self.problem = conveyed(problem)

    def node(self) -> str:
        """Return the node that this runs on."""
        import ray

        return str(ray.get_runtime_context().get_node_id())

    def work(self, piece: bytes) -> bytes:
        try:
            return packed(self.problem if self.worker is None else self.worker.work(pickle.loads(piece)))
        except Exception as problem:
            return packed(conveyed(problem))


class OnRay:
    """A worker in an actor of the cluster at an address; "local" starts one on this machine."""

    def __init__(self, make: Callable[[], Worker], address: str, *, cuda: bool = False) -> None:
        self._ray = cluster_at(address)
        made = self._ray.remote(_Actor).options(num_cpus=1, num_gpus=int(cuda), scheduling_strategy="SPREAD")
        self.actor = made.remote(packed(make))
        self._pending: Any = None

    def send(self, piece: ShardWork) -> None:
        self._pending = self.actor.work.remote(packed(piece))

    def receive(self) -> Done:
        try:
            found = pickle.loads(self._ray.get(self._pending))
        except self._ray.exceptions.RayActorError as gone:
            raise WorkerLost(str(gone).splitlines()[0]) from gone
        if isinstance(found, Exception):
            raise found
        done: Done = found
        return done

    def close(self) -> None:
        with suppress(Exception):  # it may be gone already
            self._ray.kill(self.actor)


def cluster_at(address: str) -> Any:
    """Return the module ray, connected to a cluster."""
    try:
        import ray
    except ImportError:
        raise InputError("--ray needs the extra ray, which is not installed; pip install 'polyeps[ray]'") from None
    if not ray.is_initialized():
        try:
            ray.init(None if address == "local" else address, include_dashboard=False, log_to_driver=True)
        except (ConnectionError, ValueError, RuntimeError) as problem:
            raise InputError(f"--ray {address}: no such cluster can be joined: {problem}; check the address") from None
    return ray
