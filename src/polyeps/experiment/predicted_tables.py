"""Tables that a saved model is to predict: columns by name, as plain values, checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyeps.data.schema import Where
from polyeps.errors import DataError, InputError


def columns_of(records: Any) -> dict[str, Sequence[Any]]:
    """Return the columns of a mapping or a data frame by name."""
    try:
        names = list(records) if isinstance(records, Mapping) else list(records.columns)
        found: dict[str, Sequence[Any]] = {str(name): [_plain(cell) for cell in records[name]] for name in names}
    except (AttributeError, TypeError, KeyError):
        kind = type(records).__name__
        raise InputError(f"a {kind} is no table; give columns by name, a data frame, an array or a tensor") from None
    if len({len(cells) for cells in found.values()}) > 1:
        raise DataError("the table's columns have different lengths; make them equal")
    return found


def _plain(cell: Any) -> Any:
    """Return a cell as a value of Python's own."""
    return cell.item() if isinstance(cell, np.number | np.bool_) else cell


def check_columns(wanted: Sequence[str], table: Mapping[str, Sequence[Any]], name: str) -> None:
    """Refuse a table without a column that the model was trained on."""
    if missing := [column for column in wanted if column not in table]:
        shown = ", ".join(list(table)[:8]) + (", …" if len(table) > 8 else "")
        raise DataError(
            f"{name} has no column {missing[0]!r}, which the model was trained on; it has {shown or 'none'}: add it, or"
            " rename a column"
        )


def numbers_in(column: str, cells: Sequence[Any], where: Where) -> NDArray[np.float64]:
    """Return the cells of a column as numbers, or name the first that is none."""
    try:
        return np.array(cells, dtype=np.float64)
    except (TypeError, ValueError):
        for row, cell in enumerate(cells):
            try:
                float(cell)
            except (TypeError, ValueError):
                raise DataError(f"{where(row)}: {column} is {cell!r}, not a number; correct it") from None
        raise
