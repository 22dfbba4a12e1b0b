"""Reads one file of a client's own records: CSV, Parquet or .npz.

Every refusal names the file and the row or column; nothing is dropped, filled in or guessed. A reader returns a file's
columns as they stand; `read_table` then takes features, labels and clients from them.
"""

from __future__ import annotations

import csv
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyeps.errors import DataError

SUFFIXES = (".csv", ".npz", ".parquet")


@dataclass(frozen=True)
class RecordTable:
    """The records of one file."""

    path: Path
    features: NDArray[np.float32]  # (r, ...)
    labels: NDArray[Any]  # (r,) whole numbers or text
    clients: NDArray[np.str_] | None  # (r,)
    columns: tuple[str, ...]  # names of the features, if they have any
    lines: NDArray[np.int64]  # (r,) the row of each record in the file, for messages

    def where(self, record: int) -> str:
        """Name the place of a record."""
        client = f" (client {self.clients[record]})" if self.clients is not None else ""
        return f"{self.path}, row {self.lines[record]}{client}"


@dataclass(frozen=True)
class _Columns:
    """A file's columns in order, their cells as text or as typed values, and the row of each record."""

    header: list[str]
    cells: list[Sequence[str] | NDArray[Any]]
    lines: NDArray[np.int64]


def read_table(path: Path, label: str, client: str | None) -> RecordTable:
    """Read a file with a label column and, unless `client` is None, a client column; all others are features."""
    if not path.is_file():
        raise DataError(f"{path} does not exist: name a folder of client files, or one file")
    match path.suffix:
        case ".csv":
            table = _to_table(path, _read_csv(path), label, client)
        case ".parquet":
            table = _to_table(path, _read_parquet(path), label, client)
        case ".npz":
            table = _read_npz(path, client)
        case other:
            raise DataError(f"{path} ends in {other or 'no suffix'}: give a {', '.join(SUFFIXES)} file")
    if not len(table.labels):
        raise DataError(f"client {path.stem} has no records, as {path} is empty: remove it or add records")
    bad = np.argwhere(~np.isfinite(table.features))
    if len(bad):
        at = tuple(int(i) for i in bad[0])
        column = repr(table.columns[at[1]]) if table.columns else str(at[1:])
        raise DataError(
            f"{table.where(at[0])}, column {column}: {table.features[at]} is not a finite number: "
            "fill it in or remove the row"
        )
    return table


def _read_csv(path: Path) -> _Columns:
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
    cells: list[Any] = list(zip(*records, strict=True)) if records else [()] * len(header)
    return _Columns(header, cells, np.array(lines[1:], dtype=np.int64))


def _read_parquet(path: Path) -> _Columns:
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
    cells = [column.to_numpy() for column in table.columns]  # missing values become NaN or None
    return _Columns(list(table.column_names), cells, np.arange(1, table.num_rows + 1))


def _to_table(path: Path, found: _Columns, label: str, client: str | None) -> RecordTable:
    _check_header(path, found.header, label, client)
    by_name = dict(zip(found.header, found.cells, strict=True))
    for needed in filter(None, (label, client)):
        for line, cell in zip(found.lines, by_name[needed], strict=True):
            if cell is None or cell == "" or cell != cell:  # NaN differs from itself
                raise DataError(f"{path}, row {line}, column {needed!r}: the cell is empty: fill it in")
    columns = tuple(name for name in found.header if name not in (label, client))
    numbers = [_numbers(f"{path}, row {{}}, column {name!r}", by_name[name], found.lines) for name in columns]
    return RecordTable(
        path,
        _as_float32(np.stack(numbers, axis=1)),
        _labels(path, by_name[label]),
        np.array(by_name[client]).astype(np.str_) if client else None,
        columns,
        found.lines,
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


def _numbers(where: str, cells: Sequence[str] | NDArray[Any], lines: NDArray[np.int64]) -> NDArray[np.float64]:
    if isinstance(cells, np.ndarray):
        if cells.dtype.kind in "fiub":
            return cells.astype(np.float64)
        wrong = 0
    else:
        try:
            return np.array(cells, dtype=np.float64)
        except ValueError:
            wrong = next(place for place, cell in enumerate(cells) if not _is_number(cell))
    what = f"{cells[wrong]!r} is not a number" if str(cells[wrong] or "").strip() else "the cell is empty"
    raise DataError(f"{where.format(lines[wrong])}: {what}: encode the column as numbers or remove it")


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def _read_npz(path: Path, client: str | None) -> RecordTable:
    try:
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as stored:
            arrays = {name: stored[name] for name in stored.files}
    except (ValueError, TypeError, OSError, EOFError, zipfile.BadZipFile) as e:
        raise DataError(f"{path} is not a readable .npz file of plain arrays ({e}): write it again") from e
    needed = ("features", "labels") + (("clients",) if client else ())
    for name in needed:
        if name not in arrays:
            raise DataError(f"{path} has no array {name!r}: store {', '.join(needed)} in it")
    features = arrays["features"]
    if features.dtype.kind not in "fiub" or features.ndim < 2:
        raise DataError(f"{path}: features must be numbers with one row per record, not {features.dtype}")
    for name in needed[1:]:
        if arrays[name].shape != features.shape[:1]:
            raise DataError(f"{path}: {name} has shape {arrays[name].shape}, but there are {len(features)} records")
    return RecordTable(
        path,
        _as_float32(features),
        _labels(path, arrays["labels"]),
        arrays["clients"].astype(np.str_) if client else None,
        (),
        np.arange(1, len(features) + 1),
    )


def _labels(path: Path, cells: Sequence[str] | NDArray[Any]) -> NDArray[Any]:
    """Return labels as whole numbers where all of them are, else as text."""
    if not isinstance(cells, np.ndarray):
        text = np.array([cell.strip() for cell in cells], dtype=np.str_)
        try:
            return text.astype(np.int64)
        except ValueError:
            return text
    if cells.dtype.kind == "f" and not np.array_equal(cells, np.floor(cells)):
        record = int(np.argmax(cells != np.floor(cells)))
        raise DataError(f"{path}, row {record + 1}: label {cells[record]} is not a whole number: correct it")
    return cells.astype(np.int64 if cells.dtype.kind in "fiub" else np.str_)


def _as_float32(values: NDArray[Any]) -> NDArray[np.float32]:
    with np.errstate(over="ignore"):  # a value too large becomes infinite, which is refused by its place
        return values.astype(np.float32)
