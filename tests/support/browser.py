"""Headless Chromium, driven by the DevTools protocol over a pair of pipes: no port, no driver, no package."""

from __future__ import annotations

import base64
import itertools
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-extensions", "--disable-dev-shm-usage",
    "--disable-default-apps", "--hide-scrollbars", "--remote-debugging-pipe",
    "--host-resolver-rules=MAP rebound.test 127.0.0.1",
)  # fmt: skip
_PATIENCE = 60.0  # seconds


class Browser:
    """One Chromium with a profile of its own."""

    def __init__(self, profile: Path) -> None:
        assert CHROMIUM
        commands, self._out = os.pipe()
        self._in, events = os.pipe()

        # The browser reads commands at 3 and writes answers at 4. Copies are made first: 3 or 4 may be in use here.
        high = [os.dup2(one, number) for one, number in ((commands, 203), (events, 204))]
        script = 'exec "$0" "$@" 3<&203 4>&204 203<&- 204>&-'
        self._process = subprocess.Popen(
            ["bash", "-c", script, CHROMIUM, *_FLAGS, f"--user-data-dir={profile}", "about:blank"],
            pass_fds=high,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for one in (commands, events, *high):
            os.close(one)
        self._numbers = itertools.count(1)
        self._rest = b""
        self.events: list[dict[str, Any]] = []

    def close(self) -> None:
        """End the browser."""
        try:
            self.call("Browser.close")
            self._process.wait(10)
        except Exception:
            self._process.kill()
            self._process.wait(10)
        finally:
            os.close(self._out)
            os.close(self._in)

    def call(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """Send a command and return its result."""
        number = next(self._numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if session:
            message["sessionId"] = session
        sent = json.dumps(message).encode() + b"\0"
        while sent:
            sent = sent[os.write(self._out, sent) :]
        deadline = time.monotonic() + _PATIENCE
        while True:
            answer = self._next(deadline)
            if answer.get("id") == number:
                assert "error" not in answer, (method, answer["error"])
                found: dict[str, Any] = answer["result"]
                return found
            self.events.append(answer)

    def listen(self, seconds: float) -> None:
        """Collect events for some time."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                self.events.append(self._next(deadline))
            except TimeoutError:
                return

    def _next(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._rest:
            if not select.select([self._in], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise TimeoutError("the browser does not answer")
            found = os.read(self._in, 1 << 16)
            if not found:
                raise RuntimeError("the browser has ended")
            self._rest += found
        message, _, self._rest = self._rest.partition(b"\0")
        answer: dict[str, Any] = json.loads(message)
        return answer

    @contextmanager
    def tab(self, width: int = 1400, height: int = 900, *, dark: bool = False, media: str = "screen") -> Iterator[Tab]:
        """Open a tab of a size, and close it."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        tab = Tab(self, session)
        for domain in ("Page", "Runtime", "Log", "Network"):
            tab.call(f"{domain}.enable")
        tab.call("Page.setBypassCSP", enabled=False)
        tab.size(width, height)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        tab.call("Emulation.setEmulatedMedia", media=media, features=[scheme])
        try:
            yield tab
        finally:
            self.call("Target.closeTarget", targetId=target)


class Tab:
    """One page."""

    def __init__(self, browser: Browser, session: str) -> None:
        self.browser, self.session = browser, session

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self.browser.call(method, self.session, **parameters)

    def size(self, width: int, height: int) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def open(self, address: str) -> float:
        """Go to an address; return the seconds until its script has run."""
        began = time.perf_counter()
        self.call("Page.navigate", url=address)
        self.until("document.readyState === 'complete' && document.documentElement.dataset.ready === '1'")
        return time.perf_counter() - began

    def until(self, condition: str, seconds: float = 30.0) -> None:
        """Wait for a condition."""
        deadline = time.monotonic() + seconds
        while not self._holds(condition):
            assert time.monotonic() < deadline, f"never true: {condition}"
            time.sleep(0.03)

    def _holds(self, condition: str) -> bool:
        try:
            return bool(self.value(condition))
        except AssertionError as problem:
            if "navigated" in str(problem):  # to another page meanwhile
                return False
            raise

    def value(self, expression: str) -> Any:
        """Return the value of an expression."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def move(self, x: float, y: float) -> None:
        """Move the pointer."""
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def click(self, selector: str) -> None:
        """Click in the middle of an element."""
        x, y = self.middle(selector)
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def box(self, selector: str) -> tuple[float, float, float, float]:
        """Return the left, top, right and bottom of an element, and scroll it into the middle before."""
        found = self.value(
            f"(async () => {{ const one = document.querySelector({json.dumps(selector)}); "
            "one.scrollIntoView({block: 'center', behavior: 'instant'}); "
            "await new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done))); "
            "const box = one.getBoundingClientRect(); return [box.left, box.top, box.right, box.bottom]; })()"
        )
        return found[0], found[1], found[2], found[3]

    def middle(self, selector: str) -> tuple[float, float]:
        """Scroll to an element and return the place of its middle."""
        left, top, right, bottom = self.box(selector)
        return (left + right) / 2, (top + bottom) / 2

    def texts(self, selector: str) -> list[str]:
        """Return the text of all such elements."""
        found: list[str] = self.value(
            f"[...document.querySelectorAll({json.dumps(selector)})].map(one => one.textContent)"
        )
        return found

    def enter(self, selector: str, text: str) -> None:
        """Fill in a control."""
        self.value(
            f"(one => {{ one.value = {json.dumps(text)}; one.dispatchEvent(new Event('input')); }})"
            f"(document.querySelector({json.dumps(selector)}))"
        )

    def picture(self, path: Path | None = None, *, whole: bool = False) -> bytes:
        """Return a PNG of the window, or of the whole page."""
        more: dict[str, Any] = {}
        if whole:
            size = self.call("Page.getLayoutMetrics")["cssContentSize"]
            more = {"clip": {"x": 0, "y": 0, "width": size["width"], "height": min(size["height"], 12000), "scale": 1}}
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole, **more)
        content = base64.b64decode(shot["data"])
        if path is not None:
            path.write_bytes(content)
        return content

    def complaints(self) -> list[str]:
        """Return console messages, log entries and exceptions of this page so far."""
        self.browser.listen(0.05)
        kinds: dict[str, Callable[[Any], str]] = {
            "Runtime.consoleAPICalled": lambda given: f"console: {given['args']}",
            "Runtime.exceptionThrown": lambda given: f"exception: {given['exceptionDetails']}",
            "Log.entryAdded": lambda given: f"log: {given['entry']['text']}",
        }
        return [kinds[one["method"]](one["params"]) for one in self._own() if one["method"] in kinds]

    def requests(self) -> list[str]:
        """Return the addresses that this page has asked for, without what its own policy held back."""
        self.browser.listen(0.05)
        held = {
            one["params"]["requestId"]
            for one in self._own()
            if one["method"] == "Network.loadingFailed" and one["params"].get("blockedReason") == "csp"
        }
        asked = [one["params"] for one in self._own() if one["method"] == "Network.requestWillBeSent"]
        return [one["request"]["url"] for one in asked if one["requestId"] not in held]

    def _own(self) -> list[dict[str, Any]]:
        return [one for one in self.browser.events if one.get("sessionId") == self.session]


@contextmanager
def started() -> Iterator[Browser]:
    """Start Chromium, and end it."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        browser = Browser(Path(profile))
        try:
            yield browser
        finally:
            browser.close()
