"""Metrics by name: scikit-learn's scorer names and short aliases, expected calibration error, confusion matrix.

A metric takes a model's outputs on test records and their labels. Where the labels do not define it, for instance an
AUC without records of one class, it raises `UndefinedMetricError`, which says why.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from polyeps.errors import InputError

BINS = 10  # of confidence, equally wide, for the calibration error
CONFUSION = "confusion"  # a matrix, not a number: counted at the end of a run
_Floats = NDArray[np.float64]
_Labels = NDArray[np.int64]
_Needs = Literal["none", "second", "several", "all"]  # classes among the labels


class UndefinedMetricError(Exception):
    """The labels, or outputs that are not finite, leave a metric undefined."""

    def __init__(self, reason: str, missing: int | None = None) -> None:
        super().__init__(reason)
        self.reason, self.missing = reason, missing

    def sentence(self, classes: tuple[str, ...]) -> str:
        """Return the reason, with the name of the class that is missing."""
        return self.reason if self.missing is None else f"no test record of class {classes[self.missing]!r}"


@dataclass(frozen=True)
class Scored:
    """A model's outputs on test records: a probability for each class, and the class that is predicted."""

    probabilities: _Floats  # (T, classes)
    predicted: _Labels  # (T,)
    labels: _Labels  # (T,)
    margin: _Floats  # (T,) with two classes, the second's score less the first's: fewer ties than probabilities

    @property
    def classes(self) -> int:
        return int(self.probabilities.shape[1])


def scored(outputs: Tensor, labels: Tensor) -> Scored:
    """Turn outputs into class probabilities; one output tells class 1 from class 0 by its sign.

    Outputs of models with a hinge loss are scores: their order is right, but they are not calibrated.
    """
    if not bool(torch.isfinite(outputs).all()):
        raise UndefinedMetricError("the model's outputs are not finite")
    wide = outputs.double()
    if wide.shape[1] == 1:
        wide = torch.cat([torch.zeros_like(wide), wide], dim=1)
    predicted = wide.argmax(1)
    margin = wide[:, 1] - wide[:, 0] if wide.shape[1] == 2 else torch.zeros(len(wide))
    return Scored(wide.softmax(1).numpy(), predicted.numpy(), labels.cpu().numpy(), margin.double().numpy())


def _of_scores(name: str, average: str, found: Scored) -> float:
    """Return a metric of scikit-learn: of the second of two classes, or one-vs-rest over all classes."""
    from sklearn import metrics

    metric = getattr(metrics, name)
    if found.classes == 2:
        return float(metric(found.labels, found.margin))
    each = [metric(found.labels == one, found.probabilities[:, one]) for one in range(found.classes)]
    weights = np.bincount(found.labels, minlength=found.classes) if average == "weighted" else None
    return float(np.average(each, weights=weights))


def _brier(found: Scored) -> float:
    """Return the Brier score: of the second of two classes, or summed over more."""
    if found.classes == 2:
        return float(np.mean((found.probabilities[:, 1] - found.labels) ** 2))
    return float(np.mean(((found.probabilities - np.eye(found.classes)[found.labels]) ** 2).sum(1)))


def _log_loss(found: Scored) -> float:
    from sklearn.metrics import log_loss

    return float(log_loss(found.labels, found.probabilities, labels=range(found.classes)))


def _of_predictions(name: str, found: Scored, **options: Any) -> float:
    """Return a metric of scikit-learn that compares labels with predictions."""
    from sklearn import metrics

    return float(getattr(metrics, name)(found.labels, found.predicted, **options))


def _per_class(name: str, average: str, found: Scored) -> float:
    counted = None if average == "binary" else list(range(found.classes))
    return _of_predictions(name, found, average=average, zero_division=0.0, labels=counted)


def reliability(found: Scored) -> list[tuple[int, float, float]]:
    """Return, for each bin of the predicted class's probability: records, mean probability, share that is right."""
    sure = found.probabilities.max(1)
    # The first bin begins at 0, the last one ends at 1 and includes it.
    places = np.minimum((sure * BINS).astype(int), BINS - 1)
    count = np.bincount(places, minlength=BINS)
    mean = np.bincount(places, sure, BINS) / np.maximum(count, 1)
    right = np.bincount(places, found.predicted == found.labels, BINS) / np.maximum(count, 1)
    return [(int(n), float(p), float(r)) for n, p, r in zip(count, mean, right, strict=True)]


def _calibration_error(found: Scored) -> float:
    """Return the expected calibration error: how far confidence is from accuracy, on average over records."""
    return sum(n * abs(mean - right) for n, mean, right in reliability(found)) / len(found.labels)


