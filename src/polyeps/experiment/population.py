"""The population of an experiment: records, budgets and the model to train, drawn from one seed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from polyeps.accounting.calibration import ProgressCallback
from polyeps.aggregation.client_groups import split_by_epsilon
from polyeps.core import Budget, Records
from polyeps.data.dataset import Dataset, hold_out, validation
from polyeps.data.natural_clients import by_column
from polyeps.data.own_files import load_own
from polyeps.data.own_tables import assemble, from_arrays, from_frame
from polyeps.data.partition import BY_OWNER, Partition, divide, set_apart, to_records, unit_sizes
from polyeps.data.public_loaders import load_dataset
from polyeps.data.schema_files import TableDeclaration, schema_of
from polyeps.data.synthetic import SYNTHETIC, synthetic
from polyeps.data.table_readers import read_columns
from polyeps.data.targets import Target
from polyeps.errors import InputError
from polyeps.experiment import config
from polyeps.experiment.client_budgets import budgets_of, clients_named
from polyeps.experiment.encoders import encoded, planned
from polyeps.experiment.metrics import CONFUSION
from polyeps.experiment.model_choice import model_for
from polyeps.experiment.registry import BUILT_IN, Parts
from polyeps.experiment.seeds import generator, seed_for
from polyeps.models import Model, of_units


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


def populate(
    experiment: config.Experiment,
    seed: int,
    device: str = "cpu",
    parts: Parts = BUILT_IN,
    progress: ProgressCallback | None = None,
    *,
    plans: bool = False,
) -> Population:
    """Return the clients of a seed, with their records and budgets; for `plans`, records need not be encoded."""
    wanted = experiment.data
    dataset = dataset_of(experiment, seed, parts, device, progress, plans=plans)
    kind = partition_kind(wanted, dataset)
    if dataset.own and kind == "as-in-file":
        _check_as_named(wanted, dataset)
    partition = divide(
        dataset,
        kind,
        clients=wanted.clients or (None if kind in BY_OWNER else clients_named(experiment.budgets)),
        generator=generator(seed, "partition"),
        **wanted.model_dump(include={"size", "shards_per_client", "labels_per_client", "alpha"}),
    )
    own_tests = None
    if wanted.own_test:
        partition, own_tests = set_apart(partition, wanted.own_test, generator(seed, "own tests"), dataset)
    hidden = any(experiment.training_of(method).rate is not None for method in experiment.algorithm)
    budgets, groups = budgets_of(experiment.budgets, partition, dataset, seed, hidden=hidden)
    if CONFUSION in experiment.metrics and dataset.target != "class":
        raise InputError(f"metrics: {CONFUSION} is for one class a record, which {dataset.name} has not; leave it out")
    model = model_for(experiment.model, dataset, seed_for(seed, "model"), parts)
    start = model.start(torch.Generator().manual_seed(seed_for(seed, "model")))
    return Population(dataset, partition, budgets, model, start, seed, torch.device(device), groups, own_tests)


def dataset_of(
    experiment: config.Experiment,
    seed: int,
    parts: Parts = BUILT_IN,
    device: str = "cpu",
    progress: ProgressCallback | None = None,
    *,
    plans: bool = False,
) -> Dataset:
    """Return the records of a seed, with test records set apart, as the model takes them."""
    dataset, encoder = _dataset(experiment.data, seed, parts.data), experiment.model.encoder_choice
    if encoder is None:
        return _split(experiment.data, dataset, seed)
    if dataset.inputs is not None:
        raise InputError(f"model.encoder takes one input a record, but {dataset.name} has several; leave it out")
    if plans:
        return planned(_split(experiment.data, dataset, seed), encoder, parts)
    # Before the split, so that all seeds share the features.
    return _split(experiment.data, encoded(dataset, encoder, parts, device, progress), seed)


def partition_kind(wanted: config.DataSettings, dataset: Dataset) -> str:
    """Return how records are divided: as in the file for your own tables that name their clients, else at random."""
    return wanted.partition or ("as-in-file" if dataset.own and dataset.groups is not None else "iid")


def _check_as_named(wanted: config.DataSettings, dataset: Dataset) -> None:
    """Refuse settings of drawn partitions where the table names the clients."""
    if wanted.size is not None or wanted.clients not in (None, len(dataset.group_names)):
        key, value = ("size", wanted.size) if wanted.size is not None else ("clients", wanted.clients)
        raise InputError(
            f"data.{key} = {value} has no effect, since {dataset.name} names its {len(dataset.group_names)} clients; "
            "leave it out"
        )


def own_dataset(data: Any, wanted: config.DataSettings) -> Dataset | None:
    """Return a table that is given in Python, if one is, as a data set, read as the settings declare."""
    if data is None:
        return None
    if wanted.file is not None:
        raise InputError(f"data.file = {wanted.file} and data= are both given; leave out one of them")
    if isinstance(data, Dataset):
        return replace(data, own=True)
    target = wanted.target or "class"
    if isinstance(data, Mapping) and isinstance(data.get("features"), Mapping | tuple):
        return _of_arrays(data, wanted.classes, target)
    roles: dict[str, Any] = {"label": wanted.label, "client": wanted.client, "unit": wanted.unit}
    return from_frame(data, **roles, schema=wanted.columns or None, classes=wanted.classes, target=target)


def _of_arrays(data: Mapping[str, Any], classes: tuple[str, ...] | None, target: Target) -> Dataset:
    """Return the data set of a dictionary of features, which are several inputs, labels, clients and persons."""
    if unknown := next((key for key in data if key not in ("features", "labels", "clients", "persons")), None):
        raise InputError(f"data has {unknown!r} beside features of several inputs; give labels, clients and persons")
    if "labels" not in data:
        raise InputError("data has features, but no labels; give both")
    others = (data["features"], data["labels"], data.get("clients"), data.get("persons"))
    return from_arrays(*others, classes=classes, target=target)


def stand_in_dataset(file: Path, wanted: config.DataSettings) -> Dataset:
    """Return a table in the place of the planned one; a single file need not name clients, and is that of one."""
    declared = _declared(wanted)
    if file.is_dir():
        return _own_loaded(file, declared, _stamp(file))
    return assemble(file.name, [read_columns(file)], declared, [file.stem])


def same_dataset(data: Any, wanted: config.DataSettings, digest: str | None) -> Dataset | None:
    """Return a table for a run that is resumed; refuse another one than it was started with."""
    found = own_dataset(data, wanted)
    if found is None and digest is not None:
        raise InputError("the run was started with data=; resume it with the same")
    if found is not None and found.digest != digest:
        begun = "other data; give the same" if digest else "the data that its settings name; leave out data="
        raise InputError(f"the run was started with {begun}")
    return found


@lru_cache(maxsize=2)
def _loaded(name: str) -> Dataset:
    return load_dataset(name, download=None)


@lru_cache(maxsize=2)
def _own_loaded(file: Path, declared: TableDeclaration, _stamp: tuple[Any, ...]) -> Dataset:
    return load_own(file, declared)


def _declared(wanted: config.DataSettings) -> TableDeclaration:
    schema = schema_of(wanted.columns) if wanted.columns else None
    return TableDeclaration(wanted.label, wanted.client, wanted.unit, schema, wanted.classes, wanted.target or "class")


def _stamp(file: Path) -> tuple[Any, ...]:
    """Return what tells that a file, or a file of a folder, has changed since it was loaded."""
    found = sorted(file.iterdir()) if file.is_dir() else [file]
    return tuple((str(one), one.stat().st_mtime_ns, one.stat().st_size) for one in found if one.exists())


def _dataset(wanted: config.DataSettings, seed: int, given: Dataset | None) -> Dataset:
    if given is not None:
        dataset = given
    elif wanted.file is not None:
        dataset = _own_loaded(wanted.file, _declared(wanted), _stamp(wanted.file))
    elif own := [key for key in ("unit", "classes", "columns") if getattr(wanted, key)]:
        raise InputError(f"data.{own[0]} is for your own table; name its file as data.file")
    elif wanted.name in SYNTHETIC:
        dataset = synthetic(wanted.name, generator=generator(seed, "records"))
    else:
        dataset = _loaded(wanted.name)
    return by_column(dataset, wanted.client) if wanted.partition == "by-column" else dataset


def _split(wanted: config.DataSettings, dataset: Dataset, seed: int) -> Dataset:
    """Return a data set with test records: a share of the training records, where settings or a lack of them say so."""
    if wanted.validation:
        return validation(dataset, wanted.validation, generator(seed, "validation"))
    if not len(dataset.test_labels):
        return hold_out(dataset, wanted.test_share, generator(seed, "test"))
    return dataset
