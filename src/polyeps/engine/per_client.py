"""Numbers of local training, read for a cohort: each client's own setting, or else one number for all; batches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from polyeps.core import PerClient, Records
from polyeps.errors import InputError

Floats = NDArray[np.float64]
Whole = NDArray[np.int64]
# poisson: every record enters a batch independently, at a rate; fixed: every batch is exactly `batch` records.
Sampler = Literal["poisson", "fixed"]


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


@dataclass(frozen=True)
class Batching:
    """Poisson batches at `rate`, by default batch/records, or batches of a fixed size."""

    sampler: Sampler
    rate: float | None
    batch: float | None

    def __post_init__(self) -> None:
        if self.sampler not in get_args(Sampler):
            raise InputError(f'sampler must be "poisson" or "fixed", not {self.sampler!r}')
        if self.fixed and self.rate is not None:
            raise InputError('rate must be left out with sampler="fixed", where it is batch over records')

    @property
    def fixed(self) -> bool:
        return self.sampler == "fixed"

    def rates(self, cohort: CohortSettings) -> Floats:
        """Return the probability that a record is in a batch of its client."""
        if not self.fixed and cohort.has("rate", self.rate):
            return cohort.each("rate", self.rate)
        if not cohort.has("batch", self.batch):
            raise InputError("rate or batch must be given: how many records a batch holds")
        return self._sizes(cohort) / cohort.above_zero("records", None)

    def sizes(self, cohort: CohortSettings) -> Whole | None:
        """Return the exact size of every client's batches; None for Poisson batches."""
        return self._sizes(cohort).astype(np.int64) if self.fixed else None

    def event(self, noise: Any, client: CohortSettings) -> Any:
        """Return the cost of one batch for one client, if its sum is released with that noise."""
        from polyeps.accounting.events import FixedSize, Poisson

        if not self.fixed:
            return Poisson(float(self.rates(client)[0]), noise)
        (size,) = self._sizes(client).tolist()
        return FixedSize(int(client.whole("records", None)[0]), int(size), noise)

    def expected_share(self, client: CohortSettings, times: int = 1) -> float:
        """Return `times` the share of a client's records that a batch holds on average."""
        if not self.fixed:
            return times * float(self.rates(client)[0])
        return times * float(self._sizes(client)[0]) / float(client.whole("records", None)[0])

    def _sizes(self, cohort: CohortSettings) -> Floats:
        held = cohort.whole("records", None)
        sizes = cohort.above_zero("batch", self.batch)
        if self.fixed:
            cohort.whole("batch", self.batch)
        for i in np.flatnonzero(held < sizes)[:1].tolist():
            raise InputError(
                f"batch is {sizes[i]:g} for client {i} of the cohort, which has {held[i]} records; make its batch "
                "smaller, or leave it out"
            )
        return sizes
