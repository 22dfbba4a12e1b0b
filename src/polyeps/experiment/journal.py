"""The journal of a run, one SQLite file per run folder: jobs, rounds, clients, metrics, bytes and checkpoints.

A job is one method with one seed. A round and the state after it are written in one transaction, so a run that stops at
any time resumes after its last complete round.
"""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from polyeps.errors import InputError, JournalError

VERSION = 3
_SCHEMA = """
CREATE TABLE about (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE jobs (
  job TEXT PRIMARY KEY, method TEXT NOT NULL, label TEXT NOT NULL, seed INTEGER NOT NULL,
  status TEXT NOT NULL, started TEXT, ended TEXT, rounds INTEGER NOT NULL, facts TEXT NOT NULL);
CREATE TABLE rounds (
  job TEXT NOT NULL, round INTEGER NOT NULL, invited INTEGER NOT NULL, answered INTEGER NOT NULL,
  declined INTEGER NOT NULL, active INTEGER NOT NULL, seconds REAL NOT NULL, PRIMARY KEY (job, round));
CREATE TABLE metrics (
  job TEXT NOT NULL, round INTEGER NOT NULL, name TEXT NOT NULL, value REAL, PRIMARY KEY (job, round, name));
CREATE TABLE answers (
  job TEXT NOT NULL, round INTEGER NOT NULL, client TEXT NOT NULL, answered INTEGER NOT NULL,
  received INTEGER NOT NULL, sent INTEGER NOT NULL, PRIMARY KEY (job, round, client));
CREATE TABLE clients (
  job TEXT NOT NULL, client TEXT NOT NULL, epsilon REAL, delta REAL, own_epsilon REAL, records INTEGER NOT NULL,
  noise_multiplier REAL, level TEXT, spent REAL, left_after INTEGER, PRIMARY KEY (job, client));
CREATE TABLE checkpoints (
  job TEXT PRIMARY KEY, round INTEGER NOT NULL, active TEXT NOT NULL, state BLOB NOT NULL);
CREATE TABLE memory (
  job TEXT NOT NULL, piece TEXT NOT NULL, content BLOB NOT NULL, PRIMARY KEY (job, piece)) WITHOUT ROWID;
"""

COUNTED = ("invited", "answered", "declined", "active", "seconds")  # of a round, beside its metrics
_NEW_JOB = "INSERT INTO jobs VALUES (?, ?, ?, ?, 'waiting', NULL, NULL, ?, '{}')"

JobRow = tuple[str, str, str, int, int]  # job, method, label, seed, rounds


class ClientRow(NamedTuple):
    """A client of a job: its effective budget (None: no guarantee) and its own one."""

    client: str
    epsilon: float | None
    delta: float | None
    own_epsilon: float | None  # of the budget that the client itself set; controls replace it
    records: int
    noise_multiplier: float | None
    level: str | None = None  # the privacy level it chose, if there are levels


@dataclass(frozen=True)
class Checkpoint:
    """The state from which a job can be resumed."""

    round: int  # the next one
    active: tuple[str, ...] | None  # clients that may be drawn; None: those of the job that have not left
    state: bytes
    memory: Mapping[str, bytes]  # of clients, in pieces; only those that changed are written, all are read


def spent_key(epsilon: float, delta: float) -> str:
    """Return the key of the facts that hold the ε spent against observers who know the draws."""
    return f"{epsilon!r} at {delta!r}"


