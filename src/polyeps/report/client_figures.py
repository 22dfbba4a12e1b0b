"""Figures of each client over the seeds of a method: metrics on its own test records, the majority class, spending."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from polyeps.report.formatting import SHARES, percent, short
from polyeps.report.tables import MethodRuns, deviation, mean_of


@dataclass(frozen=True)
class Spread:
    """A figure over seeds: mean and standard deviation (None: one seed)."""

    mean: float
    deviation: float | None = None

    def text(self, metric: str) -> str:
        """Format the figure of a metric."""
        if metric in SHARES:
            return percent(self.mean, self.deviation)
        spread = "" if self.deviation is None else f" ± {self.deviation:.3f}"
        return f"{self.mean:.3f}{spread}" if abs(self.mean) < 10 else f"{short(self.mean)}{spread}"


@dataclass(frozen=True)
class ClientFigures:
    """One client under one method, over seeds."""

    client: str
    records: int  # or persons, where these are the unit
    own_epsilon: float
    spent: float | None  # the most under any seed
    test_records: float | None  # its own; None: it has none
    majority: Spread | None  # the accuracy of guessing its majority class
    metrics: Mapping[str, Spread | None]  # on its own test records; None: undefined
    undefined: Mapping[str, str]  # why


def over_seeds(values: Sequence[float | None]) -> Spread | None:
    """Return mean and deviation of the figures there are; None without any."""
    known = [value for value in values if value is not None and math.isfinite(value)]
    if not known:
        return None
    return Spread(statistics.fmean(known), deviation(known) if len(known) > 1 else None)


def measured_jobs(method: MethodRuns) -> list[Mapping[str, Any]]:
    """Return what the finished jobs of a method say about clients."""
    return [job.facts["clients"] for job in method.counted if "clients" in job.facts]


def client_figures(method: MethodRuns) -> list[ClientFigures]:
    """Return every client's figures, strictest own budget first; nothing where no client has test records."""
    found = [one for one in measured_jobs(method) if "values" in one]
    if not found:
        return []
    names = list(dict.fromkeys(name for one in found for name in one["values"]))
    rows = {row.client: row for job in reversed(method.counted) for row in job.clients}
    spent: dict[str, list[float]] = {}
    for row in (row for job in method.counted for row in job.clients if row.spent is not None):
        spent.setdefault(row.client, []).append(row.spent or 0.0)
    places = [{client: place for place, client in enumerate(one["ids"])} for one in found]

    def of(client: str, pick: Any) -> list[Any]:
        return [pick(one, place[client]) for one, place in zip(found, places, strict=True) if client in place]

    return [
        ClientFigures(
            client=row.client,
            records=row.records,
            own_epsilon=row.own_epsilon,
            spent=max(spent[row.client]) if row.client in spent else None,
            test_records=mean_of(of(row.client, lambda one, at: one["test_records"][at])),
            majority=over_seeds(of(row.client, lambda one, at: one["majority"][at])),
            metrics={name: over_seeds(of(row.client, lambda one, at, n=name: one["values"][n][at])) for name in names},
            undefined={
                name: why
                for name in names
                for why in of(row.client, lambda one, _, n=name, c=row.client: one["undefined"].get(n, {}).get(c))
                if why
            },
        )
        for row in rows.values()
    ]
