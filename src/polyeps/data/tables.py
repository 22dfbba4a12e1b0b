"""Reads one table of somebody's own records from CSV, Parquet or .npz, exactly as it stands.

Every refusal names the file and the row or column; nothing is dropped, filled in or guessed.
"""

from __future__ import annotations

import csv
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyeps.errors import DataError

SUFFIXES = (".csv", ".npz", ".parquet")


@dataclass(frozen=True)
class Table:
    """The records of one file, as they stand in it."""

    path: Path
    features: NDArray[np.float32]  # (r, ...)
    labels: NDArray[Any]  # (r,) whole numbers or text
    clients: NDArray[np.str_] | None  # (r,)
    columns: tuple[str, ...]
    lines: NDArray[np.int64]  # (r,) where each record stands, for messages

    def where(self, record: int) -> str:
        client = f" (client {self.clients[record]})" if self.clients is not None else ""
        return f"{self.path}, row {self.lines[record]}{client}"


def read_table(path: Path, label: str, client: str | None, ignore: str | None = None) -> Table:
    if not path.is_file():
        raise DataError(f"{path} does not exist: name a folder of client files, or one file")
    match path.suffix:
        case ".csv":
            part = _read_csv(path, label, client, ignore)
        case ".parquet":
            part = _read_parquet(path, label, client, ignore)
        case ".npz":
            part = _read_npz(path, client)
        case other:
            raise DataError(f"{path} ends in {other or 'no suffix'}: give a {', '.join(SUFFIXES)} file")
    if not len(part.labels):
        raise DataError(f"client {path.stem} has no records, as {path} is empty: remove it or add records")
    _check_finite(part)
    return part


def _read_csv(path: Path, label: str, client: str | None, ignore: str | None) -> Table:
    rows: list[list[str]] = []
    lines: list[int] = []
    try:
        with path.open(newline="", encoding="utf-8-sig") as stream:
            reader = csv.reader(stream, strict=True)
            for row in reader:
                if row:  # a blank line is no record
                    rows.append(row)
                    lines.append(reader.line_num)
    except UnicodeDecodeError as e:
        raise DataError(f"{path} is not UTF-8 text (byte {e.start}): save it as UTF-8") from e
    except csv.Error as e:
        raise DataError(f"{path}, row {reader.line_num}: {e}: correct its quotes") from e
    if not rows:
        raise DataError(f"{path} is empty: its first row must name the columns")
    header, records = [name.strip() for name in rows[0]], rows[1:]
    for line, row in zip(lines[1:], records, strict=True):
        if len(row) != len(header):
            raise DataError(
                f"{path}, row {line}: {len(row)} cells where the header names {len(header)}: correct the row"
            )
    by_name = dict(zip(header, zip(*records, strict=True), strict=True)) if records else dict.fromkeys(header, ())
    _check_header(path, header, label, client)
    columns = tuple(name for name in header if name not in (label, client, ignore))
    for needed in (label, client):
        if needed is not None and "" in by_name[needed]:
            line = lines[1 + by_name[needed].index("")]
            raise DataError(f"{path}, row {line}, column {needed!r}: the cell is empty: fill it in")
    numbers = [_numbers(path, name, by_name[name], lines[1:]) for name in columns]
    return Table(
        path,
        _as_float32(np.stack(numbers, axis=1)),
        _labels_from_text(by_name[label]),
        np.array(by_name[client], dtype=np.str_) if client else None,
        columns,
        np.array(lines[1:], dtype=np.int64),
    )


def _check_header(path: Path, header: list[str], label: str, client: str | None) -> None:
    for position, name in enumerate(header, 1):
        if not name:  # as pandas writes its index
            raise DataError(f"{path}, column {position} has no name: name it, or remove it if it counts the rows")
        if header.count(name) > 1:
            raise DataError(f"{path} has {header.count(name)} columns named {name!r}: rename or remove all but one")
    for needed, use in ((label, "label"), (client, "client")):
        if needed is not None and needed not in header:
            shown = ", ".join(header[:8]) + (", …" if len(header) > 8 else "")
            raise DataError(
                f"{path} has no column {needed!r} (it has {shown}): name the {use} column with --{use}-column"
            )
    if len(header) < 2 + (client is not None):
        raise DataError(f"{path} has no feature column beside {', '.join(header)}: add one")


