"""Reads the columns of a file: CSV, Parquet, Arrow, Feather or .npz.

Every refusal names the file and the row or column; nothing that has a name is dropped, filled in or guessed. Readers
return columns as they stand; `own_tables` takes features, labels, clients and persons from them.
"""

from __future__ import annotations

import csv
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyeps.errors import DataError

SUFFIXES = (".arrow", ".csv", ".feather", ".npz", ".parquet", ".tsv")
_DELIMITERS = (",", ";", "\t")
_BLOCK = 20_000  # rows of a CSV file that are turned into columns at a time

Cells = Sequence[Any] | NDArray[Any]


@dataclass(frozen=True, eq=False)
class RawTable:
    """The columns of one file or frame, as they stand."""

    source: str  # for messages
    columns: Mapping[str, Cells]
    lines: NDArray[np.int64]  # (r,) the row of each record in the file, for messages
    features: NDArray[Any] | None = None  # (r, ...) where records are arrays; columns are then labels, clients, persons

    def where(self, record: int) -> str:
        """Name the place of a record."""
        return f"{self.source}, row {self.lines[record]}"


def read_columns(path: Path) -> RawTable:
    """Read the columns of a file."""
    if path.is_dir():
        raise DataError(f"{path} is a folder: name one client's file in it")
    if not path.is_file():
        raise DataError(f"{path} does not exist; check its path")
    match path.suffix.lower():
        case ".csv" | ".tsv":
            return _read_csv(path)
        case ".parquet" | ".arrow" | ".feather":
            return _read_arrow(path)
        case ".npz":
            return _read_npz(path)
        case ".xls" | ".xlsx" | ".ods":
            raise DataError(f"{path} is a spreadsheet: save its sheet as CSV (UTF-8), and name that file")
        case other:
            raise DataError(f"{path} ends in {other or 'no suffix'}: give a {', '.join(SUFFIXES)} file")


def check_names(source: str, header: Sequence[str]) -> None:
    """Refuse columns without a name, and two of one name."""
    for position, name in enumerate(header, 1):
        if not name:
            raise DataError(f"{source}, column {position} has no name: name it, or remove it if it counts the rows")
        if not name.isprintable():
            raise DataError(f"{source}, column {position} is named {name!a}, which cannot be shown; rename it")
        if header.count(name) > 1:
            raise DataError(f"{source} has {header.count(name)} columns named {name!r}: rename or remove all but one")


def _read_csv(path: Path) -> RawTable:
    header: list[str] = []
    columns: list[list[str]] = []
    lines: list[int] = []
    rows: list[list[str]] = []

    def take() -> None:
        """Move the rows to the columns; many small lists at a time would be slow to clear away."""
        for line, row in zip(lines[len(lines) - len(rows) :], rows, strict=True):
            if len(row) != len(header):
                # With decimal commas there are too many cells, all but a few of them digits.
                decimals = len(row) > len(header) and 2 * sum(cell.strip().isdecimal() for cell in row) > len(row)
                hint = "; write decimals with a point, or separate columns by semicolons" if decimals else ""
                raise DataError(
                    f"{path}, row {line}: {len(row)} cells where the header names {len(header)}: correct it{hint}"
                )
        for column, cells in zip(columns, zip(*rows, strict=True), strict=False):
            column.extend(cells)
        rows.clear()

    try:
        with path.open(newline="", encoding="utf-8-sig") as stream:
            delimiter = delimiter_of(next((line for line in stream if line.strip()), ""))
            stream.seek(0)
            reader = csv.reader(stream, strict=True, delimiter=delimiter)
            for row in reader:
                if not row:  # a blank line is no record
                    continue
                if not header:
                    header = [name.strip() for name in row]
                    columns = [[] for _ in header]
                    continue
                rows.append(row)
                lines.append(reader.line_num)
                if len(rows) == _BLOCK:
                    take()
            take()
    except UnicodeDecodeError as e:
        raise DataError(f"{path} is not UTF-8 text (byte {e.start}): save it as UTF-8") from e
    except OSError as e:
        raise DataError(f"{path} cannot be read: {e.strerror}; make it readable") from e
    except csv.Error as e:
        raise DataError(f"{path}, after row {lines[-1] if lines else 1}: {e}: correct its quotes") from e
    if not header:
        raise DataError(f"{path} is empty: its first row must name the columns")
    # Columns without a name, which nothing can refer to, are no part of the table: pandas writes its index so, and
    # spreadsheets write empty columns.
    named = {place: name for place, name in enumerate(header) if name}
    check_names(str(path), list(named.values()))
    found = {name: columns[place] for place, name in named.items()}
    return RawTable(str(path), found, np.array(lines, dtype=np.int64))


