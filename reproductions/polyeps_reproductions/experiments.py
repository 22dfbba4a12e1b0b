"""Trials that are experiments of any kind: the settings of one method as a TOML file has them, and a seed.

A study names its settings; where a learning rate or the like is open, it names the candidates, and the one that does
best on a validation split with the first seed is taken; methods may share the choice of one of them. Results go to the
same store as all others, one file each.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import as_completed
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

from polyeps import __version__
from polyeps.algorithms._personal_models import personal_models
from polyeps.core import State
from polyeps.experiment import config
from polyeps.experiment.evaluation import by_group
from polyeps.experiment.job import prepare
from polyeps.experiment.population import Population, populate
from polyeps.ledger import Ledger
from polyeps.server import Round
from polyeps.transport.memory import InMemory
from polyeps_reproductions.running import Means, Told, processes
from polyeps_reproductions.trials import Result, Store

LAST = 10  # rounds whose mean accuracy is the final one
VALIDATION = 1 / 6
CHOICE_SEED = 1
Changes = Mapping[str, Any]  # such as {"training.learning_rate": 0.1}


@dataclass(frozen=True)
class Trial:
    """What to run; text, so that trials can be compared and named."""

    name: str  # what a file's name begins with
    settings: str  # an experiment with one algorithm, as JSON
    seed: int
    candidates: tuple[str, ...] = ()  # changes as JSON, of which the best is to be found first
    validation: bool = False
    judged: Trial | None = None  # which the candidates are tried with; None: with this one

    @property
    def key(self) -> str:
        digest = hashlib.sha256(f"{self.settings}/{self.validation}".encode()).hexdigest()[:16]
        return f"{self.name}-{'choice-' if self.validation else ''}{self.seed}-{digest}"

    def experiment(self) -> config.Experiment:
        values = json.loads(self.settings)
        return config.experiment(_changed(values, {"data.validation": VALIDATION}) if self.validation else values)


def trial(
    name: str,
    values: Mapping[str, Any],
    seed: int,
    candidates: Iterable[Changes] = (),
    judged: Trial | None = None,
) -> Trial:
    """A trial of plain values."""
    return Trial(name, _text(values), seed, tuple(_text(changes) for changes in candidates), judged=judged)


def choice_of(wanted: Trial) -> tuple[Trial, ...]:
    """The trials that decide between a trial's candidates."""
    judged = wanted.judged or wanted
    values = json.loads(judged.settings)
    return tuple(
        Trial(judged.name, _text(_changed(values, json.loads(changes))), CHOICE_SEED, validation=True)
        for changes in wanted.candidates
    )


def settled(wanted: Trial, store: Store) -> Trial | None:
    """The trial with the best of its candidates, ties to the first; nothing while some are not tried."""
    if not wanted.candidates:
        return wanted
    results = [read(one, store) for one in choice_of(wanted)]
    finals = [result["final"] for result in results if result is not None]
    if len(finals) < len(results):
        return None
    best = json.loads(wanted.candidates[finals.index(max(finals))])
    return replace(wanted, settings=_text(_changed(json.loads(wanted.settings), best)), candidates=(), judged=None)


def read(wanted: Trial, store: Store) -> Result | None:
    """What a trial has brought, if it is finished."""
    return store.remember(f"{wanted.key}.json")


def found(wanted: Iterable[Trial], store: Store) -> list[Result]:
    """The results of those trials that are finished."""
    settled_ones = [settled(one, store) for one in wanted]
    return [result for one in settled_ones if one is not None and (result := read(one, store)) is not None]


def run_all(wanted: Sequence[Trial], store: Store, means: Means, told: Told = lambda *_: None) -> None:
    """Choose between candidates where some are open, and run what is missing."""
    mine = list(dict.fromkeys(wanted))[means.shard[0] - 1 :: means.shard[1]]
    choices = list(dict.fromkeys(choice for one in mine for choice in choice_of(one)))
    _run_missing(choices, store, means, lambda *count: told("choosing settings", *count))
    ready = [one for one in (settled(one, store) for one in mine) if one is not None]
    _run_missing(ready, store, means, lambda *count: told("running", *count))


