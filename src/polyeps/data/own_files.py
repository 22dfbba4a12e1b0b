"""Loads your own records: CSV, Parquet or .npz, one file per client or one file with a client column."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from polyeps.data.dataset import Dataset
from polyeps.data.table_readers import SUFFIXES, RecordTable, read_table
from polyeps.errors import DataError


def load_own(
    path: Path,
    *,
    label: str = "label",
    client: str = "client",
    test: Path | None = None,
    classes: int | None = None,
) -> Dataset:
    """Load a folder with one file per client, named after it, or one file with a column `client`.

    Labels are whole numbers from 0, or words. `test` is a file of test records; `classes` is the number of labels,
    where the files do not show them all.
    """
    if path.is_dir():
        parts = [read_table(file, label, None) for file in _client_files(path)]
        for part in parts:
            if client in part.columns:
                raise DataError(
                    f"{part.path} has a column {client!r}, but the file's name is already the client's: "
                    "remove the column, or give one file instead of a folder"
                )
        names = [part.path.stem for part in parts]
        groups = np.repeat(np.arange(len(parts)), [len(part.labels) for part in parts])
    else:
        part = read_table(path, label, client)
        parts = [part]
        assert part.clients is not None
        unique, groups = np.unique(part.clients, return_inverse=True)
        names = [str(name) for name in unique]
    held_out = read_table(test, label, None, ignore=client) if test is not None else None
    every = parts if held_out is None else [*parts, held_out]
    _check_alike(every)
    meanings, numbers = _number_labels(every, classes)
    features = np.concatenate([part.features for part in parts])
    return Dataset(
        f"own:{path.name}",  # never taken for a public set of that name
        features,
        np.concatenate(numbers[: len(parts)]),
        features[:0] if held_out is None else held_out.features,
        numbers[0][:0] if held_out is None else numbers[-1],
        meanings,
        groups=groups.astype(np.int64),
        group_names=tuple(names),
        columns=parts[0].columns,
    )


def _client_files(folder: Path) -> list[Path]:
    files = sorted(file for file in folder.iterdir() if file.suffix in SUFFIXES)
    if not files:
        raise DataError(f"{folder} holds no {', '.join(SUFFIXES)} file: put one file per client into it")
    for one, other in itertools.pairwise(files):
        if one.stem == other.stem:
            raise DataError(f"{one} and {other} both name client {one.stem}: rename one of them")
    return files


def _check_alike(parts: list[RecordTable]) -> None:
    first = parts[0]
    for part in parts[1:]:
        if part.columns != first.columns:
            odd = sorted(set(part.columns) ^ set(first.columns)) or ["their order"]
            raise DataError(f"{part.path} and {first.path} differ in columns ({', '.join(odd)}): make them alike")
        if part.features.shape[1:] != first.features.shape[1:]:
            raise DataError(
                f"{part.path} has records of shape {part.features.shape[1:]} and {first.path} of "
                f"{first.features.shape[1:]}: make them alike"
            )


def _number_labels(parts: list[RecordTable], classes: int | None) -> tuple[tuple[str, ...], list[NDArray[np.int64]]]:
    if any(part.labels.dtype.kind == "U" for part in parts):
        names = np.unique(np.concatenate([part.labels.astype(np.str_) for part in parts]))
        if classes is not None and len(names) > classes:
            raise DataError(f"{parts[0].path}: {len(names)} different labels, but {classes} were announced: correct it")
        numbers = [np.searchsorted(names, part.labels.astype(np.str_)).astype(np.int64) for part in parts]
        return tuple(str(name) for name in names), numbers
    count = classes if classes is not None else 1 + max(int(part.labels.max()) for part in parts)
    for part in parts:
        wrong = (part.labels < 0) | (part.labels >= count)
        if wrong.any():
            record = int(wrong.argmax())
            raise DataError(
                f"{part.where(record)}: label {part.labels[record]} is outside 0 to {count - 1}: correct it"
            )
    return tuple(str(i) for i in range(count)), [part.labels for part in parts]
