"""The live view: whom it answers and whom it refuses, what it serves, and how it ends."""

from __future__ import annotations

import http.client
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.commands import refused
from support.journals import new_journal, write_job

from polyeps.deploy.serving import JOURNAL
from polyeps.errors import InputError
from polyeps.report.live import LivePage, LiveServer, _follow
from polyeps.report.page import _JOURNALS

Answer = tuple[int, dict[str, str], str]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    journal = new_journal(tmp_path / "run")
    write_job(journal, planned=9, finished=False)
    journal.close()
    (tmp_path / "secret.txt").write_text("secret")
    (tmp_path / "run" / "link").symlink_to(tmp_path / "secret.txt")
    return tmp_path / "run"


@pytest.fixture
def server(folder: Path) -> Iterator[LiveServer]:
    with LiveServer(LivePage([folder])) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def ask(server: LiveServer, path: str, method: str = "GET", **headers: str) -> Answer:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=10)
    connection.putrequest(method, path, skip_host=True)
    sent = {"Host": server.hosts[0], **{name.replace("_", "-"): value for name, value in headers.items()}}
    for name, value in sent.items():
        if value:
            connection.putheader(name, value)
    connection.endheaders()
    answer = connection.getresponse()
    found = answer.status, dict(answer.getheaders()), answer.read().decode()
    connection.close()
    return found


def cookie(server: LiveServer) -> str:
    status, headers, text = ask(server, f"/?token={server.token}")
    assert (status, f"url={server.place}" in text, server.token in text) == (200, True, False)
    held, _, rules = headers["Set-Cookie"].partition("; ")
    assert rules == f"Path={server.place}; HttpOnly; SameSite=Strict"  # no other server of this machine is sent it
    assert len(server.place) > 20
    assert server.place not in ask(server, "/")[2]
    return held


def test_the_token_becomes_a_cookie_and_the_cookie_opens_the_page(server: LiveServer) -> None:
    held = cookie(server)
    status, headers, text = ask(server, server.place, Cookie=held)
    assert status == 200
    assert "Not finished." in text
    assert 'id="live"' in text
    assert server.token not in text  # a saved page opens nothing
    assert headers["Cache-Control"] == "no-store"
    assert headers["Referrer-Policy"] == "no-referrer"
    assert "frame-ancestors 'none'" in headers["Content-Security-Policy"]
    assert "connect-src 'self'" in headers["Content-Security-Policy"]
    version = headers["X-Polyeps-Version"]
    assert f'data-live="{version}"' in text
    assert ask(server, f"{server.place}update?known={version}", Cookie=held)[0] == 204
    assert ask(server, f"{server.place}update?known=other", Cookie=held)[0] == 200


def test_nobody_without_the_token(server: LiveServer) -> None:
    for path in ("/", server.place, f"{server.place}update", "/?token=", f"/?token={server.token[:-1]}", "/journal.db"):
        status, headers, text = ask(server, path)
        assert (status, "Set-Cookie" in headers) == (403, False), path
        assert "fedavg" not in text
    held = cookie(server)
    name, _, value = held.partition("=")
    for wrong in (f"{name}=", f"{name}={value}x", f"other={value}", "\x01", f'{name}="'):
        assert ask(server, server.place, Cookie=wrong)[0] == 403
    assert ask(server, f"{server.place}update?token={server.token}")[0] == 403  # the address of the page alone takes it
    assert ask(server, f"/?token={server.token}&token={server.token}")[0] == 403


def test_no_other_host_and_no_other_page(server: LiveServer) -> None:
    held, port = cookie(server), server.server_address[1]
    for host in ("evil.example", f"evil.example:{port}", "127.0.0.1", f"127.0.0.1.evil:{port}", f"[::1]:{port}", ""):
        assert ask(server, server.place, Cookie=held, Host=host)[0] in (400, 421), host
        assert ask(server, f"/?token={server.token}", Host=host)[0] in (400, 421), host
    for origin in ("http://evil.example", "null", f"https://127.0.0.1:{port}", f"http://127.0.0.1:{port + 1}"):
        for path in (server.place, f"{server.place}update", f"/?token={server.token}"):
            assert ask(server, path, Cookie=held, Origin=origin)[0] == 403, (origin, path)
    for site in ("cross-site", "same-site"):
        assert ask(server, f"{server.place}update", Cookie=held, Sec_Fetch_Site=site)[0] == 403
        assert ask(server, server.place, Cookie=held, Sec_Fetch_Site=site, Sec_Fetch_Mode="navigate")[0] == 403
        assert ask(server, f"/?token={server.token}", Sec_Fetch_Site=site, Sec_Fetch_Mode="no-cors")[0] == 403
        # A link in a mail may lead to the page: whoever has the token may open it.
        assert ask(server, f"/?token={server.token}", Sec_Fetch_Site=site, Sec_Fetch_Mode="navigate")[0] == 200
    own = {"Origin": f"http://localhost:{port}", "Sec_Fetch_Site": "same-origin"}
    assert ask(server, f"{server.place}update", Cookie=held, Host=f"localhost:{port}", **own)[0] == 200