def confusion(found: Scored) -> list[list[int]]:
    """Return how many records of class i (row) were taken for class j (column)."""
    flat = np.bincount(found.labels * found.classes + found.predicted, minlength=found.classes**2)
    rows: list[list[int]] = flat.reshape(found.classes, found.classes).tolist()
    return rows


@dataclass(frozen=True)
class NamedMetric:
    """A metric by name, as a function of (outputs, labels), and which classes it needs among the labels."""

    name: str
    compute: Callable[[Scored], float]
    needs: _Needs = "none"
    instead: str = ""  # for two classes only: what to write for more

    def __call__(self, outputs: Tensor, labels: Tensor) -> float:
        if labels.dim() > 1 or labels.is_floating_point():
            raise InputError(f"{self.name} is for one class a record, which is not what is predicted; leave it out")
        found = scored(outputs, labels)
        if self.instead and found.classes != 2:
            raise InputError(f"{self.name} is for two classes, and there are {found.classes}; write {self.instead}")
        held = np.bincount(found.labels, minlength=found.classes)
        if not len(found.labels):
            raise UndefinedMetricError("no test records")
        if self.needs == "several" and np.count_nonzero(held) < 2:
            raise UndefinedMetricError("all test records are of one class")
        needed = {"second": [1], "all": range(found.classes)}.get(self.needs, [])
        if (missing := next((one for one in needed if not held[one]), None)) is not None:
            raise UndefinedMetricError(f"no test record of class {missing}", missing)
        return self.compute(found)


def _table() -> dict[str, NamedMetric]:
    plain: tuple[tuple[str, Callable[[Scored], float], _Needs], ...] = (
        ("roc_auc", partial(_of_scores, "roc_auc_score", "macro"), "all"),
        ("roc_auc_ovr", partial(_of_scores, "roc_auc_score", "macro"), "all"),
        ("roc_auc_ovr_weighted", partial(_of_scores, "roc_auc_score", "weighted"), "all"),
        ("average_precision", partial(_of_scores, "average_precision_score", "macro"), "all"),
        ("balanced_accuracy", partial(_of_predictions, "balanced_accuracy_score"), "all"),
        ("matthews_corrcoef", partial(_of_predictions, "matthews_corrcoef"), "several"),
        ("cohen_kappa", partial(_of_predictions, "cohen_kappa_score"), "several"),
        ("brier", _brier, "none"),
        ("neg_brier_score", lambda scores: -_brier(scores), "none"),
        ("log_loss", _log_loss, "none"),
        ("neg_log_loss", lambda scores: -_log_loss(scores), "none"),
        ("calibration", _calibration_error, "none"),
    )
    found = {name: NamedMetric(name, compute, needs) for name, compute, needs in plain}
    for name in ("f1", "precision", "recall", "jaccard"):
        function = f"{name}_score"
        found[name] = NamedMetric(name, partial(_per_class, function, "binary"), "second", f"{name}_macro")
        for average in ("micro", "macro", "weighted"):
            needs: _Needs = "all" if average == "macro" else "none"
            found[f"{name}_{average}"] = NamedMetric(f"{name}_{average}", partial(_per_class, function, average), needs)
    short = {"auc": "roc_auc", "ece": "calibration", "mcc": "matthews_corrcoef", "matthews": "matthews_corrcoef"}
    return found | {alias: found[name] for alias, name in short.items()}


NAMED_METRICS: Mapping[str, NamedMetric] = MappingProxyType(_table())


def auc_contributions(found: Scored) -> _Floats:
    """Return a value per record whose mean is the AUC and whose variance over records gives that of the AUC.

    These are DeLong's components, one-vs-rest over classes: two models on the same records are compared by the mean and
    variance of their differences.
    """
    from scipy.stats import rankdata

    total = np.zeros(len(found.labels))
    scores = [found.margin] if found.classes == 2 else list(found.probabilities.T)
    for place, score in enumerate(scores):
        positive = found.labels == (1 if found.classes == 2 else place)
        ranks, many = rankdata(score), int(positive.sum())
        rest = len(score) - many
        of_positive = (ranks[positive] - rankdata(score[positive])) / rest
        of_rest = 1 - (ranks[~positive] - rankdata(score[~positive])) / many
        auc = float(of_positive.mean())
        shares = np.empty(len(score))
        shares[positive] = (of_positive - auc) * len(score) / many
        shares[~positive] = (of_rest - auc) * len(score) / rest
        total += auc + shares
    return total / len(scores)
