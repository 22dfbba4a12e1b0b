"""Measures models on test records: all together and, in simulation only, client by client and group by group.

A deployed server never sees the figures of single clients: they come from records that no ledger was charged for.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite, nan

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from polyeps.core import Records
from polyeps.errors import InputError
from polyeps.experiment.population import Population
from polyeps.experiment.registry import Metric
from polyeps.models import Model

EVALUATED_AT_ONCE = 5000  # test records: a few hundred MB of activations for the largest of our networks
AT_ONCE = 1 << 28  # bytes of models and outputs evaluated together


def measure(population: Population, vector: Tensor, metrics: Mapping[str, Metric] | None = None) -> dict[str, float]:
    """Return accuracy, mean loss and further metrics of a model on the test records."""
    features, labels = population.test
    right, loss, seen = 0.0, 0.0, []
    for first in range(0, len(labels), EVALUATED_AT_ONCE):
        rows, truth = features[first : first + EVALUATED_AT_ONCE], labels[first : first + EVALUATED_AT_ONCE]
        outputs = population.model.outputs(vector.to(population.device), rows)
        right += float((population.model.classes(outputs) == truth).sum())
        loss += float(population.model.loss(outputs, truth).sum())
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


def own_accuracy(model: Model, vectors: Tensor, records: Records) -> NDArray[np.float64]:
    """Return every client's accuracy on its own records, with one model (d,) for all or one for each (n, d)."""
    counts = torch.from_numpy(records.counts)
    device = records.features.device
    owner = torch.repeat_interleave(torch.arange(len(counts)), counts)
    place = torch.arange(len(owner)) - (counts.cumsum(0) - counts)[owner]
    rows = records.spans[:, 0].cpu()[owner] + place
    features = records.features.reshape(-1, *model.input_shape)
    right = torch.zeros(len(counts), dtype=torch.float64)
    if vectors.ndim == 1:
        for some in torch.split(torch.arange(len(rows)), max(1, AT_ONCE // (4 * model.floats_per_row))):
            mine = rows[some].to(device)
            hits = model.classes(model.outputs(vectors.to(device), features[mine])) == records.labels[mine]
            right.index_add_(0, owner[some], hits.double().cpu())
        return np.asarray(right / counts)
    # Clients' records are padded to as many as the largest client has, so that one pass evaluates many models.
    most = int(counts.max())
    table = torch.full((len(counts), most), -1)
    table[owner, place] = rows
    evaluate = torch.func.vmap(model.outputs)
    together = max(1, AT_ONCE // (4 * (model.size + most * model.floats_per_row)))
    for some in torch.split(torch.arange(len(counts)), together):
        mine = table[some].to(device)
        outputs = evaluate(vectors[some.to(vectors.device)].to(device), features[mine.clamp(min=0)])
        hits = (model.classes(outputs) == records.labels[mine.clamp(min=0)]) & (mine >= 0)
        right[some] = hits.sum(1).double().cpu()
    return np.asarray(right / counts)


def by_group(population: Population, model: Tensor, personal: Tensor | None = None) -> dict[str, float]:
    """Return means and variances over clients of the accuracy on their own test records, overall and per group.

    Names are "own accuracy", of the common model, and "personal accuracy", followed by the group where there are some.
    Clients that were never drawn have no personal model yet and are evaluated with the common one.
    """
    if population.own_tests is None:
        raise InputError("clients hold no test records of their own; set data.own_test to a share of their records")
    measured = {"own accuracy": own_accuracy(population.model, model, population.own_test_records)}
    if personal is not None:
        measured["personal accuracy"] = own_accuracy(population.model, personal, population.own_test_records)
    found: dict[str, float] = {}
    for name, accuracy in measured.items():
        for group, members in _members(population).items():
            found[f"{name}{group}"] = float(accuracy[members].mean())
            found[f"{name} variance{group}"] = float(accuracy[members].var())
    return found


def _members(population: Population) -> Mapping[str, NDArray[np.bool_]]:
    everyone = {"": np.ones(len(population.ids), dtype=bool)}
    groups = np.array(population.groups or ())
    return everyone | {f" ({name})": groups == name for name in sorted(set(population.groups or ()))}
