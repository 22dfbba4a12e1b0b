"""Schemas: how the columns of a table become numbers, agreed before anybody's records are read.

Ranges and categories are declared, never computed from the records of all clients: whatever is computed from them would
be a release that nobody paid for. One client may draft a schema from its own file (`draft`), for all to agree to.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from polyeps.data.cells import EPOCH, as_date, as_text, is_missing, listed, matching, of_each, short_text
from polyeps.errors import DataError, InputError

Missing = Literal["refuse", "mean-of-range"] | float
Where = Callable[[int], str]  # the place of a record, for messages
_DECIMAL_COMMA = re.compile(r"[+-]?\d+,\d+")
_THOUSANDS = re.compile(r"[+-]?[1-9]\d{0,2},\d{3}")
_BARE = re.compile(r"[A-Za-z0-9_-]+")
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
        place = self.place
        if len(given) != 1:
            said = f"has {' and '.join(given)}" if given else "says nothing about its values"
            raise InputError(f"{place} {said}; give it exactly one of range, dates and categories")
        low, high = self._bounds
        if not (math.isfinite(high - low) and low < high):
            first, last = self.dates or (f"{low:g}", f"{high:g}")
            raise InputError(f"{place}.{given[0]} goes from {first} to {last}; give two values, the smaller one first")
        if self.categories is not None:
            named = [as_text(text) for text in self.categories]
            if not named or len(set(named)) < len(named) or "" in named:
                raise InputError(f"{place}.categories must be different texts, at least one and none empty")
            if self.missing != "refuse":
                raise InputError(f"{place}.missing: a missing category counts as another one; leave missing out")
        elif not isinstance(self.missing, str) and not low <= self.missing <= high:
            raise InputError(f"{place}.missing is {self.missing:g}, outside of {low:g} to {high:g}; choose one within")

    @property
    def place(self) -> str:
        """Its key in an experiment's file."""
        return f"data.columns.{toml_key(self.name)}"

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
            return self._one_hot(values, self.categories)
        low, high = self._bounds
        numbers = self._numbers(values, where)
        gone = np.isnan(numbers)
        if self.missing == "refuse" and gone.any():
            raise DataError(
                f"{where(int(gone.argmax()))}: {self.name} is missing; declare {self.place}.missing = "
                '"mean-of-range" or a number, or fill it in'
            )
        if np.isinf(numbers).any():
            row = int(np.isinf(numbers).argmax())
            raise DataError(
                f"{where(row)}: {self.name} is {short_text(values[row])}, no finite number; correct it or empty it"
            )
        filled = (low + high) / 2 if isinstance(self.missing, str) else self.missing
        scaled = 2 * ((np.clip(np.where(gone, filled, numbers), low, high) - low) / (high - low)) - 1
        columns = [scaled] if self.missing == "refuse" else [scaled, gone]
        return np.stack(columns, axis=1).astype(np.float32)

    def _numbers(self, values: Sequence[Any] | NDArray[Any], where: Where) -> NDArray[np.float64]:
        """Return cells as numbers, dates as days; NaN for missing ones."""
        if isinstance(values, np.ndarray) and values.dtype.kind == "M" and self.dates is not None:
            days = values.astype("datetime64[D]")
            return np.where(np.isnat(days), math.nan, days.astype(np.int64) + EPOCH)
        if isinstance(values, np.ndarray) and values.dtype.kind in "fiub" and self.dates is None:
            return values.astype(np.float64)
        cells = listed(values)
        if self.dates is None and set(map(type, cells)) == {str} and "_" not in "".join(cells):
            try:  # the usual case, at the speed of numpy; cells such as n/a go the other way
                return np.array([text or "nan" for text in cells], dtype=np.float64)
            except ValueError:
                pass
        return of_each(cells, np.float64, lambda value, row: self._number(value, row, where))

    def _number(self, value: Any, row: int, where: Where) -> float:
        if is_missing(value):
            return math.nan
        try:
            if self.dates is not None:
                return float(as_date(value).toordinal())
            if isinstance(value, str) and "_" in value:
                raise ValueError
            return float(value)
        except (TypeError, ValueError, OverflowError):
            wanted, remedy = "a number", "correct it, or declare categories for it"
            if self.dates is not None:
                wanted, remedy = "a date like 2024-05-31", "correct it"
            elif isinstance(value, str) and _DECIMAL_COMMA.fullmatch(value.strip()):
                remedy = f"write decimals with a point, {value.strip().replace(',', '.')}"
                if _THOUSANDS.fullmatch(value.strip()):
                    remedy += f", or, if the comma separates thousands, {value.strip().replace(',', '')}"
            raise DataError(f"{where(row)}: {self.name} is {short_text(repr(value))}, not {wanted}; {remedy}") from None

    def _one_hot(self, values: Sequence[Any] | NDArray[Any], categories: tuple[str, ...]) -> NDArray[np.float32]:
        other, find = len(categories), matching(categories)
        if isinstance(values, np.ndarray) and values.dtype.kind in "fiub":
            distinct, rows = np.unique(values, return_inverse=True)
            found = np.array([find(value, other) for value in distinct.tolist()], dtype=np.int64)
            places = found[rows.ravel()] if len(distinct) else np.zeros(0, np.int64)
        else:
            places = of_each(listed(values), np.int64, lambda value, _: find(value, other))
        encoded = np.zeros((len(values), other + 1), np.float32)
        encoded[np.arange(len(values)), places] = 1
        return encoded


