"""How a training takes its batches, as its caller says it: checked, read for a cohort, and priced."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

from polyeps.engine.per_client import Floats, PerClient, Rows, Whole, above_zero, each, of_row, whole
from polyeps.errors import InputError

# poisson: every record enters a batch independently, at `rate`; fixed: every batch is exactly `batch` records.
Sampler = Literal["poisson", "fixed"]


@dataclass(frozen=True)
class Batching:
    """Poisson batches at a rate, or batches of a fixed size, of which there is then no rate to choose."""

    sampler: Sampler
    rate: PerClient | None
    batch: PerClient | None  # for Poisson batches no more than what sums are divided by
    records_held: PerClient | None = None  # to price batches of fixed size

    def __post_init__(self) -> None:
        if self.sampler not in get_args(Sampler):
            raise InputError(f'sampler must be "poisson" or "fixed", not {self.sampler!r}')
        if self.fixed and self.batch is None:
            raise InputError('batch must be given with sampler="fixed": how many records a batch holds')
        if self.fixed and self.rate is not None:
            raise InputError('rate must be left out with sampler="fixed", where it is batch over records')
        if not self.fixed and self.rate is None:
            raise InputError('rate must be given for Poisson batches; batches of an exact size need sampler="fixed"')
        if not self.fixed and self.records_held is not None:
            raise InputError("records_held prices batches of fixed size; leave it out for Poisson batches")

    @property
    def fixed(self) -> bool:
        return self.sampler == "fixed"

    def rates(self, cohort: Rows) -> Floats:
        """How likely a record is to be in a batch of its client."""
        if self.fixed:
            return self._exact(cohort) / cohort.counts
        assert self.rate is not None
        return each("rate", self.rate, cohort)

    def sizes(self, cohort: Rows) -> Whole | None:
        """The exact size of every client's batches; None for Poisson batches."""
        return self._exact(cohort) if self.fixed else None

    def event(self, noise: Any, row: int | None) -> Any:
        """What one batch costs a client when its sum is released with that noise."""
        from polyeps.accounting.events import FixedSize, Poisson

        if not self.fixed:
            assert self.rate is not None
            return Poisson(of_row("rate", self.rate, row), noise)
        if self.records_held is None:
            raise InputError('records_held must be given to price sampler="fixed": how many records each client has')
        assert self.batch is not None
        size, held = of_row("batch", self.batch, row), of_row("records_held", self.records_held, row)
        if not (1 <= size <= held and size.is_integer() and held.is_integer()):
            raise InputError(f"batch must be a whole number from 1 to records_held, which is {held:g}, not {size:g}")
        return FixedSize(int(held), int(size), noise)

    def expected_share(self, row: int, times: int = 1) -> float:
        """Return `times` the share of a client's records that a batch holds on average."""
        if not self.fixed:
            assert self.rate is not None
            return times * of_row("rate", self.rate, row)
        assert self.batch is not None
        assert self.records_held is not None
        return times * of_row("batch", self.batch, row) / of_row("records_held", self.records_held, row)

    def _exact(self, cohort: Rows) -> Whole:
        assert self.batch is not None
        counts = cohort.counts
        exact = whole("batch", above_zero("batch", self.batch, cohort), Rows(counts))
        if self.records_held is not None:
            held = whole("records_held", self.records_held, cohort)
            for i in np.flatnonzero(held != counts)[:1].tolist():
                raise InputError(
                    f"records_held is {held[i]} for the client in row {cohort.row(i)}, which has {counts[i]} records; "
                    "correct it, for the price depends on it"
                )
        for i in np.flatnonzero(counts < exact)[:1].tolist():
            raise InputError(
                f"batch is {exact[i]} for the client in row {cohort.row(i)}, which has {counts[i]} records; "
                "make its batch smaller or leave it out of the cohort"
            )
        return exact
