"""Features of tables: columns by a schema, columns of plain numbers, or arrays as they stand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyeps.data.cells import is_missing, listed, of_each, short_text
from polyeps.data.dataset import LabelArray
from polyeps.data.schema import Schema, Where
from polyeps.data.schema_files import TableDeclaration
from polyeps.data.table_readers import Cells, RawTable
from polyeps.errors import DataError


def read_features(
    tables: Sequence[RawTable],
    declared: TableDeclaration,
    where: Sequence[Where],
    clients: Sequence[str],
    groups: LabelArray | None,
) -> tuple[tuple[str, ...], NDArray[np.float32], list[str]]:
    """Return the names of the features, the features, and what is to be said about them."""
    if declared.schema is not None:
        encoded = [
            declared.schema.encode(table.columns, at, table.source) for table, at in zip(tables, where, strict=True)
        ]
        features = np.concatenate(encoded)
        return declared.schema.outputs, features, _unmatched(declared.schema, features, clients, groups)
    if any(table.features is not None for table in tables):
        return (), np.concatenate(_arrays(tables, where)), []
    roles = {declared.label, declared.client, declared.unit}
    first, names = tables[0], [name for name in tables[0].columns if name not in roles]
    if not names:
        raise DataError(f"{first.source} has no feature column beside {', '.join(first.columns)}: add one")
    for table in tables[1:]:
        if odd := sorted((set(table.columns) ^ set(first.columns)) - roles):
            raise DataError(
                f"{table.source} and {first.source} differ in columns ({', '.join(odd)}): make them alike, or declare "
                "the columns to use as data.columns"
            )
    blocks = [
        np.stack([plain_numbers(table.columns[name], name, at) for name in names], axis=1)
        for table, at in zip(tables, where, strict=True)
    ]
    remark = (
        f"{first.source} is used as it stands, {', '.join(names[:5])}{', …' if len(names) > 5 else ''} unscaled, since "
        "data.columns declares no ranges; draft a schema with `polyeps data describe FILE --write schema.toml`"
    )
    return tuple(names), np.concatenate(blocks), [remark]


def _unmatched(
    schema: Schema, encoded: NDArray[np.float32], names: Sequence[str], groups: LabelArray | None
) -> list[str]:
    """Return a remark for each column of which no cell, of all clients or of one, has a declared category."""
    remarks, at = [], 0
    owner = np.zeros(len(encoded), np.int64) if groups is None else groups
    for column in schema.columns:
        at += len(column.outputs)
        if column.categories is None:
            continue
        without = np.flatnonzero(np.bincount(owner, 1 - encoded[:, at - 1], minlength=len(names)) == 0).tolist()
        if not without:
            continue
        some = len(without) < len(names)
        whose = f" of client {names[without[0]]!r}" if some else ""
        more = f" (and so for {len(without) - 1} more)" if some and len(without) > 1 else ""
        remarks.append(
            f"no cell of {column.name}{whose} is one of {', '.join(column.categories)}{more}; compare "
            f"{column.place}.categories with the table"
        )
    return remarks


def _arrays(tables: Sequence[RawTable], where: Sequence[Where]) -> list[NDArray[np.float32]]:
    first = tables[0]
    blocks = []
    for table, at in zip(tables, where, strict=True):
        if table.features is None or first.features is None:
            raise DataError(f"{table.source} and {first.source}: one has columns, the other an array; make them alike")
        if table.features.shape[1:] != first.features.shape[1:]:
            raise DataError(
                f"{table.source} has records of shape {table.features.shape[1:]} and {first.source} of "
                f"{first.features.shape[1:]}: make them alike"
            )
        blocks.append(_as_float32(table.features))
        bad = np.argwhere(~np.isfinite(blocks[-1]))
        if len(bad):
            place = tuple(int(i) for i in bad[0])
            value = table.features[place]
            raise DataError(
                f"{at(place[0])}, column {place[1:]}: {value} is not a finite number: fill it in or remove it"
            )
    return blocks


def plain_numbers(cells: Cells, name: str, where: Where) -> NDArray[np.float32]:
    """Return a column without a schema as numbers."""
    drafted = "declare data.columns, which `polyeps data describe FILE --write schema.toml` drafts"

    def number(value: Any, row: int) -> float:
        if is_missing(value):
            raise DataError(f"{where(row)}, column {name!r}: the cell is empty: fill it in, or {drafted}")
        try:
            return float(value)
        except (TypeError, ValueError, OverflowError):
            raise DataError(
                f"{where(row)}, column {name!r}: {short_text(repr(value))} is not a number: {drafted}"
            ) from None

    plain = isinstance(cells, np.ndarray) and cells.dtype.kind in "iub"
    numbers = _as_float32(np.asarray(cells) if plain else of_each(listed(cells), np.float64, number))
    if not np.isfinite(numbers).all():
        row = int((~np.isfinite(numbers)).argmax())
        raise DataError(
            f"{where(row)}, column {name!r}: {short_text(cells[row])} is not a finite number: correct or remove it"
        )
    return numbers


def _as_float32(values: NDArray[Any]) -> NDArray[np.float32]:
    with np.errstate(over="ignore"):  # a value too large becomes infinite, which is refused by its place
        return values.astype(np.float32)
