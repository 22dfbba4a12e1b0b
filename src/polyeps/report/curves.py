"""What the pictures show: figures per round and per client of one method, over its seeds."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from polyeps.report.numbers import plural
from polyeps.report.tables import ClientSummary, Job, Line, deviation


@dataclass(frozen=True)
class Curve:
    """A figure per round: the mean over seeds, and the standard deviation (0 for one seed)."""

    rounds: tuple[int, ...]
    mean: tuple[float, ...]
    deviation: tuple[float, ...]


@dataclass(frozen=True)
class Traffic:
    """Bytes one client of a job sends and receives: on average, and from least to most."""

    sent: tuple[float, int, int]  # mean, least, most
    received: tuple[float, int, int]


def worst_rows(line: Line) -> list[ClientSummary]:
    """For every client the seed in which it came closest to its budget, strictest own budget first."""
    worst: dict[str, ClientSummary] = {}
    for row in (row for job in line.jobs for row in job.clients if row.ratio is not None):
        if row.client not in worst or (worst[row.client].ratio or 0.0) < (row.ratio or 0.0):
            worst[row.client] = row
    return sorted(worst.values(), key=lambda row: row.own_epsilon)


def together(rows: Sequence[ClientSummary]) -> list[ClientSummary]:
    """One row for all clients with the same budgets that spent the same, with their number for a name."""
    same: dict[object, list[ClientSummary]] = {}
    for row in rows:
        same.setdefault((row.epsilon, row.own_epsilon, row.spent), []).append(row)
    return [
        some[0] if len(some) == 1 else replace(some[0], client=plural(len(some), "client")) for some in same.values()
    ]


def accuracy_curve(line: Line) -> Curve:
    """Accuracy per evaluated round."""
    return _curve([job.accuracy for job in line.counted])


def active_curve(line: Line) -> Curve:
    """How many clients could afford each round that was planned."""
    return _curve([_active(job) for job in line.counted])


def traffic(line: Line) -> Traffic | None:
    """Bytes per client over a whole job, or None before any client has been asked."""
    rows = [row for job in line.counted for row in job.clients]
    if not any(row.sent or row.received for row in rows):
        return None
    sent, received = [row.sent for row in rows], [row.received for row in rows]
    return Traffic(
        (statistics.fmean(sent), min(sent), max(sent)),
        (statistics.fmean(received), min(received), max(received)),
    )


def _active(job: Job) -> dict[int, int]:
    if not job.rounds:
        return {}
    first = job.rounds[0][1] + sum(client.left_after == 1 for client in job.clients)
    # Who is active after the last planned round could afford one that was never to come.
    return {1: first} | {number + 1: active for number, active, _ in job.rounds if number < job.planned}


def _curve(seeds: Sequence[Mapping[int, float]]) -> Curve:
    rounds = sorted({round for seed in seeds for round in seed})
    values = [[seed[round] for seed in seeds if round in seed] for round in rounds]
    means = tuple(statistics.fmean(some) for some in values)
    return Curve(tuple(rounds), means, tuple(deviation(some) if len(some) > 1 else 0.0 for some in values))
