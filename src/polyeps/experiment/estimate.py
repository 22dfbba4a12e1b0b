"""Estimates the accuracy of a planned experiment on a stand-in for its records.

The stand-in is a public data set itself, a file that the asker names, or records drawn from the schema alone. Clients
have as many records and the budgets that they will have; of the planned records, only their number, their shape and the
number of classes are used. Ledgers are temporary: an estimate is charged to nobody.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from polyeps.accounting.calibration import ProgressCallback
from polyeps.algorithms._personal_models import personal_models
from polyeps.data.dataset import Dataset
from polyeps.data.partition import Partition, unit_sizes
from polyeps.data.public_catalogue import PUBLIC_DATASETS
from polyeps.data.schema import Schema
from polyeps.errors import InputError
from polyeps.experiment import config
from polyeps.experiment.client_metrics import majority
from polyeps.experiment.evaluation import measure_models
from polyeps.experiment.job import Job, prepare
from polyeps.experiment.model_choice import model_for
from polyeps.experiment.population import Population, dataset_of, populate, stand_in_dataset
from polyeps.experiment.registry import BUILT_IN, Parts
from polyeps.experiment.seeds import generator, seed_for
from polyeps.ledger import Ledger
from polyeps.transport.memory import InMemory

LEARNABLE = 0.85  # the best accuracy there is on drawn records, by construction
_TESTED = 2000  # drawn test records
_OPEN = config.Method(name="fedavg", budgets="none", label="without privacy")

Source = Literal["public", "file", "drawn"]


@dataclass(frozen=True)
class Estimate:
    """The estimated accuracy of one method, beside what could be had without privacy and without training."""

    method: str
    accuracy: float  # mean over seeds, after the last round
    deviation: float | None  # over seeds; None: one seed
    without_privacy: float  # federated averaging without noise, under the same settings
    majority: float  # of the class that is most frequent in the training records

    @property
    def cost(self) -> float:
        """The accuracy that privacy costs."""
        return self.without_privacy - self.accuracy


@dataclass(frozen=True)
class Estimates:
    """The estimates for all methods of an experiment, and the records they were made with."""

    source: Source
    stand_in: str
    seeds: tuple[int, ...]
    methods: tuple[Estimate, ...]

    @property
    def worth(self) -> str:
        """Say what the estimates are worth."""
        if self.source == "public":
            seeds = f"{len(self.seeds)} seed{'s' if len(self.seeds) > 1 else ''}"
            return f"{self.stand_in} is public: the estimate is the run itself, with {seeds}."
        if self.source == "file":
            return (
                f"These are accuracies on the records of {self.stand_in}, dealt out to all clients at random. Expect "
                "other ones where clients' records differ from these."
            )
        return (
            "These are accuracies on drawn records, alike for all clients: uniform within the declared ranges and "
            f"categories, with classes that can be told apart in {LEARNABLE:.0%} of cases at best. They show what "
            "privacy costs at these budgets and numbers of records, not what your records can teach; for that, name "
            "a table with --stand-in."
        )


def estimate(
    experiment: config.Experiment,
    *,
    stand_in: Path | None = None,
    seeds: int = 3,
    progress: ProgressCallback | None = None,
    parts: Parts = BUILT_IN,
) -> Estimates:
    """Simulate every method of an experiment on a stand-in for its records, with its first seeds."""
    if seeds < 1:
        raise InputError(f"an estimate needs at least 1 seed, not {seeds}")
    chosen = (*experiment.seeds, *(seed for seed in range(1, seeds + 1) if seed not in experiment.seeds))[:seeds]
    methods = (*experiment.algorithm, _OPEN)
    accuracy: dict[str, list[float]] = {method.title: [] for method in experiment.algorithm}
    open_accuracy: list[float] = []
    guessed: list[float] = []
    source: Source = "drawn"
    name, done, total = "", 0, len(chosen) * len(methods) * experiment.rounds

    def round_done() -> None:
        nonlocal done
        done += 1
        if progress:
            progress(done, total)

    if stand_in is not None and not stand_in.exists():
        raise InputError(f"--stand-in {stand_in}: there is no such file; name a table with the experiment's columns")
    held = None if stand_in is None else stand_in_dataset(stand_in, experiment.data)
    for seed in chosen:
        population = populate(experiment, seed, parts=parts)
        public = not population.dataset.own and population.dataset.name in PUBLIC_DATASETS
        source = "file" if stand_in else "public" if public else "drawn"
        if source != "public":
            dataset = None if held is None else _split(experiment, held, seed, parts)
            population = _replaced(experiment, population, dataset, parts)
        name = population.dataset.name
        guessed.append(majority(population)[0])
        for place, method in enumerate(methods):
            found = _final_accuracy(prepare(experiment, method, population, parts=parts), experiment.rounds, round_done)
            (open_accuracy if place == len(methods) - 1 else accuracy[method.title]).append(found)
    return Estimates(
        source,
        stand_in.name if stand_in else name,
        chosen,
        tuple(
            Estimate(one, fmean(found), stdev(found) if found[1:] else None, fmean(open_accuracy), fmean(guessed))
            for one, found in accuracy.items()
        ),
    )


def _final_accuracy(job: Job, rounds: int, round_done: Callable[[], None]) -> float:
    """Return the accuracy of a job's last model; its ledger is deleted."""
    with tempfile.TemporaryDirectory() as folder:
        ledger = None if job.budgets is None else Ledger.open_or_create(Path(folder) / "ledger.db", job.terms)
        cohort = job.clients(ledger)
        transport = InMemory(cohort, job.algorithm, job.discloses)
        state = job.serve(transport, rounds, job.name, observe=lambda *_: round_done())
        if ledger:
            ledger.close()
    personal = None if job.entry.common else personal_models(cohort.memory, state.model)
    found = measure_models(job.population, state.model if job.entry.common else None, personal)["accuracy"]
    return found if math.isfinite(found) else 0.0


