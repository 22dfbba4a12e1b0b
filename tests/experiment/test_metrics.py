"""Metrics by name, against scikit-learn's own scorers and plain loops."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn import metrics as sk
from support.federations import experiment
from torch import Tensor

from polyeps.errors import InputError
from polyeps.experiment.metrics import (
    NAMED_METRICS,
    UndefinedMetricError,
    auc_contributions,
    confusion,
    reliability,
    scored,
)
from polyeps.experiment.registry import Parts


def drawn(records: int, outputs: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Outputs that know something about the labels."""
    generator = torch.Generator().manual_seed(seed)
    classes = max(2, outputs)
    labels = torch.arange(records) % classes
    told = torch.nn.functional.one_hot(labels, classes).float() if outputs > 1 else 2.0 * labels[:, None] - 1
    return told + torch.randn(records, outputs, generator=generator), labels


class Fixed:
    """A classifier of scikit-learn's kind that answers with given probabilities."""

    _estimator_type = "classifier"

    def __init__(self, probabilities: Any) -> None:
        self.probabilities = probabilities
        self.classes_ = np.arange(probabilities.shape[1])

    def __sklearn_tags__(self) -> Any:
        from sklearn.utils import ClassifierTags, Tags, TargetTags

        tags = Tags(estimator_type="classifier", target_tags=TargetTags(required=True))
        tags.classifier_tags = ClassifierTags()
        return tags

    def fit(self, *_: Any) -> Fixed:
        return self

    def predict_proba(self, rows: Any) -> Any:
        return self.probabilities[: len(rows)]

    def predict(self, rows: Any) -> Any:
        return self.predict_proba(rows).argmax(1)


COMMON = ["balanced_accuracy", "f1_macro", "f1_micro", "f1_weighted", "precision_macro", "recall_weighted"]
COMMON += ["jaccard_macro", "matthews_corrcoef", "neg_log_loss"]


@pytest.mark.parametrize("name", [*COMMON, "roc_auc_ovr", "roc_auc_ovr_weighted"])
def test_many_classes_are_measured_as_scikit_learn_does(name: str) -> None:
    outputs, labels = drawn(97, 4)
    judge = Fixed(outputs.double().softmax(1).numpy())
    expected = sk.get_scorer(name)(judge, np.zeros((len(labels), 1)), labels.numpy())
    assert NAMED_METRICS[name](outputs, labels) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("outputs", [1, 2])
@pytest.mark.parametrize(
    "name", [*COMMON, "roc_auc", "f1", "precision", "recall", "jaccard", "average_precision", "neg_brier_score"]
)
def test_two_classes_are_measured_as_scikit_learn_does_with_one_output_or_two(name: str, outputs: int) -> None:
    found, labels = drawn(83, outputs)
    chance = found.double().sigmoid() if outputs == 1 else found.double().softmax(1)[:, 1:]
    judge = Fixed(torch.cat([1 - chance, chance], 1).numpy())
    expected = sk.get_scorer(name)(judge, np.zeros((len(labels), 1)), labels.numpy())
    assert NAMED_METRICS[name](found, labels) == pytest.approx(expected, rel=1e-9)


def test_aliases_and_signs() -> None:
    found, labels = drawn(60, 3)
    value = {name: metric(found, labels) for name, metric in NAMED_METRICS.items() if not metric.instead}
    assert value["auc"] == value["roc_auc"]
    assert value["ece"] == value["calibration"]
    assert value["mcc"] == value["matthews"] == value["matthews_corrcoef"]
    assert (value["brier"], value["log_loss"]) == (-value["neg_brier_score"], -value["neg_log_loss"])
    by_hand = sum(
        (p - (k == label)) ** 2
        for row, label in zip(found.double().softmax(1).tolist(), labels.tolist(), strict=True)
        for k, p in enumerate(row)
    )
    assert value["brier"] == pytest.approx(by_hand / len(labels))
    assert value["cohen_kappa"] == pytest.approx(sk.cohen_kappa_score(labels, found.argmax(1)))


