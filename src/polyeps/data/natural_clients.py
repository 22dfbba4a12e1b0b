"""Clients by a column of a public table: `data.partition = "by-column"` with `data.client = "workclass"`."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from polyeps.data.dataset import Dataset
from polyeps.errors import InputError

LEAST = 50  # training records of a client; values with fewer, and records without a value, are one client together
OTHER = "other"


def by_column(dataset: Dataset, column: str) -> Dataset:
    """Return a data set whose clients are the values of a one-hot column, which is no feature any more.

    Values with fewer than LEAST training records, and records of no value, make up the client "other".
    """
    prefix = f"{column}="
    places = [place for place, name in enumerate(dataset.columns) if name.startswith(prefix)]
    if not places:
        known = sorted({name.partition("=")[0] for name in dataset.columns if "=" in name.replace(">=", "")})
        offered = f"it has {', '.join(known)}" if known else "it has none; choose another partition"
        raise InputError(f"data.client = {column!r} is no column of categories of {dataset.name}; {offered}")
    values = [dataset.columns[place].removeprefix(prefix) for place in places]

    def owners(features: NDArray[np.float32]) -> NDArray[np.int64]:
        cells = features[:, places]
        return np.where(cells.any(axis=1), cells.argmax(axis=1), len(values)).astype(np.int64)

    training, test = owners(dataset.features), owners(dataset.test_features)
    held = np.bincount(training, minlength=len(values) + 1)
    large = [place for place in range(len(values)) if held[place] >= LEAST]
    number = np.full(len(values) + 1, len(large))
    number[large] = range(len(large))
    names = tuple(values[place] for place in large)
    if held.sum() > held[large].sum():
        names = (*names, OTHER if OTHER not in names else f"{OTHER} values")
    kept = np.setdiff1d(np.arange(len(dataset.columns)), places)
    return replace(
        dataset,
        features=dataset.features[:, kept],
        test_features=dataset.test_features[:, kept],
        columns=tuple(dataset.columns[place] for place in kept),
        groups=number[training],
        group_names=names,
        test_groups=number[test],
    )
