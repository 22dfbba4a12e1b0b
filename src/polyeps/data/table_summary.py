"""Describes a table of one client, and drafts a schema from it for all clients to agree to."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from polyeps.data.cells import as_text, is_missing, listed, short_text
from polyeps.data.schema import Column, Schema, draft, no_column
from polyeps.data.schema_files import TableDeclaration
from polyeps.data.table_readers import Cells, RawTable
from polyeps.errors import DataError

_CLIENTS = "client hospital clinic site centre center institution organisation organization bank branch company party"
_PERSONS = "patient person subject individual customer user member participant pupil student employee"
_LABELS = "label outcome target y class diagnosis died death event response readmitted churn default income result"
_MOST_LABELS = 20
_SHOWN = 6  # categories that are shown of a column
_IDENTIFIER = re.compile(r"(?i)(.*[_ .-])?(id|uuid|key|index)|unnamed: \d+|__index_level_\d+__|.*[a-z]I[dD]")
_COMMA = re.compile(r"[+-]?\d+,\d+")
_OTHER_DATE = re.compile(r"\d{1,4}[./-]\d{1,2}[./-]\d{1,4}\b.*")


@dataclass(frozen=True)
class ColumnSummary:
    """One column of a table: what it seems to be, and how a schema would declare it."""

    name: str
    role: str  # label, client, unit, feature, or "left out"
    kind: str  # number, date, category, text or empty
    missing: int
    different: int
    suggestion: str


@dataclass(frozen=True)
class TableSummary:
    """A table's columns, and the schema that is drafted from it."""

    records: int
    columns: tuple[ColumnSummary, ...]
    declared: TableDeclaration | None  # None: there is nothing to train on


def of_client(table: RawTable, column: str, name: str) -> RawTable:
    """Return the rows of one client."""
    if column not in table.columns:
        raise DataError(no_column(table.source, column, "names the client", table.columns))
    texts = [as_text(cell) for cell in listed(table.columns[column])]
    rows = [row for row, text in enumerate(texts) if text == name]
    if not rows:
        known = ", ".join(sorted(set(texts))[:10])
        raise DataError(f"{table.source} has no rows of client {name!r}; its column {column!r} has {known}")
    taken: dict[str, Cells] = {
        key: cells[rows] if isinstance(cells, np.ndarray) else [cells[row] for row in rows]
        for key, cells in table.columns.items()
    }
    return replace(table, columns=taken, lines=table.lines[rows])


def summarise_table(table: RawTable, *, label: str | None, client: str | None, unit: str | None) -> TableSummary:
    """Describe a table; roles of columns that are not given are guessed from their names."""
    if table.features is not None:
        raise DataError(f"{table.source} holds features as one array, which need no schema; describe a table")
    for name, why in (
        (label, "--label-column names"),
        (client, "--client-column names"),
        (unit, "--unit-column names"),
    ):
        if name is not None and name not in table.columns:
            raise DataError(no_column(table.source, name, why, table.columns))
    client = client or _named(table, _CLIENTS, {label, unit})
    unit = unit or _named(table, _PERSONS, {label, client})
    label = label or _named(table, _LABELS, {client, unit}) or _last(table, {client, unit})
    roles = {label: "label", client: "client", unit: "unit"}
    drafted, _ = draft(table.columns, [name for name in roles if name is not None])
    found = {
        column.name: column
        for column in drafted
        if not _counts_rows(column, table.columns[column.name])
        and not (column.categories and _foreign(_texts(table.columns[column.name])))
    }
    schema = Schema(tuple(found.values())) if found else None
    labels = () if label is None else listed(table.columns[label])
    texts = sorted({as_text(cell) for cell in labels if not is_missing(cell)})
    classes = tuple(texts) if 2 <= len(texts) <= _MOST_LABELS else None
    columns = tuple(_summary(name, cells, roles.get(name), found.get(name)) for name, cells in table.columns.items())
    declared = None if schema is None else TableDeclaration(label or "label", client, unit, schema, classes)
    return TableSummary(len(table.lines), columns, declared)