def test_calibration_and_confusion_are_those_of_a_plain_loop() -> None:
    outputs, labels = drawn(200, 3, seed=4)
    chances = (2 * outputs.double()).softmax(1)
    bins: list[list[tuple[float, bool]]] = [[] for _ in range(10)]
    table = [[0] * 3 for _ in range(3)]
    for row, label in zip(chances.tolist(), labels.tolist(), strict=True):
        sure, predicted = max(row), row.index(max(row))
        bins[min(9, int(10 * sure))].append((sure, predicted == label))
        table[label][predicted] += 1
    expected = sum(abs(sum(sure - right for sure, right in one)) for one in bins) / len(labels)
    assert NAMED_METRICS["calibration"](2 * outputs, labels) == pytest.approx(expected)
    found = scored(2 * outputs, labels)
    assert [count for count, *_ in reliability(found)] == [len(one) for one in bins]
    assert confusion(found) == table


def test_a_model_that_is_sure_and_right_is_calibrated() -> None:
    labels = torch.tensor([0, 1, 1, 0])
    assert NAMED_METRICS["calibration"](80 * (2.0 * labels[:, None] - 1), labels) == pytest.approx(0)
    assert reliability(scored(80 * (2.0 * labels[:, None] - 1), labels))[-1] == (4, 1.0, 1.0)


@pytest.mark.parametrize(
    ("name", "labels", "said"),
    [
        ("auc", [0, 0, 0], "no test record of class 'dear'"),
        ("auc", [1, 1, 1], "no test record of class 'cheap'"),
        ("f1", [0, 0, 0], "no test record of class 'dear'"),
        ("balanced_accuracy", [1, 1, 1], "no test record of class 'cheap'"),
        ("mcc", [1, 1, 1], "all test records are of one class"),
        ("brier", [], "no test records"),
    ],
)
def test_what_labels_do_not_define_is_undefined_with_a_reason(name: str, labels: list[int], said: str) -> None:
    with pytest.raises(UndefinedMetricError) as why:
        NAMED_METRICS[name](torch.zeros(len(labels), 1), torch.tensor(labels, dtype=torch.int64))
    assert why.value.sentence(("cheap", "dear")) == said


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_outputs_that_are_not_finite_leave_every_metric_undefined(bad: float) -> None:
    outputs, labels = drawn(8, 2)
    outputs[3, 1] = bad
    for metric in NAMED_METRICS.values():
        with pytest.raises(UndefinedMetricError, match="outputs are not finite"):
            metric(outputs, labels)


@given(st.lists(st.tuples(st.sampled_from([-2.0, -1.0, 0.0, 0.5, 3.0]), st.integers(0, 1)), min_size=1, max_size=30))
@settings(max_examples=60, deadline=None)
def test_no_labels_or_ties_crash_a_metric(rows: list[tuple[float, int]]) -> None:
    outputs = torch.tensor([[score] for score, _ in rows])
    labels = torch.tensor([label for _, label in rows])
    for metric in NAMED_METRICS.values():
        try:
            assert np.isfinite(metric(outputs, labels))
        except UndefinedMetricError as why:
            assert why.reason  # noqa: PT017


@pytest.mark.parametrize("outputs", [1, 2, 4])
def test_contributions_average_to_the_auc_and_give_its_variance(outputs: int) -> None:
    found, labels = drawn(400, outputs, seed=2)
    found = found.round()  # ties
    values = auc_contributions(scored(found, labels))
    assert values.mean() == pytest.approx(NAMED_METRICS["auc"](found, labels), abs=1e-12)
    generator = np.random.default_rng(1)
    again = []
    for _ in range(300):
        rows = torch.from_numpy(generator.integers(0, len(labels), len(labels)))
        again.append(NAMED_METRICS["auc"](found[rows], labels[rows]))
    assert values.std() / len(labels) ** 0.5 == pytest.approx(np.std(again), rel=0.15)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("acu", "there is no metric 'acu'; did you mean 'auc'?"),
        ("confusion_matrix", "did you mean 'confusion'"),
        ("rocauc", "did you mean 'roc_auc'"),
        ("zzz", "there is no metric 'zzz'; known are auc, average_precision"),
        ("accuracy", "metrics: accuracy is measured wherever it can be; leave it out"),
    ],
)
def test_unknown_names_are_refused_with_near_misses(name: str, said: str) -> None:
    with pytest.raises(InputError, match=said.replace("?", r"\?")):
        Parts().measuring(experiment(metrics=[name]))


def test_an_own_metric_goes_before_the_built_in_one_of_its_name() -> None:
    def auc(outputs: Tensor, labels: Tensor) -> float:
        return 0.25

    found = Parts(metrics={"auc": auc}).measuring(experiment(metrics=["auc", "f1_macro", "confusion"]))
    assert found["auc"] is auc
    assert list(found) == ["auc", "f1_macro"]  # a matrix is not a number
