"""Measures models on test records: all together and, in simulation only, client by client and group by group.

A deployed server never sees the figures of single clients: they come from records that no ledger was charged for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import isfinite, nan

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from polyeps.errors import InputError
from polyeps.experiment.metrics import UndefinedMetricError
from polyeps.experiment.population import Population
from polyeps.experiment.registry import Metric
from polyeps.experiment.target_metrics import ALWAYS_MEASURED, SequenceScores, target_figures
from polyeps.models import Model

EVALUATED_AT_ONCE = 5000  # test records: a few hundred MB of activations for the largest of our networks
AT_ONCE = 1 << 28  # bytes of models and outputs evaluated together
MOST_MEASURED = 300  # with further metrics of their own: those are computed one client after another


@dataclass(frozen=True)
class OwnTest:
    """Test records and the client each belongs to, ordered by client."""

    features: Tensor  # (T, ...)
    labels: Tensor  # (T,)
    counts: NDArray[np.int64]  # (n,) of each client, 0 for some
    persons: NDArray[np.int64] | None = None  # (T,) numbers among those of the client

    @property
    def owners(self) -> NDArray[np.int64]:
        """The client of each record, as its place, (T,)."""
        return np.repeat(np.arange(len(self.counts)), self.counts)

    def of_each(self) -> list[slice]:
        """Return the rows of each client."""
        ends = np.cumsum(self.counts).tolist()
        return [slice(end - count, end) for end, count in zip(ends, self.counts.tolist(), strict=True)]


def own_test(population: Population) -> OwnTest | None:
    """Return the test records of each client: those it held back, or those of the test split that name it.

    None: the test records belong to no client.
    """
    dataset, partition = population.dataset, population.partition
    if (held := population.own_tests) is not None:
        features, labels, counts = dataset.features[held.rows], dataset.labels[held.rows], held.sizes
        persons = None if dataset.persons is None else dataset.persons[held.rows]
    elif dataset.test_groups is not None and dataset.groups is not None and len(dataset.test_groups):
        place = {client: number for number, client in enumerate(partition.ids)}
        of_group = np.array([place.get(name, -1) for name in dataset.group_names])
        if not np.array_equal(of_group[dataset.groups[partition.rows]], np.repeat(range(len(place)), partition.sizes)):
            return None  # records were divided otherwise than the data say
        owner = of_group[dataset.test_groups]
        rows = np.argsort(owner, kind="stable")[np.count_nonzero(owner < 0) :]
        features, labels = dataset.test_features[rows], dataset.test_labels[rows]
        counts = np.bincount(owner[owner >= 0], minlength=len(place))
        persons = None if dataset.test_persons is None else dataset.test_persons[rows]
    else:
        return None
    shaped = torch.from_numpy(features).to(population.device).reshape(-1, *population.model.input_shape)
    return OwnTest(shaped, torch.from_numpy(labels).to(population.device), counts, persons)


def outputs_of(model: Model, vector: Tensor, features: Tensor) -> Tensor:
    """Return one model's outputs for many records."""
    parts = [model.outputs(vector.to(features.device), rows) for rows in torch.split(features, EVALUATED_AT_ONCE)]
    return torch.cat(parts) if parts else torch.empty(0, 1)


def measure(population: Population, vector: Tensor, metrics: Mapping[str, Metric] | None = None) -> dict[str, float]:
    """Return the figures of what is predicted, the mean loss and further metrics of a model on the test records."""
    features, labels = population.test
    if population.dataset.target == "sequence" and not metrics:
        return _of_sequences(population.model, vector, features, labels)
    found = _figures_and_loss(population, outputs := outputs_of(population.model, vector, features), labels)
    return found | {name: measured(name, one, outputs, labels)[0] for name, one in (metrics or {}).items()}


