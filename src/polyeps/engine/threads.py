"""Work for several threads that take one torch thread each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def side_by_side(threads: int) -> Iterator[Callable[..., Iterable[Any]]]:
    """Return a `map` that works in so many threads; 1: in this one.

    Threads within an operation wait for each other at its end, and for whatever else the machine does.
    """
    if threads == 1:
        yield map
        return
    before = torch.get_num_threads()
    pool = ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,))
    try:
        yield pool.map
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(before)
