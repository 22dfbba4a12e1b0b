"""Figures from journals, per method and per client.

Rounds are counted from one here: the journal's round 0 is a reader's first. Where a method ran with several seeds,
figures come from its finished jobs, or from all that have begun while none is finished.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from polyeps.experiment.journal import Journal

LAST_ROUNDS = 10  # the final accuracy is the mean over those of them that were evaluated
NOT_BEGUN = "not begun"  # the budgets of a method are not known yet


@dataclass(frozen=True)
class ClientSummary:
    """One client in one job."""

    client: str
    epsilon: float | None  # the effective budget; None: no guarantee
    own_epsilon: float  # infinite: it chose to have no guarantee
    delta: float | None
    records: int
    noise_multiplier: float | None
    spent: float | None  # None: its ledger has not been read
    ratio: float | None  # spent over the effective budget
    exceeded: bool  # it spent more than its effective budget, or than its own where that one is guaranteed
    joined: int  # rounds answered
    declined: int
    left_after: int | None  # the last round it could afford
    sent: int  # bytes
    received: int


@dataclass(frozen=True)
class MethodSummary:
    """One method of one run over its seeds; bytes and clients are of one job, on average over seeds."""

    label: str
    method: str
    run: str
    summary: str
    budgets: str  # own, minimum, maximum, exceeded, published, none
    seeds: int
    finished: int  # of the seeds
    clients: int
    rounds: int  # planned
    rounds_run: float
    final_accuracy: float | None  # None: never evaluated; NaN: not a number in one of the last rounds
    final_accuracy_deviation: float | None  # over seeds, n - 1 in the denominator; None: one seed
    last_accuracy: float | None
    majority_accuracy: float | None  # of always guessing the class with most training records; None: not finished
    metrics: Mapping[str, float | None]  # the experiment's own ones, over the same rounds as the final accuracy
    bytes_up: float
    bytes_down: float
    bytes_up_per_client_round: float | None
    seconds_per_round: float | None
    largest_ratio: float | None  # over all clients and seeds
    exceeded: int  # clients over all seeds
    left_early: float  # clients that could afford no further round before the planned end
    measure: str = "accuracy"  # what stands in the place of the accuracy, where no classes are predicted


@dataclass(frozen=True)
class JobSummary:
    """One method with one seed."""

    name: str
    seed: int
    status: str
    planned: int
    facts: Mapping[str, Any]
    clients: tuple[ClientSummary, ...]  # strictest own budget first
    rounds: tuple[tuple[int, int, float], ...]  # number, clients active after it, seconds
    accuracy: Mapping[int, float]  # of the evaluated rounds
    own: Mapping[str, float]  # means over clients of the accuracy on their own test records, by model and group
    metrics: Mapping[str, Mapping[int, float]]  # the experiment's own ones, of the evaluated rounds
    measure: str = "accuracy"  # what `accuracy` holds
    deployed: bool = False  # clients are silos, whose budgets and spending the server does not see


@dataclass(frozen=True)
class MethodRuns:
    """The jobs of one method in one run, one per seed."""

    label: str
    method: str
    run: str
    jobs: tuple[JobSummary, ...]

    @property
    def facts(self) -> Mapping[str, Any]:
        """Return the journal's facts about the method."""
        return next((job.facts for job in self.jobs if job.facts), {})

    @property
    def budgets(self) -> str:
        """Return the kind of effective budgets: the clients' own only if they are under every seed."""
        if not any(job.clients for job in self.jobs):
            return NOT_BEGUN
        kinds = [str(job.facts.get("budgets", "own")) for job in self.jobs if job.facts]
        return next((kind for kind in kinds if kind != "own"), "own")

    @property
    def measure(self) -> str:
        """Return what its models are measured by: the accuracy, where they predict classes."""
        return next((job.measure for job in self.jobs), "accuracy")

    @property
    def deployed(self) -> bool:
        """Whether its clients are silos with ledgers of their own."""
        return any(job.deployed for job in self.jobs)

    @property
    def alike(self) -> bool:
        """Whether all its clients set the same budget."""
        return len({row.own_epsilon for job in self.jobs for row in job.clients}) == 1

    @property
    def control(self) -> bool:
        """Whether effective budgets are others than the clients' own."""
        return self.budgets != "own"

    @property
    def counted(self) -> tuple[JobSummary, ...]:
        """Return the jobs to average: unfinished jobs are not mixed with finished ones."""
        done = tuple(job for job in self.jobs if job.status == "done")
        return done or tuple(job for job in self.jobs if job.status == "running")


