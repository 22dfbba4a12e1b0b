"""Predictions for the records of a file: read a table, encode it as the model was trained, and score it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from polyeps.data.cells import as_text, is_missing, listed, matching, of_each
from polyeps.data.table_features import plain_numbers
from polyeps.data.table_readers import Cells, RawTable, read_columns
from polyeps.errors import DataError, InputError
from polyeps.experiment.saved_model import TEXT, SavedModel, probabilities_of
from polyeps.experiment.target_metrics import target_figures
from polyeps.experiment.target_predictions import numbers_of
from polyeps.models import Model

PREDICTION, PROBABILITY = "prediction", "probability"


@dataclass(frozen=True, eq=False)
class Predictions:
    """The class and the probabilities of every record, in the order of the file."""

    kept: Mapping[str, Cells]  # columns passed through
    places: NDArray[np.int64]  # (n,) of the predicted class
    probabilities: NDArray[np.float64]  # (n, classes)
    classes: tuple[str, ...]
    scores: Mapping[str, float | None]  # accuracy and AUC, where they were asked for

    def header(self, every: bool = False) -> list[str]:
        """Return the names of the columns of `rows`."""
        named = [f"{PROBABILITY} of {name}" for name in self.classes] if every else []
        return [*self.kept, PREDICTION, PROBABILITY, *named]

    def rows(self, every: bool = False) -> list[list[Any]]:
        """Return one row for each record: kept cells, class, its probability, and all probabilities if asked for."""
        found = []
        for row, place in enumerate(self.places.tolist()):
            mine = self.probabilities[row].tolist()
            kept = [cells[row] for cells in self.kept.values()]
            found.append([*kept, self.classes[place], mine[place], *(mine if every else ())])
        return found


class NumberPredictions(Predictions):
    """The number that is predicted for every record: (n, 1), in the place of the probabilities."""

    def header(self, every: bool = False) -> list[str]:
        if every:
            raise InputError("numbers have no probabilities; leave out --probabilities")
        return [*self.kept, PREDICTION]

    def rows(self, every: bool = False) -> list[list[Any]]:  # noqa: ARG002
        kept = list(self.kept.values())
        return [[*(cells[row] for cells in kept), float(one[0])] for row, one in enumerate(self.probabilities)]


def predict_file(
    model: SavedModel,
    file: Path,
    keep: Sequence[str] = (),
    score: bool = False,
    label: str | None = None,
    progress: Callable[[int, int], None] = lambda *_: None,
) -> Predictions:
    """Predict the class, or the number, of every record of a CSV, Parquet or .npz file; with `score`, compare it.

    The label column is the one that the model was trained with, unless `label` names another. A model whose features
    have no names takes all columns in order, but for the label and the columns to `keep`.
    """
    table = read_columns(file)
    if not len(table.lines):
        raise DataError(f"{file} holds no records; add some below its header")
    label = label or model.metadata.label or ("labels" if table.features is not None else "label")
    for name in keep:
        if name not in table.columns:
            known = ", ".join(table.columns) or "none"
            raise InputError(f"--keep {name}: {file} has no such column; it has {known}")
    kept = {name: table.columns[name] for name in keep}
    result = {PREDICTION, PROBABILITY, *(f"{PROBABILITY} of {name}" for name in model.classes)}
    if taken := next((name for name in kept if name in result), None):
        raise InputError(f"--keep {taken}: the result has a column of that name; rename it in {file}")
    if model.target in ("sequence", "labels") or model.metadata.inputs is not None:
        raise InputError(f"{model.path} predicts from or of several things at once, which no table holds; use Python")
    truth: NDArray[Any] | None = None
    if score:
        if label not in table.columns:
            known = ", ".join(table.columns) or "none"
            raise InputError(f"--score: {file} has no column {label!r} (it has {known}); name it with --label")
        numbers = model.target == "number"
        truth = plain_numbers(table.columns[label], label, table.where) if numbers else _truth(model, table, label)
    records: Any = table.features
    if records is None:
        named = model.schema is not None or bool(model.metadata.features) or TEXT in table.columns
        records = {name: table.columns[name] for name in table.columns if named or name not in {label, *kept}}
    outputs = model.outputs(model.encode(records, table.where, str(file)), progress)
    if model.target == "number":
        found = numbers_of(outputs, model.metadata.scale)
        return NumberPredictions(kept, np.zeros(0, np.int64), found[:, None], model.classes, _errors(truth, found))
    places, chances = Model.classes(outputs).numpy(), probabilities_of(outputs)
    scores = {} if truth is None else _scores(truth, places, chances)
    return Predictions(kept, places, chances, model.classes, scores)


def _truth(model: SavedModel, table: RawTable, label: str) -> NDArray[np.int64]:
    """Return the place of every record's true class."""
    find = matching(model.classes)  # as labels are read for training

    def place(cell: Any, row: int) -> int:
        if (found := find(cell, -1)) < 0:
            known = ", ".join(model.classes[:8]) + (", …" if len(model.classes) > 8 else "")
            shown = "missing" if is_missing(cell) else repr(as_text(cell))
            raise DataError(
                f"{table.where(row)}: the label is {shown}, which the model does not know ({known}); correct it"
            )
        return found

    return of_each(listed(table.columns[label]), np.int64, place)


def _errors(truth: NDArray[Any] | None, found: NDArray[np.float64]) -> dict[str, Any]:
    """Return the errors of numbers, and R²."""
    if truth is None:
        return {}
    figures = target_figures("number", torch.from_numpy(found), torch.from_numpy(truth))
    return {name: value if isfinite(value) else None for name, value in figures.items()}


def _scores(truth: NDArray[np.int64], places: NDArray[np.int64], chances: NDArray[np.float64]) -> dict[str, Any]:
    """Return accuracy and AUC: for several classes, the mean over classes of one against the rest."""
    from sklearn.metrics import roc_auc_score

    mine = [place for place in range(chances.shape[1]) if 0 < (truth == place).sum() < len(truth)]
    mine = mine[-1:] if chances.shape[1] == 2 else mine
    found = [float(roc_auc_score(truth == place, chances[:, place])) for place in mine]
    return {"accuracy": float((truth == places).mean()), "auc": float(np.mean(found)) if found else None}