def _numbers(path: Path, name: str, cells: tuple[str, ...], lines: list[int]) -> NDArray[np.float64]:
    try:
        return np.array(cells, dtype=np.float64)
    except ValueError:
        for line, cell in zip(lines, cells, strict=True):
            try:
                float(cell)
            except ValueError:
                what = f"{cell!r} is not a number" if cell.strip() else "the cell is empty"
                raise DataError(
                    f"{path}, row {line}, column {name!r}: {what}: encode the column as numbers or remove it"
                ) from None
        raise


def _labels_from_text(cells: tuple[str, ...]) -> NDArray[Any]:
    text = np.array([cell.strip() for cell in cells], dtype=np.str_)
    try:
        return text.astype(np.int64)
    except ValueError:
        return text


def _read_parquet(path: Path, label: str, client: str | None, ignore: str | None) -> Table:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise DataError(
            f"reading {path} needs pyarrow: run `pip install 'polyeps[parquet]'`, or save it as CSV"
        ) from None
    try:
        table = pyarrow.parquet.read_table(path)
    except (pyarrow.ArrowException, OSError) as e:
        raise DataError(f"{path} is not a readable Parquet file ({e}): write it again") from e
    _check_header(path, list(table.column_names), label, client)
    columns = tuple(name for name in table.column_names if name not in (label, client, ignore))
    numbers = []
    for name in columns:
        values = table[name].to_numpy()  # a missing value becomes NaN, which is refused with its row
        if values.dtype.kind not in "fiub":
            raise DataError(f"{path}, column {name!r}: {table[name].type} is not a number: encode it or remove it")
        numbers.append(values.astype(np.float64))
    labels = table[label]
    if labels.null_count:
        raise DataError(f"{path}, column {label!r}: {labels.null_count} labels are missing: fill them in")
    return Table(
        path,
        _as_float32(np.stack(numbers, axis=1)),
        _plain_labels(path, labels.to_numpy()),
        table[client].to_numpy().astype(np.str_) if client else None,
        columns,
        np.arange(1, table.num_rows + 1),
    )


def _read_npz(path: Path, client: str | None) -> Table:
    try:
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as stored:
            arrays = {name: stored[name] for name in stored.files}
    except (ValueError, TypeError, OSError, EOFError, zipfile.BadZipFile) as e:
        raise DataError(f"{path} is not a readable .npz file of plain arrays ({e}): write it again") from e
    wanted = ("features", "labels") + (("clients",) if client else ())
    for name in wanted:
        if name not in arrays:
            raise DataError(f"{path} has no array {name!r}: store {', '.join(wanted)} in it")
    features, labels = arrays["features"], arrays["labels"]
    if features.dtype.kind not in "fiub" or features.ndim < 2:
        raise DataError(f"{path}: features must be numbers with one row per record, not {features.dtype}")
    for name in wanted[1:]:
        if arrays[name].shape != features.shape[:1]:
            raise DataError(f"{path}: {name} has shape {arrays[name].shape}, but there are {len(features)} records")
    return Table(
        path,
        _as_float32(features),
        _plain_labels(path, labels),
        arrays["clients"].astype(np.str_) if client else None,
        (),
        np.arange(1, len(labels) + 1),
    )


def _plain_labels(path: Path, labels: NDArray[Any]) -> NDArray[Any]:
    if labels.dtype.kind == "f" and not np.array_equal(labels, np.floor(labels)):
        record = int(np.argmax(labels != np.floor(labels)))
        raise DataError(f"{path}, row {record + 1}: label {labels[record]} is not a whole number: correct it")
    return labels.astype(np.int64 if labels.dtype.kind in "fiub" else np.str_)


def _as_float32(values: NDArray[Any]) -> NDArray[np.float32]:
    with np.errstate(over="ignore"):  # what is too large becomes infinite, which is refused by place
        return values.astype(np.float32)


def _check_finite(part: Table) -> None:
    bad = np.argwhere(~np.isfinite(part.features))
    if len(bad):
        at = tuple(int(i) for i in bad[0])
        column = repr(part.columns[at[1]]) if part.columns else str(at[1:])
        raise DataError(
            f"{part.where(at[0])}, column {column}: {part.features[at]} is not a finite number: "
            "fill it in or remove the row"
        )
