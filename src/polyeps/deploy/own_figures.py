"""A silo's own figures: how well each model it was sent does on its own test records. They are never sent.

    FOLDER/figures.jsonl      one JSON object for each round, and for the silo's personal model if it has one

Figures of records that no ledger is charged for must stay where the records are. They are made after the reply is on
its way, so that not even its time depends on them.
"""

from __future__ import annotations

import json
import os
from datetime import UTC, datetime
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from polyeps.experiment.evaluation import measure
from polyeps.experiment.metrics import NAMED_METRICS
from polyeps.experiment.population import Population

FIGURES = "figures.jsonl"
_LARGEST = 10 << 20  # bytes of a file of lines; the last such file is kept beside it


def figures_of(population: Population, models: dict[str, Tensor]) -> list[dict[str, Any]]:
    """Return what models (d,) reach on the test records, with what is reached by always naming the larger class."""
    labels = population.dataset.test_labels
    if not len(labels):
        return []
    wanted = {"auc": NAMED_METRICS["auc"]} if len(population.dataset.classes) == 2 else {}
    larger = float(np.bincount(labels).max()) / len(labels)
    found = []
    for name, model in models.items():
        figures = {key: value for key, value in measure(population, model, wanted).items() if isfinite(value)}
        found.append({"model": name, "records": len(labels), **figures, "larger class": larger})
    return found


def append_line(path: Path, facts: dict[str, Any]) -> None:
    """Append one JSON object with the time to a file that only its owner reads, and that does not grow for ever."""
    line = json.dumps({"time": datetime.now(UTC).isoformat(timespec="seconds"), **facts})
    if path.exists() and path.stat().st_size > _LARGEST:
        path.replace(path.with_suffix(".jsonl.1"))
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
    with os.fdopen(file, "a", encoding="utf-8") as stream:
        stream.write(line + "\n")
