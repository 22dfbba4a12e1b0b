"""Serves the page of a run while it goes on: on this machine alone, behind a token, and read-only.

The server answers two paths, the page and its newer version, and opens no file that a request names. It refuses a
request without the token (first in the address, then in a cookie), with a Host other than its own (a name that was
rebound to this machine), or sent by another page (Origin, Sec-Fetch-Site). Browsers send a cookie to all ports of a
machine, so this one belongs to a secret path: other servers here, perhaps other users' ones, are never sent it.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from http import HTTPStatus
from http.cookies import CookieError, SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from polyeps.errors import InputError, PolyepsError
from polyeps.report.page import journal_path, make_page, open_journals
from polyeps.report.whole_pages import policy

HOST = "127.0.0.1"
_PATIENCE = 10.0  # seconds for a request, so that a silent connection holds nothing
_SHARE = 5  # a page that took a second to make is made again after five seconds at the earliest
_LEAST = 1.0  # seconds between two pages
_LONGEST = 4096  # bytes of a path


class LivePage:
    """The page of some runs, made again when their journals have changed."""

    def __init__(self, folders: Sequence[Path], clock: Callable[[], float] = time.monotonic) -> None:
        self._folders, self._clock = list(folders), clock
        self._lock = threading.Lock()
        self._seen: object = None
        self._next = 0.0
        self._text = self.version = ""
        self.latest()  # what is no run is refused at once

    def latest(self) -> tuple[str, str]:
        """Return the version and the text of the page as it is now, or was a moment ago."""
        with self._lock:
            state = self._state()
            if state != self._seen and self._clock() >= self._next:
                began = self._clock()
                with ExitStack() as stack:
                    self._text = make_page(open_journals(self._folders, stack), live=_VERSION)
                self._seen = state
                self._next = self._clock() + max(_LEAST, _SHARE * (self._clock() - began))
                self.version = hashlib.sha256(self._text.encode("utf-8", "replace")).hexdigest()[:20]
                self._text = self._text.replace(_VERSION, self.version, 1)
            return self.version, self._text

    @property
    def ended(self) -> bool:
        """Whether all jobs of all runs are done."""
        with ExitStack() as stack:
            journals = open_journals(self._folders, stack)
            states = [row["status"] for one in journals for row in one.query("SELECT status FROM jobs")]
        return bool(states) and all(state == "done" for state in states)

    def _state(self) -> list[tuple[str, int, int]]:
        """Return what changes when a journal does: sizes and times of its files."""
        found = []
        for folder in self._folders:
            path = journal_path(folder)
            for one in (path, path.with_name(f"{path.name}-wal")):
                try:
                    about = one.stat()
                except OSError:
                    continue
                found.append((one.name, about.st_size, about.st_mtime_ns))
        return found


_VERSION = "version-of-this-page"  # stands in the page until its version is known


class LiveServer(ThreadingHTTPServer):
    """A server on loopback for one page."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, page: LivePage, port: int = 0) -> None:
        self.page, self.token = page, secrets.token_urlsafe(32)
        try:
            super().__init__((HOST, port), _Handler)
        except OSError as problem:
            raise InputError(
                f"port {port} of {HOST} cannot be used ({problem.strerror}); choose another with --port, or none"
            ) from None
        number = self.server_address[1]
        self.hosts = (f"{HOST}:{number}", f"localhost:{number}")
        self.cookie, self.place = f"polyeps-{number}", f"/{secrets.token_urlsafe(16)}/"

    @property
    def address(self) -> str:
        """Return the address to open, with the token."""
        return f"http://{self.hosts[0]}/?token={self.token}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: a browser that closes a connection is no problem of the run."""


