"""The population of an experiment: records, budgets and the model to train, drawn from one seed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import inf, isfinite, nan, prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from polyeps.aggregation.client_groups import split_by_epsilon
from polyeps.core import Budget, Records
from polyeps.data.budgets import draw_budgets, read_budgets
from polyeps.data.dataset import Dataset, hold_out, validation
from polyeps.data.imdb import FIRST_WORD
from polyeps.data.own_files import load_own
from polyeps.data.partition import Partition, divide, set_apart, to_records
from polyeps.data.privacy_levels import choose_levels
from polyeps.data.public_loaders import load_dataset
from polyeps.data.synthetic import SYNTHETIC, synthetic
from polyeps.errors import InputError
from polyeps.experiment import config
from polyeps.experiment.registry import BUILT_IN, Encoder, Metric, ModelFactory, Parts
from polyeps.models import MODELS, Model, cross_entropy

EVALUATED_AT_ONCE = 5000  # test records: a few hundred MB of activations for the largest of our networks
_COMPARED = 16  # records encoded apart from the others, to see that an encoder treats records one by one


@dataclass(frozen=True, eq=False)
class Population:
    """The clients of one seed, with their records and budgets."""

    dataset: Dataset
    partition: Partition
    budgets: tuple[Budget | None, ...]  # None: a client that chose a level without a guarantee
    model: Model
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
    def records(self) -> Records:
        held = to_records(self.dataset, self.partition)
        return Records(held.features.to(self.device), held.labels.to(self.device), held.offsets)

    @cached_property
    def own_test_records(self) -> Records:
        """The records that clients keep for tests."""
        assert self.own_tests is not None
        held = to_records(self.dataset, self.own_tests)
        return Records(held.features.to(self.device), held.labels.to(self.device), held.offsets)

    @cached_property
    def test(self) -> tuple[Tensor, Tensor]:
        features = torch.from_numpy(self.dataset.test_features).to(self.device)
        return features.reshape(-1, *self.model.input_shape), torch.from_numpy(self.dataset.test_labels).to(self.device)

    def evaluate(self, vector: Tensor, metrics: Mapping[str, Metric] | None = None) -> dict[str, float]:
        """Return accuracy, mean loss and further metrics of a model on the test records."""
        features, labels = self.test
        right, loss, seen = 0.0, 0.0, []
        for first in range(0, len(labels), EVALUATED_AT_ONCE):
            rows, truth = features[first : first + EVALUATED_AT_ONCE], labels[first : first + EVALUATED_AT_ONCE]
            outputs = self.model.outputs(vector.to(self.device), rows)
            right += float((self.model.classes(outputs) == truth).sum())
            loss += float(self.model.loss(outputs, truth).sum())
            if metrics:
                seen.append(outputs.cpu())
        found = {"accuracy": right / len(labels), "loss": loss / len(labels)}
        return found | {name: _measured(name, one, torch.cat(seen), labels) for name, one in (metrics or {}).items()}


def _measured(name: str, metric: Metric, outputs: Tensor, labels: Tensor) -> float:
    """Return the value of a user's metric, NaN where it is not finite."""
    try:
        value = float(metric(outputs, labels.cpu().clone()))
    except Exception as problem:
        raise InputError(f"metric {name!r} failed: {type(problem).__name__}: {problem}") from problem
    return value if isfinite(value) else nan


def populate(experiment: config.Experiment, seed: int, device: str = "cpu", parts: Parts = BUILT_IN) -> Population:
    """Return the clients of a seed, with their records and budgets."""
    wanted = experiment.data
    dataset = _dataset(wanted, seed)
    if wanted.encoder is not None:
        dataset = _encoded(dataset, wanted.encoder, parts)
    partition = divide(
        dataset,
        wanted.partition,
        clients=wanted.clients or _clients_named(experiment.budgets),
        generator=generator(seed, "partition"),
        size=wanted.size,
        shards_per_client=wanted.shards_per_client,
        labels_per_client=wanted.labels_per_client,
        alpha=wanted.alpha,
    )
    own_tests = None
    if wanted.own_test:
        partition, own_tests = set_apart(partition, wanted.own_test, generator(seed, "own tests"))
    budgets, groups = _budgets(experiment.budgets, partition, dataset, seed)
    model = _model(experiment.model, dataset, seed_for(seed, "model"), parts)
    start = model.start(torch.Generator().manual_seed(seed_for(seed, "model")))
    return Population(dataset, partition, budgets, model, start, seed, torch.device(device), groups, own_tests)


def generator(seed: int, purpose: str) -> np.random.Generator:
    """Return a random generator for one purpose, so that drawing more for one leaves the others as they were."""
    return np.random.default_rng(seed_for(seed, purpose))


def seed_for(seed: int, purpose: str) -> int:
    return int(np.random.SeedSequence([seed, *purpose.encode()]).generate_state(1, np.uint32)[0])


@lru_cache(maxsize=2)
def _loaded(name: str, file: Path | None, label: str) -> Dataset:
    return load_dataset(name, download=None) if file is None else load_own(file, label=label)


def _dataset(wanted: config.DataSettings, seed: int) -> Dataset:
    if wanted.name in SYNTHETIC and wanted.file is None:
        dataset = synthetic(wanted.name, generator=generator(seed, "records"))
    else:
        dataset = _loaded(wanted.name, wanted.file, wanted.label)
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

    training, some = encode(dataset.features), dataset.features[:_COMPARED]
    others = 2 * some + 1 if np.issubdtype(some.dtype, np.floating) else some[::-1]
    again = [encode(some), encode(np.concatenate([others, some]))[len(some) :]]
    if not all(np.allclose(rows, training[: len(some)], rtol=1e-3, atol=1e-4) for rows in again):
        raise InputError(
            f"data.encoder = {name} encodes a record differently with other records beside it, so one record would "
            "change the features of others; compute each row from its own record, with fixed or seeded parameters"
        )
    return replace(dataset, features=training, test_features=encode(dataset.test_features), columns=(), words=())