def _run_missing(wanted: Sequence[Trial], store: Store, means: Means, told: Any) -> None:
    missing = [one for one in wanted if read(one, store) is None]
    missing.sort(key=lambda one: one.seed)  # those of a seed often share their clients
    done = len(wanted) - len(missing)
    told(done, len(wanted))
    with processes(means) as pool:
        if pool is None:
            for one in missing:
                _work(one, store.folder, means.device)
                done += 1
                told(done, len(wanted))
            return
        waiting = [pool.submit(_work, one, store.folder, means.device, os.getpid()) for one in missing]
        for future in as_completed(waiting):
            future.result()
            done += 1
            told(done, len(wanted))


def _work(wanted: Trial, folder: Path, device: str, parent: int | None = None) -> None:
    if parent is not None and os.getppid() != parent:
        return  # whoever wanted it is gone
    store = Store(folder)
    if read(wanted, store) is None:
        store.write(f"{wanted.key}.json", perform(wanted, device))


def perform(wanted: Trial, device: str = "cpu") -> Result:
    """Train, and say what came out."""
    began = time.perf_counter()
    experiment = wanted.experiment()
    population = _people(_text(_of_clients(experiment)), wanted.seed, device)
    job = prepare(experiment, experiment.algorithm[0], population)
    accuracy: dict[int, float] = {}
    kept: dict[str, list[float]] = {}
    traffic = [0, 0]

    def observe(round: Round, state: State) -> None:
        for received, sent in round.traffic.values():
            traffic[0] += received
            traffic[1] += sent
        number = round.number + 1
        if number % experiment.evaluate_every == 0 or number > experiment.rounds - LAST:
            accuracy[number] = population.evaluate(state.model)["accuracy"]
            for name, value in state.kept.items():
                if value.numel() == 1:
                    kept.setdefault(name, []).append(float(value))

    with TemporaryDirectory(prefix="polyeps-") as folder:
        ledger = None if job.budgets is None else Ledger.create(Path(folder) / "ledger.db", job.terms)
        cohort = job.clients(ledger)
        trained = time.perf_counter()
        transport = InMemory(cohort, job.algorithm, job.discloses)
        state = job.serve(transport, experiment.rounds, wanted.key, observe=observe)
        rounds_took = time.perf_counter() - trained
        spent = max((ledger.spent(client) for client in job.terms), default=None) if ledger else None
        if ledger:
            ledger.close()
    own = {}
    if population.own_tests is not None:
        own = by_group(population, state.model, personal_models(cohort.memory, state.model))
    last = [value for number, value in accuracy.items() if number > state.round - LAST]
    return {
        "trial": {"name": wanted.name, "seed": wanted.seed, "validation": wanted.validation},
        "final": fmean(last) if last else 0.0,
        "accuracy": accuracy,
        "own": own,
        "kept": kept,
        "rounds": state.round,
        "down": traffic[0],
        "up": traffic[1],
        "spent": spent,
        "scales": sorted(set(job.noise_multiplier.tolist())),
        "parameters": population.model.size,
        "seconds": round(time.perf_counter() - began, 3),
        "training_seconds": round(rounds_took, 3),
        "device": device,
        "version": __version__,
        "settings": experiment.as_dict(),
    }


def _of_clients(experiment: config.Experiment) -> dict[str, Any]:
    """The part of an experiment that decides who its clients are, and which model they train."""
    values = experiment.as_dict()
    return {name: values[name] for name in ("data", "budgets", "model")}


@lru_cache(maxsize=1)
def _people(settings: str, seed: int, device: str) -> Population:
    return populate(config.experiment(json.loads(settings)), seed, device)


def _changed(values: Mapping[str, Any], changes: Changes) -> dict[str, Any]:
    """The same settings but for these, named as in "training.clip"."""
    new: dict[str, Any] = json.loads(_text(values))
    for place, value in changes.items():
        *path, last = place.split(".")
        table = new
        for key in path:
            table = table.setdefault(key, {})
        table[last] = value
    return new


def _text(values: Mapping[str, Any]) -> str:
    return json.dumps(values, sort_keys=True, ensure_ascii=False)
