"""What the journals say, per method and per client, as plain figures.

Rounds are counted from one here: the journal's round 0 is a reader's first. Where a method ran with several seeds,
figures come from its finished jobs, or from all that have begun while none is finished.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from polyeps.experiment.journal import Journal

LAST_ROUNDS = 10  # the final accuracy is the mean over those of them that were evaluated
NOT_BEGUN = "not begun"  # nobody knows yet whose budgets a method will spend


@dataclass(frozen=True)
class ClientSummary:
    """What became of one client in one job."""

    client: str
    epsilon: float | None  # the budget in force; None: no promise
    own_epsilon: float  # infinite: it chose to be promised nothing
    delta: float | None
    records: int
    scale: float | None
    spent: float | None  # None: its ledger has not been read
    ratio: float | None  # spent over the budget in force
    exceeded: bool  # more was spent than the budget in force, or than its own where that one was promised
    joined: int  # rounds answered
    declined: int
    left_after: int | None  # rounds after which it could afford no further one
    sent: int  # bytes
    received: int


@dataclass(frozen=True)
class MethodSummary:
    """One method of one run over its seeds; bytes and clients are of one job, on average over seeds."""

    label: str
    method: str
    run: str
    summary: str
    budgets: str  # own, minimum, maximum, none
    seeds: int
    finished: int  # of the seeds
    clients: int
    rounds: int  # planned
    rounds_run: float
    final_accuracy: float | None  # None: never evaluated; NaN: not a number in one of the last rounds
    final_accuracy_deviation: float | None  # over seeds, n - 1 in the denominator; None: one seed
    last_accuracy: float | None
    metrics: Mapping[str, float | None]  # the experiment's own ones, over the same rounds as the final accuracy
    bytes_up: float
    bytes_down: float
    bytes_up_per_client_round: float | None
    seconds_per_round: float | None
    largest_ratio: float | None  # over all clients and seeds
    exceeded: int  # clients over all seeds
    left_early: float  # clients that could afford no further round before the planned end


@dataclass(frozen=True)
class Job:
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


@dataclass(frozen=True)
class Line:
    """One method of one run over its seeds: a row of the table, a line in the pictures."""

    label: str
    method: str
    run: str
    jobs: tuple[Job, ...]

    @property
    def facts(self) -> Mapping[str, Any]:
        return next((job.facts for job in self.jobs if job.facts), {})

    @property
    def budgets(self) -> str:
        """Whose budgets are in force; with budgets drawn by seed it is each client's own only if it always was."""
        if not any(job.clients for job in self.jobs):
            return NOT_BEGUN
        kinds = [str(job.facts.get("budgets", "own")) for job in self.jobs if job.facts]
        return next((kind for kind in kinds if kind != "own"), "own")

    @property
    def alike(self) -> bool:
        """Whether all its clients set the same budget."""
        return len({row.own_epsilon for job in self.jobs for row in job.clients}) == 1

    @property
    def control(self) -> bool:
        """Whether something else than each client's own budget is in force."""
        return self.budgets != "own"

    @property
    def counted(self) -> tuple[Job, ...]:
        """Half a job must not be averaged with whole ones."""
        done = tuple(job for job in self.jobs if job.status == "done")
        return done or tuple(job for job in self.jobs if job.status == "running")


def read(journals: Sequence[Journal]) -> tuple[Line, ...]:
    """All methods of all runs in the order they were added, those under the clients' own budgets first."""
    runs = names(journals)
    found = [
        Line(label, jobs[0]["method"], run, tuple(_job(journal, job) for job in jobs))
        for journal, run in zip(journals, runs, strict=True)
        for label, jobs in _by_label(journal).items()
    ]
    times = Counter(line.label for line in found)
    shown = [
        line if times[line.label] == 1 else Line(f"{line.label} ({line.run})", line.method, line.run, line.jobs)
        for line in found
    ]
    return tuple(sorted(shown, key=lambda line: line.control))


def names(journals: Sequence[Journal]) -> list[str]:
    """What to call each run: its name, with its folder where two bear the same name."""
    plain = [str(journal.about().get("name", journal.path.parent.name)) for journal in journals]
    times = Counter(plain)
    return [
        name if times[name] == 1 else f"{name}, {journal.path.parent}"
        for name, journal in zip(plain, journals, strict=True)
    ]


def summaries(journals: Sequence[Journal]) -> list[MethodSummary]:
    """One row per method of every run."""
    return [summarise(line) for line in read(journals)]


