"""The SQLite file of a chain: created without races, opened, and checked against the schema."""

import contextlib
import os
import sqlite3
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any
from uuid import uuid4

from polyeps.errors import LedgerError, LedgerTampered
from polyeps.ledger.head_file import START, Head, announced, head_path, new_file, read_head, sync_folder

_APPLICATION = 0x706C7965  # marks the file as ours
_SCHEMA = 3
_READABLE = (1, 2, _SCHEMA)  # the tables are the same; version 2 adds reservations, version 3 repeated charges
_PATIENCE = 60.0  # seconds to wait for another process that is writing
_TABLES = """
CREATE TABLE rows (
    seq INTEGER PRIMARY KEY, time TEXT NOT NULL, kind TEXT NOT NULL, body TEXT NOT NULL,
    previous TEXT NOT NULL, hash TEXT NOT NULL
) STRICT;
CREATE TRIGGER rows_are_final BEFORE UPDATE ON rows BEGIN SELECT RAISE(ABORT, 'rows are never changed'); END;
CREATE TRIGGER rows_stay BEFORE DELETE ON rows BEGIN SELECT RAISE(ABORT, 'rows are never deleted'); END;
"""
_CREATE = f"""
BEGIN;
PRAGMA application_id = {_APPLICATION};
PRAGMA user_version = {_SCHEMA};
{_TABLES}
"""
INSERT = "INSERT INTO rows VALUES (?, ?, ?, ?, ?, ?)"
_DEFINED = "SELECT type, name, tbl_name, sql FROM sqlite_master ORDER BY rowid"


def create_file(path: Path, rows: Sequence[Sequence[Any]], end: Head) -> None:
    """Create a chain's file and head; of several processes that try, exactly one succeeds.

    A complete file is first written under another name. The head file, which announces its last row, is then linked
    into place; this fails if there is one already, so exactly one process creates the chain. Last, the file is linked
    to its name. Any process that finds an announced file not yet in place puts it there, so a creator may crash
    anywhere.
    """
    _refuse_existing(path)
    candidate = _candidate(path, end)
    claim = path.with_name(f"{path.name}.{uuid4().hex}.head.new")
    claimed = False
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _write_candidate(candidate, rows)
        with announced(claim, Head(0, START), end):
            try:
                os.link(claim, head_path(path))
            except FileExistsError:
                _refuse_existing(path)
                raise LedgerError(f"{path} was created and removed by another process meanwhile; try again") from None
            claimed = True
            sync_folder(path.parent)
            finish_creation(path)
    except (OSError, sqlite3.Error) as problem:
        raise LedgerError(f"{path} cannot be created: {problem}") from None
    finally:
        claim.unlink(missing_ok=True)
        if not claimed:
            candidate.unlink(missing_ok=True)


def finish_creation(path: Path) -> None:
    """Put the file that the head announces in place, unless it is there already."""
    kept = read_head(path)
    if kept is None or not kept.creating:
        return
    candidate = _candidate(path, kept.head)
    with contextlib.suppress(FileExistsError, FileNotFoundError):
        os.link(candidate, path)
        sync_folder(path.parent)
    candidate.unlink(missing_ok=True)


def _candidate(path: Path, end: Head) -> Path:
    return path.with_name(f"{path.name}.{end.hash[:32]}.new")


def _write_candidate(candidate: Path, rows: Sequence[Sequence[Any]]) -> None:
    os.close(new_file(candidate, b""))  # SQLite would make it world-readable
    with contextlib.closing(sqlite3.connect(candidate, isolation_level=None)) as connection:
        connection.executescript(_CREATE)
        connection.executemany(INSERT, rows)
        connection.execute("COMMIT")


def _refuse_existing(path: Path) -> None:
    refuse_links(path)
    if not path.exists():
        finish_creation(path)
    if path.exists():
        raise LedgerError(f"{path} exists already; open it instead of creating it")
    refuse_vanished(path)


def refuse_vanished(path: Path) -> None:
    """Refuse a chain whose file is missing while its head exists."""
    left = read_head(path)
    if left is None or path.exists():  # the creation was finished meanwhile
        return
    head = head_path(path).name
    if left.creating:
        raise LedgerError(
            f"the creation of {path} was cut off and cannot be finished; nothing was charged yet: delete {head} and "
            "create it again"
        )
    raise LedgerTampered(
        f"{path} is missing, but {head} records {left.head.seq} rows: put the file back, or delete {head} too if you "
        "mean to forget what was spent"
    )


