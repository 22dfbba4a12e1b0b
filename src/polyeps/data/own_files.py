"""Loads records from files of your own: one file per client, or one file with a client column."""

from __future__ import annotations

import itertools
import unicodedata
from pathlib import Path
from typing import Any

from polyeps.data.cells import as_text, listed, of_each
from polyeps.data.dataset import Dataset
from polyeps.data.own_tables import assemble
from polyeps.data.schema_files import TableDeclaration, read_schema
from polyeps.data.table_readers import SUFFIXES, RawTable, read_columns
from polyeps.errors import DataError


def load_own(path: Path, declared: TableDeclaration | None = None, **roles: Any) -> Dataset:
    """Load a folder with one file per client, named after it, or one file with a column `client`.

    Undeclared columns are left out where a schema is given; without one, all others must be numbers. `roles` are the
    fields of a declaration, where none is given.
    """
    declared = declared or TableDeclaration(**roles)
    if not path.is_dir():
        return assemble(path.name, [read_columns(path)], declared)
    files = _client_files(path)
    tables = [read_columns(file) for file in files]
    for table, file in zip(tables, files, strict=True):
        _check_owner(table, _name(file), declared.client)
    return assemble(path.name, tables, declared, [_name(file) for file in files])


def load_client(path: Path, schema: Path | TableDeclaration, name: str | None = None) -> Dataset:
    """Load one client's own file by the schema that all clients agreed to, as a deployed client does.

    The client is called `name`, or as the file is. The schema must declare the classes: those of one client's file
    need not be those of another's.
    """
    declared = schema if isinstance(schema, TableDeclaration) else read_schema(schema)
    unnamed = declared.classes is None and declared.target != "number"
    if unnamed or declared.schema is None:
        missing = "classes" if unnamed else "columns"
        raise DataError(f"{path} cannot be encoded as by other clients: the schema declares no {missing}; add them")
    table = read_columns(path)
    called = name or _name(path)
    _check_owner(table, called, declared.client)
    return assemble(path.name, [table], declared, [called])


def _check_owner(table: RawTable, name: str, column: str | None) -> None:
    """Refuse a client's file in which a column names another client."""

    def check(cell: Any, row: int) -> bool:
        if as_text(cell) != name:
            raise DataError(
                f"{table.where(row)}: the column {column!r} names {as_text(cell)!r}, but the file is that of client "
                f"{name!r}: correct it, remove the column, or give one file instead of a folder"
            )
        return True

    if column is not None and table.features is None:
        of_each(listed(table.columns.get(column, ())), bool, check)


def _client_files(folder: Path) -> list[Path]:
    found = (file for file in folder.iterdir() if file.suffix.lower() in SUFFIXES and file.name[0] != ".")
    files = sorted(found, key=lambda file: (_name(file), file.name))
    if not files:
        raise DataError(f"{folder} holds no {', '.join(SUFFIXES)} file: put one file per client into it")
    for one, other in itertools.pairwise(files):
        if _name(one) == _name(other):
            raise DataError(f"{one} and {other} both name client {_name(one)}: rename one of them")
    return files


def _name(file: Path) -> str:
    """Return the client that a file is named after; some systems write é in a file's name as two letters."""
    return unicodedata.normalize("NFC", file.stem)
