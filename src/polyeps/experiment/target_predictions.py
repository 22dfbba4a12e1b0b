"""What the outputs of a model stand for: classes, numbers in their own units, labels that apply."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from polyeps.data.schema import Column
from polyeps.data.targets import Target
from polyeps.experiment.target_metrics import unscaled
from polyeps.models import Model


def predictions(target: Target, outputs: Tensor, classes: tuple[str, ...], scale: Column | None = None) -> list[Any]:
    """Return a prediction for each row of outputs: a class, a number or several, all labels, or nested classes."""
    if target == "number":
        return list(numbers_of(outputs, scale).tolist())
    if target == "labels":
        rows = (outputs > 0).tolist()
        return [[name for name, held in zip(classes, row, strict=True) if held] for row in rows]
    return [_named(classes, row) for row in Model.classes(outputs).tolist()]


def numbers_of(outputs: Tensor, scale: Column | None) -> NDArray[np.float64]:
    """Return the numbers that outputs stand for, in their own units, (n,) or (n, numbers)."""
    found = np.asarray(unscaled(outputs.double(), scale))
    return found[:, 0] if found.ndim == 2 and found.shape[1] == 1 else found


def predicted_as(target: Target, count: int) -> str:
    """Return in words what a model of so many classes, numbers or labels predicts."""
    if target == "number":
        return "a number" if count == 1 else f"{count} numbers"
    return f"{count} labels" if target == "labels" else f"one of {count} classes"


def _named(classes: tuple[str, ...], places: Any) -> Any:
    return [_named(classes, each) for each in places] if isinstance(places, list) else classes[places]
