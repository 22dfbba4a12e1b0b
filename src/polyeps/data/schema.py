"""Schemas: how the columns of a table become numbers, agreed before anybody's records are read.

Ranges and categories are declared, never computed from the records of all clients: whatever is computed from them would
be a release that nobody paid for. One client may draft a schema from its own file (`draft`), for all to agree to.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from polyeps.errors import DataError, InputError

Missing = Literal["refuse", "mean-of-range"] | float
Where = Callable[[int], str]  # the place of a record, for messages
_EMPTY = frozenset({"", "na", "n/a", "nan", "none", "null", "?"})
_MOST_CATEGORIES = 20  # a drafted column with more different texts is left out


@dataclass(frozen=True)
class Column:
    """One column: numbers within a range, dates within a range, or one of some categories.

    Numbers are clamped to the range and scaled to -1 to 1. A category becomes one number for each category and one for
    all others, missing ones among them. Where missing numbers are allowed, a further number says that one was missing.

    >>> Column("age", range=(0, 100), missing="mean-of-range").encode([25, None, 300], str).tolist()
    [[-0.5, 0.0], [0.0, 1.0], [1.0, 0.0]]
    >>> Column("sex", categories=("m", "f")).encode(["f", "x"], str).tolist()
    [[0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]
    """

    name: str
    range: tuple[float, float] | None = None
    dates: tuple[date, date] | None = None
    categories: tuple[str, ...] | None = None
    missing: Missing = "refuse"

    def __post_init__(self) -> None:
        given = [name for name in ("range", "dates", "categories") if getattr(self, name) is not None]
        place = f"data.columns.{self.name}"
        if len(given) != 1:
            raise InputError(f"{place} must have exactly one of range, dates and categories, not {len(given)}")
        low, high = self._bounds
        if not (math.isfinite(low) and math.isfinite(high) and low < high):
            raise InputError(
                f"{place}.{given[0]} goes from {low:g} to {high:g}; give two numbers, the smaller one first"
            )
        if self.categories is not None:
            if not self.categories or len(set(self.categories)) < len(self.categories):
                raise InputError(f"{place}.categories must be different texts, at least one")
            if self.missing != "refuse":
                raise InputError(f"{place}.missing: a missing category counts as another one; leave missing out")
        elif not isinstance(self.missing, str) and not low <= self.missing <= high:
            raise InputError(f"{place}.missing is {self.missing:g}, outside of {low:g} to {high:g}")

    @property
    def _bounds(self) -> tuple[float, float]:
        if self.dates is not None:
            first, last = self.dates
            return float(first.toordinal()), float(last.toordinal())
        return self.range if self.range is not None else (0.0, 1.0)

    @property
    def outputs(self) -> tuple[str, ...]:
        """The names of the numbers it becomes."""
        if self.categories is not None:
            return (*(f"{self.name}={category}" for category in self.categories), f"{self.name}=(other)")
        return (self.name,) if self.missing == "refuse" else (self.name, f"{self.name} missing")

    def encode(self, values: Sequence[Any] | NDArray[Any], where: Where) -> NDArray[np.float32]:
        """Return the numbers of some records, (n, len(outputs))."""
        if self.categories is not None:
            return self._one_hot(values)
        low, high = self._bounds
        numbers = np.array([self._number(value, row, where) for row, value in enumerate(values)], dtype=np.float64)
        gone = np.isnan(numbers)
        filled = (low + high) / 2 if isinstance(self.missing, str) else self.missing
        scaled = 2 * (np.clip(np.where(gone, filled, numbers), low, high) - low) / (high - low) - 1
        columns = [scaled] if self.missing == "refuse" else [scaled, gone]
        return np.stack(columns, axis=1).astype(np.float32)

    def _number(self, value: Any, row: int, where: Where) -> float:
        if is_missing(value):
            if self.missing == "refuse":
                raise DataError(
                    f'{where(row)}: {self.name} is missing; declare data.columns.{self.name}.missing = "mean-of-range"'
                    " or a number, or fill it in"
                )
            return math.nan
        try:
            found = float(as_date(value).toordinal()) if self.dates is not None else float(value)
        except (TypeError, ValueError):
            wanted = "a date like 2024-05-31" if self.dates is not None else "a number"
            raise DataError(
                f"{where(row)}: {self.name} is {value!r}, not {wanted}; correct it, or declare categories for it"
            ) from None
        if math.isnan(found) or math.isinf(found):
            raise DataError(f"{where(row)}: {self.name} is {value!r}, no finite number; correct it, or leave it empty")
        return found

    def _one_hot(self, values: Sequence[Any] | NDArray[Any]) -> NDArray[np.float32]:
        assert self.categories is not None
        places = {category: place for place, category in enumerate(self.categories)}
        folded = {category.casefold(): place for category, place in reversed(places.items())}  # TRUE is True
        encoded = np.zeros((len(values), len(self.categories) + 1), np.float32)
        for row, value in enumerate(values):
            text = "" if is_missing(value) else as_text(value)
            encoded[row, places.get(text, folded.get(text.casefold(), len(self.categories)))] = 1
        return encoded


@dataclass(frozen=True)
class Schema:
    """The columns a model is trained on, in the order in which they were declared."""

    columns: tuple[Column, ...]

    @property
    def outputs(self) -> tuple[str, ...]:
        """The names of all numbers of a record."""
        return tuple(name for column in self.columns for name in column.outputs)

    def encode(self, table: Mapping[str, Sequence[Any]], where: Where, file: str) -> NDArray[np.float32]:
        """Return the records of a table as numbers, (n, len(outputs)); columns that are not declared are left out."""
        for column in self.columns:
            if column.name not in table:
                known = ", ".join(table) or "none"
                raise DataError(f"{file} has no column {column.name!r}, which data.columns declares; it has {known}")
        return np.concatenate([column.encode(table[column.name], where) for column in self.columns], axis=1)


def draft(table: Mapping[str, Sequence[Any]], leave_out: Iterable[str] = ()) -> tuple[list[Column], list[str]]:
    """Return a schema drafted from one client's table, and the columns for which none could be drafted.

    Ranges are those of the table, widened to round numbers: a starting point for what all clients agree to.
    """
    columns, skipped = [], []
    for name, values in table.items():
        if name in set(leave_out):
            continue
        found = _drafted(name, values)
        if found is None:
            skipped.append(name)
        else:
            columns.append(found)
    return columns, skipped


def _drafted(name: str, values: Sequence[Any]) -> Column | None:
    present = [value for value in values if not is_missing(value)]
    if not present:
        return None
    missing: Missing = "mean-of-range" if len(present) < len(values) else "refuse"
    if not any(isinstance(value, bool) for value in present):
        try:
            numbers = [float(value) for value in present]
        except (TypeError, ValueError):
            pass
        else:
            low, high = _widened(min(numbers), max(numbers))
            return Column(name, range=(low, high), missing=missing)
        try:
            days = [as_date(value) for value in present]
        except (TypeError, ValueError):
            pass
        else:
            return Column(name, dates=(date(min(days).year, 1, 1), date(max(days).year, 12, 31)), missing=missing)
    texts = sorted({as_text(value) for value in present})
    return Column(name, categories=tuple(texts)) if len(texts) <= _MOST_CATEGORIES else None


def _widened(low: float, high: float) -> tuple[float, float]:
    step = 10.0 ** math.floor(math.log10(high - low)) if high > low else 1.0
    return math.floor(low / step) * step, (math.floor(high / step) + 1) * step


def toml_of(columns: Iterable[Column]) -> str:
    """Return columns as the table [data.columns] of an experiment's file."""
    lines = ["[data.columns]"]
    for column in columns:
        if column.categories is not None:
            shown = f"categories = [{', '.join(_quoted(text) for text in column.categories)}]"
        elif column.dates is not None:
            shown = f'dates = ["{column.dates[0]}", "{column.dates[1]}"]'
        else:
            assert column.range is not None
            shown = f"range = [{column.range[0]:g}, {column.range[1]:g}]"
        if column.missing != "refuse":
            shown += f", missing = {_quoted(column.missing) if isinstance(column.missing, str) else column.missing}"
        lines.append(f"{_quoted(column.name)} = {{ {shown} }}")
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def is_missing(value: Any) -> bool:
    """Whether a cell is empty, or says that nothing is known."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return True
    return isinstance(value, str) and value.strip().casefold() in _EMPTY


def as_text(value: Any) -> str:
    """Return a cell as the text that categories are compared with: 1.0 is 1."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return str(value).strip()


def as_date(value: Any) -> date:
    """Return a cell as a date."""
    if isinstance(value, date):
        return value
    return date.fromisoformat(str(value).strip()[:10])