class Journal:
    """The open journal at `path`."""

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            if (path.parent / "sweep.json").exists():
                raise InputError(f"{path.parent} is a sweep; give the folder of one of its runs")
            raise InputError(f"there is no run at {path.parent}: {path.name} is missing; give the folder of a run")
        self.path = path
        address = f"{path.absolute().as_uri()}?immutable=1" if _archived(path) else path
        self._connection = sqlite3.connect(address, isolation_level=None, timeout=30, uri=True)
        self._connection.row_factory = sqlite3.Row
        with self._errors():
            version = self._connection.execute("PRAGMA user_version").fetchone()[0]
            if version != VERSION:
                raise JournalError(f"{path} is not a journal this version reads (schema {version}, not {VERSION})")
            self._connection.execute("PRAGMA synchronous = FULL")

    @classmethod
    def create(cls, path: Path, about: Mapping[str, Any], jobs: Iterable[JobRow] = ()) -> Journal:
        """Start a journal with the jobs to be done, atomically, so that no job is forgotten."""
        if path.exists():
            raise InputError(f"{path.parent} holds a run already; resume it, or choose another folder")
        partial = path.with_suffix(".part")
        partial.unlink(missing_ok=True)
        try:
            connection = sqlite3.connect(partial, isolation_level=None)
            connection.executescript("PRAGMA journal_mode = WAL;" + _SCHEMA)
            facts = [(key, json.dumps(value)) for key, value in about.items()]
            connection.executemany("INSERT INTO about VALUES (?, ?)", facts)
            connection.executemany(_NEW_JOB, jobs)
            connection.execute(f"PRAGMA user_version = {VERSION}")
            connection.close()
            partial.rename(path)
        except (sqlite3.Error, OSError) as problem:
            raise JournalError(f"{path} cannot be written ({problem}); make room or choose another folder") from problem
        return cls(path)

    def close(self) -> None:
        """Close the file."""
        self._connection.close()

    # writing

    def begin(self, job: str, clients: Iterable[ClientRow], facts: Mapping[str, Any]) -> None:
        """Record that a job has begun, its clients and the terms of its guarantees."""
        with self._writing() as db:
            db.execute(
                "UPDATE jobs SET status = 'running', started = ?, facts = ? WHERE job = ?",
                (_now(), json.dumps(facts), job),
            )
            db.executemany(
                "INSERT OR REPLACE INTO clients VALUES (?, ?, ?, ?, ?, ?, ?, ?, NULL, NULL)",
                ((job, *client) for client in clients),
            )

    def write_round(
        self,
        job: str,
        round: int,
        counts: Mapping[str, float],  # COUNTED
        answers: Iterable[tuple[str, bool, int, int]],  # client, answered, received, sent
        left: Iterable[str],
        metrics: Mapping[str, float],
        checkpoint: Checkpoint,
    ) -> None:
        """Write a round and the checkpoint after it, both or neither."""
        with self._writing() as db:
            db.execute(
                "INSERT INTO rounds VALUES (:job, :round, :invited, :answered, :declined, :active, :seconds)",
                {"job": job, "round": round, **counts},
            )
            db.executemany("INSERT INTO answers VALUES (?, ?, ?, ?, ?, ?)", [(job, round, *one) for one in answers])
            db.executemany(
                "UPDATE clients SET left_after = ? WHERE job = ? AND client = ?", [(round, job, who) for who in left]
            )
            db.executemany("INSERT INTO metrics VALUES (?, ?, ?, ?)", [(job, round, *one) for one in metrics.items()])
            db.execute(
                "INSERT OR REPLACE INTO checkpoints VALUES (?, ?, ?, ?)",
                (job, checkpoint.round, json.dumps(checkpoint.active), checkpoint.state),
            )
            memory = [(job, piece, content) for piece, content in checkpoint.memory.items()]
            db.executemany("INSERT OR REPLACE INTO memory VALUES (?, ?, ?)", memory)

    def finish(self, job: str, spent: Mapping[str, float], facts: Mapping[str, Any]) -> None:
        """Record that a job is done and what every client has spent; drop its checkpoint."""
        with self._writing() as db:
            db.executemany(
                "UPDATE clients SET spent = ? WHERE job = ? AND client = ?", [(e, job, who) for who, e in spent.items()]
            )
            known = json.loads(db.execute("SELECT facts FROM jobs WHERE job = ?", (job,)).fetchone()[0])
            db.execute(
                "UPDATE jobs SET status = 'done', ended = ?, facts = ? WHERE job = ?",
                (_now(), json.dumps({**known, **facts}), job),
            )
            for table in ("checkpoints", "memory"):
                db.execute(f"DELETE FROM {table} WHERE job = ?", (job,))

    # reading

    def about(self) -> dict[str, Any]:
        """Return the facts about the run: its experiment, version and others."""
        return {row["key"]: json.loads(row["value"]) for row in self.query("SELECT * FROM about")}

    def jobs(self) -> list[dict[str, Any]]:
        """Return all jobs in the order they were added, facts unpacked."""
        return [{**row, "facts": json.loads(row["facts"])} for row in self.query("SELECT * FROM jobs ORDER BY rowid")]

    def rounds(self) -> tuple[list[dict[str, Any]], list[str]]:
        """Return all rounds of all jobs, each with its metrics by name, and the names of all metrics."""
        measured: dict[tuple[str, int], dict[str, Any]] = {}
        for row in self.query("SELECT * FROM metrics"):
            measured.setdefault((row["job"], row["round"]), {})[row["name"]] = row["value"]
        known = self.query(
            "SELECT label AS method, seed, rounds.* FROM rounds JOIN jobs USING (job) ORDER BY jobs.rowid, round"
        )
        rows = [row | measured.get((row["job"], row["round"]), {}) for row in known]
        return rows, sorted({name for found in measured.values() for name in found})

    def checkpoint(self, job: str) -> Checkpoint | None:
        """Return the checkpoint of a job, if it has begun."""
        for row in self.query("SELECT * FROM checkpoints WHERE job = ?", (job,)):
            pieces = self.query("SELECT piece, content FROM memory WHERE job = ?", (job,))
            memory = {piece["piece"]: piece["content"] for piece in pieces}
            active = json.loads(row["active"])
            if active is None:
                staying = "SELECT client FROM clients WHERE job = ? AND left_after IS NULL ORDER BY rowid"
                active = [one["client"] for one in self.query(staying, (job,))]
            return Checkpoint(row["round"], tuple(active), row["state"], memory)
        return None

    def query(self, statement: str, values: Sequence[Any] = ()) -> list[dict[str, Any]]:
        """Return the rows of any SELECT as dictionaries."""
        with self._errors():
            return [dict(row) for row in self._connection.execute(statement, values)]

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        with self._errors():
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield self._connection
                self._connection.execute("COMMIT")
            except BaseException:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as problem:
            raise JournalError(
                f"{self.path} cannot be used ({problem}); make room on the disk or check the file, then resume the run"
            ) from problem


def _archived(path: Path) -> bool:
    """Say whether the folder is read-only: SQLite would otherwise write beside a file that it only reads."""
    log = path.with_name(f"{path.name}-wal")  # rounds of a running job that are not in the file yet
    return not os.access(path.parent, os.W_OK) and not (log.exists() and log.stat().st_size)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
