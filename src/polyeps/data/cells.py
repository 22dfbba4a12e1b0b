"""Cells of a table: what counts as missing, and how they are read as texts and dates."""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Callable, Sequence
from datetime import date, datetime
from decimal import Decimal
from typing import Any

import numpy as np
from numpy.typing import NDArray

EPOCH = date(1970, 1, 1).toordinal()
_EMPTY = frozenset({"", "na", "n/a", "nan", "none", "null", "?"})
_LONGEST = 60  # characters of a cell in a message
_ISO = re.compile(r"\d{4}-\d\d-\d\d")
_NUMBER = re.compile(r"[+-]?[0-9]{1,25}(\.[0-9]{0,25})?(e[+-]?0?[0-9])?")
_ZERO_DECIMALS = re.compile(r"^([+-]?\d+)\.0+$")


def of_each(values: Sequence[Any], kind: type, of: Callable[[Any, int], Any]) -> NDArray[Any]:
    """Return a function of every cell, called once for each different cell with the first row that has it."""
    mixed = len(set(map(type, values))) > 1
    keys = [(type(value), value) for value in values] if mixed else values  # for a dict, True and 1 are the same
    first: dict[Any, int] = {}
    try:
        for row, key in enumerate(keys):
            first.setdefault(key, row)
    except TypeError:  # cells that are lists or tables
        return np.fromiter((of(value, row) for row, value in enumerate(values)), kind, len(values))
    found = {key: of(values[row], row) for key, row in first.items()}
    return np.fromiter(map(found.__getitem__, keys), kind, len(values))


def listed(values: Sequence[Any] | NDArray[Any]) -> Sequence[Any]:
    """Return cells as Python's own values, times excepted."""
    if isinstance(values, np.ndarray):
        return list(values) if values.dtype.kind == "M" else list(values.tolist())
    return values


def matching(categories: Sequence[str]) -> Callable[[Any, int], int]:
    """Return a function from a cell, and what to return without a match, to the place of the category it names.

    A category matches as it is spelled or, where none does, in capitals or not; 1.0 is 1.
    """
    places = {as_text(category): place for place, category in enumerate(categories)}
    folded = {category.casefold(): place for category, place in reversed(places.items())}  # TRUE is True

    def find(value: Any, other: int) -> int:
        text = "" if is_empty(value) else as_text(value)
        return places.get(text, folded.get(text.casefold(), other))

    return find


def is_empty(value: Any) -> bool:
    """Whether a cell holds nothing: also the missing values of pandas and numpy."""
    if value is None or type(value).__name__ in ("NAType", "NaTType"):
        return True
    if isinstance(value, float | np.floating):
        return math.isnan(value)
    if isinstance(value, np.datetime64):
        return bool(np.isnat(value))
    return isinstance(value, str) and not value.strip()


def is_missing(value: Any) -> bool:
    """Whether a cell is empty, or says that nothing is known."""
    return is_empty(value) or (isinstance(value, str) and value.strip().casefold() in _EMPTY)


def as_text(value: Any) -> str:
    """Return a cell as the text that categories are compared with: 1.0 is 1, also where it is a text.

    >>> as_text(1.0), as_text("1.0"), as_text("01"), as_text(True), as_text(2.5)
    ('1', '1', '01', 'True', '2.5')
    """
    if isinstance(value, float | np.floating) and float(value).is_integer():
        value = int(value)
    text = unicodedata.normalize("NFC", str(value))  # é is one letter, whether it was typed as one or as two
    return _ZERO_DECIMALS.sub(r"\1", text.strip())


def person_key(value: Any) -> str:
    """Return the same text for all spellings of an identifier: whoever is taken for two persons is protected less.

    Capitals, blanks, invisible letters and the way a number is written make no difference.

    >>> person_key("P 17") == person_key("p17"), person_key("007"), person_key("1e+05")
    (True, '7', '100000')
    """
    folded = unicodedata.normalize("NFKC", as_text(value)).casefold()
    text = "".join(folded.split())
    if not text.isascii():
        text = "".join(letter for letter in text if unicodedata.category(letter) != "Cf") or text
    if not _NUMBER.fullmatch(text):
        return text
    number = Decimal(text)
    return str(int(number)) if number == number.to_integral_value() else f"{number.normalize():f}"


def short_text(value: Any) -> str:
    """Return a cell as a message shows it: a long one without its end."""
    text = str(value)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"


def as_date(value: Any) -> date:
    """Return a cell as a date; of a time, its day."""
    if isinstance(value, date):
        return value
    if isinstance(value, np.datetime64):
        return date.fromordinal(int(value.astype("datetime64[D]").astype(np.int64)) + EPOCH)
    text = str(value).strip()
    if not _ISO.match(text):
        raise ValueError(f"{text!r} is not a date")
    return datetime.fromisoformat(text)
