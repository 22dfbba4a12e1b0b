"""Data sets from tables of your own: frames, dictionaries of columns, arrays, torch data sets, and files once read."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyeps.core import check_name
from polyeps.data.cells import as_text, is_empty, is_missing, listed, of_each, person_key
from polyeps.data.dataset import Dataset, LabelArray, without_test
from polyeps.data.named_inputs import by_name, inputs_of
from polyeps.data.schema import Schema, Where, no_column, toml_key
from polyeps.data.schema_files import TableDeclaration, schema_of
from polyeps.data.table_features import read_features
from polyeps.data.table_labels import labels_alike, number_labels, read_targets
from polyeps.data.table_readers import Cells, RawTable, array_table, check_names, role
from polyeps.data.targets import Target, stored
from polyeps.errors import DataError, InputError

_LONGEST_WORD = 30  # letters that certificates call a person by


def from_frame(
    frame: Any,
    *,
    label: str = "label",
    client: str | None = "client",
    unit: str | None = None,
    schema: Schema | Mapping[str, Any] | None = None,
    classes: Sequence[Any] | None = None,
    target: Target = "class",
    name: str = "table",
) -> Dataset:
    """Return a data set of a pandas or polars frame, an Arrow table, or a dictionary of columns.

    Rows are counted from 0 in messages. Without a `client` column, an experiment divides the records among clients.
    With the target "number" the label is a number to predict, scaled by its range if the schema declares one.
    """
    if schema is not None and not isinstance(schema, Schema):
        schema = schema_of(schema)
    declared = TableDeclaration(label, client, unit, schema, _texts(classes), target)
    return assemble(name, [frame_table(frame, name)], declared)


def from_arrays(
    features: Any,
    labels: Any,
    clients: Any = None,
    persons: Any = None,
    *,
    person: str = "person",
    classes: Sequence[Any] | None = None,
    target: Target = "class",
    name: str = "arrays",
) -> Dataset:
    """Return a data set of features (R, ...) of any shape, labels (R,) and, if known, clients (R,) and persons (R,).

    A model of several inputs takes features in a dictionary by the names of its arguments, or in a tuple by their
    places; whole numbers stay whole. Other targets than classes have other labels: `target` "number" floats (R,) or
    (R, k), "labels" 0 or 1 (R, classes), "soft" probabilities (R, classes), "sequence" classes (R, positions).
    """
    inputs = inputs_of(features) if isinstance(features, Mapping | tuple) else None
    block = features if inputs is None else inputs.pack(by_name(features), name)
    kept = labels if target == "class" else stored(labels, target)
    given = {"features": block, "labels": kept, "clients": clients, person: persons}
    columns = {key: np.asarray(column) for key, column in given.items() if column is not None}
    unit = None if persons is None else person
    declared = TableDeclaration("labels", None if clients is None else "clients", unit, None, _texts(classes), target)
    found = assemble(name, [array_table(name, columns, first=0)], declared)
    if inputs is None:
        return found
    return replace(found, features=block, test_features=block[:0], inputs=inputs)


def from_torch(
    dataset: Any,
    clients: Any = None,
    persons: Any = None,
    *,
    classes: Sequence[Any] | None = None,
    target: Target = "class",
    name: str = "torch",
) -> Dataset:
    """Return a data set of a torch `Dataset` with a length, whose items are (features, label).

    Features may be a dictionary or a tuple of several inputs. An item may also be a dictionary with a key "labels".
    """
    features, labels = [], []
    for place in range(len(dataset)):
        item = dataset[place]
        if isinstance(item, Mapping) and "labels" in item:
            item = {key: value for key, value in item.items() if key != "labels"}, item["labels"]
        try:
            record, label = item
        except (TypeError, ValueError):
            raise DataError(
                f"item {place} of the torch data set is not a pair (features, label); make it one"
            ) from None
        features.append(record)
        labels.append(label.item() if target == "class" and hasattr(label, "item") else np.asarray(label))
    if features and isinstance(features[0], Mapping | tuple):
        records = [by_name(record) for record in features]
        stacked = {key: _stacked([record[key] for record in records]) for key in records[0]}
        given: Any = tuple(stacked.values()) if isinstance(features[0], tuple) else stacked
    else:
        whole = _stacked(features)
        given = whole.reshape(len(features), *whole.shape[1:] or (1,))
    kept = labels if target == "class" else _stacked(labels)
    return from_arrays(given, kept, clients, persons, classes=classes, target=target, name=name)


def _stacked(items: Sequence[Any]) -> NDArray[Any]:
    """Return the arrays of all items of a torch data set as one."""
    arrays = [np.asarray(item) for item in items]
    if shapes := {array.shape for array in arrays} - ({arrays[0].shape} if arrays else set()):
        raise DataError(
            f"records of the torch data set have shapes {arrays[0].shape} and {shapes.pop()}; make them one"
        )
    return np.stack(arrays) if arrays else np.zeros((0, 1))


def _texts(classes: Sequence[Any] | None) -> tuple[str, ...] | None:
    return None if classes is None else tuple(as_text(one) for one in classes)


def frame_table(frame: Any, name: str = "table") -> RawTable:
    """Return the columns of a pandas or polars frame, an Arrow table, or a dictionary of columns."""
    if isinstance(frame, Mapping):
        return array_table(name, {str(key): _cells(column) for key, column in frame.items()}, first=0)
    names = getattr(frame, "column_names", None) or getattr(frame, "columns", None)
    if names is None or not hasattr(frame, "__getitem__"):
        raise InputError(f"data is a {type(frame).__name__}; give a Dataset, a frame or a dictionary of columns")
    keys = list(names)
    check_names(name, [str(key) for key in keys])
    return RawTable(name, {str(key): _cells(frame[key]) for key in keys}, np.arange(len(frame)))


def _cells(column: Any) -> Cells:
    if isinstance(column, np.ndarray | list | tuple):
        return column
    return np.asarray(column.to_numpy() if hasattr(column, "to_numpy") else column)


def assemble(
    name: str, tables: Sequence[RawTable], declared: TableDeclaration, clients: Sequence[str] | None = None
) -> Dataset:
    """Return the data set of one table whose rows name their clients, or of one table for each of some clients."""
    for place, table in enumerate(tables):
        _check_columns(table, declared, clients is None)
        if not len(table.lines):
            whose = f"client {clients[place]} has no records, as " if clients else ""
            raise DataError(f"{whose}{table.source} has no rows: remove it or add records")
    names, groups = _clients(tables, declared, clients)
    check_name(f"{name}: the name of a client", *names)
    owners = None if clients is not None else groups
    where = [_where(table, names, owners) for table in tables]
    columns, features, remarks = read_features(tables, declared, where, names, groups)
    if declared.target == "class":
        classes, labels = number_labels(tables, declared, where)
    else:
        classes, labels = read_targets(tables, declared, where)
    if declared.target == "number" and declared.scale is None:
        remarks.append(
            f"{', '.join(classes[:5])} is predicted as it stands, unscaled; declare its range as "
            f"data.columns.{toml_key(classes[0])} = {{ range = [low, high] }}"
        )
    elif declared.classes is None and declared.target == "class":
        shown = ", ".join(classes[:5]) + (", …" if len(classes) > 5 else "")
        remarks.append(f"the labels of {name} ({shown}) were read off the records; declare them as data.classes")
    if alike := labels_alike(classes):
        remarks.append(alike)
    folded = {text.casefold(): text for text in names}
    if twin := next((text for text in names if folded[text.casefold()] != text), None):
        remarks.append(
            f"clients {twin!r} and {folded[twin.casefold()]!r} are two clients, which differ in capitals only"
        )
    persons = _persons(tables, declared, groups, where, remarks)
    return without_test(
        f"own:{name}",  # never taken for a public set of that name
        features,
        labels,
        classes,
        groups=groups,
        group_names=tuple(names),
        persons=persons,
        person="" if declared.unit is None else in_words(declared.unit),
        schema=declared.schema,
        columns=columns,
        own=True,
        remarks=tuple(remarks),
        target=declared.target,
        scale=declared.scale,
    )


def in_words(column: str) -> str:
    """Return the word for what a column of identifiers names; "person" where its name is no single word.

    >>> in_words("patient_id"), in_words("customerID"), in_words("Pupil"), in_words("case_no"), in_words("id")
    ('patient', 'customer', 'pupil', 'person', 'person')
    """
    bare = re.sub(r"(?i:[_ .-]id)$|(?<=[a-z])I[Dd]$", "", column.strip()).casefold()
    return bare if bare.isalpha() and bare != "id" and len(bare) <= _LONGEST_WORD else "person"


def _where(table: RawTable, names: Sequence[str], groups: LabelArray | None) -> Where:
    return lambda row: table.where(row) + ("" if groups is None else f" (client {names[groups[row]]})")


def _check_columns(table: RawTable, declared: TableDeclaration, with_clients: bool) -> None:
    needed = [(role(table, declared.label, "labels"), "data.label names")]
    if with_clients and declared.client is not None:
        needed.append((role(table, declared.client, "clients"), "data.client names"))
    if declared.unit is not None:
        needed.append((declared.unit, "data.unit names"))
    for name, why in needed:
        if name not in table.columns:
            if table.features is not None:
                raise DataError(
                    f"{table.source} has no array {name!r}: store features, {', '.join(n for n, _ in needed)}"
                )
            raise DataError(no_column(table.source, name, why, table.columns))
    if table.features is not None and declared.schema is not None:
        raise DataError(f"{table.source} holds features as one array, which have no columns; leave out data.columns")


def _clients(
    tables: Sequence[RawTable], declared: TableDeclaration, clients: Sequence[str] | None
) -> tuple[list[str], LabelArray | None]:
    """Return the names of the clients, in order, and the number of each record's client."""
    if clients is not None:
        return list(clients), np.repeat(np.arange(len(tables)), [len(table.lines) for table in tables])
    if declared.client is None:
        return [], None
    (table,) = tables
    column = role(table, declared.client, "clients")
    names, numbers = _numbered(table.columns[column], table.where, column)
    order = sorted(range(len(names)), key=names.__getitem__)
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    return [names[number] for number in order], place[numbers]