def delimiter_of(first: str) -> str:
    """Return what separates the names of the first line: the delimiter that gives most of them."""

    def names(delimiter: str) -> int:
        try:
            return len(next(csv.reader([first], delimiter=delimiter), []))
        except csv.Error:
            return 0

    return max(_DELIMITERS, key=names)


def _read_arrow(path: Path) -> RawTable:
    try:
        import pyarrow
        import pyarrow.feather
        import pyarrow.parquet
    except ImportError:
        remedy = "run `pip install 'polyeps[parquet]'`, or save it as CSV"
        raise DataError(f"reading {path} needs pyarrow: {remedy}") from None
    kind = "a Parquet" if path.suffix.lower() == ".parquet" else "an Arrow"
    try:
        table = _arrow_table(path)
        columns = [_arrow_cells(column) for column in table.columns]  # missing values become NaN, NaT or None
    except (pyarrow.ArrowException, OSError, ValueError) as e:
        raise DataError(f"{path} is not {kind} file that can be read ({e}): write it again") from e
    header = [str(name) for name in table.column_names]
    check_names(str(path), header)
    return RawTable(str(path), dict(zip(header, columns, strict=True)), np.arange(1, table.num_rows + 1))


def _arrow_cells(column: Any) -> NDArray[Any]:
    import pyarrow
    import pyarrow.compute

    kind = column.type
    if pyarrow.types.is_timestamp(kind) and kind.tz is not None:  # the day there, as CSV files and frames have it
        column = pyarrow.compute.local_timestamp(column)
    found: NDArray[Any] = column.to_numpy()
    return found


def _arrow_table(path: Path) -> Any:
    import pyarrow
    import pyarrow.feather
    import pyarrow.parquet

    if path.suffix.lower() == ".parquet":
        # A file by itself, whatever the names of its folders say.
        return pyarrow.parquet.ParquetFile(path).read()
    try:
        return pyarrow.feather.read_table(path)
    except pyarrow.ArrowException:  # a stream instead of a file
        with path.open("rb") as stream:
            return pyarrow.ipc.open_stream(stream).read_all()


def _read_npz(path: Path) -> RawTable:
    try:
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as stored:
            arrays = {name: stored[name] for name in stored.files}
    except (ValueError, TypeError, OSError, EOFError, zipfile.BadZipFile) as e:
        raise DataError(f"{path} is not a readable .npz file of plain arrays ({e}): write it again") from e
    return array_table(str(path), arrays, first=1)


def array_table(source: str, arrays: Mapping[str, Cells], *, first: int) -> RawTable:
    """Return arrays as a table: `features` of any shape beside other arrays, or one array for each column."""
    whole = "features" in arrays and ("labels" in arrays or np.ndim(arrays["features"]) > 1)
    columns = {name: column for name, column in arrays.items() if not (whole and name == "features")}
    if whole:
        features = np.asarray(arrays["features"])
        if features.dtype.kind not in "fiub" or features.ndim < 2:
            raise DataError(f"{source}: features must be numbers with one row per record, not {features.dtype}")
        records = len(features)
    else:
        features, records = None, len(next(iter(columns.values()), ()))
    for name, column in columns.items():
        shape = column.shape if isinstance(column, np.ndarray) else (len(column),)
        if len(shape) != 1 and features is None:
            raise DataError(f"{source} has no array 'features', and {name!r} is no column: store features, labels")
        if shape != (records,) and not (whole and name == "labels" and shape[:1] == (records,)):
            raise DataError(f"{source}: {name} has shape {shape}, but there are {records} records")
    check_names(source, list(columns))
    return RawTable(source, columns, np.arange(first, first + records), features)


def role(table: RawTable, name: str, of_arrays: str) -> str:
    """Return the column of a role: tables of arrays call theirs labels and clients."""
    return name if table.features is None else of_arrays
