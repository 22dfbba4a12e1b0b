"""An append-only table of rows in one SQLite file, each row committing to the one before it.

The file is safe under several processes and threads, and a row is on disk before `append` returns. A small file beside
it (`head_file`) records where the chain ends, so that removed, restored or foreign rows are detected. There is no key:
an attacker who rewrites both files together is detected only with a head that was stored elsewhere.
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
from typing import Any, NamedTuple, TypeVar

from polyeps.errors import LedgerError, LedgerTampered, PolyepsError
from polyeps.ledger.chain_file import INSERT, check_schema, check_table, create_file, explain, open_file, refuse_links
from polyeps.ledger.head_file import START, Head, StoredHead, announced, head_path, read_head

_ALL = "SELECT seq, time, kind, body, previous, hash FROM rows ORDER BY seq"
_LAST = "SELECT seq, time, kind, body, previous, hash FROM rows WHERE seq >= ? ORDER BY seq"

_T = TypeVar("_T")


class LedgerRow(NamedTuple):
    """One row of the chain."""

    seq: int
    time: str
    kind: str
    body: str  # JSON
    previous: str
    hash: str

    @property
    def content(self) -> Any:
        return json.loads(self.body)


Draft = tuple[str, dict[str, Any]]  # kind and content of a new row


def now() -> datetime:
    """Return the time that rows are stamped with."""
    return datetime.now(UTC)


def _hash(seq: int, time: str, kind: str, body: str, previous: str) -> str:
    return hashlib.sha256(json.dumps([seq, time, kind, body, previous]).encode()).hexdigest()


class Chain:
    """The file at `path`; `replay` is called with every verified row exactly once, in order.

    Without `replay` the file is only to be verified, in one pass that keeps no row.
    """

    def __init__(self, path: Path, replay: Callable[[LedgerRow], None] | None = None) -> None:
        self.path = path
        self._replay = replay or (lambda _: None)
        self._lock = threading.RLock()
        self._connection: sqlite3.Connection | None = None
        self._process = 0
        self._file = (0, 0)  # device and inode of the open file
        self._version = -1  # SQLite's data_version when the rows were last read
        self.head = Head(0, START)
        if replay is not None:
            self.refresh()

    @staticmethod
    def create(path: Path, drafts: Sequence[Draft]) -> None:
        """Create a chain; an existing one is not touched."""
        rows = _chained(drafts, Head(0, START))
        try:
            create_file(path, rows, _end(rows))
        except OSError as problem:
            raise LedgerError(f"{path} cannot be created: {problem}") from None

    def append(self, make: Callable[[], Sequence[Draft]]) -> None:
        """Append the rows that `make` returns, all or none, after every earlier row was replayed."""
        with self._lock, self._errors(), self._writing() as connection:
            self._look()
            rows = _chained(make(), self.head)
            if not rows:
                return
            check_schema(self.path, connection)
            connection.executemany(INSERT, rows)
            stored = [LedgerRow(*values) for values in connection.execute(_LAST, (self.head.seq,))]
            if not stored or _end(stored[:1]) != self.head or stored[1:] != rows:
                raise LedgerTampered(f"{self.path}: row {rows[0].seq} cannot be read back; nothing was committed")
            written = False
            try:
                mode = self.path.stat().st_mode & 0o666  # as SQLite's journal
                with announced(head_path(self.path), self.head, _end(rows), mode):
                    connection.execute("COMMIT")
                    written = True
                    for row in rows:
                        self._accept(row)
            except OSError as problem:
                done = "was written, but not confirmed in its head" if written else "was not written"
                raise LedgerError(f"{self.path}: row {rows[0].seq} {done}: {problem}; free some space") from None

    def rows(self) -> list[LedgerRow]:
        """Return all rows, verified."""
        rows: list[LedgerRow] = []

        def look() -> list[LedgerRow]:
            rows.clear()
            self._scan(rows.append)
            return rows

        with self._lock, self._errors():
            return self._settled(look)

    def refresh(self) -> None:
        """Replay rows that other processes wrote."""
        with self._lock, self._errors():
            self._look()

    def verify(self, kept: StoredHead | None = None) -> Head:
        """Check every row and the head file, and that the chain continues a head that was stored elsewhere."""
        with self._lock, self._errors():
            end, found = self._settled(lambda: self._scan(lambda _: None, kept.ends if kept else ()))
        if kept is not None and not found:
            seq = kept.head.seq
            gone = "is missing" if seq > end.seq else "is not the one that it names"
            raise LedgerTampered(
                f"{self.path} does not continue the head that was stored: row {seq} {gone}, so rows were removed or "
                "rewritten"
            )
        return end

    def close(self) -> None:
        with self._lock:
            if self._connection is not None:
                self._connection.close()
                self._connection = None

    def __del__(self) -> None:
        connection = getattr(self, "_connection", None)
        if connection is not None and self._process == os.getpid():
            connection.close()

    def _accept(self, row: LedgerRow) -> None:
        try:
            self._replay(row)
        except LedgerError:
            raise
        except (PolyepsError, LookupError, ValueError, TypeError, AttributeError, ArithmeticError) as problem:
            raise LedgerTampered(f"{self.path}: row {row.seq} cannot be understood: {problem}") from None
        self.head = Head(row.seq, row.hash)

    def _settled(self, look: Callable[[], _T]) -> _T:
        """Read rows and head; again under a lock if they disagree, since another process may have just appended."""
        connection = self._open()
        try:
            return look()
        except LedgerTampered:
            if connection.in_transaction:
                raise
        with _transaction(connection, "BEGIN"):
            connection.execute("SELECT count(*) FROM sqlite_master").fetchone()  # from here on, no other can commit
            return look()

    def _look(self) -> None:
        self._settled(self._replay_new)

    def _replay_new(self) -> None:
        """Check the head and, if another connection wrote since the last look, every row; replay new rows."""
        kept = self._read_head()
        (version,) = self._open().execute("PRAGMA data_version").fetchone()
        if version == self._version:
            self._check_end(kept, self.head)
            return
        new: list[LedgerRow] = []
        _, found = self._scan(lambda row: new.append(row) if row.seq > self.head.seq else None, [self.head])
        if not found:
            raise LedgerTampered(f"{self.path} was replaced or removed while it was open; restart and verify it")
        for row in new:
            self._accept(row)
        self._version = version

    def _scan(self, take: Callable[[LedgerRow], None], heads: Sequence[Head] = ()) -> tuple[Head, bool]:
        """Pass all rows to `take`; return the end, and whether the chain holds one of some heads.

        Refuse rows, a head file or a schema that were changed, possibly after some rows were passed.
        """
        kept = self._read_head()
        connection = self._open()
        check_table(self.path, connection)
        end = Head(0, START)
        found, recorded = end in heads, False
        for values in connection.execute(_ALL):
            row, expected = LedgerRow(*values), end.seq + 1
            if row.seq != expected:
                raise LedgerTampered(f"{self.path}: row {expected} is missing")
            whole = isinstance(row.seq, int) and all(isinstance(value, str) for value in row[1:])
            if not whole or row.previous != end.hash or row.hash != _hash(*row[:-1]):
                raise LedgerTampered(f"{self.path}: row {expected} is not as it was written, or not in its place")
            take(row)
            end = Head(row.seq, row.hash)
            found, recorded = found or end in heads, recorded or end in kept.ends
        if not end.seq:
            raise LedgerTampered(f"{self.path}: row 1 is missing")
        if kept.head.seq <= end.seq and not recorded:
            raise LedgerTampered(f"{self.path}: row {kept.head.seq} is not the one its head file records")
        self._check_end(kept, end)
        check_schema(self.path, connection)
        return end, found

    def _read_head(self) -> StoredHead:
        kept = read_head(self.path)
        if kept is None:
            raise LedgerTampered(f"{head_path(self.path)} is missing; copy the head file along with the ledger")
        return kept

    def _check_end(self, kept: StoredHead, end: Head) -> None:
        """Refuse a chain that does not end where its head file says."""
        if end in kept.ends:
            return
        if end.seq in (head.seq for head in kept.ends):
            raise LedgerTampered(f"{self.path}: row {end.seq} is not the one its head file records")
        if end.seq < kept.head.seq:
            raise LedgerTampered(
                f"{self.path}: row {end.seq + 1} is missing; the tail was cut or an old copy was put back"
            )
        raise LedgerTampered(
            f"{self.path}: row {kept.head.seq + 1} was not written by polyeps, because its head file ends before it; "
            "if an older head file was restored by mistake, put the right one back"
        )

    def _open(self) -> sqlite3.Connection:
        if self._connection is None or self._process != os.getpid():  # a connection must not cross a fork
            connection = open_file(self.path)
            self._connection, self._process, self._version = connection, os.getpid(), -1
            self._file = self._identity()
        return self._connection

    def _identity(self) -> tuple[int, int]:
        try:
            found = self.path.stat()
        except FileNotFoundError:
            return 0, 0
        return found.st_dev, found.st_ino

    @contextlib.contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        """Hold the file's write lock; roll back what is not committed inside."""
        connection = self._open()
        refuse_links(self.path)
        with _transaction(connection, "BEGIN IMMEDIATE"):
            if self._identity() != self._file:
                raise LedgerTampered(f"{self.path} was replaced or removed while it was open; restart and verify it")
            yield connection

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as problem:
            raise explain(self.path, problem) from None
        except UnicodeDecodeError:  # in SQLite's message, which quotes the file
            raise LedgerTampered(f"{self.path} is damaged and cannot be read") from None
        except OSError as problem:
            raise LedgerError(f"{self.path} cannot be used: {problem}") from None


@contextlib.contextmanager
def _transaction(connection: sqlite3.Connection, begin: str) -> Iterator[None]:
    connection.execute(begin)
    try:
        yield
    finally:
        if connection.in_transaction:
            connection.execute("ROLLBACK")


def _end(rows: Sequence[LedgerRow]) -> Head:
    return Head(rows[-1].seq, rows[-1].hash)


def _chained(drafts: Sequence[Draft], head: Head) -> list[LedgerRow]:
    time = now().isoformat()
    rows: list[LedgerRow] = []
    seq, previous = head
    for kind, content in drafts:
        seq += 1
        body = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
        rows.append(LedgerRow(seq, time, kind, body, previous, _hash(seq, time, kind, body, previous)))
        previous = rows[-1].hash
    return rows
