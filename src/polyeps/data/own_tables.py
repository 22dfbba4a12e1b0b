"""Data sets from tables of your own: frames, dictionaries of columns, arrays, torch data sets, and files once read."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyeps.core import check_name
from polyeps.data.cells import as_text, is_empty, is_missing, listed, of_each, person_key, short_text
from polyeps.data.dataset import Dataset, LabelArray
from polyeps.data.schema import Schema, Where, no_column
from polyeps.data.schema_files import TableDeclaration, schema_of
from polyeps.data.table_labels import labels_alike, number_labels
from polyeps.data.table_readers import Cells, RawTable, array_table, check_names, role
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
    name: str = "table",
) -> Dataset:
    """Return a data set of a pandas or polars frame, an Arrow table, or a dictionary of columns.

    Rows are counted from 0 in messages. Without a `client` column, an experiment divides the records among clients.
    """
    if schema is not None and not isinstance(schema, Schema):
        schema = schema_of(schema)
    named = None if classes is None else tuple(as_text(one) for one in classes)
    declared = TableDeclaration(label, client, unit, schema, named)
    return assemble(name, [frame_table(frame, name)], declared)


def from_arrays(
    features: Any,
    labels: Any,
    clients: Any = None,
    persons: Any = None,
    *,
    person: str = "person",
    classes: Sequence[Any] | None = None,
    name: str = "arrays",
) -> Dataset:
    """Return a data set of features (R, ...) of any shape, labels (R,) and, if known, clients (R,) and persons (R,)."""
    given = {"features": features, "labels": labels, "clients": clients, person: persons}
    columns = {key: np.asarray(column) for key, column in given.items() if column is not None}
    unit, named = (
        None if persons is None else person,
        None if classes is None else tuple(as_text(one) for one in classes),
    )
    declared = TableDeclaration("labels", None if clients is None else "clients", unit, None, named)
    return assemble(name, [array_table(name, columns, first=0)], declared)


def from_torch(
    dataset: Any, clients: Any = None, persons: Any = None, *, classes: Sequence[Any] | None = None, name: str = "torch"
) -> Dataset:
    """Return a data set of a torch `Dataset` with a length, whose items are (features, label)."""
    features, labels = [], []
    for place in range(len(dataset)):
        item = dataset[place]
        try:
            record, label = item
        except (TypeError, ValueError):
            raise DataError(
                f"item {place} of the torch data set is not a pair (features, label); make it one"
            ) from None
        features.append(np.asarray(record))
        labels.append(label.item() if hasattr(label, "item") else label)
    if shapes := {record.shape for record in features} - ({features[0].shape} if features else set()):
        raise DataError(
            f"records of the torch data set have shapes {features[0].shape} and {shapes.pop()}; make them one"
        )
    stacked = np.stack(features) if features else np.zeros((0, 1))
    flat = stacked.reshape(len(stacked), -1) if stacked.ndim == 1 else stacked
    return from_arrays(flat, labels, clients, persons, classes=classes, name=name)


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
    for client in names:
        check_name(f"{name}: the name of a client", client)
    owners = None if clients is not None else groups
    where = [_where(table, names, owners) for table in tables]
    columns, features, remarks = _features(tables, declared, where, names, groups)
    classes, labels = number_labels(tables, declared, where)
    if declared.classes is None:
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
    return Dataset(
        f"own:{name}",  # never taken for a public set of that name
        features,
        labels,
        features[:0],
        labels[:0],
        classes,
        groups=groups,
        group_names=tuple(names),
        persons=persons,
        person="" if declared.unit is None else in_words(declared.unit),
        schema=declared.schema,
        columns=columns,
        own=True,
        remarks=tuple(remarks),
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


def _features(
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
        np.stack([_plain_numbers(table.columns[name], name, at) for name in names], axis=1)
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


def _plain_numbers(cells: Cells, name: str, where: Where) -> NDArray[np.float32]:
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
