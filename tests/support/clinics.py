"""Six clinics whose patients have 1 to 12 visits: a data set with persons, in place of the one an experiment names."""

from typing import Any

import numpy as np
import pytest

from polyeps.data.dataset import Dataset
from polyeps.experiment import config, population
from support.federations import EPSILONS, experiment

NAMES = ("elm", "alder", "cedar", "fir", "oak", "birch")
PATIENTS = (30, 24, 40, 26, 36, 28)  # of each clinic


def clinics(person: str = "patient", seed: int = 0) -> Dataset:
    """Return visits in any order; patients of two clinics may have the same number."""
    rng = np.random.default_rng(seed)
    visits = [rng.integers(1, 13, count) for count in PATIENTS]
    groups = np.repeat(np.arange(len(NAMES)), [each.sum() for each in visits])
    persons = np.concatenate([np.repeat(np.arange(len(each)), each) for each in visits])
    order = rng.permutation(len(groups))
    weights = rng.normal(size=5)
    features = rng.normal(size=(len(groups) + 200, 5)).astype(np.float32)
    labels = (features @ weights > 0).astype(np.int64)
    here, there = slice(0, len(groups)), slice(len(groups), None)
    return Dataset(
        "clinics",
        features[here],
        labels[here],
        features[there],
        labels[there],
        ("no", "yes"),
        groups=groups[order].astype(np.int64),
        group_names=NAMES,
        persons=persons[order].astype(np.int64),
        person=person,
    )


def at_clinics(monkeypatch: pytest.MonkeyPatch, dataset: Dataset | None = None) -> Dataset:
    """Have every experiment read the clinics' records; `clinical` names one."""
    held = dataset or clinics()
    monkeypatch.setattr(population, "_dataset", lambda *_: held)
    return held


def clinical(algorithm: Any = "fedavg", **changes: Any) -> config.Experiment:
    """An experiment on the clinics' records."""
    data = {"clients": None, "size": None, "partition": "as-in-file", **changes.pop("data", {})}
    assert len(EPSILONS) == len(NAMES)
    return experiment(algorithm, data=data, **changes)
