"""Finds, verifies and downloads the files of a data set. Standard library only.

Places, in order: the folder the caller names, POLYEPS_DATA, the user's cache, /usr/share/datasets, and last a
download into the cache. A file that is found but is not the published one is refused, never passed over.
"""

from __future__ import annotations

import gzip
import hashlib
import lzma
import os
import sys
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from polyeps.data.catalogue import DataFile, Entry
from polyeps.errors import DataError

SYSTEM_FOLDER = Path("/usr/share/datasets")
_FETCH_AGAIN = "delete it and fetch it again"
_DAMAGE = (EOFError, zlib.error, gzip.BadGzipFile, lzma.LZMAError, tarfile.TarError, zipfile.BadZipFile)
_GZIP_MAGIC, _XZ_MAGIC = b"\x1f\x8b", b"\xfd7zXZ\x00"
# Called with a file to download and the folder to put it below; `downloads.download` is the real one.
Download = Callable[[DataFile, Path], Path]
State = Literal["built in", "here", "missing"]


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
    """The folder for what can be made or fetched again, where this platform keeps such things."""
    if environ.get("XDG_CACHE_HOME"):
        return Path(environ["XDG_CACHE_HOME"]) / "polyeps"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "polyeps"
    if sys.platform == "win32":
        return Path(environ.get("LOCALAPPDATA", Path.home() / "AppData" / "Local")) / "polyeps" / "cache"
    return Path.home() / ".cache" / "polyeps"


def places(data_dir: Path | None, environ: Mapping[str, str] = os.environ) -> Places:
    """Where to look; a folder that the caller or POLYEPS_DATA names must exist."""
    cache = user_cache(environ) / "data"
    named = [
        ("the data folder", data_dir),
        ("the folder in POLYEPS_DATA", environ.get("POLYEPS_DATA") or None),
    ]
    folders = []
    for what, folder in named:
        if folder is None:
            continue
        if not Path(folder).is_dir():
            raise DataError(f"{what}, {folder}, does not exist: create it or name another one")
        folders.append(Path(folder))
    return Places((*folders, cache, SYSTEM_FOLDER), cache)


def locate(file: DataFile, where: Places) -> Found | None:
    """The first copy of a file, packed, unpacked or inside its official archive."""
    for folder in where.folders:
        for packing in ("", ".gz", ".xz"):
            path = folder / (file.path + packing)
            if path.is_file():
                return Found(file, path)
        if file.member and (folder / file.download).is_file():
            return Found(file, folder / file.download, file.member)
    return None


def read(found: Sequence[Found]) -> list[bytes]:
    """The unpacked contents of files, once their checksums are the published ones."""
    # By path first: an archive is unpacked in one pass, however many of the files it holds.
    unpacked = {path: _unpacked(path, [copy for copy in found if copy.path == path]) for path in _paths(found)}
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


def _paths(found: Sequence[Found]) -> list[Path]:
    return list(dict.fromkeys(copy.path for copy in found))


def _unpacked(path: Path, copies: list[Found]) -> dict[str, bytes]:
    """Contents by member; a file that is no archive has one, under the empty name."""
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


def how_to_get(entry: Entry, where: Places) -> str:
    """One clause that says how to obtain a data set that is not here."""
    megabytes = max(1, round(entry.download_mb))
    return f"run `polyeps data fetch {entry.name}` ({megabytes} MB), or {_by_hand(entry, where)}"


def _by_hand(entry: Entry, where: Places) -> str:
    names = sorted({file.download for file in entry.other_files or entry.files})
    install = f"run `{entry.package}`, or " if entry.package else ""
    return f"{install}put {', '.join(names)} into {where.folders[0]}"


def obtain(entry: Entry, where: Places, download: Download | None) -> tuple[Found, ...]:
    """Every file of a data set in one of its forms; missing ones are downloaded unless `download` is None."""
    for files in (entry.files, entry.other_files):
        found = [locate(file, where) for file in files]
        here = tuple(copy for copy in found if copy is not None)
        if files and len(here) == len(files):
            return here
    if download is None:
        searched = ", ".join(str(folder) for folder in where.folders)
        raise DataError(f"{entry.name} is not here (looked in {searched}): {how_to_get(entry, where)}")
    wanted = entry.other_files or entry.files
    for file in wanted:
        if locate(file, where) is None:
            try:
                download(file, where.cache)
            except DataError as e:
                raise DataError(f"{entry.name} is not here, and {e}: try again, or {_by_hand(entry, where)}") from e
    return tuple(copy for file in wanted if (copy := locate(file, where)) is not None)


def state(entry: Entry, where: Places) -> State:
    """Whether a data set's files are on this machine; their content is not looked at."""
    if not entry.files:
        return "built in"
    forms = (entry.files, entry.other_files)
    here = any(files and all(locate(file, where) is not None for file in files) for files in forms)
    return "here" if here else "missing"
