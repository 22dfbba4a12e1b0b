"""Runs paper 001's trials, those not yet in the store: first those that choose learning rates, then the others."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import as_completed
from dataclasses import replace
from pathlib import Path
from statistics import fmean

from polyeps_reproductions.fedsel_trials import Result, Trial, perform
from polyeps_reproductions.running import Means, Told, of_shard, processes
from polyeps_reproductions.trials import Store

GRID = tuple(round(10 ** (power / 2), 4) for power in range(-4, 7))  # 0.01 to 1000, the same for all methods
QUICK_GRID = (0.01, 0.1, 1.0, 10.0, 100.0, 1000.0)
AT_ONCE = 25


def run_all(trials: Iterable[Trial], store: Store, means: Means, quick: bool, told: Told) -> None:
    """Choose learning rates where they are open (zero) and run what is missing."""
    number, count = means.shard
    of_shard([], means.shard)  # refuses what is no shard
    wanted = dict.fromkeys(trials)
    rows = sorted({trial.row.key for trial in wanted})[number - 1 :: count]  # whole rows: a shard chooses by itself
    everything = [trial for trial in wanted if trial.row.key in rows]
    choices = [choice for trial in everything for choice in trial.choices(*choosing(quick))]
    _perform_missing(choices, store, means, lambda *count: told("choosing learning rates", *count))
    _perform_missing(settle(everything, store, quick), store, means, lambda *count: told("running", *count))


def choosing(quick: bool) -> tuple[tuple[float, ...], int]:
    """The grid, and on how many folds' training records it is tried."""
    return (QUICK_GRID, 1) if quick else (GRID, 2)


def settle(trials: Iterable[Trial], store: Store, quick: bool) -> list[Trial]:
    """Trials with their learning rates; those whose choice is not complete are left out."""
    rates: dict[Trial, float | None] = {}
    settled = []
    for trial in trials:
        if trial.row not in rates:
            rates[trial.row] = _chosen(trial, store, quick)
        if rate := rates[trial.row]:
            settled.append(replace(trial, learning_rate=rate))
    return settled


def _chosen(trial: Trial, store: Store, quick: bool) -> float | None:
    """The rate with the best mean accuracy on validation records; ties go to the smallest."""
    finals: dict[float, list[float]] = {}
    for choice in trial.choices(*choosing(quick)):
        result = read(store, choice)
        if result is None:
            return None
        finals.setdefault(choice.learning_rate, []).append(result["final"])
    return max(finals, key=lambda rate: fmean(finals[rate]))


def read(store: Store, trial: Trial) -> Result | None:
    """The result of a trial, if it is there."""
    return store.remember(f"{trial.key}.json")


def _perform_missing(trials: Sequence[Trial], store: Store, means: Means, told: Callable[[int, int], None]) -> None:
    there = {path.name for path in store.folder.iterdir()}
    missing = [trial for trial in dict.fromkeys(trials) if f"{trial.key}.json" not in there]
    missing.sort(key=lambda one: (one.data, one.records or 0, one.validation, one.repeat, one.fold))
    total = len(dict.fromkeys(trials))
    done = total - len(missing)
    told(done, total)
    parts = [missing[first : first + AT_ONCE] for first in range(0, len(missing), AT_ONCE)]
    with processes(means) as pool:
        if pool is None:
            for part in parts:
                _work(part, store.folder)
                done += len(part)
                told(done, total)
            return
        waiting = {pool.submit(_work, part, store.folder, os.getpid()): part for part in parts}
        for future in as_completed(waiting):
            future.result()
            done += len(waiting[future])
            told(done, total)


def _work(trials: Sequence[Trial], folder: Path, parent: int | None = None) -> None:
    store = Store(folder)
    for trial in trials:
        if parent is not None and os.getppid() != parent:
            return  # whoever wanted it is gone
        store.write(f"{trial.key}.json", perform(trial))
