"""Accuracies on clients' own records, against a plain loop over clients."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from support.federations import experiment

from polyeps.core import Records
from polyeps.errors import InputError
from polyeps.experiment import evaluation
from polyeps.experiment.evaluation import by_group, own_accuracy
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
    records = Records(features, labels, torch.from_numpy(edges))
    vectors = torch.randn(len(SIZES), model.size, generator=generator)
    expected = []
    for place, (first, end) in enumerate(pairwise(edges.tolist())):
        vector = vectors[place] if own else vectors[0]
        right = 0
        for row in range(first, end):
            right += int(model.outputs(vector, features[row : row + 1]).argmax()) == int(labels[row])
        expected.append(right / (end - first))
    found = own_accuracy(model, vectors if own else vectors[0], records)
    np.testing.assert_allclose(found, expected)
    backwards = own_accuracy(model, vectors.flip(0) if own else vectors[0], records.select([3, 2, 1, 0]))
    np.testing.assert_allclose(backwards, expected[::-1])


def test_groups_are_judged_apart() -> None:
    wanted = experiment(
        "fedhdp",
        data={"name": "digits", "clients": 10, "size": 30, "own_test": 0.2},
        budgets={"epsilons": None, "levels": LEVELS},
    )
    people = populate(wanted, 1)
    personal = people.start + torch.randn(10, people.model.size, generator=torch.Generator().manual_seed(1))
    found = by_group(people, people.start, personal)
    each = own_accuracy(people.model, personal, people.own_test_records)
    assert people.groups is not None
    open_ones = [place for place, name in enumerate(people.groups) if name == "open"]
    assert len(open_ones) == 3
    assert found["personal accuracy (open)"] == pytest.approx(each[open_ones].mean())
    assert found["personal accuracy variance (open)"] == pytest.approx(each[open_ones].var())
    assert found["personal accuracy"] == pytest.approx(each.mean())
    common = own_accuracy(people.model, people.start, people.own_test_records)
    assert found["own accuracy"] == pytest.approx(common.mean())
    assert set(by_group(people, people.start)) < set(found)


def test_without_records_of_their_own_nothing_can_be_judged() -> None:
    people = populate(experiment("fedavg"), 1)
    with pytest.raises(InputError, match=r"set data\.own_test"):
        by_group(people, people.start)