def client_count(table: RawTable, summary: TableSummary) -> int:
    """Return how many clients a table names; 1 if it names none."""
    name = next((column.name for column in summary.columns if column.role == "client"), None)
    return 1 if name is None else len({as_text(cell) for cell in listed(table.columns[name])})


def _named(table: RawTable, words: str, taken: set[str | None]) -> str | None:
    """Return the first column that is called by one of some words, alone or as an identifier."""
    for word in words.split():
        for name in table.columns:
            if name not in taken and re.fullmatch(rf"(?i){word}s?([_ .-]?(id|name|number|no))?", name.strip()):
                return name
    return None


def _last(table: RawTable, taken: set[str | None]) -> str | None:
    """Return the last column, if it has few values, none of them missing."""
    name = next(reversed(list(table.columns)), None)
    if name is None or name in taken or any(map(is_missing, listed(table.columns[name]))):
        return None
    return name if 2 <= len({as_text(cell) for cell in listed(table.columns[name])}) <= _MOST_LABELS else None


def _counts_rows(column: Column, cells: Cells) -> bool:
    """Whether a column is an identifier: called so, or a different whole number in every row, in order."""
    if _IDENTIFIER.fullmatch(column.name.strip()):
        return True
    if column.range is None or column.missing != "refuse" or len(cells) < 3:
        return False
    steps = np.diff(np.array([float(cell) for cell in listed(cells)]))
    return bool((steps == 1).all())


def _summary(name: str, cells: Cells, role: str | None, column: Column | None) -> ColumnSummary:
    values = listed(cells)
    missing = sum(map(is_missing, values))
    texts = {as_text(value) for value in values if not is_missing(value)}
    kind, suggestion = "text" if texts else "empty", f"left out: {_why_left_out(values)}"
    if column is not None and column.categories is not None:
        some = ", ".join(column.categories[:_SHOWN]) + (", …" if len(column.categories) > _SHOWN else "")
        kind, suggestion = "category", f"categories {some}"
    elif column is not None and column.dates is not None:
        kind, suggestion = "date", f"dates {column.dates[0]} to {column.dates[1]}"
    elif column is not None and column.range is not None:
        kind, suggestion = "number", f"range {column.range[0]:g} to {column.range[1]:g}"
    if column is not None and column.missing != "refuse":
        suggestion += f", missing {column.missing}"
    if role is not None:
        kind, suggestion = _kind(values), f"the {role}"
    return ColumnSummary(name, role or ("feature" if column else "left out"), kind, missing, len(texts), suggestion)


def _why_left_out(values: Any) -> str:
    """Say why no schema could be drafted for a column, and what to do about it."""
    texts = _texts(values)
    if not texts:
        return "all cells are missing"
    if reason := _foreign(texts):
        return reason
    others = [text for text in texts if not _is_number(text)]
    if not others:
        return "it counts rows or names them"
    if 2 * len(others) < len(texts):
        return f"{short_text(repr(others[0]))} is no number; empty or correct it"
    return f"{len(set(texts)):,} different texts; declare their categories, or group them"


def _texts(values: Any) -> list[str]:
    return [str(value).strip() for value in listed(values) if not is_missing(value)]


def _foreign(texts: Sequence[str]) -> str | None:
    """Say why numbers or dates in another notation cannot be read; None for other texts."""
    commas = [text for text in texts if _COMMA.fullmatch(text)]
    if 2 * len(commas) > len(texts):
        return f"decimal commas; write {commas[0].replace(',', '.')} for {commas[0]}"
    if texts and all(map(_OTHER_DATE.fullmatch, texts)):
        return f"dates must read like 2024-05-31, not {short_text(texts[0])}"
    return None


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def _kind(values: Any) -> str:
    drafted, _ = draft({"": values})
    column = drafted[0] if drafted else None
    return "text" if column is None else "number" if column.range else "date" if column.dates else "category"
