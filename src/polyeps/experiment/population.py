"""The clients of an experiment: their records, budgets and the model they train, drawn from one seed."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import inf, prod
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from polyeps.aggregation.client_groups import split_by_epsilon
from polyeps.core import Budget, Records
from polyeps.data import public_loaders
from polyeps.data.budgets import draw_budgets, read_budgets
from polyeps.data.dataset import Dataset, hold_out, validation
from polyeps.data.imdb import FIRST_WORD
from polyeps.data.own_files import load_own
from polyeps.data.partition import Partition, divide, set_apart, to_records
from polyeps.data.privacy_levels import choose_levels
from polyeps.data.synthetic import SYNTHETIC, synthetic
from polyeps.errors import InputError
from polyeps.experiment import config
from polyeps.models import MODELS, Model

EVALUATED_AT_ONCE = 5000  # test records: a few hundred MB of activations for the largest of our networks


@dataclass(frozen=True, eq=False)
class Population:
    """The clients of one seed: whose records are whose, and what each is willing to lose."""

    dataset: Dataset
    partition: Partition
    budgets: tuple[Budget | None, ...]  # None: a client that chose to be promised nothing
    model: Model
    start: Tensor  # (d,) the model everybody begins with
    seed: int
    device: torch.device
    groups: tuple[str, ...] | None = None  # what each chose from the menu, where there is one
    own_tests: Partition | None = None  # rows of the training records that clients keep to judge models by

    @property
    def ids(self) -> tuple[str, ...]:
        return self.partition.ids

    @cached_property
    def liberal(self) -> NDArray[np.bool_]:
        """Who counts as public: those who are promised nothing, or else those with the liberal budgets."""
        promised = [budget.epsilon for budget in self.budgets if budget is not None]
        if len(promised) < len(self.budgets):
            return np.array([budget is None for budget in self.budgets])
        return split_by_epsilon(np.array(promised))

    @cached_property
    def records(self) -> Records:
        held = to_records(self.dataset, self.partition)
        return Records(held.features.to(self.device), held.labels.to(self.device), held.offsets)

    @cached_property
    def own_test_records(self) -> Records:
        """What clients hold back to judge models by."""
        assert self.own_tests is not None
        held = to_records(self.dataset, self.own_tests)
        return Records(held.features.to(self.device), held.labels.to(self.device), held.offsets)

    @cached_property
    def test(self) -> tuple[Tensor, Tensor]:
        features = torch.from_numpy(self.dataset.test_features).to(self.device)
        return features.reshape(-1, *self.model.input_shape), torch.from_numpy(self.dataset.test_labels).to(self.device)

    def evaluate(self, vector: Tensor) -> dict[str, float]:
        """Accuracy and mean loss of a model on the test records."""
        features, labels = self.test
        right, loss = 0.0, 0.0
        for first in range(0, len(labels), EVALUATED_AT_ONCE):
            rows, truth = features[first : first + EVALUATED_AT_ONCE], labels[first : first + EVALUATED_AT_ONCE]
            outputs = self.model.outputs(vector.to(self.device), rows)
            right += float((self.model.classes(outputs) == truth).sum())
            loss += float(self.model.loss(outputs, truth).sum())
        return {"accuracy": right / len(labels), "loss": loss / len(labels)}


def populate(experiment: config.Experiment, seed: int, device: str = "cpu") -> Population:
    """The clients of a seed, with their records and budgets."""
    dataset = _dataset(experiment.data, seed)
    wanted = experiment.data
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
    model = _model(experiment.model, dataset)
    start = model.start(torch.Generator().manual_seed(seed_for(seed, "model")))
    return Population(dataset, partition, budgets, model, start, seed, torch.device(device), groups, own_tests)


def generator(seed: int, purpose: str) -> np.random.Generator:
    """A random generator for one purpose, so that drawing more for one leaves the others as they were."""
    return np.random.default_rng(seed_for(seed, purpose))


def seed_for(seed: int, purpose: str) -> int:
    return int(np.random.SeedSequence([seed, *purpose.encode()]).generate_state(1, np.uint32)[0])


@lru_cache(maxsize=2)
def _loaded(name: str, file: Path | None, label: str) -> Dataset:
    return public_loaders.load_dataset(name, download=None) if file is None else load_own(file, label=label)


def _dataset(wanted: config.Data, seed: int) -> Dataset:
    if wanted.name in SYNTHETIC and wanted.file is None:
        dataset = synthetic(wanted.name, generator=generator(seed, "records"))
    else:
        dataset = _loaded(wanted.name, wanted.file, wanted.label)
    if wanted.validation:
        return validation(dataset, wanted.validation, generator(seed, "validation"))
    if not len(dataset.test_labels):
        return hold_out(dataset, wanted.test_share, generator(seed, "test"))
    return dataset


def _clients_named(budgets: config.Budgets) -> int | None:
    if budgets.epsilons is not None:
        return len(budgets.epsilons)
    return len(read_budgets(budgets.file, budgets.delta)) if budgets.file is not None else None


def _budgets(
    wanted: config.Budgets, partition: Partition, dataset: Dataset, seed: int
) -> tuple[tuple[Budget | None, ...], tuple[str, ...] | None]:
    """Every client's budget and, where there is a menu, the name of the level it chose."""
    given = [
        name for name in ("distribution", "file", "epsilons", "epsilon", "menu") if getattr(wanted, name) is not None
    ]
    if len(given) != 1:
        raise InputError("budgets: give exactly one of distribution, file, epsilons, epsilon and menu")
    if wanted.menu is None:
        return _given_budgets(wanted, partition, seed), None
    held = partition.counts(dataset.labels, len(dataset.classes))
    chosen = [wanted.menu[place] for place in choose_levels(wanted.menu, held, generator(seed, "menu"))]
    budgets = [None if level.epsilon is None else Budget(level.epsilon, wanted.delta) for level in chosen]
    return tuple(budgets), tuple(level.name for level in chosen)


