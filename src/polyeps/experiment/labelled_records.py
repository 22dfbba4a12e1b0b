"""Records with labels as scikit-learn has them, (X, y), become a data set; budgets by client become a table."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import scipy.sparse
from numpy.typing import NDArray
from sklearn.exceptions import DataConversionWarning
from torch import Tensor

from polyeps.data.cells import as_text, is_empty
from polyeps.data.dataset import Dataset
from polyeps.data.own_tables import frame_table, from_arrays, from_frame
from polyeps.errors import DataError, InputError

_MOST_CLASSES = 100  # more must be declared: they may be a number to predict
_TYPES = ("float32", "int64")


@dataclass(frozen=True, eq=False)
class LabelledRecords:
    """A data set, and the names that its columns and classes have for the user."""

    dataset: Dataset
    classes: NDArray[Any]  # of the labels' own type, in the order of dataset.classes
    names: tuple[str, ...] | None  # columns of a table
    label: str = "label"  # columns of the label and the client in the data set
    client: str = "client"

    @staticmethod
    def array(X: Any, kind: str) -> NDArray[Any]:  # noqa: N803
        """Return records (n, ...) as numbers."""
        if kind not in _TYPES:
            raise InputError(f"dtype is {kind!r}; records are {' or '.join(_TYPES)}")
        if scipy.sparse.issparse(X):
            raise InputError("X is sparse; give a dense array: X.toarray()")
        found = X.detach().cpu().numpy() if isinstance(X, Tensor) else np.asarray(X)
        if found.dtype.kind == "c":
            raise InputError("Complex data not supported; give real numbers")
        if found.dtype.kind not in "fiub":
            try:
                found = found.astype(np.float64)
            except (TypeError, ValueError):
                raise DataError(
                    "X holds what is no number; give a table with named columns, and declare columns=, which `polyeps "
                    "data describe FILE --write schema.toml` drafts"
                ) from None
        if found.ndim < 2:
            raise InputError(f"X has {found.ndim} dimensions; Reshape your data to one row for each record")
        if not len(found):
            raise DataError("Found array with 0 sample(s), while a minimum of 1 is required; give records")
        if not found[0].size:
            raise DataError(
                f"Found array with 0 feature(s) (shape={found.shape}) while a minimum of 1 is required; add some"
            )
        if found.dtype.kind == "f" and len(bad := np.argwhere(~np.isfinite(found))):
            value = "NaN" if np.isnan(found[tuple(bad[0])]) else found[tuple(bad[0])]
            raise DataError(f"X, record {bad[0][0]}: a feature is {value}; fill it in, or remove the record")
        if kind == "float32":
            return found
        if (found != np.floor(found)).any():
            raise DataError('X holds fractions, but dtype="int64" is for tokens; give whole numbers')
        return found.astype(np.int64)


def is_table(X: Any) -> bool:  # noqa: N803
    """Return whether records have named columns."""
    named = isinstance(X, Mapping) or hasattr(X, "columns") or hasattr(X, "column_names")
    return named and not scipy.sparse.issparse(X)


def read_records(
    X: Any,  # noqa: N803
    y: Any,
    client: Any,
    unit: Any,
    test: Any,
    classes: Any,
    columns: Mapping[str, Any] | None,
    kind: str,
) -> LabelledRecords:
    """Return training records and, if given as a pair (X, y), test records."""
    remarks: tuple[str, ...] = ()
    if classes is None:
        known = _classes_of(_labels(y))
        shown = ", ".join(map(str, known[:5])) + (", …" if len(known) > 5 else "")
        remarks = (f"the labels ({shown}) were read off the records; declare them as classes",)
    else:
        known = np.asarray(classes)
    texts = tuple(as_text(one) for one in known.tolist())
    if len(set(texts)) < len(texts):
        twice = next(text for text in texts if texts.count(text) > 1)
        raise DataError(f"y has two labels that are written {twice!r}; write them in different ways")
    found = _read(X, y, client, unit, texts, columns, kind, known)
    found = replace(found, dataset=replace(found.dataset, remarks=(*found.dataset.remarks, *remarks)))
    if test is None:
        return found
    if not isinstance(test, tuple | list) or len(test) != 2:
        raise InputError("test must be a pair (X, y) of records and labels")
    held = _read(test[0], test[1], None, None, texts, columns, kind, known).dataset
    if held.features.shape[1:] != found.dataset.features.shape[1:] or held.columns != found.dataset.columns:
        raise DataError("test has other features than X; give the same, in the same order")
    together = replace(found.dataset, test_features=held.features, test_labels=held.labels)
    return replace(found, dataset=together)


def _read(
    X: Any,  # noqa: N803
    y: Any,
    client: Any,
    unit: Any,
    classes: Sequence[str],
    columns: Mapping[str, Any] | None,
    kind: str,
    known: NDArray[Any],
) -> LabelledRecords:
    given = {"y": y, "client": client, "unit": unit}
    cells = {what: None if column is None else np.asarray(column) for what, column in given.items()}
    cells["y"] = _labels(y)
    if not is_table(X):
        if columns is not None:
            raise InputError("columns are declared, but X is an array, which has none; give a table, or leave them out")
        array = LabelledRecords.array(X, kind)
        _check_lengths(len(array), cells)
        person = _name(unit, "person", ())
        made = from_arrays(array, *cells.values(), person=person, classes=classes, name="X")
        dataset = made if kind == "float32" else replace(made, features=array, test_features=array[:0])
        return LabelledRecords(dataset, known, None)
    if kind != "float32":
        raise InputError(f"dtype={kind!r} is for arrays; the columns of a table are numbers or declared as columns")
    table = frame_table(X, "X")
    names = tuple(table.columns)
    _check_lengths(len(table.lines), cells)
    frame = dict(table.columns)
    usual = {"y": "label", "client": "client", "unit": "person"}
    roles: dict[str, str] = {}
    for what, column in cells.items():
        roles[what] = _name(given[what], usual[what], frame)
        if column is not None:
            frame[roles[what]] = column
    made = from_frame(
        frame,
        label=roles["y"],
        client=None if client is None else roles["client"],
        unit=None if unit is None else roles["unit"],
        schema=columns,
        classes=classes,
        name="X",
    )
    return LabelledRecords(made, known, names, roles["y"], roles["client"])


def _labels(y: Any) -> NDArray[Any]:
    """Return labels (n,)."""
    if y is None:
        raise InputError("fit requires y to be passed, but the target y is None; give the label of each record")
    found = y.detach().cpu().numpy() if isinstance(y, Tensor) else np.asarray(y)
    if found.ndim == 2 and found.shape[1] == 1:
        said = "A column-vector y was passed when a 1d array was expected; give y.ravel()"
        warnings.warn(said, DataConversionWarning, stacklevel=4)
        found = found[:, 0]
    if found.ndim != 1:
        raise DataError(f"y should be a 1d array, got an array of shape {found.shape} instead; give one label a record")
    if found.dtype.kind == "f" and len(odd := found[~np.isfinite(found)]):
        what = "NaN" if np.isnan(odd[0]) else "infinity"
        raise DataError(f"Input y contains {what}; fill in the labels, or remove their records")
    if (empty := next((row for row, one in enumerate(found.tolist()) if is_empty(one)), None)) is not None:
        raise DataError(f"y, record {empty}: the label is empty; fill it in, or remove the record")
    return found


def _classes_of(labels: NDArray[Any]) -> NDArray[Any]:
    """Return the different labels, sorted."""
    try:
        found = np.unique(labels)
    except TypeError:
        kinds = sorted({type(one).__name__ for one in labels.tolist()})
        raise DataError(f"y mixes labels of the types {', '.join(kinds)}; write them in one") from None
    if found.dtype.kind == "f" and len(odd := found[found != np.floor(found)]):
        raise DataError(
            f"Unknown label type: continuous, as {odd[0]} is not a whole number; labels are classes, so group them"
        )
    if len(found) == 1:
        raise DataError(f"y has one class only, {found[0]!r}; give records of several, or declare them as classes")
    if len(found) > _MOST_CLASSES:
        raise DataError(f"y has {len(found)} different labels; if they are classes, declare them as classes")
    return found


def _check_lengths(records: int, cells: Mapping[str, NDArray[Any] | None]) -> None:
    for what, column in cells.items():
        if column is not None and column.shape != (records,):
            raise DataError(
                f"Found input variables with inconsistent numbers of samples: X has {records} records, and {what} has "
                f"shape {column.shape}; give one for each"
            )


def _name(column: Any, usual: str, taken: Mapping[str, Any] | tuple[()]) -> str:
    """Return the name of a pandas series, or the usual one; never that of another column."""
    named = getattr(column, "name", None)
    found = named if isinstance(named, str) and named.isprintable() and named and named not in taken else usual
    while found in taken:
        found += "_"
    return found


def budget_table(budgets: Any, wanted_delta: Any, names: Sequence[str]) -> dict[str, Any]:
    """Return the table [budgets] of an experiment for clients of these names; without names, in order."""
    given = budgets.to_dict() if hasattr(budgets, "to_dict") else budgets
    if given is not budgets and len(given) < len(budgets):
        raise InputError("budgets names a client twice; keep one of them")
    delta = _by_client("delta", wanted_delta) if isinstance(wanted_delta, Mapping) else wanted_delta
    kept = {} if delta is None else {"delta": delta}
    if given is None:
        return kept  # privacy levels or a file, by settings
    if isinstance(given, str):
        return {"distribution": given, **kept}
    if isinstance(given, Mapping):
        return {"epsilon": _by_client("budgets", given), **kept}
    if np.ndim(given) == 0:
        return {"epsilon": _plain(given), **kept}
    if np.ndim(given) > 1:
        raise InputError(f"budgets has {np.ndim(given)} dimensions; give one epsilon for each client")
    epsilons = [_plain(one) for one in given]
    if not names:
        return {"epsilons": epsilons, **kept}
    if set(names) != {str(number) for number in range(len(epsilons))}:
        raise InputError(
            f"budgets is an array of {len(epsilons)}, whose clients are 0 to {len(epsilons) - 1}, but the records "
            f"are those of {', '.join(map(repr, names[:5]))}{', …' if len(names) > 5 else ''}; give a dictionary by"
            " client"
        )
    return {"epsilon": {name: epsilons[int(name)] for name in names}, **kept}


def _plain(number: Any) -> Any:
    """Return a number of numpy, pandas or torch as one of Python's own."""
    return number.item() if hasattr(number, "item") else number


def _by_client(what: str, given: Mapping[Any, Any]) -> dict[str, Any]:
    found = {as_text(name): _plain(one) for name, one in given.items()}
    if len(found) < len(given):
        raise InputError(f"{what} names a client twice, written in two ways; keep one of them")
    return found
