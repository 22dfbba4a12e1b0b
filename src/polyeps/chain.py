"""An append-only table of rows in one SQLite file, each row committing to the one before it.

The file is safe under several processes and threads, and a row is on the disk before `append` returns. The head of
the chain is also kept in a small file beside it, so that a cut tail or an old copy put back is noticed. What this
cannot stop is an owner who rewrites file and head together: the chain protects the client against accidents and
against others, not against itself.
"""

import contextlib
import hashlib
import json
import os
import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from polyeps.errors import LedgerError, LedgerTampered
from polyeps.head import Head, head_path, read_head, write_head

_APPLICATION = 0x706C7965  # marks the file as ours
_SCHEMA = 1
_START = "0" * 64
_PATIENCE = 60.0  # seconds to wait for another process that is writing
_CREATE = f"""
PRAGMA application_id = {_APPLICATION};
PRAGMA user_version = {_SCHEMA};
CREATE TABLE rows (
    seq INTEGER PRIMARY KEY, time TEXT NOT NULL, kind TEXT NOT NULL, body TEXT NOT NULL,
    previous TEXT NOT NULL, hash TEXT NOT NULL
) STRICT;
CREATE TRIGGER rows_are_final BEFORE UPDATE ON rows BEGIN SELECT RAISE(ABORT, 'rows are never changed'); END;
CREATE TRIGGER rows_stay BEFORE DELETE ON rows BEGIN SELECT RAISE(ABORT, 'rows are never deleted'); END;
"""


class Row(NamedTuple):
    """One line of the chain."""

    seq: int
    time: str
    kind: str
    body: str  # JSON
    previous: str
    hash: str

    @property
    def content(self) -> Any:
        return json.loads(self.body)


Draft = tuple[str, dict[str, Any]]  # kind and content of a row to be
Clock = Callable[[], datetime]


def now() -> datetime:
    """The time rows are stamped with."""
    return datetime.now(UTC)


def _hash(seq: int, time: str, kind: str, body: str, previous: str) -> str:
    return hashlib.sha256(json.dumps([seq, time, kind, body, previous]).encode()).hexdigest()