def summarise(line: Line) -> MethodSummary:
    """A method over its seeds."""
    counted = line.counted
    finals = [_final(job, job.accuracy) for job in counted if job.accuracy]
    lasts = [job.accuracy[max(job.accuracy)] for job in counted if job.accuracy]
    seconds = [spell for job in counted for *_, spell in job.rounds]
    joined = sum(client.joined for job in counted for client in job.clients)
    sent = sum(client.sent for job in counted for client in job.clients)
    everyone = [client for job in line.jobs for client in job.clients]
    return MethodSummary(
        label=line.label,
        method=line.method,
        run=line.run,
        summary=str(line.facts.get("summary", "")),
        budgets=line.budgets,
        seeds=len(line.jobs),
        finished=sum(job.status == "done" for job in line.jobs),
        clients=max((len(job.clients) for job in line.jobs), default=0),
        rounds=max(job.planned for job in line.jobs),
        rounds_run=_mean([len(job.rounds) for job in counted]) or 0.0,
        final_accuracy=_mean(finals),
        final_accuracy_deviation=deviation(finals) if len(finals) > 1 else None,
        last_accuracy=_mean(lasts),
        metrics={
            name: _mean([_final(job, job.metrics[name]) for job in counted if job.metrics.get(name)])
            for name in dict.fromkeys(name for job in line.jobs for name in job.metrics)
        },
        bytes_up=sent / max(1, len(counted)),
        bytes_down=sum(client.received for job in counted for client in job.clients) / max(1, len(counted)),
        bytes_up_per_client_round=sent / joined if joined else None,
        seconds_per_round=_mean(seconds),
        largest_ratio=max((client.ratio for client in everyone if client.ratio is not None), default=None),
        exceeded=sum(client.exceeded for client in everyone),
        left_early=_mean([left_early(job) for job in counted]) or 0.0,
    )


def left_early(job: Job) -> int:
    """How many clients could afford no further round while rounds were still planned."""
    return sum(client.left_after is not None and client.left_after < job.planned for client in job.clients)


def deviation(values: Sequence[float]) -> float:
    """The standard deviation of two or more figures, NaN if one of them is not finite."""
    return statistics.stdev(values) if all(map(math.isfinite, values)) else math.nan


def client_rows(journal: Journal, job: str, budgets: str = "own") -> list[ClientSummary]:
    """Every client of a job, strictest own budget first."""
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


def _job(journal: Journal, job: Mapping[str, Any]) -> Job:
    key = (job["job"],)
    rounds = journal.query("SELECT round, active, seconds FROM rounds WHERE job = ? ORDER BY round", key)
    own = "SELECT name, value FROM metrics WHERE job = ? AND name LIKE '% accuracy%' AND name NOT LIKE '%variance%'"
    measured: dict[str, dict[int, float]] = {name: {} for name in ("accuracy", *journal.about().get("metrics", ()))}
    for row in journal.query("SELECT name, round, value FROM metrics WHERE job = ? ORDER BY round", key):
        if row["name"] in measured:  # SQLite keeps what is not a number as NULL
            measured[row["name"]][row["round"] + 1] = math.nan if row["value"] is None else row["value"]
    return Job(
        name=job["job"],
        seed=job["seed"],
        status=job["status"],
        planned=job["rounds"],
        facts=job["facts"],
        clients=tuple(client_rows(journal, job["job"], job["facts"].get("budgets", "own"))),
        rounds=tuple((row["round"] + 1, row["active"], row["seconds"]) for row in rounds),
        accuracy=measured.pop("accuracy"),
        own={row["name"]: row["value"] for row in journal.query(own, key)},
        metrics=measured,
    )


def _client(row: Mapping[str, Any], budgets: str) -> ClientSummary:
    epsilon, spent = row["epsilon"], row["spent"]
    own = math.inf if row["own_epsilon"] is None else row["own_epsilon"]
    limit = min(own, own if epsilon is None else epsilon) if budgets == "own" else epsilon
    return ClientSummary(
        client=row["client"],
        epsilon=epsilon,
        own_epsilon=own,
        delta=row["delta"],
        records=row["records"],
        scale=row["scale"],
        spent=spent,
        ratio=None if epsilon is None or spent is None else spent / epsilon,
        exceeded=limit is not None and spent is not None and spent > limit,
        joined=row["joined"],
        declined=row["declined"],
        left_after=None if row["left_after"] is None else row["left_after"] + 1,
        sent=row["sent"],
        received=row["received"],
    )


def final_rounds(job: Job) -> tuple[int, ...]:
    """The evaluated rounds among the last of a job: with few evaluations, early ones must not count for the end."""
    return tuple(round for round in sorted(job.accuracy) if round > max(job.accuracy) - LAST_ROUNDS)


def _final(job: Job, values: Mapping[int, float]) -> float:
    return statistics.fmean(values[round] for round in final_rounds(job))


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None
