"""How a training draws its batches: checked, read for a cohort, and priced."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

from polyeps.engine.per_client import CohortSettings, Floats, Whole
from polyeps.errors import InputError

# poisson: every record enters a batch independently, at a rate; fixed: every batch is exactly `batch` records.
Sampler = Literal["poisson", "fixed"]


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
