"""Encoded records on disk, so that a later run with the same data and encoder need not encode them again.

Features are as private as the records they come from: a file can be read by its owner alone. A file is used only if it
is the owner's, names the same records, encoder, parameters and code, and its checksum is right; otherwise the records
are encoded again. The checksum finds damage; it is no proof against somebody who may write to the owner's files.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import stat
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from polyeps.errors import InputError

LIMIT = "POLYEPS_FEATURE_CACHE"  # GiB that all files together may take; 0: none are written or read
_USUAL_LIMIT = 8.0
_FORMAT = 1
_LONGEST_HEADER = 1 << 16  # bytes
_ABANDONED = 24 * 3600  # seconds after which an unfinished file is removed


def features_limit() -> int:
    """Return the bytes that feature files may take together; 0 where they are switched off."""
    given = os.environ.get(LIMIT) or str(_USUAL_LIMIT)
    try:
        found = float(given)
    except ValueError:
        found = math.nan
    if not 0 <= found < math.inf:
        raise InputError(f"{LIMIT} is {given!r}; it must be a number of GiB, or 0 to keep no encoded records on disk")
    return int(found * 2**30)


def load_features(directory: Path, subject: Mapping[str, Any]) -> NDArray[np.float32] | None:
    """Return the features stored for a subject; None if there are none, or the file cannot be relied on."""
    if not features_limit():
        return None
    path = _path(directory, subject)
    try:
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            found = _read(file, _plain(subject))
        os.utime(path)  # the files that were not used for longest are removed first
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError, MemoryError):
        return None
    return found


def save_features(directory: Path, subject: Mapping[str, Any], features: NDArray[np.float32]) -> None:
    """Store features in a file that only its owner can read; ignore a folder that cannot be written."""
    values = np.ascontiguousarray(features, dtype="<f4")
    if values.nbytes > features_limit():
        return
    header = {"subject": _plain(subject), "shape": values.shape, "sha256": _checksum(values)}
    partial: Path | None = None
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        _make_room(directory, features_limit() - values.nbytes)
        handle, name = tempfile.mkstemp(dir=directory, prefix="features-", suffix=".tmp")  # mode 0600
        partial = Path(name)
        with os.fdopen(handle, "wb") as file:
            file.write(json.dumps(header).encode() + b"\n")
            file.write(values.data)
        partial.replace(_path(directory, subject))  # replaces a symbolic link, does not follow it
    except OSError:
        return
    finally:
        if partial is not None:
            partial.unlink(missing_ok=True)


def _read(file: BinaryIO, subject: Any) -> NDArray[np.float32] | None:
    about = os.fstat(file.fileno())
    if not stat.S_ISREG(about.st_mode) or about.st_uid != os.geteuid() or about.st_mode & 0o077:
        return None
    first = file.readline(_LONGEST_HEADER)
    header = json.loads(first)
    shape = tuple(header["shape"])
    if header["subject"] != subject or len(shape) < 2 or not all(type(one) is int and one >= 0 for one in shape):
        return None
    if len(first) + 4 * math.prod(shape) != about.st_size:
        return None
    found = np.empty(shape, dtype="<f4")
    if file.readinto(found.reshape(-1).view(np.uint8).data) != found.nbytes:  # type: ignore[attr-defined]
        return None
    if _checksum(found) != header["sha256"] or not np.isfinite(found).all():
        return None
    return found.astype(np.float32, copy=False)


def _checksum(values: NDArray[np.float32]) -> str:
    found = hashlib.sha256(repr(values.shape).encode())
    found.update(values.data)
    return found.hexdigest()


def _make_room(directory: Path, room: int) -> None:
    """Remove the files that were not used for longest until the rest fit, and files left by a killed process."""
    held = []
    for path in directory.glob("features-*"):
        with suppress(OSError):
            about = path.lstat()
            if path.suffix == ".tmp" and time.time() - about.st_mtime > _ABANDONED:
                path.unlink()
            elif path.suffix == ".bin":
                held.append((about.st_mtime, about.st_size, path))
    taken = sum(size for _, size, _ in held)
    for _, size, path in sorted(held):
        if taken > room:
            with suppress(OSError):
                path.unlink()
            taken -= size


def _path(directory: Path, subject: Mapping[str, Any]) -> Path:
    text = json.dumps(_plain(subject), sort_keys=True)
    return directory / f"features-{hashlib.sha256(text.encode()).hexdigest()[:32]}.bin"


def _plain(subject: Mapping[str, Any]) -> dict[str, Any]:
    return {"format": _FORMAT, **subject}
