"""The small file beside a chain that remembers where the chain ended."""

import json
import os
from pathlib import Path
from typing import NamedTuple

from polyeps.errors import LedgerTampered


class Head(NamedTuple):
    """Where a chain ends."""

    seq: int
    hash: str


def head_path(path: Path) -> Path:
    """Where the head of the chain at `path` is kept."""
    return path.with_name(path.name + ".head")


def read_head(path: Path) -> Head | None:
    """The head kept for the chain at `path`, if there is one."""
    try:
        stored = json.loads(head_path(path).read_text())
        return Head(int(stored["seq"]), str(stored["hash"]))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError):
        raise LedgerTampered(f"{head_path(path)} is not as it was written") from None


def write_head(path: Path, head: Head) -> None:
    """Replace the head kept for the chain at `path`; on the disk when this returns."""
    replace_file(head_path(path), json.dumps(head._asdict()).encode())  # the caller holds the write lock


def replace_file(target: Path, content: bytes, mode: int = 0o666) -> None:
    """Write a file whole or not at all, for one writer at a time; on the disk when this returns."""
    unfinished = target.with_name(f"{target.name}.new")
    with open(unfinished, "wb", opener=lambda path, flags: os.open(path, flags, mode)) as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(target)
    folder = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