def _clients_named(budgets: config.BudgetSettings) -> int | None:
    if budgets.epsilons is not None:
        return len(budgets.epsilons)
    return len(read_budgets(budgets.file, budgets.delta)) if budgets.file is not None else None


def _budgets(
    wanted: config.BudgetSettings, partition: Partition, dataset: Dataset, seed: int
) -> tuple[tuple[Budget | None, ...], tuple[str, ...] | None]:
    """Return every client's budget and, where there are privacy levels, the name of its level."""
    kinds = ("distribution", "file", "epsilons", "epsilon", "levels")
    if sum(getattr(wanted, name) is not None for name in kinds) != 1:
        raise InputError("budgets: give exactly one of distribution, file, epsilons, epsilon and levels")
    if wanted.levels is None:
        return _given_budgets(wanted, partition, seed), None
    held = partition.counts(dataset.labels, len(dataset.classes))
    # The purpose keeps its first name, on which the draw depends.
    chosen = [wanted.levels[place] for place in choose_levels(wanted.levels, held, generator(seed, "menu"))]
    budgets = [None if level.epsilon is None else Budget(level.epsilon, wanted.delta) for level in chosen]
    return tuple(budgets), tuple(level.name for level in chosen)


def _given_budgets(wanted: config.BudgetSettings, partition: Partition, seed: int) -> tuple[Budget, ...]:
    clients = partition.ids
    if wanted.file is not None:
        named = {row.client: row.budget for row in read_budgets(wanted.file, wanted.delta)}
        if missing := [client for client in clients if client not in named]:
            raise InputError(f"client {missing[0]!r} has no budget in {wanted.file}; add a line for it")
        return tuple(named[client] for client in clients)
    if wanted.distribution is not None:
        drawn = draw_budgets(
            wanted.distribution, len(clients), generator(seed, "budgets"), stratified=wanted.stratified
        ).epsilons.tolist()
    elif wanted.epsilon is not None:
        drawn = [wanted.epsilon] * len(clients)
    else:
        assert wanted.epsilons is not None
        drawn = list(wanted.epsilons)
        if len(drawn) != len(clients):
            raise InputError(
                f"budgets.epsilons names {len(drawn)} budgets for {len(clients)} clients; give one for each"
            )
    try:
        return tuple(Budget(epsilon, wanted.delta) for epsilon in drawn)
    except InputError as problem:
        client = next(client for client, epsilon in zip(clients, drawn, strict=True) if not 0 < epsilon < inf)
        raise InputError(f"budgets.epsilons, client {client!r}: {problem}") from None


def _model(wanted: config.ModelSettings, dataset: Dataset, seed: int, parts: Parts) -> Model:
    shape = dataset.features.shape[1:]
    if wanted.name not in MODELS:
        make = parts.find("model.name", wanted.name, {**MODELS, **parts.models}, "models")
        model = _own_model(wanted.name, make, dataset, seed)
    else:
        model = _built_in_model(wanted, dataset)
    if prod(model.input_shape) != prod(shape):
        raise InputError(
            f"model.name: {wanted.name} takes records of shape {model.input_shape}, but {dataset.name} has {shape}; "
            "choose logistic or mlp, which take any"
        )
    return model


def _own_model(name: str, make: ModelFactory, dataset: Dataset, seed: int) -> Model:
    """Return a user's model, checked against autograd, with first weights drawn from the seed."""
    shape, classes = dataset.features.shape[1:], len(dataset.classes)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            made = make(shape, classes)
    except Exception as problem:
        raise InputError(f"model.name = {name} failed: {type(problem).__name__}: {problem}") from problem
    if isinstance(made, nn.Module):
        made = Model(made, cross_entropy, shape, torch.from_numpy(dataset.features[:1]).dtype)
    elif isinstance(made, Model):
        made = replace(made)  # which checks it, also where the factory did not
    else:
        raise InputError(f"model.name = {name} returned a {type(made).__name__}, not a Model or an nn.Module")
    outputs = made.outputs(torch.zeros(made.size), torch.zeros(1, *made.input_shape, dtype=made.input_type)).shape[-1]
    if outputs != classes and (outputs, classes) != (1, 2):
        raise InputError(f"model.name = {name} has {outputs} outputs for {classes} classes; give each class one")
    return made


def _built_in_model(wanted: config.ModelSettings, dataset: Dataset) -> Model:
    shape, classes = dataset.features.shape[1:], len(dataset.classes)
    if (wanted.name == "lstm") != bool(dataset.words):
        raise InputError(
            f"model.name: {wanted.name} takes numbers, but the records of {dataset.name} are words; choose lstm"
            if dataset.words
            else f"model.name: lstm reads words, but {dataset.name} has none; choose logistic or mlp, or imdb for data"
        )
    match wanted.name:
        case "logistic" | "linear_svm":
            return MODELS[wanted.name](features=prod(shape), classes=classes)
        case "binary_logistic" | "binary_svm":
            if classes != 2:
                raise InputError(f"model.name: {wanted.name} is for two classes, but {dataset.name} has {classes}")
            return MODELS[wanted.name](features=prod(shape))
        case "mlp":
            return MODELS["mlp"](features=prod(shape), hidden=wanted.hidden or (50,), classes=classes)
        case "lstm":
            return MODELS["lstm"](vocabulary=FIRST_WORD + len(dataset.words), length=prod(shape), classes=classes)
    return MODELS[wanted.name](classes=classes)