@dataclass(frozen=True)
class Schema:
    """The columns a model is trained on, in the order in which they were declared."""

    columns: tuple[Column, ...]

    def __post_init__(self) -> None:
        if not self.columns:
            raise InputError("data.columns declares no column; declare at least one, or leave it out")

    @property
    def outputs(self) -> tuple[str, ...]:
        """The names of all numbers of a record."""
        return tuple(name for column in self.columns for name in column.outputs)

    def encode(self, table: Mapping[str, Sequence[Any] | NDArray[Any]], where: Where, file: str) -> NDArray[np.float32]:
        """Return the records of a table as numbers, (n, len(outputs)); columns that are not declared are left out."""
        for column in self.columns:
            if column.name not in table:
                raise DataError(no_column(file, column.name, "data.columns declares", table))
        return np.concatenate([column.encode(table[column.name], where) for column in self.columns], axis=1)


def draft(
    table: Mapping[str, Sequence[Any] | NDArray[Any]], leave_out: Iterable[str] = ()
) -> tuple[list[Column], list[str]]:
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


def _drafted(name: str, values: Sequence[Any] | NDArray[Any]) -> Column | None:
    present = [value for value in listed(values) if not is_missing(value)]
    if not present:
        return None
    missing: Missing = "mean-of-range" if len(present) < len(values) else "refuse"
    if not any(isinstance(value, bool) for value in present):
        try:
            numbers = [float(value) for value in present]
        except (TypeError, ValueError):
            pass
        else:
            if not all(map(math.isfinite, numbers)):
                return None
            return Column(name, range=_widened(min(numbers), max(numbers)), missing=missing)
        try:
            days = [as_date(value) for value in present]
        except (TypeError, ValueError):
            pass
        else:
            return Column(name, dates=(date(min(days).year, 1, 1), date(max(days).year, 12, 31)), missing=missing)
    spelled = {text.casefold(): text for text in sorted({as_text(value) for value in present}, reverse=True)}
    texts = sorted(spelled.values())  # M and m are one: cells match in capitals or not
    return Column(name, categories=tuple(texts)) if len(texts) <= _MOST_CATEGORIES else None


def _widened(low: float, high: float) -> tuple[float, float]:
    step = 10.0 ** math.floor(math.log10(high - low)) if high > low else 1.0
    low, up = math.floor(low / step) * step, math.ceil(high / step) * step
    return float(f"{low:.12g}"), float(f"{up if up > low else low + step:.12g}")


def toml_of(columns: Iterable[Column], heading: str = "data.columns") -> str:
    """Return columns as the table [data.columns] of an experiment's file, or as another one."""
    lines = [f"[{heading}]"]
    for column in columns:
        if column.categories is not None:
            shown = f"categories = [{', '.join(toml_text(text) for text in column.categories)}]"
        elif column.dates is not None:
            shown = f'dates = ["{column.dates[0]}", "{column.dates[1]}"]'
        else:
            assert column.range is not None
            shown = f"range = [{_figure(column.range[0])}, {_figure(column.range[1])}]"
        if column.missing != "refuse":
            shown += f", missing = {toml_text(column.missing) if isinstance(column.missing, str) else column.missing}"
        lines.append(f"{toml_key(column.name)} = {{ {shown} }}")
    return "\n".join(lines) + "\n"


def _figure(value: float) -> str:
    return str(int(value)) if float(value).is_integer() and abs(value) < 1e15 else repr(float(value))


def toml_text(text: str) -> str:
    """Return a text as TOML writes it."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def toml_key(name: str) -> str:
    """Return a name as a key of TOML: in quotes, unless it needs none.

    >>> toml_key("age"), toml_key("blood pressure")
    ('age', '"blood pressure"')
    """
    return name if _BARE.fullmatch(name) else toml_text(name)


def no_column(file: str, name: str, why: str, known: Iterable[str]) -> str:
    """Return the sentence for a column that is not there, with the nearest one that is."""
    names = list(known)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    shown = ", ".join(names[:8]) + (", …" if len(names) > 8 else "") or "none"
    hint = f"; did you mean {near[0]!r}?" if near else "; name one of them"
    if name == "client" and why == "data.client names":  # the default: 'patient' is near, and would be wrong
        hint = '; write data.client = "COLUMN", the one that names the client of each record'
    if len(names) == 1:
        hint = "; separate its columns by commas, semicolons or tabs"
    return f"{file} has no column {name!r}, which {why} (it has {shown}){hint}"