def read_methods(journals: Sequence[Journal]) -> tuple[MethodRuns, ...]:
    """Return all methods of all runs in the order they were added, those under the clients' own budgets first."""
    found = [
        MethodRuns(label, jobs[0]["method"], run, tuple(_job(journal, job) for job in jobs))
        for journal, run in zip(journals, run_names(journals), strict=True)
        for label, jobs in _by_label(journal).items()
    ]
    times = Counter(method.label for method in found)
    shown = [
        method if times[method.label] == 1 else replace(method, label=f"{method.label} ({method.run})")
        for method in found
    ]
    return tuple(sorted(shown, key=lambda method: method.control))


def run_names(journals: Sequence[Journal]) -> list[str]:
    """Return the name of each run, with its folder where two have the same name."""
    plain = [str(journal.about().get("name", journal.path.parent.name)) for journal in journals]
    times = Counter(plain)
    return [
        name if times[name] == 1 else f"{name}, {journal.path.parent}"
        for name, journal in zip(plain, journals, strict=True)
    ]


def summarise(method: MethodRuns) -> MethodSummary:
    """Summarise a method over its seeds."""
    counted = method.counted
    finals = [final_value(job, job.accuracy) for job in counted if job.accuracy]
    lasts = [job.accuracy[max(job.accuracy)] for job in counted if job.accuracy]
    seconds = [spell for job in counted for *_, spell in job.rounds]
    joined = sum(client.joined for job in counted for client in job.clients)
    sent = sum(client.sent for job in counted for client in job.clients)
    clients = [client for job in method.jobs for client in job.clients]
    return MethodSummary(
        label=method.label,
        method=method.method,
        run=method.run,
        summary=str(method.facts.get("summary", "")),
        budgets=method.budgets,
        seeds=len(method.jobs),
        finished=sum(job.status == "done" for job in method.jobs),
        clients=max((len(job.clients) for job in method.jobs), default=0),
        rounds=max(job.planned for job in method.jobs),
        rounds_run=mean_of([len(job.rounds) for job in counted]) or 0.0,
        measure=method.measure,
        final_accuracy=mean_of(finals),
        final_accuracy_deviation=deviation(finals) if len(finals) > 1 else None,
        last_accuracy=mean_of(lasts),
        majority_accuracy=mean_of([job.facts["majority"] for job in counted if "majority" in job.facts]),
        metrics={
            name: mean_of([final_value(job, job.metrics[name]) for job in counted if job.metrics.get(name)])
            for name in dict.fromkeys(name for job in method.jobs for name in job.metrics)
        },
        bytes_up=sent / max(1, len(counted)),
        bytes_down=sum(client.received for job in counted for client in job.clients) / max(1, len(counted)),
        bytes_up_per_client_round=sent / joined if joined else None,
        seconds_per_round=mean_of(seconds),
        largest_ratio=max((client.ratio for client in clients if client.ratio is not None), default=None),
        exceeded=sum(client.exceeded for client in clients),
        left_early=mean_of([left_early(job) for job in counted]) or 0.0,
    )


def left_early(job: JobSummary) -> int:
    """Count the clients that could afford no further round while rounds were still planned."""
    return sum(client.left_after is not None and client.left_after < job.planned for client in job.clients)