def _given_budgets(wanted: config.Budgets, partition: Partition, seed: int) -> tuple[Budget, ...]:
    clients = partition.ids
    if wanted.file is not None:
        named = {row.client: row.budget for row in read_budgets(wanted.file, wanted.delta)}
        if partition_names := [client for client in clients if client not in named]:
            raise InputError(f"client {partition_names[0]!r} has no budget in {wanted.file}; add a line for it")
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


def _model(wanted: config.Model, dataset: Dataset) -> Model:
    if wanted.name not in MODELS:
        raise InputError(config.unknown_key(f"model.name = {wanted.name}", wanted.name, MODELS))
    shape, classes = dataset.features.shape[1:], len(dataset.classes)
    if (wanted.name == "lstm") != bool(dataset.words):
        raise InputError(
            f"model.name: {wanted.name} takes numbers, but the records of {dataset.name} are words; choose lstm"
            if dataset.words
            else f"model.name: lstm reads words, but {dataset.name} has none; choose logistic or mlp, or imdb for data"
        )
    match wanted.name:
        case "logistic" | "linear_svm":
            model = MODELS[wanted.name](features=prod(shape), classes=classes)
        case "binary_logistic" | "binary_svm":
            if classes != 2:
                raise InputError(f"model.name: {wanted.name} is for two classes, but {dataset.name} has {classes}")
            model = MODELS[wanted.name](features=prod(shape))
        case "mlp":
            model = MODELS["mlp"](features=prod(shape), hidden=wanted.hidden or (50,), classes=classes)
        case "lstm":
            model = MODELS["lstm"](vocabulary=FIRST_WORD + len(dataset.words), length=prod(shape), classes=classes)
        case _:
            model = MODELS[wanted.name](classes=classes)
    if prod(model.input_shape) != prod(shape):
        raise InputError(
            f"model.name: {wanted.name} takes records of shape {model.input_shape}, but {dataset.name} has {shape}; "
            "choose logistic or mlp, which take any"
        )
    return model