def _split(experiment: config.Experiment, held: Dataset, seed: int, parts: Parts) -> Dataset:
    """Return the records of a stand-in, with test records set apart by person; persons do not matter afterwards."""
    data = experiment.data.model_copy(update={"partition": None})
    found = dataset_of(experiment.model_copy(update={"data": data}), seed, replace(parts, data=held))
    return replace(found, groups=None, group_names=(), test_groups=None, persons=None, test_persons=None, person="")


def _replaced(
    experiment: config.Experiment, population: Population, records: Dataset | None, parts: Parts
) -> Population:
    """Return a population with other records: those given, dealt out at random, or drawn ones.

    Where all records of a person are protected together, a person becomes one record.
    """
    planned, rng = population.dataset, generator(population.seed, "stand-in")
    if planned.target != "class" or planned.inputs is not None:
        raise InputError(
            f"--accuracy estimates the accuracy of classes from one input, but {planned.name} has others; leave it out"
        )
    units = unit_sizes(planned, population.partition)
    if records is None:
        records = _drawn(planned, int(units.sum()), rng)
        rows = np.arange(units.sum())
    else:
        if records.features.shape[1:] != planned.features.shape[1:]:
            raise InputError(
                f"the stand-in has records of shape {records.features.shape[1:]}, but the experiment's have "
                f"{planned.features.shape[1:]}; give it the same columns"
            )
        if len(records.classes) != len(planned.classes):
            raise InputError(
                f"the stand-in has {len(records.classes)} labels, but the experiment's records have "
                f"{len(planned.classes)}; declare data.classes, or give it records of every label"
            )
        held, wanted = len(records.labels), int(units.sum())
        rows = rng.choice(held, wanted, replace=True) if wanted > held else rng.permutation(held)[:wanted]
    offsets = np.concatenate([[0], np.cumsum(units)]).astype(np.int64)
    model = model_for(experiment.model, records, seed_for(population.seed, "model"), parts)
    start = model.start(torch.Generator().manual_seed(seed_for(population.seed, "model")))
    partition = Partition(population.ids, rows.astype(np.int64), offsets)
    return replace(population, dataset=records, partition=partition, model=model, start=start, own_tests=None)


def _drawn(planned: Dataset, count: int, rng: np.random.Generator) -> Dataset:
    """Draw records like the planned ones in shape alone, with labels from a random linear model.

    Labels are those that the model gives, and with probability 1 - LEARNABLE another one: no classifier can be more
    accurate than LEARNABLE, and a linear one can be as accurate.
    """
    if planned.words:
        raise InputError("records of words cannot be drawn; name a file with --stand-in")
    shape, classes = planned.features.shape[1:], len(planned.classes)
    both = count + _TESTED
    features = _drawn_features(planned.schema, shape, both, rng)
    flat = features.reshape(both, -1)
    scores = (flat - flat.mean(axis=0)) @ rng.standard_normal((flat.shape[1], classes))
    labels = scores.argmax(axis=1)
    other = (labels + rng.integers(1, classes, both)) % classes if classes > 1 else labels
    labels = np.where(rng.random(both) < LEARNABLE, labels, other).astype(np.int64)
    return Dataset(
        "drawn records", features[:count], labels[:count], features[count:], labels[count:], planned.classes,
    )  # fmt: skip


def _drawn_features(
    schema: Schema | None, shape: tuple[int, ...], count: int, rng: np.random.Generator
) -> NDArray[np.float32]:
    """Draw features: by the schema or, without one, uniformly from -1 to 1."""
    if schema is None or (len(schema.outputs),) != shape:
        return rng.uniform(-1, 1, (count, *shape)).astype(np.float32)
    drawn, at = np.zeros((count, len(schema.outputs)), np.float32), 0
    for column in schema.columns:
        if column.categories is not None:
            drawn[np.arange(count), at + rng.integers(0, len(column.categories), count)] = 1
        else:
            drawn[:, at] = rng.uniform(-1, 1, count)
        at += len(column.outputs)
    return drawn