def final_rounds(job: JobSummary) -> tuple[int, ...]:
    """Return the evaluated ones of a job's last rounds."""
    return tuple(round for round in sorted(job.accuracy) if round > max(job.accuracy) - LAST_ROUNDS)


def mean_of(values: Sequence[float]) -> float | None:
    """Return the mean, or None without values."""
    return statistics.fmean(values) if values else None


def deviation(values: Sequence[float]) -> float:
    """Return the standard deviation of two or more figures, NaN if one of them is not finite."""
    return statistics.stdev(values) if all(map(math.isfinite, values)) else math.nan


def summarise_clients(journal: Journal, job: str, budgets: str = "own") -> list[ClientSummary]:
    """Summarise every client of a job, strictest own budget first."""
    statement = """
      SELECT c.*, COALESCE(a.joined, 0) AS joined, COALESCE(a.declined, 0) AS declined,
             COALESCE(a.sent, 0) AS sent, COALESCE(a.received, 0) AS received
      FROM clients c LEFT JOIN (
        SELECT client, SUM(answered) AS joined, SUM(1 - answered) AS declined, SUM(sent) AS sent,
               SUM(received) AS received
        FROM answers WHERE job = ? GROUP BY client) a USING (client)
      WHERE c.job = ? ORDER BY c.own_epsilon IS NULL, c.own_epsilon, c.rowid"""
    return [_client(row, budgets) for row in journal.query(statement, (job, job))]


def _by_label(journal: Journal) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for job in journal.jobs():
        found.setdefault(job["label"], []).append(job)
    return found


def _job(journal: Journal, job: Mapping[str, Any]) -> JobSummary:
    key = (job["job"],)
    rounds = journal.query("SELECT round, active, seconds FROM rounds WHERE job = ? ORDER BY round", key)
    own = """SELECT name, value FROM metrics WHERE job = ? AND (name LIKE 'own accuracy%' OR name LIKE
             'personal accuracy%') AND name NOT LIKE '%variance%'"""
    about = journal.about()
    measure = str(about.get("headline", "accuracy"))
    measured: dict[str, dict[int, float]] = {name: {} for name in (measure, *about.get("metrics", ()))}
    for row in journal.query("SELECT name, round, value FROM metrics WHERE job = ? ORDER BY round", key):
        if row["name"] in measured:  # SQLite stores NaN as NULL
            measured[row["name"]][row["round"] + 1] = math.nan if row["value"] is None else row["value"]
    return JobSummary(
        name=job["job"],
        seed=job["seed"],
        status=job["status"],
        planned=job["rounds"],
        facts=job["facts"],
        clients=tuple(summarise_clients(journal, job["job"], str(job["facts"].get("budgets", "own")))),
        rounds=tuple((row["round"] + 1, row["active"], row["seconds"]) for row in rounds),
        accuracy=measured.pop(measure),
        own={row["name"]: row["value"] for row in journal.query(own, key)},
        metrics=measured,
        measure=measure,
        deployed="contract" in about,
    )


def _client(row: Mapping[str, Any], budgets: str) -> ClientSummary:
    epsilon, spent = row["epsilon"], row["spent"]
    own = math.inf if row["own_epsilon"] is None else row["own_epsilon"]
    limit = min(own, own if epsilon is None else epsilon) if budgets == "own" else epsilon
    same = ("client", "epsilon", "delta", "records", "noise_multiplier", "spent", "joined", "declined")
    return ClientSummary(
        **{name: row[name] for name in (*same, "sent", "received")},
        own_epsilon=own,
        ratio=None if epsilon is None or spent is None else spent / epsilon,
        exceeded=limit is not None and spent is not None and spent > limit,
        left_after=None if row["left_after"] is None else row["left_after"] + 1,
    )


def final_value(job: JobSummary, values: Mapping[int, float]) -> float:
    """Return the mean of a metric over a job's final rounds."""
    return statistics.fmean(values[round] for round in final_rounds(job))
