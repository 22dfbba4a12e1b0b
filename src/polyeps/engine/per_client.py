"""Numbers of local training, read for a cohort: each client's own setting, or else one number for all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from polyeps.core import PerClient, Records
from polyeps.errors import InputError

Floats = NDArray[np.float64]
Whole = NDArray[np.int64]


class CohortSettings(NamedTuple):
    """The settings of n clients; a number that a client has not set is the common one."""

    clients: int
    own: PerClient

    @classmethod
    def of_one(cls, settings: Mapping[str, float]) -> CohortSettings:
        """Return the settings of a single client."""
        return cls(1, {name: np.array([value]) for name, value in settings.items()})

    def each(self, name: str, common: ArrayLike | None) -> Floats:
        """Return one number of at least 0 for each client."""
        values = self.own.get(name, common)
        if values is None:
            raise InputError(f"{name} is not set; give one number for all clients, or put it into their settings")
        array = np.asarray(values, dtype=np.float64)
        if array.shape not in ((), (self.clients,)):
            raise InputError(f"{name} must be one number or {self.clients} of them, not of shape {array.shape}")
        if np.isnan(array).any() or (array < 0).any():
            raise InputError(f"{name} must be at least 0 for every client, not {np.min(array)}")
        return np.broadcast_to(array, (self.clients,)).copy()

    def whole(self, name: str, common: ArrayLike | None) -> Whole:
        """Return one whole number for each client."""
        array = self.each(name, common)
        if not np.isfinite(array).all() or (array != np.floor(array)).any():
            raise InputError(f"{name} must be whole numbers, not {array}")
        return array.astype(np.int64)

    def above_zero(self, name: str, common: ArrayLike | None) -> Floats:
        """Return one number above 0 for each client."""
        array = self.each(name, common)
        if (array == 0).any():
            raise InputError(f"{name} must be above 0 for every client")
        return array

    def unless_zero(self, name: str, common: ArrayLike | None) -> Floats | None:
        """Return one number for each client, or None where all are 0."""
        array = self.each(name, common)
        return array if array.any() else None

    def has(self, name: str, common: ArrayLike | None) -> bool:
        """Return whether a number is set, by clients or for all."""
        return common is not None or name in self.own


def settings_of(records: Records, own: PerClient, *, empty: bool = False) -> CohortSettings:
    """Return the settings of clients with these records; clients without any are refused unless `empty` allows them."""
    counts = records.counts
    cohort = CohortSettings(len(counts), {**own, "records": counts})
    held = CohortSettings(len(counts), own).whole("records", counts)
    for i in np.flatnonzero(held != counts)[:1].tolist():
        raise InputError(
            f"records is {held[i]} in the settings of client {i}, which has {counts[i]} records; correct it, for the "
            "price depends on it"
        )
    for i in [] if empty else np.flatnonzero(counts <= 0)[:1].tolist():
        raise InputError(f"client {i} of the cohort has no records; leave it out")
    return cohort
