"""The process of one shard's worker: reads how to make it, then work after work, from the pipe it was started with."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection

from polyeps.transport.sharded import Worker, conveyed, packed


def work_until_closed(descriptor: int) -> None:
    """Work until the other end is closed."""
    pipe, worker, problem = Connection(descriptor), None, None
    try:
        make: Callable[[], Worker] = pickle.loads(pipe.recv_bytes())
        try:
            worker = make()
        except Exception as failed:
            problem = conveyed(failed)
        while True:
            piece = pickle.loads(pipe.recv_bytes())
            try:
                pipe.send_bytes(packed(problem if worker is None else worker.work(piece)))
            except Exception as failed:
                pipe.send_bytes(packed(conveyed(failed)))
    except (EOFError, OSError, KeyboardInterrupt):  # the run is over or was stopped
        return


if __name__ == "__main__":
    work_until_closed(int(sys.argv[1]))
