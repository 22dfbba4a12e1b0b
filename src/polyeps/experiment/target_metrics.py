"""Figures that are always measured, by what is predicted: classes, positions, numbers or several labels.

The first figure of each is the headline, which tables and reports show in the place of the accuracy; more is better.
Numbers are measured in their own units, also where they were scaled for training.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import exp, nan
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor

from polyeps.data.schema import Column
from polyeps.data.targets import IGNORED, Target

ALWAYS_MEASURED: Mapping[Target, tuple[str, ...]] = MappingProxyType(
    {
        "class": ("accuracy",),
        "soft": ("accuracy",),
        "sequence": ("token accuracy", "perplexity"),
        "number": ("r2", "mean squared error", "mean absolute error"),
        "labels": ("exact match", "macro auc"),
    }
)
HEADLINES = tuple(dict.fromkeys(names[0] for names in ALWAYS_MEASURED.values()))
MEASURED_NAMES = frozenset(name for names in ALWAYS_MEASURED.values() for name in names)


def headline(target: Target) -> str:
    """Return the figure that stands for a model."""
    return ALWAYS_MEASURED[target][0]


def target_figures(target: Target, outputs: Tensor, labels: Tensor, scale: Column | None = None) -> dict[str, float]:
    """Return the figures of outputs (T, ...) for targets (T, ...); NaN where one is undefined."""
    if not len(labels):
        return dict.fromkeys(ALWAYS_MEASURED[target], nan)
    if target == "sequence":
        return SequenceScores().add(outputs, labels).figures()
    outputs, labels = outputs.double().cpu(), labels.cpu()
    match target:
        case "number":
            return _of_numbers(_two(unscaled(outputs, scale)), _two(unscaled(labels.double(), scale)))
        case "labels":
            return _of_labels(_two(outputs), _two(labels))
        case "soft":
            labels = labels.argmax(-1)
    chosen = (outputs[..., 0] > 0).long() if outputs.shape[-1] == 1 else outputs.argmax(-1)
    return {"accuracy": float((chosen == labels).double().mean())}


def unscaled(values: Tensor, scale: Column | None) -> Tensor:
    """Return numbers in their own units, of numbers that were scaled from a range to -1 to 1."""
    if scale is None or scale.range is None:
        return values
    low, high = scale.range
    return low + (values + 1) * ((high - low) / 2)


def _two(values: Tensor) -> Tensor:
    return values[:, None] if values.dim() == 1 else values.flatten(1)


@dataclass
class SequenceScores:
    """Sums over positions that count, of which a model of sequences has too many outputs to keep them all."""

    positions: int = 0
    right: int = 0
    cross_entropy: float = 0.0

    def add(self, outputs: Tensor, labels: Tensor) -> SequenceScores:
        """Add the positions of some records: outputs (T, ..., classes) and labels (T, ...)."""
        counts = labels != IGNORED
        flat, wanted = outputs[counts].float(), labels[counts].long()
        self.positions += len(wanted)
        self.right += int((flat.argmax(-1) == wanted).sum())
        self.cross_entropy += float(torch.nn.functional.cross_entropy(flat, wanted, reduction="none").double().sum())
        return self

    def figures(self) -> dict[str, float]:
        """Return the share of positions that are right, and e to the mean cross-entropy of a position."""
        if not self.positions:
            return dict.fromkeys(ALWAYS_MEASURED["sequence"], nan)
        mean = self.cross_entropy / self.positions
        return {"token accuracy": self.right / self.positions, "perplexity": exp(mean) if mean < 700 else nan}


def _of_numbers(outputs: Tensor, labels: Tensor) -> dict[str, float]:
    """Return errors and R², the mean over numbers; R² is undefined where all targets are equal."""
    squares = (outputs - labels).square()
    spread = (labels - labels.mean(0)).square().sum(0)
    explained = torch.where(spread > 0, 1 - squares.sum(0) / spread, nan)
    return {
        "r2": float(explained.mean()),
        "mean squared error": float(squares.mean()),
        "mean absolute error": float((outputs - labels).abs().mean()),
    }


def _of_labels(outputs: Tensor, labels: Tensor) -> dict[str, float]:
    """Return the share of records whose labels are all right, and the mean AUC of labels that have both kinds."""
    from sklearn.metrics import roc_auc_score

    exact = float(((outputs > 0) == (labels > 0.5)).all(1).double().mean())
    if not bool(torch.isfinite(outputs).all()):
        return {"exact match": exact, "macro auc": nan}
    truth, scores = (labels > 0.5).numpy(), outputs.numpy()
    both = [place for place in range(truth.shape[1]) if 0 < truth[:, place].sum() < len(truth)]
    each = [float(roc_auc_score(truth[:, place], scores[:, place])) for place in both]
    return {"exact match": exact, "macro auc": float(np.mean(each)) if each else nan}
