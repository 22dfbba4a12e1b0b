"""Downloads a published file into the user's cache: resumed when cut, kept only with the right checksum."""

from __future__ import annotations

import fcntl
import http.client
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from polyeps.data.catalogue import DataFile
from polyeps.data.sources import Found, read
from polyeps.errors import DataError

BLOCK = 1 << 18
TIMEOUT = 30.0  # seconds of silence before a download is given up
Progress = Callable[[int, int | None], None]  # bytes so far, bytes in all where the server says


def _silent(_done: int, _total: int | None) -> None:
    """The progress of a download nobody watches."""


def download(file: DataFile, folder: Path, progress: Progress = _silent) -> Path:
    """Fetch a file to its place below a folder; a cut download is resumed, a wrong one is not kept."""
    if not file.url:
        raise DataError(f"{file.path} has no download address")
    target = folder / file.download
    partial = target.with_name(target.name + ".part")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("ab") as stream:
            _lock(stream, partial)
            _receive(file.url, stream, progress)
            _verify(file, partial)
            partial.rename(target)
    except (urllib.error.URLError, http.client.HTTPException, TimeoutError, ConnectionError) as e:
        if partial.stat().st_size == 0:
            partial.unlink()
        reason = getattr(e, "reason", None) or e
        raise DataError(f"{file.url} could not be downloaded ({reason})") from e
    except OSError as e:
        raise DataError(f"{target} could not be written ({e.strerror or e})") from e
    return target


def _lock(stream: BinaryIO, partial: Path) -> None:
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise DataError(f"{partial} is being downloaded by another process, wait for it to end") from None


def _receive(url: str, stream: BinaryIO, progress: Progress) -> None:
    done = stream.seek(0, 2)
    request = urllib.request.Request(url, headers={"Range": f"bytes={done}-"} if done else {})
    try:
        response = urllib.request.urlopen(request, timeout=TIMEOUT)
    except urllib.error.HTTPError as e:
        e.close()
        if e.code != http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
            raise
        return  # everything was there already: the checksum decides
    with response:
        if response.status != http.HTTPStatus.PARTIAL_CONTENT:  # the server begins anew, and so do we
            stream.truncate(0)
            done = 0
        length = response.headers.get("Content-Length")
        total = done + int(length) if length else None
        while block := response.read(BLOCK):
            stream.write(block)
            done += len(block)
            progress(done, total)
        stream.flush()
    if total is not None and done < total:
        raise ConnectionError(f"the connection ended after {done} of {total} bytes, run it again to resume")


def _verify(file: DataFile, partial: Path) -> None:
    try:
        read([Found(file, partial, file.member)])
    except DataError as e:
        partial.unlink()
        raise DataError(f"what {file.url} gave is not the published file and was not kept") from e