def refuse_links(path: Path) -> None:
    """Refuse symbolic links in place of the file or of the files that SQLite writes beside it."""
    for name in (path, *(path.with_name(path.name + suffix) for suffix in ("-journal", "-wal", "-shm"))):
        if name.is_symlink():
            raise LedgerError(f"{name} is a symbolic link; a ledger must be a plain file: name the file itself")


def open_file(path: Path) -> sqlite3.Connection:
    """Open a chain's file and check that it is one."""
    refuse_links(path)
    if not path.exists():
        finish_creation(path)
    if not path.exists():
        refuse_vanished(path)
        raise LedgerError(f"there is no ledger at {path}; set a budget to create it")
    mode = "rw" if os.access(path, os.W_OK) else "ro"
    address = f"{path.absolute().as_uri()}?mode={mode}"
    connection = sqlite3.connect(address, uri=True, timeout=_PATIENCE, isolation_level=None, check_same_thread=False)
    try:
        connection.execute("PRAGMA synchronous = EXTRA")  # a commit is on disk when it returns
        _check_kind(path, connection)
        check_table(path, connection)
    except BaseException:
        connection.close()
        raise
    return connection


def _check_kind(path: Path, connection: sqlite3.Connection) -> None:
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    (schema,) = connection.execute("PRAGMA user_version").fetchone()
    if application != _APPLICATION:
        raise LedgerError(f"{path} is a database, but not a polyeps ledger; check the path")
    if schema not in _READABLE:
        age = "an older" if schema < _SCHEMA else "a newer"
        raise LedgerError(f"{path} was written by {age} polyeps (schema {schema}, not {_SCHEMA}); use that version")


@cache
def _as_created() -> list[tuple[Any, ...]]:
    with contextlib.closing(sqlite3.connect(":memory:")) as connection:
        connection.executescript(_TABLES)
        return connection.execute(_DEFINED).fetchall()


def check_table(path: Path, connection: sqlite3.Connection) -> None:
    """Refuse a file whose rows are not in the table that was created: a view, for instance, could hide some."""
    (table, *_), found = _as_created(), connection.execute(_DEFINED).fetchall()
    if table not in found:
        raise LedgerTampered(f"{path} was tampered with: its table of rows is not the one that polyeps defines")


def check_schema(path: Path, connection: sqlite3.Connection) -> None:
    """Refuse a file whose schema is not the one it was created with: a trigger could make charges vanish."""
    (journal,) = connection.execute("PRAGMA journal_mode").fetchone()
    if journal != "delete":
        raise LedgerTampered(
            f"{path} was set to journal mode {journal!r}, which polyeps does not use; set it back with "
            "PRAGMA journal_mode = DELETE and verify it"
        )
    found, created = connection.execute(_DEFINED).fetchall(), _as_created()
    if found == created:
        return
    foreign = next((entry for entry in found if entry not in created), None)
    if foreign is None:
        lost = next((entry for entry in created if entry not in found), created[0])
        raise LedgerTampered(f"{path} was tampered with: its {lost[0]} {lost[1]} is missing or defined twice")
    raise LedgerTampered(f"{path} was tampered with: its {foreign[0]} {foreign[1]!r} is not one that polyeps defines")


def explain(path: Path, problem: sqlite3.Error) -> LedgerError:
    """Return SQLite's error in words."""
    code = getattr(problem, "sqlite_errorcode", None)
    match (code or 0) & 0xFF:
        case sqlite3.SQLITE_FULL:
            return LedgerError(f"the disk that holds {path} is full; nothing was written: free some space, try again")
        case sqlite3.SQLITE_READONLY:
            return LedgerError(f"{path} is read-only; nothing was written: make it writable for this account")
        case sqlite3.SQLITE_BUSY:
            return LedgerError(f"another process has held {path} for over {_PATIENCE:g} s; nothing was written")
        case sqlite3.SQLITE_NOTADB:
            return LedgerError(f"{path} is not a polyeps ledger; check the path")
        case sqlite3.SQLITE_CORRUPT | sqlite3.SQLITE_ERROR | 0:  # 0: text that is not valid
            return LedgerTampered(f"{path} is damaged and cannot be read: {problem}")
        case _:
            return LedgerError(f"{path} cannot be used: {problem}")