class Chain:
    """The file at `path`; `replay` is told of every row exactly once, in order, after it is known to be genuine."""

    def __init__(self, path: Path, replay: Callable[[Row], None], *, clock: Clock = now) -> None:
        self.path = path
        self._replay, self._clock = replay, clock
        self._lock = threading.RLock()
        self._connection: sqlite3.Connection | None = None
        self._process = 0
        self._version = -1  # SQLite's count of what other connections wrote, when we last looked
        self.head = Head(0, _START)
        with self._errors(), self._lock:
            self._look()

    @staticmethod
    def create(path: Path, drafts: Sequence[Draft], *, clock: Clock = now) -> None:
        """Start a chain; an existing one is left alone."""
        if path.exists():
            raise LedgerError(f"{path} exists already; open it instead of creating it")
        left = read_head(path)
        if left is not None and left.seq > len(drafts):
            raise LedgerTampered(
                f"{path} is gone, but {head_path(path).name} remembers {left.seq} rows: put the file back, or "
                "delete that file too if you mean to forget what was spent"
            )
        unfinished = path.with_name(f"{path.name}.{os.getpid()}.new")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            unfinished.unlink(missing_ok=True)
            with contextlib.closing(sqlite3.connect(unfinished, isolation_level=None)) as connection:
                connection.executescript(_CREATE)
                rows = _chained(drafts, Head(0, _START), clock)
                connection.execute("BEGIN")  # else every row would wait for the disk
                connection.executemany("INSERT INTO rows VALUES (?, ?, ?, ?, ?, ?)", rows)
                connection.execute("COMMIT")
            write_head(path, Head(rows[-1].seq, rows[-1].hash))
            os.link(unfinished, path)  # unlike a rename, this fails when another process was first
        except FileExistsError:
            raise LedgerError(f"{path} exists already; open it instead of creating it") from None
        except (OSError, sqlite3.Error) as problem:
            raise LedgerError(f"{path} cannot be created: {problem}") from None
        finally:
            unfinished.unlink(missing_ok=True)

    def append(self, make: Callable[[], Sequence[Draft]]) -> None:
        """Add the rows `make` returns, all or none, after every earlier row was replayed."""
        with self._lock, self._errors():
            with self._writing() as connection:
                self._look()
                rows = _chained(make(), self.head, self._clock)
                connection.executemany("INSERT INTO rows VALUES (?, ?, ?, ?, ?, ?)", rows)
                connection.execute("COMMIT")
            for row in rows:
                self._accept(row)
            self._publish_head()

    def rows(self) -> list[Row]:
        """All rows, verified."""
        with self._lock, self._errors():
            return self._genuine_rows()

    def refresh(self) -> None:
        """Take notice of what other processes wrote."""
        with self._lock, self._errors():
            self._look()

    def verify(self) -> Head:
        """Check every row and the head file; name the first row that is not as written."""
        with self._lock, self._errors():
            rows = self._genuine_rows()
            return Head(rows[-1].seq, rows[-1].hash)

    def close(self) -> None:
        with self._lock:
            if self._connection is not None:
                self._connection.close()
                self._connection = None

    def __del__(self) -> None:
        connection = getattr(self, "_connection", None)
        if connection is not None and self._process == os.getpid():
            connection.close()

    def _accept(self, row: Row) -> None:
        self._replay(row)
        self.head = Head(row.seq, row.hash)

    def _look(self) -> None:
        """Verify again if anybody else wrote since we last looked, and replay what is new."""
        (version,) = self._open().execute("PRAGMA data_version").fetchone()
        if version == self._version:
            return
        rows = self._genuine_rows()
        if self.head.seq and (len(rows) < self.head.seq or rows[self.head.seq - 1].hash != self.head.hash):
            raise LedgerTampered(f"{self.path} was replaced while it was open; restart and verify it")
        for row in rows[self.head.seq :]:
            self._accept(row)
        self._version = version

    def _genuine_rows(self) -> list[Row]:
        # The head first: others may append while we read, and it must not be younger than the rows.
        kept = read_head(self.path)
        stored = self._open().execute("SELECT seq, time, kind, body, previous, hash FROM rows ORDER BY seq")
        rows: list[Row] = []
        previous = _START
        for expected, values in enumerate(stored, start=1):
            row = Row(*values)
            if row.seq != expected:
                raise LedgerTampered(f"{self.path}: row {expected} is missing")
            whole = isinstance(row.seq, int) and all(isinstance(value, str) for value in row[1:])
            if not whole or row.previous != previous or row.hash != _hash(*row[:-1]):
                raise LedgerTampered(f"{self.path}: row {expected} is not as it was written, or not in its place")
            rows.append(row)
            previous = row.hash
        if not rows:
            raise LedgerTampered(f"{self.path}: row 1 is missing")
        if kept is None:
            raise LedgerTampered(
                f"{head_path(self.path)} is missing; the head belongs beside the ledger, bring it along"
            )
        if kept.seq > len(rows):
            raise LedgerTampered(
                f"{self.path}: row {len(rows) + 1} is missing; the tail was cut or an old copy was put back"
            )
        if rows[kept.seq - 1].hash != kept.hash:
            raise LedgerTampered(f"{self.path}: row {kept.seq} is not the one its head file remembers")
        return rows

    def _open(self) -> sqlite3.Connection:
        if self._connection is None or self._process != os.getpid():  # a connection must not cross a fork
            if not self.path.exists():
                raise LedgerError(f"there is no ledger at {self.path}; set a budget to create it")
            writable = os.access(self.path, os.W_OK)
            mode = "rw" if writable else "ro"
            address = f"{self.path.absolute().as_uri()}?mode={mode}"
            connection = sqlite3.connect(
                address, uri=True, timeout=_PATIENCE, isolation_level=None, check_same_thread=False
            )
            connection.execute("PRAGMA synchronous = EXTRA")  # a commit is on the disk when it returns
            _check_file(self.path, connection)
            self._connection, self._process, self._version = connection, os.getpid(), -1
        return self._connection

    @contextlib.contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        """Hold the file's write lock; whatever is not committed inside is undone."""
        connection = self._open()
        connection.execute("BEGIN IMMEDIATE")
        try:
            yield connection
        finally:
            if connection.in_transaction:
                connection.execute("ROLLBACK")

    def _publish_head(self) -> None:
        """Write the head file under the write lock, so that it can only move forward."""
        with self._writing() as connection:
            seq, digest = connection.execute("SELECT seq, hash FROM rows ORDER BY seq DESC LIMIT 1").fetchone()
            try:
                write_head(self.path, Head(seq, digest))
            except OSError as problem:
                raise LedgerError(
                    f"row {seq} of {self.path} is written but its head could not be: {problem}; free some space"
                ) from None

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as problem:
            raise _explain(self.path, problem) from None


def _chained(drafts: Sequence[Draft], head: Head, clock: Clock) -> list[Row]:
    time = clock().isoformat()
    rows: list[Row] = []
    seq, previous = head
    for kind, content in drafts:
        seq += 1
        body = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
        rows.append(Row(seq, time, kind, body, previous, _hash(seq, time, kind, body, previous)))
        previous = rows[-1].hash
    return rows


def _check_file(path: Path, connection: sqlite3.Connection) -> None:
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    (schema,) = connection.execute("PRAGMA user_version").fetchone()
    if application != _APPLICATION:
        raise LedgerError(f"{path} is a database, but not a polyeps ledger; check the path")
    if schema != _SCHEMA:
        age = "an older" if schema < _SCHEMA else "a newer"
        raise LedgerError(
            f"{path} was written by {age} polyeps (schema {schema}, this one reads {_SCHEMA}); use that version"
        )


def _explain(path: Path, problem: sqlite3.Error) -> LedgerError:
    code = getattr(problem, "sqlite_errorcode", None)
    match (code or 0) & 0xFF:
        case sqlite3.SQLITE_FULL:
            return LedgerError(
                f"the disk that holds {path} is full; nothing was written: free some space and try again"
            )
        case sqlite3.SQLITE_READONLY:
            return LedgerError(f"{path} is read-only; nothing was written: make it writable for this account")
        case sqlite3.SQLITE_BUSY:
            return LedgerError(f"another process has held {path} for over {_PATIENCE:g} s; nothing was written")
        case sqlite3.SQLITE_NOTADB:
            return LedgerError(f"{path} is not a polyeps ledger; check the path")
        case sqlite3.SQLITE_CORRUPT | sqlite3.SQLITE_ERROR | 0:  # 0: text that is no longer text
            return LedgerTampered(f"{path} is damaged and cannot be read: {problem}")
        case _:
            return LedgerError(f"{path} cannot be used: {problem}")