class _Handler(BaseHTTPRequestHandler):
    server: LiveServer
    timeout = _PATIENCE
    server_version, sys_version = "polyeps", ""
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if len(self.path) > _LONGEST:
            return self._send(HTTPStatus.REQUEST_URI_TOO_LONG, "The address is too long.")
        if self.headers.get_all("Host", []) not in [[host] for host in self.server.hosts]:
            return self._send(HTTPStatus.MISDIRECTED_REQUEST, "This server answers on this machine alone.")
        try:
            asked = urlsplit(self.path)
            known = parse_qs(asked.query, max_num_fields=8)
        except ValueError:
            return self._send(HTTPStatus.BAD_REQUEST, "This is no address of the live view.")
        given = known.get("token", [])
        if not self._is_own_page(first=asked.path == "/" and bool(given)):
            return self._send(HTTPStatus.FORBIDDEN, "Other pages may not ask.")
        if asked.path == "/" and len(given) == 1 and self._is_token(given[0]):
            return self._welcome()
        if not self._is_token(self._cookie()):
            return self._send(HTTPStatus.FORBIDDEN, "The token is missing: open the address that polyeps watch prints.")
        place = self.server.place
        if asked.path not in (place, f"{place}update"):
            return self._send(HTTPStatus.NOT_FOUND, "There is nothing here but the page.")
        try:
            version, text = self.server.page.latest()
        except PolyepsError as problem:
            return self._send(HTTPStatus.SERVICE_UNAVAILABLE, str(problem))
        if asked.path != place and known.get("known") == [version]:
            return self._send(HTTPStatus.NO_CONTENT, "")
        return self._send(HTTPStatus.OK, text, {"X-Polyeps-Version": version}, "text/html")

    def __getattr__(self, name: str) -> Callable[[], None]:
        """Refuse every other method."""
        if name.startswith("do_"):
            return lambda: self._send(HTTPStatus.METHOD_NOT_ALLOWED, "The live view is read-only.", {"Allow": "GET"})
        raise AttributeError(name)

    def _is_own_page(self, *, first: bool) -> bool:
        """Whether a request comes from the page itself, or is typed by a person; a link may lead to the first page."""
        origin, site = self.headers.get("Origin"), self.headers.get("Sec-Fetch-Site")
        if origin is not None and origin not in [f"http://{host}" for host in self.server.hosts]:
            return False
        if site in (None, "same-origin", "none"):
            return True
        return first and self.headers.get("Sec-Fetch-Mode") == "navigate"

    def _is_token(self, given: str) -> bool:
        return hmac.compare_digest(given.encode("utf-8", "replace"), self.server.token.encode())

    def _cookie(self) -> str:
        try:
            held = SimpleCookie(self.headers.get("Cookie", "")).get(self.server.cookie)
        except CookieError:
            return ""
        return held.value if held else ""

    def _welcome(self) -> None:
        """Take the token out of the address: from now on a cookie of this browser holds it.

        The browser goes on from a page of ours: after a redirect it would count as sent by the page with the link.
        """
        place = self.server.place
        cookie = f"{self.server.cookie}={self.server.token}; Path={place}; HttpOnly; SameSite=Strict"
        text = f'<!doctype html><meta http-equiv="refresh" content="0;url={place}"><title>polyeps</title>'
        self._send(HTTPStatus.OK, text, {"Set-Cookie": cookie}, "text/html")

    def _send(
        self, status: HTTPStatus, text: str, more: dict[str, str] | None = None, kind: str = "text/plain"
    ) -> None:
        content = text.encode("utf-8", "replace")
        self.send_response(status)
        headers = {
            "Content-Type": f"{kind}; charset=utf-8",
            "Content-Length": str(len(content)),
            "Content-Security-Policy": f"{policy(live=True)}; frame-ancestors 'none'",
            "X-Content-Type-Options": "nosniff",
            "X-Frame-Options": "DENY",
            "Referrer-Policy": "no-referrer",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Cross-Origin-Opener-Policy": "same-origin",
            "Cache-Control": "no-store",
            "Connection": "close",
            **(more or {}),
        }
        if status == HTTPStatus.NO_CONTENT:
            del headers["Content-Type"], headers["Content-Length"]
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.close_connection = True
        if status != HTTPStatus.NO_CONTENT:
            self.wfile.write(content)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Log nothing: an address may hold the token."""


def serve_live(folders: Sequence[Path], port: int, ready: Callable[[str], None], say: Callable[[str], None]) -> None:
    """Serve the page of some runs until Ctrl-C; `ready` is given its address, `say` what happens."""
    page = LivePage(folders)
    with LiveServer(page, port) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.2}, daemon=True)
        thread.start()
        try:
            ready(server.address)
            _follow(page, say)
        finally:
            server.shutdown()
            thread.join()


def _follow(page: LivePage, say: Callable[[str], None]) -> None:
    """Say when the run has ended or cannot be read; return at Ctrl-C."""
    ended, problem = False, ""
    while True:
        try:
            now = page.ended
            if now and not ended:
                say("the run has ended; the page stays until Ctrl-C")
            ended, problem = now, ""
        except PolyepsError as found:
            if str(found) != problem:
                problem = str(found)
                say(problem)
        time.sleep(2.0)
