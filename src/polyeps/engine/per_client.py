"""Numbers that may differ between clients, given as one for all or as one for each, read for a cohort."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from polyeps.errors import InputError

Floats = NDArray[np.float64]
Whole = NDArray[np.int64]
PerClient = float | Sequence[float] | Floats


class Rows(NamedTuple):
    """The clients to read for: how many records each has, and which rows of the numbers are theirs."""

    counts: Whole  # (n,)
    rows: Whole | None = None  # None: all of them, in order

    @property
    def clients(self) -> int:
        return len(self.counts)

    def row(self, client: int) -> int:
        """The row under which the caller knows a client of the cohort."""
        return client if self.rows is None else int(self.rows[client])


def cohort_of(counts: Whole, rows: Sequence[int] | None, *, empty: bool = False) -> Rows:
    """The cohort of clients with so many records, whose numbers stand in `rows`; without any only if `empty` allows."""
    cohort = Rows(counts)
    if rows is not None:
        array = np.asarray(rows)
        if array.shape != counts.shape:
            raise InputError(f"rows must be {len(counts)} numbers, one per client, not of shape {array.shape}")
        # A mask would be read as rows 0 and 1.
        if len(array) and (array.dtype.kind not in "iu" or array.min() < 0):
            raise InputError(f"rows must be whole numbers of at least 0, not {array}")
        cohort = Rows(counts, array.astype(np.int64))
    for i in [] if empty else np.flatnonzero(counts <= 0)[:1].tolist():
        raise InputError(f"client in row {cohort.row(i)} has no records; leave it out of the cohort")
    return cohort


def check_lengths(**fields: PerClient | None) -> None:
    """Refuse fields that disagree on how many clients there are: rows of them could not mean the same clients."""
    lengths = {name: np.size(values) for name, values in fields.items() if values is not None and np.ndim(values)}
    for name, length in lengths.items():
        other, wanted = next(iter(lengths.items()))
        if length != wanted:
            raise InputError(f"{name} is given for {length} clients, but {other} for {wanted}; give one number or all")


def each(name: str, values: ArrayLike, cohort: Rows) -> Floats:
    """One number of at least 0 for each client of the cohort."""
    array = np.asarray(values, dtype=np.float64)
    if cohort.rows is None and array.shape not in ((), (cohort.clients,)):
        raise InputError(f"{name} must be one number or {cohort.clients} of them, not of shape {array.shape}")
    if cohort.rows is not None and array.ndim:
        if array.ndim > 1 or cohort.rows.max(initial=-1) >= len(array):
            last = cohort.rows.max(initial=-1)
            raise InputError(f"{name} must be one number or have a row {last}, which rows asks for, not {array.shape}")
        array = array[cohort.rows]
    if np.isnan(array).any() or (array < 0).any():
        raise InputError(f"{name} must be at least 0 for every client, not {np.min(array)}")
    return np.broadcast_to(array, (cohort.clients,)).copy()


def whole(name: str, values: ArrayLike, cohort: Rows) -> Whole:
    """One whole number for each client."""
    array = each(name, values, cohort)
    if not np.isfinite(array).all() or (array != np.floor(array)).any():
        raise InputError(f"{name} must be whole numbers, not {array}")
    return array.astype(np.int64)


def above_zero(name: str, values: ArrayLike, cohort: Rows) -> Floats:
    """One number above 0 for each client."""
    array = each(name, values, cohort)
    if (array == 0).any():
        raise InputError(f"{name} must be above 0 for every client")
    return array


def unless_zero(name: str, values: ArrayLike, cohort: Rows) -> Floats | None:
    """One number for each client, or None where all are 0."""
    array = each(name, values, cohort)
    return array if array.any() else None


def of_row(name: str, values: ArrayLike, row: int | None) -> float:
    """The number of one client, who may remain unnamed where all have the same."""
    array = np.unique(np.asarray(values, dtype=np.float64)) if row is None else np.asarray(values).ravel()
    if row is None and len(array) > 1:
        raise InputError(f"{name} differs between clients; say whose price is asked with row=")
    return float(array[0] if row is None or len(array) == 1 else array[row])
