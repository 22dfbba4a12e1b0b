"""Shards of a job: how workers elsewhere make their slice of a population, and check that it is the right one."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from polyeps.clients import Clients
from polyeps.core import Records
from polyeps.engine.noise import SeededStreams
from polyeps.errors import InputError
from polyeps.experiment import config
from polyeps.experiment.job import Job, prepare
from polyeps.experiment.population import Population, populate
from polyeps.experiment.registry import Code, Parts
from polyeps.experiment.seeds import seed_for
from polyeps.transport.sharded import Host, InOtherProcess, Shards, Worker, even_edges


@dataclass(frozen=True)
class Sharding:
    """Where a run's clients train: 0 shards: in the run's own process."""

    shards: int = 0
    ray: str | None = None  # the address of a Ray cluster, or "local" for one on this machine; None: processes

    def __post_init__(self) -> None:
        if self.shards < 0 or (self.ray is not None and not self.shards):
            raise InputError(f"--shards is {self.shards}; give at least 1, and with --ray how many actors there are")


@dataclass(frozen=True)
class Recipe:
    """All that a worker needs to make its slice of a job: what a run's journal has, and what the run found out."""

    experiment: Mapping[str, Any]
    method: str
    seed: int
    device: str
    noise_multiplier: NDArray[np.float64]
    first: int
    end: int
    digest: str  # of the whole population
    code: tuple[Path, Mapping[str, str]] | None = None

    def __call__(self) -> Worker:
        code = None if self.code is None else Code(self.code[0], dict(self.code[1]), resumed=True)
        wanted, parts = config.experiment(self.experiment), Parts(code=code)
        method = next(one for one in wanted.algorithm if one.title == self.method)
        population = populate(wanted, self.seed, self.device, parts)
        if population_digest(population) != self.digest:
            raise InputError(
                "a shard's worker found other records or clients than the run; give all machines the same files and "
                "the same versions of polyeps, numpy and torch"
            )
        job = prepare(wanted, method, population, parts=parts, known=self.noise_multiplier)
        streams = partial(SeededStreams, seed_for(self.seed, "noise"))
        return Worker(block(population.records, self.first, self.end), job.algorithm.actions, streams)


@contextmanager
def workers(
    cohort: Clients, job: Job, experiment: config.Experiment, sharding: Sharding, device: str, parts: Parts
) -> Iterator[None]:
    """Have clients' work done by shards, if there are to be any."""
    if not sharding.shards:
        yield
        return
    cohort.workers = shards = start_shards(job, experiment, sharding, device, parts)
    try:
        yield
    finally:
        shards.close()


def start_shards(job: Job, experiment: config.Experiment, sharding: Sharding, device: str, parts: Parts) -> Shards:
    """Start a worker for each slice of a job's clients."""
    if given := [kind for kind, names in parts.names.items() if names] or ["data"] * (parts.data is not None):
        raise InputError(
            f"{given[0]} given as Python objects cannot be taken to shards; name them in the experiment "
            '("module:name", or data.file), or run without shards'
        )
    edges = even_edges(len(job.population.ids), sharding.shards)
    whole = Recipe(
        experiment.as_dict(),
        job.method.title,
        job.population.seed,
        device,
        job.noise_multiplier,
        0,
        len(job.population.ids),
        population_digest(job.population),
        None if parts.code is None else (parts.code.folder, parts.code.digests),
    )
    threads = max(1, (os.cpu_count() or 1) // sharding.shards)

    def start(shard: int) -> Host:
        recipe = replace(whole, first=int(edges[shard]), end=int(edges[shard + 1]), device=_device(device, shard))
        if sharding.ray is None:
            return InOtherProcess(recipe, threads)
        from polyeps.transport.ray_actors import OnRay

        return OnRay(recipe, sharding.ray, cuda=device.startswith("cuda"))

    return Shards(edges, start)


def _device(device: str, shard: int) -> str:
    """Return the device of a shard: of several, each shard has another one."""
    return f"cuda:{shard % torch.cuda.device_count()}" if device == "cuda" and torch.cuda.is_available() else device


def block(records: Records, first: int, end: int) -> Records:
    """Return the records of the clients from `first` up to `end`, in memory of their own."""
    offsets = records.offsets[first : end + 1]
    low, high = int(offsets[0]), int(offsets[-1])
    units = None
    if records.units is not None:
        units = records.units[low:high]
        low, high = (int(units[0, 0]), int(units[-1, 1])) if len(units) else (0, 0)
        units = units - low
    return Records(
        records.features[low:high].clone(),
        records.labels[low:high].clone(),
        offsets - offsets[0],
        units,
        records.padded,
    )


def population_digest(population: Population) -> str:
    """Return a checksum of a population's clients, first model and, if they are the user's own, records."""
    dataset = population.dataset
    named = [population.ids, population.groups, dataset.digest if dataset.own else ""]
    found = hashlib.sha256(json.dumps(named).encode())
    found.update(np.asarray(population.sizes, np.int64).tobytes())
    found.update(population.start.detach().cpu().numpy().tobytes())
    return found.hexdigest()


def job_digest(job: Job) -> str:
    """Return a checksum of a job's clients, budgets and noise, and of records of one's own: files may change."""
    found = hashlib.sha256(population_digest(job.population).encode())
    for budgets in (job.population.budgets, job.budgets or ()):
        known = [(np.inf, 0.0) if budget is None else (budget.epsilon, budget.delta) for budget in budgets]
        found.update(np.array(known, np.float64).tobytes())
    found.update(np.asarray(job.noise_multiplier, np.float64).tobytes())
    return found.hexdigest()