def _of_sequences(model: Model, vector: Tensor, features: Tensor, labels: Tensor) -> dict[str, float]:
    """Return the figures of sequences, of a few records at a time: their outputs may not fit into memory together."""
    sums, loss = SequenceScores(), 0.0
    step = max(1, min(EVALUATED_AT_ONCE, AT_ONCE // (4 * model.floats_per_row)))
    for rows, wanted in zip(torch.split(features, step), torch.split(labels, step), strict=True):
        outputs = model.outputs(vector.to(rows.device), rows)
        sums.add(outputs, wanted)
        loss += float(model.loss(outputs, wanted).double().sum())
    return sums.figures() | {"loss": loss / len(labels)}


def _figures_and_loss(population: Population, outputs: Tensor, labels: Tensor) -> dict[str, float]:
    model, dataset = population.model, population.dataset
    loss = float(model.loss(outputs, labels).double().sum()) / len(labels)
    if dataset.target != "class":
        return target_figures(dataset.target, outputs, labels, dataset.scale) | {"loss": loss}
    right = float((model.classes(outputs) == labels).sum())
    return {"accuracy": right / len(labels), "loss": loss}


def each_on_all(population: Population, vectors: Tensor) -> Iterator[Tensor]:
    """Yield blocks of clients' own models' outputs on all test records, (clients, T, classes), of all clients in turn.

    The models (n, d) of a block are evaluated in one pass.
    """
    model, (features, labels) = population.model, population.test
    evaluate = torch.func.vmap(model.outputs, in_dims=(0, None))
    rows = min(len(labels), EVALUATED_AT_ONCE)
    together = max(1, AT_ONCE // (4 * (model.size + rows * model.floats_per_row)))
    for some in torch.split(vectors.to(features.device), together):
        yield torch.cat([evaluate(some, part) for part in torch.split(features, EVALUATED_AT_ONCE)], dim=1)


def measure_each(
    population: Population, vectors: Tensor, metrics: Mapping[str, Metric] | None = None
) -> dict[str, float]:
    """Return means over clients of what each client's own model (n, d) reaches on all test records.

    Of more than MOST_MEASURED clients, further metrics are means over the first ones.
    """
    labels, target = population.test[1], population.dataset.target
    always = (*ALWAYS_MEASURED[target], "loss")
    found: dict[str, list[float]] = {name: [] for name in (*always, *(metrics or {}))}
    for block in each_on_all(population, vectors):
        if target == "class":
            found["accuracy"] += (population.model.classes(block) == labels).double().mean(1).tolist()
            flat = block.reshape(-1, block.shape[-1])
            losses = population.model.loss(flat, labels.repeat(len(block))).double()
            found["loss"] += losses.reshape(len(block), -1).mean(1).tolist()
        else:
            for outputs in block:
                for name, value in _figures_and_loss(population, outputs, labels).items():
                    found[name].append(value)
        for name, metric in (metrics or {}).items():
            some = block[: max(0, MOST_MEASURED - len(found[name]))]
            found[name] += [measured(name, metric, outputs, labels)[0] for outputs in some]
    return {name: float(np.mean(values)) for name, values in found.items()}


def measure_models(
    population: Population, model: Tensor | None, personal: Tensor | None, metrics: Mapping[str, Metric] | None = None
) -> dict[str, float]:
    """Return accuracy, mean loss and further metrics of the common model or, without one, of clients' own models."""
    if model is not None:
        return measure(population, model, metrics)
    assert personal is not None
    return measure_each(population, personal, metrics)


def measured(name: str, metric: Metric, outputs: Tensor, labels: Tensor) -> tuple[float, UndefinedMetricError | None]:
    """Return the value of a metric, NaN where it is not finite, and why it is undefined where it is."""
    try:
        value = float(metric(outputs.cpu().clone(), labels.cpu().clone()))
    except UndefinedMetricError as why:
        return nan, why
    except InputError as problem:
        raise InputError(f"metrics: {problem}") from None
    except Exception as problem:
        raise InputError(f"metric {name!r} failed: {type(problem).__name__}: {problem}") from problem
    return (value, None) if isfinite(value) else (nan, UndefinedMetricError("the metric is not a finite number"))


def own_outputs(model: Model, vectors: Tensor, test: OwnTest) -> Tensor:
    """Return the outputs on clients' own records, with one model (d,) for all clients or one for each (n, d)."""
    if vectors.ndim == 1:
        return outputs_of(model, vectors, test.features)
    # Clients' records are padded to as many as the largest client has, so that one pass evaluates many models.
    counts, device = torch.from_numpy(test.counts), test.features.device
    owner = torch.from_numpy(test.owners)
    place = torch.arange(len(owner)) - (counts.cumsum(0) - counts)[owner]
    most = int(counts.max())
    table = torch.full((len(counts), most), -1)
    table[owner, place] = torch.arange(len(owner))
    evaluate = torch.func.vmap(model.outputs)
    together = max(1, AT_ONCE // (4 * (model.size + most * model.floats_per_row)))
    found = []
    for some in torch.split(torch.arange(len(counts)), together):
        mine = table[some].to(device)
        outputs = evaluate(vectors[some.to(vectors.device)].to(device), test.features[mine.clamp(min=0)])
        found.append(outputs[mine >= 0])
    return torch.cat(found)


def own_accuracy(model: Model, vectors: Tensor, test: OwnTest) -> NDArray[np.float64]:
    """Return every client's accuracy on its own records, with one model (d,) for all or one for each (n, d)."""
    hits = (model.classes(own_outputs(model, vectors, test)) == test.labels).cpu().numpy()
    return mean_hits(hits, test)


def mean_hits(hits: NDArray[np.bool_], test: OwnTest) -> NDArray[np.float64]:
    """Return the share of each client's own test records that are hits; NaN for clients without any."""
    right = np.bincount(test.owners, hits, len(test.counts))
    return np.asarray(np.divide(right, test.counts, out=np.full(len(test.counts), nan), where=test.counts > 0))


def by_group(population: Population, model: Tensor | None, personal: Tensor | None = None) -> dict[str, float]:
    """Return means and variances over clients of the accuracy on their own test records, overall and per group.

    Names are "own accuracy", of the common model, and "personal accuracy", followed by the group where there are some.
    Clients that were never drawn have no personal model yet and are evaluated with the common one. There are none where
    no classes are predicted.
    """
    if population.dataset.target != "class":
        return {}
    if population.own_tests is None:
        raise InputError("clients hold no test records of their own; set data.own_test to a share of their records")
    test = own_test(population)
    assert test is not None
    models = {"own accuracy": model, "personal accuracy": personal}
    each = {name: own_accuracy(population.model, one, test) for name, one in models.items() if one is not None}
    groups = np.array(population.groups or ())
    members_of = {"": np.ones(len(population.ids), dtype=bool)}
    members_of |= {f" ({name})": groups == name for name in sorted(set(population.groups or ()))}
    found: dict[str, float] = {}
    for name, accuracy in each.items():
        for group, members in members_of.items():
            found[f"{name}{group}"] = float(accuracy[members].mean())
            found[f"{name} variance{group}"] = float(accuracy[members].var())
    return found
