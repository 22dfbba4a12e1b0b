"""The population of an experiment: records, budgets and the model to train, drawn from one seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from polyeps.aggregation.client_groups import split_by_epsilon
from polyeps.core import Budget, Records
from polyeps.data.dataset import Dataset, hold_out, validation
from polyeps.data.natural_clients import by_column
from polyeps.data.own_files import load_own
from polyeps.data.partition import Partition, divide, set_apart, to_records, unit_sizes
from polyeps.data.public_loaders import load_dataset
from polyeps.data.synthetic import SYNTHETIC, synthetic
from polyeps.errors import InputError
from polyeps.experiment import config
from polyeps.experiment.client_budgets import budgets_of, clients_named
from polyeps.experiment.model_choice import model_for
from polyeps.experiment.registry import BUILT_IN, Encoder, Parts
from polyeps.experiment.seeds import generator, seed_for
from polyeps.models import Model, of_units

_COMPARED = 16  # records encoded apart from the others, to see that an encoder treats records one by one
_Levels = Sequence[config.LevelSettings]


@dataclass(frozen=True, eq=False)
class Population:
    """The clients of one seed, with their records and budgets."""

    dataset: Dataset
    partition: Partition
    budgets: tuple[Budget | None, ...]  # None: a client that chose a level without a guarantee
    model: Model  # of single records, for tests and export
    start: Tensor  # (d,) the first model
    seed: int
    device: torch.device
    groups: tuple[str, ...] | None = None  # the privacy level of each client, where there are levels
    own_tests: Partition | None = None  # rows of the training records that clients keep for tests

    @property
    def ids(self) -> tuple[str, ...]:
        return self.partition.ids

    @cached_property
    def high_epsilon(self) -> NDArray[np.bool_]:
        """The high-ε clients: those without a guarantee or, where all have one, those with large budgets."""
        known = [budget.epsilon for budget in self.budgets if budget is not None]
        if len(known) < len(self.budgets):
            return np.array([budget is None for budget in self.budgets])
        return split_by_epsilon(np.array(known))

    @cached_property
    def trained(self) -> Model:
        """The model that clients train: of persons, where these are the unit, with the parameters of `model`."""
        return self.model if self.dataset.persons is None else of_units(self.model, self.dataset.person or "person")

    @cached_property
    def sizes(self) -> NDArray[np.int64]:
        """The number of each client's records or, where these are the unit, of its persons, (n,)."""
        return unit_sizes(self.dataset, self.partition)

    @cached_property
    def records(self) -> Records:
        """The records that clients train on, by person where these are the unit."""
        return to_records(self.dataset, self.partition, self.device)

    @cached_property
    def test(self) -> tuple[Tensor, Tensor]:
        features = torch.from_numpy(self.dataset.test_features).to(self.device)
        return features.reshape(-1, *self.model.input_shape), torch.from_numpy(self.dataset.test_labels).to(self.device)


def populate(experiment: config.Experiment, seed: int, device: str = "cpu", parts: Parts = BUILT_IN) -> Population:
    """Return the clients of a seed, with their records and budgets."""
    wanted = experiment.data
    dataset = _dataset(wanted, seed)
    if wanted.encoder is not None:
        dataset = _encoded(dataset, wanted.encoder, parts)
    partition = divide(
        dataset,
        wanted.partition or ("iid" if wanted.file is None else "as-in-file"),
        clients=wanted.clients or clients_named(experiment.budgets),
        generator=generator(seed, "partition"),
        size=wanted.size,
        shards_per_client=wanted.shards_per_client,
        labels_per_client=wanted.labels_per_client,
        alpha=wanted.alpha,
    )
    own_tests = None
    if wanted.own_test:
        partition, own_tests = set_apart(partition, wanted.own_test, generator(seed, "own tests"), dataset)
    budgets, groups = budgets_of(experiment.budgets, partition, dataset, seed)
    model = model_for(experiment.model, dataset, seed_for(seed, "model"), parts)
    start = model.start(torch.Generator().manual_seed(seed_for(seed, "model")))
    return Population(dataset, partition, budgets, model, start, seed, torch.device(device), groups, own_tests)


@lru_cache(maxsize=2)
def _loaded(name: str, file: Path | None, label: str) -> Dataset:
    return load_dataset(name, download=None) if file is None else load_own(file, label=label)


def _dataset(wanted: config.DataSettings, seed: int) -> Dataset:
    if wanted.name in SYNTHETIC and wanted.file is None:
        dataset = synthetic(wanted.name, generator=generator(seed, "records"))
    else:
        dataset = _loaded(wanted.name, wanted.file, wanted.label)
    if wanted.partition == "by-column":
        dataset = by_column(dataset, wanted.client)
    if wanted.validation:
        return validation(dataset, wanted.validation, generator(seed, "validation"))
    if not len(dataset.test_labels):
        return hold_out(dataset, wanted.test_share, generator(seed, "test"))
    return dataset


def _encoded(dataset: Dataset, name: str, parts: Parts) -> Dataset:
    """Return a data set with encoded records.

    Features must be a function of their own record alone: if other records had a part in them, clipping one record
    would not bound its influence. So some records are encoded again, beside fewer and beside other records.
    """
    make = parts.find("data.encoder", name, parts.encoders, "encoders")

    def encode(features: NDArray[Any]) -> NDArray[np.float32]:
        try:
            encoder: Encoder = make()
            with torch.no_grad():
                found = torch.as_tensor(encoder(torch.from_numpy(features.copy()))).float().cpu().numpy()
        except Exception as problem:
            raise InputError(f"data.encoder = {name} failed: {type(problem).__name__}: {problem}") from problem
        if found.ndim < 2 or len(found) != len(features) or not np.isfinite(found).all():
            raise InputError(f"data.encoder = {name} must return finite features, one row for each record")
        return found

    places = np.linspace(0, len(dataset.features) - 1, _COMPARED).astype(int)
    some, real = dataset.features[places], np.issubdtype(dataset.features.dtype, np.floating)
    # First, none of the records: an encoder that fits itself to what it sees first would depend on them.
    encode(np.random.default_rng(0).random(some.shape).astype(some.dtype) if real else np.zeros_like(some))
    training, others = encode(dataset.features), 2 * some + 1 if real else some[::-1]
    again = [encode(some), encode(np.concatenate([others, some]))[len(some) :]]
    if not all(np.allclose(rows, training[places], rtol=1e-3, atol=1e-4) for rows in again):
        raise InputError(
            f"data.encoder = {name} encodes a record differently with other records beside it, so one record would "
            "change the features of others; compute each row from its own record, with fixed or seeded parameters"
        )
    return replace(dataset, features=training, test_features=encode(dataset.test_features), columns=(), words=())
