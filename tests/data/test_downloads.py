from __future__ import annotations

import fcntl
import gzip
import hashlib
import io
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from polyeps.data.public_catalogue import PUBLIC_DATASETS, DataFile
from polyeps.data.public_files import Places, download, locate, read_files
from polyeps.errors import DataError

CONTENT = bytes(range(256)) * 4000
STORED = gzip.compress(CONTENT, 0)


class Server(HTTPServer):
    """A loopback server whose behaviour a test sets."""

    body = STORED
    cut_after: int | None = None  # bytes sent before the connection is dropped
    ranges = True
    status = 200

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[str | None] = []

    def file(self, sha256: str = hashlib.sha256(CONTENT).hexdigest()) -> DataFile:
        return DataFile("set/file", sha256, f"http://127.0.0.1:{self.server_port}/file.gz")


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        asked = self.headers.get("Range")
        self.server.asked.append(asked)
        start = int(asked.split("=")[1].rstrip("-")) if asked and self.server.ranges else 0
        body = self.server.body[start:]
        status = 206 if start else self.server.status
        if start and not body:
            status = 416
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body if self.server.cut_after is None else body[: self.server.cut_after])

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield running
        running.shutdown()
        thread.join()


def files_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


def test_a_file_arrives_whole_and_progress_is_told(server: Server, tmp_path: Path) -> None:
    told: list[tuple[int, int | None]] = []
    path = download(server.file(), tmp_path, lambda done, total: told.append((done, total)))
    assert path == tmp_path / "set/file.gz"
    assert path.read_bytes() == STORED
    assert files_in(tmp_path) == ["file.gz"]
    assert told[-1] == (len(STORED), len(STORED))


def test_a_file_in_an_archive_is_verified_and_the_archive_kept(server: Server, tmp_path: Path) -> None:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr("in/file.csv", CONTENT)
    server.body = stream.getvalue()
    file = replace(server.file(), url=server.file().url.replace("file.gz", "all.zip"), member="in/file.csv")
    path = download(file, tmp_path)
    assert path == tmp_path / "set/all.zip"
    found = locate(file, Places((tmp_path,), tmp_path))
    assert found is not None
    assert read_files([found]) == [CONTENT]
    with pytest.raises(DataError, match="not kept"):
        download(replace(file, member="in/other.csv", url=file.url.replace("all", "new")), tmp_path)
    assert files_in(tmp_path) == ["all.zip"]


def test_a_wrong_checksum_is_refused_and_not_kept(server: Server, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"file.gz gave is not the published file and was not kept"):
        download(server.file("0" * 64), tmp_path)
    assert files_in(tmp_path) == []


def test_a_wrong_download_leaves_the_old_file_alone(server: Server, tmp_path: Path) -> None:
    download(server.file(), tmp_path)
    server.body = b"something else"
    with pytest.raises(DataError, match="not kept"):
        download(server.file(), tmp_path)
    assert (tmp_path / "set/file.gz").read_bytes() == STORED


def test_a_cut_download_is_resumed_where_it_stopped(server: Server, tmp_path: Path) -> None:
    server.cut_after = 1000
    with pytest.raises(DataError, match=r"ended after 1000 of \d+ bytes, run it again to resume"):
        download(server.file(), tmp_path)
    assert files_in(tmp_path) == ["file.gz.part"]
    server.cut_after = None
    assert download(server.file(), tmp_path).read_bytes() == STORED
    assert server.asked == [None, "bytes=1000-"]


def test_a_server_that_cannot_resume_starts_anew(server: Server, tmp_path: Path) -> None:
    server.cut_after, server.ranges = 1000, False
    with pytest.raises(DataError, match="run it again"):
        download(server.file(), tmp_path)
    server.cut_after = None
    assert download(server.file(), tmp_path).read_bytes() == STORED


def test_a_part_that_is_already_whole_needs_no_more_bytes(server: Server, tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    (tmp_path / "set/file.gz.part").write_bytes(STORED)
    assert download(server.file(), tmp_path).read_bytes() == STORED
    assert files_in(tmp_path) == ["file.gz"]


def test_a_server_that_refuses_is_named(server: Server, tmp_path: Path) -> None:
    server.status = 404
    with pytest.raises(DataError, match=r"http://127.0.0.1:\d+/file.gz could not be downloaded"):
        download(server.file(), tmp_path)
    assert files_in(tmp_path) == []


def test_a_silent_address_is_named(tmp_path: Path) -> None:
    closed = Server()
    file = closed.file()
    closed.server_close()
    with pytest.raises(DataError, match=r"could not be downloaded \(.*refused"):
        download(file, tmp_path)


def test_two_processes_do_not_write_one_file(server: Server, tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    with (tmp_path / "set/file.gz.part").open("ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(DataError, match="another process"):
            download(server.file(), tmp_path)


def test_a_folder_that_cannot_be_written_is_named(server: Server, tmp_path: Path) -> None:
    (tmp_path / "set").write_text("a file where the folder should be")
    with pytest.raises(DataError, match=r"set/file.gz could not be written"):
        download(server.file(), tmp_path)


def test_a_form_without_an_address_is_not_downloaded(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"imdb_train.csv has no download address"):
        download(PUBLIC_DATASETS["imdb"].files[0], tmp_path)
