"""Figures per round and per client of one method, over its seeds, for the pictures."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from polyeps.report.formatting import plural
from polyeps.report.tables import ClientSummary, JobSummary, MethodRuns, deviation


@dataclass(frozen=True)
class Curve:
    """A figure per round: the mean over seeds, and the standard deviation (0 for one seed)."""

    rounds: tuple[int, ...]
    mean: tuple[float, ...]
    deviation: tuple[float, ...]


@dataclass(frozen=True)
class Traffic:
    """Bytes that one client of a job sends and receives: mean, least and most."""

    sent: tuple[float, int, int]
    received: tuple[float, int, int]


def worst_rows(method: MethodRuns) -> list[ClientSummary]:
    """Return every client under the seed in which it came closest to its budget, strictest own budget first."""
    worst: dict[str, ClientSummary] = {}
    for row in (row for job in method.jobs for row in job.clients if row.ratio is not None):
        if row.client not in worst or (worst[row.client].ratio or 0.0) < (row.ratio or 0.0):
            worst[row.client] = row
    return sorted(worst.values(), key=lambda row: row.own_epsilon)


def merge_equal(rows: Sequence[ClientSummary]) -> list[ClientSummary]:
    """Return one row for all clients with equal budgets and equal spending, named by their number."""
    same: dict[object, list[ClientSummary]] = {}
    for row in rows:
        same.setdefault((row.epsilon, row.own_epsilon, row.spent), []).append(row)
    return [
        some[0] if len(some) == 1 else replace(some[0], client=plural(len(some), "client")) for some in same.values()
    ]


def accuracy_curve(method: MethodRuns) -> Curve:
    """Return the accuracy per evaluated round."""
    return _curve([job.accuracy for job in method.counted])


def active_curve(method: MethodRuns) -> Curve:
    """Return the number of clients that could afford each planned round."""
    return _curve([_active(job) for job in method.counted])


def traffic(method: MethodRuns) -> Traffic | None:
    """Return the bytes per client over a whole job, or None before any client has been asked."""
    rows = [row for job in method.counted for row in job.clients]
    if not any(row.sent or row.received for row in rows):
        return None
    sent, received = [row.sent for row in rows], [row.received for row in rows]
    return Traffic(
        (statistics.fmean(sent), min(sent), max(sent)), (statistics.fmean(received), min(received), max(received))
    )


def _active(job: JobSummary) -> dict[int, int]:
    if not job.rounds:
        return {}
    first = job.rounds[0][1] + sum(client.left_after == 1 for client in job.clients)
    # After the last planned round no further one needs to be affordable.
    return {1: first} | {number + 1: active for number, active, _ in job.rounds if number < job.planned}


def _curve(seeds: Sequence[Mapping[int, float]]) -> Curve:
    rounds = sorted({round for seed in seeds for round in seed})
    values = [[seed[round] for seed in seeds if round in seed] for round in rounds]
    means = tuple(statistics.fmean(some) for some in values)
    return Curve(tuple(rounds), means, tuple(deviation(some) if len(some) > 1 else 0.0 for some in values))