def test_nothing_but_the_page(server: LiveServer, folder: Path) -> None:
    held = cookie(server)
    outside = folder.parent / "secret.txt"
    for path in (
        "/../secret.txt", "/..%2fsecret.txt", "/%2e%2e/secret.txt", "//secret.txt", f"/{outside}", f"file://{outside}",
        "/journal.db", "/./journal.db", "/update/../../secret.txt", "/\\..\\secret.txt", "http://evil.example/secret",
        "/etc/passwd", "/?file=../secret.txt", "*", "/", "/update", server.place[:-1], f"{server.place}link",
    ):  # fmt: skip
        status, _, text = ask(server, path, Cookie=held)
        assert status in (400, 404), path
        assert "secret" not in text
    assert ask(server, "/" + "x" * 5000, Cookie=held)[0] == 414
    assert ask(server, f"{server.place}?file=../secret.txt", Cookie=held)[0] == 200
    assert ask(server, f"{server.place}?" + "&".join(f"{n}=1" for n in range(99)), Cookie=held)[0] == 400


def test_what_is_no_request_is_refused(server: LiveServer) -> None:
    cases = {
        b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 200 + b"\r\n": (b" 431 ",),
        b"GET / HTTP/1.1\r\nX: " + b"y" * 70_000 + b"\r\n\r\n": (b" 431 ",),
        b"GET /" + b"z" * 70_000: (b" 414 ",),
        b"GET <script> HTTP/9.9\r\n\r\n": (b" 505 ",),
        b"GET /\r\n\r\n": (b"on this machine alone",),  # HTTP/0.9 knows no Host
    }
    for sent, expected in cases.items():
        with socket.create_connection(("127.0.0.1", int(server.server_address[1])), timeout=10) as connection:
            connection.sendall(sent)
            with connection.makefile("rb") as answer:
                found = answer.read()
        assert all(part in found for part in expected), found[:99]
        assert b"<script>" not in found


def test_it_is_read_only(server: LiveServer) -> None:
    held = cookie(server)
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD", "TRACE", "CONNECT", "NONSENSE"):
        status, headers, _ = ask(server, "/", method, Cookie=held)
        assert (status, headers["Allow"]) == (405, "GET")


def test_it_listens_on_loopback_alone(server: LiveServer) -> None:
    assert server.server_address[0] == "127.0.0.1"
    port = int(server.server_address[1])
    with pytest.raises(InputError, match=f"port {port} of 127.0.0.1 cannot be used"):
        LiveServer(server.page, port)


def test_the_page_is_made_again_when_the_journal_has_changed_but_not_all_the_time(folder: Path) -> None:
    now = [0.0]
    page = LivePage([folder], lambda: now[0])
    version, text = page.latest()
    assert "weiavg" not in text
    assert page.latest()[0] == version
    journal = new_journal(folder.parent / "other")  # of another folder: it changes nothing here
    journal.close()
    now[0] += 100
    assert page.latest()[0] == version
    from polyeps.experiment.journal import Journal

    write_job(Journal(folder / "journal.db"), "weiavg")
    now[0] += 0.0
    newer, text = page.latest()
    assert newer != version
    assert "weiavg" in text
    write_job(Journal(folder / "journal.db"), "pfa")
    assert page.latest()[0] == newer  # not yet
    now[0] += 1000
    assert "pfa" in page.latest()[1]


def test_a_run_that_vanishes_is_said(server: LiveServer, folder: Path) -> None:
    held = cookie(server)
    shutil.rmtree(folder)
    server.page._next = 0.0
    status, _, text = ask(server, f"{server.place}update", Cookie=held)
    assert status == 503
    assert "there is no run at" in text


def test_the_end_of_a_run_is_said_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page, said, turns = LivePage([folder]), list[str](), [0]

    def turn(_: float) -> None:
        turns[0] += 1
        if turns[0] == 2:
            from polyeps.experiment.journal import Journal

            Journal(folder / "journal.db").finish("fedavg-0", {}, {})
        if turns[0] == 5:
            raise KeyboardInterrupt

    monkeypatch.setattr("polyeps.report.live.time.sleep", turn)
    with pytest.raises(KeyboardInterrupt):
        _follow(page, said.append)
    assert said == ["the run has ended; the page stays until Ctrl-C"]


def test_a_served_run_can_be_watched(folder: Path) -> None:
    assert _JOURNALS[1] == JOURNAL
    (folder / "journal.db").rename(folder / JOURNAL)
    for more in folder.glob("journal.db-*"):
        more.unlink()
    assert "fedavg" in LivePage([folder]).latest()[1]


def test_the_command_ends_politely(folder: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import sys; from polyeps.cli import main; main()", "watch", str(folder)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    assert process.stdout
    address = process.stdout.readline()
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/\?token=[\w-]{43}\n", address)
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0
    assert errors.endswith("polyeps: the live view has ended\n")
    assert "Traceback" not in errors
    refused("watch", str(tmp_path / "absent"), naming=("absent", "give the folder of a run"))
