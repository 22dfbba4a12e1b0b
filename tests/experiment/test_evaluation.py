"""Accuracies on clients' own records, against a plain loop over clients."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from support.federations import experiment

from polyeps.errors import InputError
from polyeps.experiment import evaluation
from polyeps.experiment.evaluation import OwnTest, by_group, measure, measure_each, own_accuracy, own_test
from polyeps.experiment.metrics import NAMED_METRICS
from polyeps.experiment.population import populate
from polyeps.models import logistic, mlp

SIZES = (3, 1, 7, 4)
LEVELS = [{"name": "private", "epsilon": 1.5}, {"name": "open", "share": 0.3}]


@pytest.mark.parametrize("model", [logistic(5, 3), mlp(5, (4,), 3)])
@pytest.mark.parametrize("at_once", [1, 400, 1 << 28])
@pytest.mark.parametrize("own", [False, True])
def test_own_accuracy_is_that_of_a_plain_loop(
    model: Any, at_once: int, own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluation, "AT_ONCE", at_once)
    generator = torch.Generator().manual_seed(3)
    features = torch.randn(sum(SIZES), 5, generator=generator)
    labels = torch.randint(0, 3, (sum(SIZES),), generator=generator)
    edges = np.concatenate([[0], np.cumsum(SIZES)])
    test = OwnTest(features, labels, np.array(SIZES))
    vectors = torch.randn(len(SIZES), model.size, generator=generator)
    expected = []
    for place, (first, end) in enumerate(pairwise(edges.tolist())):
        vector = vectors[place] if own else vectors[0]
        right = 0
        for row in range(first, end):
            right += int(model.outputs(vector, features[row : row + 1]).argmax()) == int(labels[row])
        expected.append(right / (end - first))
    found = own_accuracy(model, vectors if own else vectors[0], test)
    np.testing.assert_allclose(found, expected)
    empty = OwnTest(features, labels, np.array([*SIZES, 0]))  # one more client, without test records
    more = torch.cat([vectors, vectors[:1]]) if own else vectors[0]
    np.testing.assert_allclose(own_accuracy(model, more, empty), [*expected, np.nan])


def test_groups_are_judged_apart() -> None:
    wanted = experiment(
        "fedhdp",
        data={"name": "digits", "clients": 10, "size": 30, "own_test": 0.2},
        budgets={"epsilons": None, "levels": LEVELS},
    )
    population = populate(wanted, 1)
    personal = population.start + torch.randn(10, population.model.size, generator=torch.Generator().manual_seed(1))
    found = by_group(population, population.start, personal)
    test = own_test(population)
    assert test is not None
    each = own_accuracy(population.model, personal, test)
    assert population.groups is not None
    open_ones = [place for place, name in enumerate(population.groups) if name == "open"]
    assert len(open_ones) == 3
    assert found["personal accuracy (open)"] == pytest.approx(each[open_ones].mean())
    assert found["personal accuracy variance (open)"] == pytest.approx(each[open_ones].var())
    assert found["personal accuracy"] == pytest.approx(each.mean())
    common = own_accuracy(population.model, population.start, test)
    assert found["own accuracy"] == pytest.approx(common.mean())
    assert set(by_group(population, population.start)) < set(found)


def test_without_records_of_their_own_nothing_can_be_judged() -> None:
    population = populate(experiment("fedavg"), 1)
    with pytest.raises(InputError, match=r"set data\.own_test"):
        by_group(population, population.start)


@pytest.mark.parametrize("at_once", [1, 1 << 28])
def test_models_of_single_clients_are_measured_as_one_by_one(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    population = populate(experiment("fedavg"), 1)
    vectors = torch.randn(5, population.model.size, generator=torch.Generator().manual_seed(2))
    metrics: Any = {name: NAMED_METRICS[name] for name in ("auc", "f1_macro")}
    one_by_one = [measure(population, vector, metrics) for vector in vectors]
    monkeypatch.setattr(evaluation, "AT_ONCE", at_once)
    monkeypatch.setattr(evaluation, "EVALUATED_AT_ONCE", 100)
    found = measure_each(population, vectors, metrics)
    assert found == pytest.approx({name: np.mean([one[name] for one in one_by_one]) for name in one_by_one[0]})
    monkeypatch.setattr(evaluation, "MOST_MEASURED", 2)
    few = measure_each(population, vectors, metrics)
    assert few["accuracy"] == found["accuracy"]
    assert few["auc"] == pytest.approx(np.mean([one["auc"] for one in one_by_one[:2]]))


def test_test_records_of_clients_are_those_that_name_them() -> None:
    population = populate(experiment("fedavg"), 1)
    assert own_test(population) is None  # the published test records of digits are nobody's
    dataset, partition = population.dataset, population.partition
    groups = np.zeros(len(dataset.labels), dtype=np.int64)
    groups[partition.rows] = np.repeat(range(6), partition.sizes)
    of_test = np.random.default_rng(1).integers(0, 7, len(dataset.test_labels))  # 6: of nobody who takes part
    named = replace(dataset, groups=groups, group_names=(*"012345", "gone"), test_groups=of_test)
    found = own_test(replace(population, dataset=named))
    assert found is not None
    assert found.counts.tolist() == [int((of_test == client).sum()) for client in range(6)]
    for client, rows in enumerate(found.of_each()):
        expected = dataset.test_features[of_test == client].reshape(-1, *population.model.input_shape)
        assert torch.equal(found.features[rows], torch.from_numpy(expected))
    shuffled = replace(named, groups=np.roll(groups, 1))
    assert own_test(replace(population, dataset=shuffled)) is None  # divided otherwise than the data say
