from __future__ import annotations

import gzip
import hashlib
import io
import lzma
import tarfile
import zipfile
from pathlib import Path

import pytest

from polyeps.data.public_catalogue import PUBLIC_DATASETS, DataFile, PublicDataset
from polyeps.data.public_files import (
    SYSTEM_FOLDER,
    Found,
    Places,
    availability,
    locate,
    obtain,
    places,
    read_files,
    user_cache,
)
from polyeps.errors import DataError

CONTENT = b"the published content\n" * 50
SHA = hashlib.sha256(CONTENT).hexdigest()
PLAIN = DataFile("set/file", SHA, "https://example.org/file.gz")


def data_set(*files: DataFile, other: tuple[DataFile, ...] = ()) -> PublicDataset:
    return PublicDataset("set", "", 1, 0, (1,), ("a",), "", "", files=files, other_files=other, download_mb=3)


def searched(folder: Path) -> Places:
    return Places((folder,), folder / "cache")


def put(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def test_places_are_searched_in_the_promised_order(tmp_path: Path) -> None:
    mine, named = tmp_path / "mine", tmp_path / "named"
    mine.mkdir()
    named.mkdir()
    environ = {"POLYEPS_DATA": str(named), "XDG_CACHE_HOME": str(tmp_path / "xdg")}
    cache = tmp_path / "xdg" / "polyeps" / "data"
    assert places(mine, environ).folders == (mine, named, cache, SYSTEM_FOLDER)
    assert places(None, environ).cache == cache
    put(named / "set/file", b"second")
    put(cache / "set/file", b"third")
    found = locate(PLAIN, places(mine, environ))
    assert found is not None
    assert found.path == named / "set/file"
    put(mine / "set/file.gz", b"first")
    found = locate(PLAIN, places(mine, environ))
    assert found is not None
    assert found.path == mine / "set/file.gz"


@pytest.mark.parametrize("how", ["argument", "environment"])
def test_a_named_folder_must_exist(tmp_path: Path, how: str) -> None:
    absent = tmp_path / "absent"
    arguments = (absent, {}) if how == "argument" else (None, {"POLYEPS_DATA": str(absent)})
    with pytest.raises(DataError, match=r"absent, does not exist: create it or name another"):
        places(*arguments)


def test_the_cache_follows_the_platform(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert user_cache({"XDG_CACHE_HOME": "/x"}) == Path("/x/polyeps")
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    monkeypatch.setattr("sys.platform", "linux")
    assert user_cache({}) == tmp_path / ".cache" / "polyeps"
    monkeypatch.setattr("sys.platform", "darwin")
    assert user_cache({}) == tmp_path / "Library" / "Caches" / "polyeps"


@pytest.mark.parametrize(
    ("suffix", "stored"),
    [
        ("", CONTENT),
        (".gz", gzip.compress(CONTENT, 1)),
        (".gz", gzip.compress(CONTENT, 9)),
        (".xz", lzma.compress(CONTENT)),
    ],
    ids=["plain", "gz-fast", "gz-best", "xz"],  # a gz holds the time, which would name a test differently each second
)
def test_packed_or_not_the_content_is_what_counts(tmp_path: Path, suffix: str, stored: bytes) -> None:
    put(tmp_path / f"set/file{suffix}", stored)
    found = locate(PLAIN, searched(tmp_path))
    assert found is not None
    assert read_files([found]) == [CONTENT]


def test_a_file_inside_its_official_archive(tmp_path: Path) -> None:
    zipped = DataFile("set/file.csv", SHA, "https://example.org/all.zip", member="in/file.csv")
    tarred = DataFile("set/file.bin", SHA, "https://example.org/all.tar.gz", member="in/file.bin")
    (tmp_path / "set").mkdir()
    with zipfile.ZipFile(tmp_path / "set/all.zip", "w") as archive:
        archive.writestr("in/file.csv", CONTENT)
    with tarfile.open(tmp_path / "set/all.tar.gz", "w:gz") as tar:
        member = tarfile.TarInfo("in/file.bin")
        member.size = len(CONTENT)
        tar.addfile(member, io.BytesIO(CONTENT))
    for file in (zipped, tarred):
        found = locate(file, searched(tmp_path))
        assert found is not None
        assert read_files([found]) == [CONTENT]
        with pytest.raises(DataError, match=r"all.* holds no in/other: .* delete it and fetch it again"):
            read_files([Found(file, found.path, "in/other")])
        whole = found.path.read_bytes()
        for damaged in (whole[: len(whole) // 2], b"", b"no archive"):
            found.path.write_bytes(damaged)
            with pytest.raises(DataError, match=rf"{found.path.name} is truncated or damaged .*fetch it again") as e:
                read_files([found])
            assert "\n" not in str(e.value)


def test_a_truncated_file_is_refused_by_name(tmp_path: Path) -> None:
    for suffix, stored in ((".gz", gzip.compress(CONTENT)), (".xz", lzma.compress(CONTENT))):
        path = put(tmp_path / f"set/file{suffix}", stored[:-9])
        with pytest.raises(DataError, match=rf"file{suffix} is truncated or damaged .*delete it and fetch it again"):
            read_files([Found(PLAIN, path)])
        assert path.exists()


def test_a_wrong_checksum_is_refused_by_name_and_nothing_is_deleted(tmp_path: Path) -> None:
    path = put(tmp_path / "set/file.gz", gzip.compress(CONTENT + b"!"))
    with pytest.raises(DataError, match=r"file.gz is not the published file .*sha256.*delete it and fetch it again"):
        read_files([Found(PLAIN, path)])
    assert path.exists()


def test_a_damaged_copy_is_not_passed_over_for_a_good_one(tmp_path: Path) -> None:
    put(tmp_path / "one/set/file", b"damaged")
    put(tmp_path / "two/set/file", CONTENT)
    found = obtain(data_set(PLAIN), Places((tmp_path / "one", tmp_path / "two"), tmp_path), None)
    with pytest.raises(DataError, match="not the published file"):
        read_files(found)


def test_a_missing_set_says_where_it_looked_and_how_to_get_it(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        obtain(data_set(PLAIN), searched(tmp_path), None)
    message = str(caught.value)
    assert message.startswith(f"set is not here (looked in {tmp_path})")
    assert "polyeps data fetch set" in message
    assert f"put set/file.gz into {tmp_path}" in message
    with pytest.raises(DataError, match="apt-get install dataset-fashion-mnist"):
        obtain(PUBLIC_DATASETS["fashion-mnist"], searched(tmp_path), None)


def test_what_is_missing_is_downloaded_into_the_cache(tmp_path: Path) -> None:
    asked = []

    def download(file: DataFile, folder: Path) -> Path:
        asked.append(file.path)
        return put(folder / file.download, gzip.compress(CONTENT))

    other = DataFile("set/other", SHA, "https://example.org/other.gz")
    put(tmp_path / "set/other", CONTENT)
    where = Places((tmp_path, tmp_path / "cache"), tmp_path / "cache")
    found = obtain(data_set(PLAIN, other), where, download)
    assert asked == ["set/file"]
    assert read_files(found) == [CONTENT, CONTENT]
    assert availability(data_set(PLAIN, other), where) == "here"


def test_either_form_of_a_set_will_do(tmp_path: Path) -> None:
    archive = DataFile("set/all.tar.gz", SHA, "https://example.org/all.tar.gz")
    entry = data_set(PLAIN, other=(archive,))
    assert availability(entry, searched(tmp_path)) == "missing"
    put(tmp_path / "set/all.tar.gz", CONTENT)
    assert [copy.file for copy in obtain(entry, searched(tmp_path), None)] == [archive]
    put(tmp_path / "set/file", CONTENT)
    assert [copy.file for copy in obtain(entry, searched(tmp_path), None)] == [PLAIN]