def _numbered(cells: Cells, where: Where, column: str) -> tuple[list[str], LabelArray]:
    """Return the different names in a column, and the number of each record's name."""
    numbers: dict[str, int] = {}
    if isinstance(cells, np.ndarray) and cells.dtype.kind in "iu" and cells.ndim == 1:  # whole numbers are their names
        values, first, inside = np.unique(cells, return_index=True, return_inverse=True)
        order = np.argsort(first)
        rank = np.empty(len(order), np.int64)
        rank[order] = np.arange(len(order))
        return list(map(str, values[order].tolist())), rank[inside]

    def number(value: Any, row: int) -> int:
        if is_empty(value):
            raise DataError(f"{where(row)}, column {column!r}: the cell is empty: fill it in")
        return numbers.setdefault(as_text(value), len(numbers))

    found: LabelArray = of_each(listed(cells), np.int64, number)
    return list(numbers), found


def _persons(
    tables: Sequence[RawTable],
    declared: TableDeclaration,
    groups: LabelArray | None,
    where: Sequence[Where],
    remarks: list[str],
) -> LabelArray | None:
    """Return the number of each record's person among those of its client."""
    if declared.unit is None:
        return None
    pieces, before = [], 0
    for table, at in zip(tables, where, strict=True):
        names, numbers = _numbered(table.columns[declared.unit], at, declared.unit)
        if (nobody := next((place for place, name in enumerate(names) if is_missing(name)), None)) is not None:
            row = int(np.flatnonzero(numbers == nobody)[0])
            raise DataError(f"{at(row)}, column {declared.unit!r}: {names[nobody]!r} names nobody: fill it in")
        keys: dict[str, int] = {}
        person = np.array([keys.setdefault(person_key(name), len(keys)) for name in names], dtype=np.int64)
        if len(keys) < len(names):
            remarks.append(
                f"{table.source}, column {declared.unit!r}: identifiers that differ in capitals, blanks or zeros only "
                f"count as the same {in_words(declared.unit)} ({len(names) - len(keys)} of {len(names)}); if they are "
                "not, make them differ in more"
            )
        pieces.append(person[numbers] + before)
        before += len(keys)
    everybody = np.concatenate(pieces)
    client = np.zeros_like(everybody) if groups is None else groups
    pairs, numbers = np.unique(client * before + everybody, return_inverse=True)
    first = np.searchsorted(pairs, client * before)
    found: LabelArray = (numbers.ravel() - first).astype(np.int64)
    return found
