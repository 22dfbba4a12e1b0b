"""Loads your own records: CSV, Parquet or .npz, one file per client or one file with a client column."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np

from polyeps.data.dataset import Dataset, LabelArray, without_test
from polyeps.data.table_readers import SUFFIXES, RecordTable, read_table
from polyeps.errors import DataError


def load_own(path: Path, *, label: str = "label", client: str = "client") -> Dataset:
    """Load a folder with one file per client, named after it, or one file with a column `client`.

    Labels are whole numbers from 0, or words.
    """
    if path.is_dir():
        tables = [read_table(file, label, None) for file in _client_files(path)]
        for table in tables:
            if client in table.columns:
                raise DataError(
                    f"{table.path} has a column {client!r}, but the file's name is already the client's: "
                    "remove the column, or give one file instead of a folder"
                )
        names = [table.path.stem for table in tables]
        groups = np.repeat(np.arange(len(tables)), [len(table.labels) for table in tables])
    else:
        tables = [read_table(path, label, client)]
        assert tables[0].clients is not None
        unique, groups = np.unique(tables[0].clients, return_inverse=True)
        names = [str(name) for name in unique]
    _check_alike(tables)
    classes, labels = _number_labels(tables)
    return replace(
        without_test(
            f"own:{path.name}",  # never taken for a public set of that name
            np.concatenate([table.features for table in tables]),
            labels,
            classes,
            columns=tables[0].columns,
        ),
        groups=groups.astype(np.int64),
        group_names=tuple(names),
    )


def _client_files(folder: Path) -> list[Path]:
    files = sorted(file for file in folder.iterdir() if file.suffix in SUFFIXES)
    if not files:
        raise DataError(f"{folder} holds no {', '.join(SUFFIXES)} file: put one file per client into it")
    for one, other in itertools.pairwise(files):
        if one.stem == other.stem:
            raise DataError(f"{one} and {other} both name client {one.stem}: rename one of them")
    return files


def _check_alike(tables: list[RecordTable]) -> None:
    first = tables[0]
    for table in tables[1:]:
        if table.columns != first.columns:
            odd = sorted(set(table.columns) ^ set(first.columns)) or ["their order"]
            raise DataError(f"{table.path} and {first.path} differ in columns ({', '.join(odd)}): make them alike")
        if table.features.shape[1:] != first.features.shape[1:]:
            raise DataError(
                f"{table.path} has records of shape {table.features.shape[1:]} and {first.path} of "
                f"{first.features.shape[1:]}: make them alike"
            )


def _number_labels(tables: list[RecordTable]) -> tuple[tuple[str, ...], LabelArray]:
    """Return the classes and the number of every record's class."""
    if any(table.labels.dtype.kind == "U" for table in tables):
        texts = np.concatenate([table.labels.astype(np.str_) for table in tables])
        classes, numbers = np.unique(texts, return_inverse=True)
        return tuple(str(name) for name in classes), numbers.astype(np.int64)
    for table in tables:
        if table.labels.min() < 0:
            record = int((table.labels < 0).argmax())
            raise DataError(f"{table.where(record)}: label {table.labels[record]} is below 0: correct it")
    labels = np.concatenate([table.labels for table in tables])
    return tuple(str(number) for number in range(1 + int(labels.max()))), labels
