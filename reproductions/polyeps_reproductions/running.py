"""Runs the trials of a study, those not yet in the store, in this process or in several, on this machine or in shards.

A shard takes whole rows, so that it can choose learning rates by itself: a row is a method and a form on one kind of
data, model and budgets, for all numbers of clients and seeds.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from polyeps.errors import InputError
from polyeps_reproductions import choosing
from polyeps_reproductions.trials import Store, Trial, perform

AT_ONCE = 8  # trials of the same clients a process takes: their records are loaded once
Told = Callable[[str, int, int], None]  # (what, done, of how many)


@dataclass(frozen=True)
class Means:
    """How trials are run."""

    device: str = "cpu"
    processes: int = 1
    shard: tuple[int, int] = (1, 1)  # which, of how many
    grid: tuple[float, ...] = choosing.GRID


def run_all(trials: Iterable[Trial], store: Store, means: Means, told: Told = lambda *_: None) -> list[Trial]:
    """Choose learning rates where they are open (zero) and run what is missing; the trials as they were run."""
    mine = of_shard(trials, means.shard)
    open_ones = [trial for trial in mine if not trial.learning_rate]
    choices = list({choice: None for trial in open_ones for choice in choosing.choice_of(trial, means.grid)})
    with processes(means) as pool:
        _perform_missing(choices, store, means, pool, lambda *count: told("choosing learning rates", *count))
        settled = settle(mine, store, means.grid)
        _perform_missing(settled, store, means, pool, lambda *count: told("running", *count))
    return settled


def settle(trials: Iterable[Trial], store: Store, grid: Sequence[float]) -> list[Trial]:
    """Trials with their learning rates; those whose choice is not complete are left out."""
    rates: dict[Trial, Trial | None] = {}
    settled = []
    for trial in trials:
        if trial.learning_rate:
            settled.append(trial)
            continue
        row = choosing.choice_of(trial, grid)[0]
        if row not in rates:
            rates[row] = choosing.chosen(store, trial, grid)
        known = rates[row]
        if known is not None:
            settled.append(replace(trial, learning_rate=known.learning_rate))
    return settled


def of_shard(trials: Iterable[Trial], shard: tuple[int, int]) -> list[Trial]:
    """Every n-th row of the trials, whole, in the order in which they share data and clients."""
    number, count = shard
    if not 1 <= number <= count:
        raise InputError(f"--shard takes a number of a count, such as 3/8, not {number}/{count}")
    everything = list(dict.fromkeys(trials))
    rows = {row: place for place, row in enumerate(sorted({_row(trial) for trial in everything}))}
    return [trial for trial in everything if rows[_row(trial)] % count == number - 1]


def _row(trial: Trial) -> str:
    cell = choosing.tuned(trial.cell)
    return repr((cell.data, cell.model, trial.method, trial.form, cell))


@contextmanager
def processes(means: Means) -> Iterator[Executor | None]:
    """The processes that do the work; none: this one does."""
    if means.processes <= 1:
        yield None
        return
    context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
    with ProcessPoolExecutor(means.processes, mp_context=context, initializer=_alone) as pool:
        try:
            yield pool
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _perform_missing(
    trials: Sequence[Trial], store: Store, means: Means, pool: Executor | None, told: Callable[[int, int], None]
) -> None:
    missing = [trial for trial in trials if not store.has(trial)]
    done, total = len(trials) - len(missing), len(trials)
    told(done, total)
    bundles = bundle(missing, means.processes)
    if pool is None:
        for trial in (trial for part in bundles for trial in part):
            _work([trial], store.folder, means.device)
            done += 1
            told(done, total)
        return
    waiting = {pool.submit(_work, part, store.folder, means.device, os.getpid()): part for part in bundles}
    for future in as_completed(waiting):
        future.result()
        done += len(waiting[future])
        told(done, total)


def bundle(trials: Iterable[Trial], processes: int) -> list[list[Trial]]:
    """Trials of the same clients together, in parts small enough that all processes have work until the end."""
    together: dict[object, list[Trial]] = {}
    for trial in sorted(trials, key=lambda one: (one.cell.data, one.cell.model, repr(one.people), one.form)):
        together.setdefault(trial.people, []).append(trial)
    count = sum(map(len, together.values()))
    most = max(1, min(AT_ONCE, count // (4 * max(1, processes))))
    return [part[first : first + most] for part in together.values() for first in range(0, len(part), most)]


def _alone() -> None:
    """Many processes share the cores: each keeps to one."""
    import torch

    torch.set_num_threads(1)


def _work(trials: Sequence[Trial], folder: Path, device: str, parent: int | None = None) -> None:
    store = Store(folder)
    for trial in trials:
        if parent is not None and os.getppid() != parent:
            return  # whoever wanted it is gone
        if not store.has(trial):
            store.write(store.path(trial).name, perform(trial, device))
