"""The small file beside a chain that records where the chain ends.

An append is announced here before it is committed and confirmed afterwards. So a row left unconfirmed by a crash can be
distinguished from a foreign row: only the announced one has the announced hash.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from polyeps.errors import InputError, LedgerError, LedgerTampered

START = "0" * 64  # the hash before the first row
_ANNOUNCED = '{"pending": '  # one digit follows: 1 until the append is confirmed, then 0
_NO_LINKS = os.O_NOFOLLOW | os.O_CLOEXEC


class Head(NamedTuple):
    """Where a chain ends."""

    seq: int
    hash: str


class StoredHead(NamedTuple):
    """The content of a head file: where the chain ends or, while an append is pending, where it may end."""

    head: Head
    before: Head | None = None  # where the chain ended before a pending append

    @property
    def ends(self) -> tuple[Head, ...]:
        return (self.head,) if self.before is None else (self.head, self.before)

    @property
    def creating(self) -> bool:
        """Return whether the pending append is the first, so that nothing was charged yet."""
        return self.before == Head(0, START)


def head_path(path: Path) -> Path:
    """Return the path of the head file of the chain at `path`."""
    return path.with_name(path.name + ".head")


def read_head(path: Path) -> StoredHead | None:
    """Return the content of the head file of the chain at `path`, or None if there is no such file."""
    place = head_path(path)
    try:
        with open(place, "rb", opener=lambda name, flags: os.open(name, flags | _NO_LINKS)) as file:
            return _stored_head(json.loads(file.read()))
    except FileNotFoundError:
        return None
    except OSError as problem:
        if place.is_symlink():
            raise LedgerTampered(f"{place} is a symbolic link; put the head file itself there") from None
        raise LedgerError(f"{place} cannot be read: {problem.strerror}; make it readable for this account") from None
    except (ValueError, KeyError, TypeError, RecursionError):
        raise LedgerTampered(f"{place} is not as it was written") from None


def read_stored_head(file: Path) -> StoredHead:
    """Return a head that was stored elsewhere.

    The file is a copy of the head file, the output of `polyeps ledger verify --json`, or the number of a row and its
    hash as text.
    """
    try:
        text = file.read_text(encoding="utf-8")
        try:
            stored = json.loads(text)
        except ValueError:
            seq, digest = text.split()
            stored = {"seq": int(seq), "hash": digest}
        if "rows" in stored:
            stored = {"seq": stored["rows"], "hash": stored["head"]}
        return _stored_head(stored)
    except OSError as problem:
        raise InputError(f"{file} cannot be read: {problem.strerror}; name the head file that you stored") from None
    except (ValueError, KeyError, TypeError, RecursionError):
        raise InputError(
            f"{file} is not a head; it must be a copy of a .head file, the output of `ledger verify --json`, or the "
            "number of a row and its hash"
        ) from None


def _stored_head(stored: Any) -> StoredHead:
    head = _head(stored, least=1)
    if stored.get("pending", 0) not in (0, 1):
        raise ValueError
    return StoredHead(head, _head(stored["before"], least=0) if stored.get("pending") else None)


def _head(stored: Any, least: int) -> Head:
    seq, digest = stored["seq"], stored["hash"]
    if type(seq) is not int or seq < least or type(digest) is not str:
        raise ValueError
    return Head(seq, digest)


@contextmanager
def announced(place: Path, before: Head, after: Head, mode: int = 0o600) -> Iterator[None]:
    """Write to `place` that an append is pending; confirm it when the body of the `with` has succeeded.

    The announcement is on disk when the body begins. The confirmation is written to the same file, even if another one
    has taken its place meanwhile. It need not reach the disk: without it the append counts as pending, and no charge is
    lost.
    """
    before_, after_ = (json.dumps(head._asdict()) for head in (before, after))
    text = f'{_ANNOUNCED}1, {after_[1:-1]}, "before": {before_}}}\n'
    file = _replaced(place, text.encode(), mode)
    try:
        yield
        os.pwrite(file, b"0", len(_ANNOUNCED))
    finally:
        os.close(file)


def replace_file(target: Path, content: bytes, mode: int = 0o600) -> None:
    """Write a file atomically, for one writer at a time; it is on disk when this returns.

    Whatever the umask, the file has the given mode. No symbolic link is followed.
    """
    os.close(_replaced(target, content, mode))


def _replaced(target: Path, content: bytes, mode: int) -> int:
    unfinished = target.with_name(f"{target.name}.new")
    unfinished.unlink(missing_ok=True)
    file = new_file(unfinished, content, mode)
    try:
        unfinished.replace(target)
        sync_folder(target.parent)
    except BaseException:
        os.close(file)
        raise
    return file


def new_file(path: Path, content: bytes, mode: int = 0o600) -> int:
    """Create a file that must not exist, not even as a link; it is on disk when the descriptor is returned."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NO_LINKS, mode)
    try:
        os.fchmod(file, mode)
        while content:
            content = content[os.write(file, content) :]
        os.fsync(file)
    except BaseException:
        os.close(file)
        raise
    return file


def sync_folder(folder: Path) -> None:
    """Flush a folder's entries to disk."""
    file = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
