"""Runs trials that are not finished, in this process or in several, on this machine or in shards.

A shard takes whole rows, so that it can choose settings by itself: a row is all trials that share a choice.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from polyeps.errors import InputError
from polyeps_reproductions.trials import Store, Trial, perform

AT_ONCE = 8  # trials of the same clients that a process takes: their records are loaded once
Progress = Callable[[str, int, int], None]  # (stage, done, total)


@dataclass(frozen=True)
class Machines:
    """Where trials run."""

    device: str = "cpu"
    processes: int = 1
    shard: tuple[int, int] = (1, 1)  # (number, of how many)
    until: float | None = None  # the time after which no further trial is begun


def run_all(trials: Iterable[Trial], store: Store, machines: Machines, progress: Progress = lambda *_: None) -> None:
    """Choose settings where they are open, and run all that is missing."""
    mine = of_shard(trials, machines.shard)
    cells = dict.fromkeys(replace(one, seed=0) for one in mine)
    choices = list(dict.fromkeys(choice for one in cells if not one.recorded for choice in one.choices()))
    with processes(machines) as pool:
        _run_missing(choices, store, machines, pool, lambda *count: progress("choosing settings", *count))
        _run_missing(settle(mine, store), store, machines, pool, lambda *count: progress("running", *count))


def settle(trials: Iterable[Trial], store: Store) -> list[Trial]:
    """Return trials with their settings chosen, without those whose choice is not complete."""
    wanted = list(trials)
    chosen = {cell: cell.settled(store) for cell in dict.fromkeys(replace(one, seed=0) for one in wanted)}
    pairs = [(one, chosen[replace(one, seed=0)]) for one in wanted]
    return [replace(cell, seed=one.seed) for one, cell in pairs if cell is not None]


def of_shard(trials: Iterable[Trial], shard: tuple[int, int]) -> list[Trial]:
    """Return every n-th row of the trials, whole."""
    number, count = shard
    if not 1 <= number <= count:
        raise InputError(f"--shard takes a number of a count, such as 3/8, not {number}/{count}")
    everything = list(dict.fromkeys(trials))
    rows = {row: place for place, row in enumerate(sorted({one.row for one in everything}))}
    return [one for one in everything if rows[one.row] % count == number - 1]


@contextmanager
def processes(machines: Machines) -> Iterator[Executor | None]:
    """Yield a pool of processes; None: this process does the work."""
    if machines.processes <= 1:
        yield None
        return
    context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
    with ProcessPoolExecutor(machines.processes, mp_context=context, initializer=_one_thread) as pool:
        try:
            yield pool
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _run_missing(
    trials: Sequence[Trial], store: Store, machines: Machines, pool: Executor | None, count: Callable[[int, int], None]
) -> None:
    missing = [one for one in trials if not store.has(one)]
    done, total = len(trials) - len(missing), len(trials)
    count(done, total)
    for finished in _finished(bundle(missing, machines.processes), store.folder, machines, pool):
        done += finished
        count(done, total)


def _finished(bundles: Sequence[list[Trial]], folder: Path, machines: Machines, pool: Executor | None) -> Iterator[int]:
    """Run bundles, and yield how many of each part's trials are finished."""
    if pool is None:
        for one in (one for part in bundles for one in part):
            yield _work([one], folder, machines)
        return
    waiting = [pool.submit(_work, part, folder, machines, os.getpid()) for part in bundles]
    for future in as_completed(waiting):
        yield future.result()


def bundle(trials: Iterable[Trial], processes: int) -> list[list[Trial]]:
    """Group trials of the same clients, small enough that all processes have work until the end; first seeds first."""
    together: dict[str, list[Trial]] = {}
    for one in sorted(trials, key=lambda one: (one.seed, one.clients)):
        together.setdefault(one.clients, []).append(one)
    count = sum(map(len, together.values()))
    most = max(1, min(AT_ONCE, count // (4 * max(1, processes))))
    return [part[first : first + most] for part in together.values() for first in range(0, len(part), most)]


def _one_thread() -> None:
    """Keep to one core, since many processes share them."""
    import torch

    torch.set_num_threads(1)


def _work(trials: Sequence[Trial], folder: Path, machines: Machines, parent: int | None = None) -> int:
    """Run trials, and return how many are finished."""
    store = Store(folder)
    for number, one in enumerate(trials):
        orphaned = parent is not None and os.getppid() != parent  # the command that wanted it is gone
        if orphaned or (machines.until is not None and time.time() > machines.until):
            return number
        if not store.has(one):
            store.write(one, perform(one, machines.device))
    return len(trials)
