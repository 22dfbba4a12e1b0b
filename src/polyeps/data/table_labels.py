"""Labels of tables: the classes they name, declared or read off the records, and other targets."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyeps.data.cells import as_text, is_empty, is_missing, listed, matching, of_each
from polyeps.data.dataset import LabelArray
from polyeps.data.schema import Where
from polyeps.data.schema_files import TableDeclaration
from polyeps.data.table_features import plain_numbers
from polyeps.data.table_readers import Cells, RawTable, role
from polyeps.data.targets import NAMES, stored
from polyeps.errors import DataError

_MOST_CLASSES = 100  # more labels must be declared: they may be a number to predict, not classes
_WHOLE = re.compile(r"[+-]?\d+")
_SAME = [{"1", "true", "t", "yes", "y", "ja", "oui"}, {"0", "false", "f", "no", "n", "nein", "non"}]  # yes, and no


def number_labels(
    tables: Sequence[RawTable], declared: TableDeclaration, where: Sequence[Where]
) -> tuple[tuple[str, ...], LabelArray]:
    """Return the classes and the number of every record's class."""
    labelled = _label_cells(tables, declared, where)
    for table, (cells, _, column) in zip(tables, labelled, strict=True):
        if isinstance(cells, np.ndarray) and cells.ndim > 1:
            raise DataError(
                f"{table.source}: {column} has shape {cells.shape}, but a class is one value a record; flatten it, or "
                'choose another data.target (in Python target=): "labels", "soft", "number" or "sequence"'
            )
    if declared.classes is not None:
        find = matching(declared.classes)
        pieces = [
            of_each(listed(cells), np.int64, _declared_class(find, declared.classes, at, column))
            for cells, at, column in labelled
        ]
        return declared.classes, np.concatenate(pieces)
    spellings: dict[str, int] = {}
    pieces = []
    for cells, at, column in labelled:

        def number(value: Any, row: int, at: Where = at, column: str = column) -> int:
            if is_missing(value):
                other = "" if is_empty(value) else ", or declare it in data.classes"
                shown = "empty" if is_empty(value) else repr(value)
                raise DataError(f"{at(row)}, column {column!r}: the label is {shown}: fill it in{other}")
            return spellings.setdefault(as_text(value), len(spellings))

        pieces.append(of_each(listed(cells), np.int64, number))
    classes = _sorted_classes(list(spellings), f"{tables[0].source}, column {labelled[0][2]!r}")
    find = matching(classes)
    return classes, np.array([find(text, -1) for text in spellings], dtype=np.int64)[np.concatenate(pieces)]


def read_targets(
    tables: Sequence[RawTable], declared: TableDeclaration, where: Sequence[Where]
) -> tuple[tuple[str, ...], NDArray[Any]]:
    """Return the names of what is predicted, and targets that are no classes."""
    pieces = []
    for table, (cells, at, column) in zip(tables, _label_cells(tables, declared, where), strict=True):
        if declared.target == "number" and np.ndim(cells) == 1:
            scale = declared.scale
            pieces.append(plain_numbers(cells, column, at) if scale is None else scale.encode(cells, at)[:, 0])
        elif table.features is None:
            raise DataError(
                f"{table.source}: {NAMES[declared.target]} cannot be read from one column of a table; give arrays, "
                "with `from_arrays` in Python or as an .npz file"
            )
        else:
            pieces.append(stored(cells, declared.target))
    if len({piece.shape[1:] for piece in pieces}) > 1:
        raise DataError(f"{tables[0].source} and others have targets of different shapes; make them alike")
    found = np.concatenate(pieces)
    if declared.classes is not None:
        return declared.classes, found
    if declared.target == "number" and found.ndim == 1:
        return (declared.label,), found
    if declared.target == "sequence":
        raise DataError(
            f"{tables[0].source}: the classes of positions are not read off the records; declare them as data.classes, "
            "in Python classes=range(...)"
        )
    return tuple(f"{declared.label} {place}" for place in range(found.shape[1] if found.ndim > 1 else 1)), found


def _label_cells(
    tables: Sequence[RawTable], declared: TableDeclaration, where: Sequence[Where]
) -> list[tuple[Cells, Where, str]]:
    columns = [role(table, declared.label, "labels") for table in tables]
    return [(table.columns[name], at, name) for table, at, name in zip(tables, where, columns, strict=True)]


def _declared_class(
    find: Callable[[Any, int], int], classes: tuple[str, ...], where: Where, column: str
) -> Callable[[Any, int], int]:
    def number(value: Any, row: int) -> int:
        if (found := find(value, -1)) >= 0:
            return found
        if is_missing(value):
            raise DataError(f"{where(row)}, column {column!r}: the label is empty: fill it in")
        raise DataError(
            f"{where(row)}, column {column!r}: the label {as_text(value)!r} is none of data.classes "
            f"({', '.join(classes)}); correct it or declare it"
        )

    return number


def _sorted_classes(texts: Sequence[str], where: str) -> tuple[str, ...]:
    """Return the classes that labels name: numbers by size, words in alphabetical order; Yes and yes are one."""
    if fraction := next((text for text in texts if _is_fraction(text)), None):
        raise DataError(
            f"{where}: the label {fraction} is not a whole number; labels are classes, so group the values, or predict "
            'numbers with model.loss = "squared" (from_arrays: target="number")'
        )
    if hidden := next((text for text in texts if not text.isprintable()), None):
        raise DataError(f"{where}: the label {hidden!a} holds letters that cannot be shown; correct it")
    if len(texts) > _MOST_CLASSES:
        raise DataError(f"{where} has {len(texts)} different labels; if they are classes, declare them as data.classes")
    whole = all(_WHOLE.fullmatch(text) for text in texts)
    ordered = sorted(texts, key=lambda text: (int(text) if whole else 0, text))
    first = {text.casefold(): text for text in reversed(ordered)}
    classes = tuple(text for text in ordered if first[text.casefold()] == text)
    if len(classes) < 2:
        raise DataError(f"{where} has one label only, {classes[0]!r}; name another column, or declare data.classes")
    return classes


def _is_fraction(text: str) -> bool:
    try:
        return not float(text).is_integer()
    except (ValueError, OverflowError):
        return False


def labels_alike(classes: Sequence[str]) -> str | None:
    """Return a remark on classes that are probably one, spelled in several ways.

    >>> labels_alike(["0", "1", "no", "yes"])
    'the labels 1 and yes are two classes; if they mean the same, write them in one way'
    >>> labels_alike(["no", "yes"])
    """
    for words in _SAME:
        found = [text for text in classes if text.casefold() in words]
        if len(found) > 1:
            many = {2: "two"}.get(len(found), str(len(found)))
            listed = f"{', '.join(found[:-1])} and {found[-1]}"
            return f"the labels {listed} are {many} classes; if they mean the same, write them in one way"
    return None
