"""The pages in a real browser: nothing complains, nothing is fetched, charts are drawn, and what moves works."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from support.browser import CHROMIUM, Browser, Tab, started
from support.journals import ABOUT, CLIENTS, FACTS, add_job, new_journal, write_job, write_large

from polyeps.accounting.events import Gaussian
from polyeps.core import Budget
from polyeps.experiment.journal import Checkpoint, ClientRow, Journal
from polyeps.ledger import Ledger
from polyeps.ledger.account import BudgetTerms
from polyeps.report.certificate_page import ClientPage, write_certificate
from polyeps.report.ledger_page import SiloRecords, write_ledger_page
from polyeps.report.live import LivePage, LiveServer
from polyeps.report.page import write_page

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed (apt-get install chromium)")
EVIL = "<img src=x onerror=window.broken=1></script><script>window.broken=1</script>"
WIDTHS = (1400, 1024, 390)
NOWHERE = Checkpoint(0, (), b"", {})


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with started() as browser:
        yield browser


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A report with hostile names, a comparison of two runs, a ledger's page and a certificate."""
    folder = tmp_path_factory.mktemp("pages")
    found = {name: folder / f"{name}.html" for name in ("report", "comparison", "ledger", "certificate")}
    clients = [ClientRow(name, 1.0 + n, 1e-5, 1.0 + n, 10 + n, 1.0) for n, name in enumerate([EVIL, "x" * 90, "ward"])]
    clients += [ClientRow(f"clinic {n}", 0.2 + n / 3, 1e-5, 0.2 + n / 3, 50 + n, 1.0) for n in range(20)]
    journal = new_journal(folder / "first", {**ABOUT, "name": EVIL, "command": EVIL, "experiment": {EVIL: EVIL}})
    for seed in range(3):
        for place, label in enumerate(("weiavg", EVIL[:60], "a long name of a method " * 3)):
            values = [0.2 + 0.02 * n + seed / 50 + place / 10 for n in range(20)]
            write_job(journal, label, seed, clients=clients, accuracies=values, facts={"summary": EVIL})
        write_job(journal, "maximum", seed, clients=CLIENTS, facts={"budgets": "maximum"})
        bare = [ClientRow("ward-a", None, None, 0.5, 100, None)]
        write_job(journal, "open", seed, clients=bare, facts={"budgets": "none"})
    journal.close()
    other = new_journal(folder / "second", {**ABOUT, "name": "second"})
    write_job(other, left={"ward-a": 0})
    other.close()
    write_page([folder / "first"], found["report"])
    write_page([folder / "first", folder / "second"], found["comparison"])
    ledger = Ledger.create(folder / "ledger.db", {"aspen": BudgetTerms(Budget(6.0, 1e-5))})
    for number in range(12):
        ledger.charge(Gaussian(30.0), purpose=f"{EVIL} {number}")
    ledger.close()
    log = folder / "events.jsonl"
    log.write_text(json.dumps({"time": "2026-01-01T00:00:00", "event": "refused", "reason": EVIL}) + "\n")
    write_ledger_page(folder / "ledger.db", found["ledger"], SiloRecords(EVIL, {}, log))
    given: dict[str, Any] = {one.name: EVIL for one in fields(ClientPage)}
    given |= {"facts": {EVIL: EVIL, "Method": "x" * 90}, "ledger": {"Hash": "f" * 64}, "limits": (EVIL,)}
    given |= {"checks": (EVIL,), "epsilon": 1.0, "delta": 1e-5, "spent": 9.0}
    write_certificate(ClientPage(**given), found["certificate"])
    return found


def coloured(tab: Tab, selector: str, colour: str) -> int:
    """Count the pixels of a part of the page that have one of its colours."""
    left, top, right, bottom = map(int, tab.box(selector))
    shown = Image.open(io.BytesIO(tab.picture())).convert("RGB")
    wanted = tab.value(f"getComputedStyle(document.documentElement).getPropertyValue('{colour}').trim()")
    rgb = [int(wanted[place : place + 2], 16) for place in (1, 3, 5)]
    part = np.asarray(shown.crop((max(0, left), max(0, top), right, bottom)), np.int64)
    return int((np.abs(part - rgb).sum(2) < 24).sum())


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ["report", "comparison", "ledger", "certificate"])
def test_nothing_complains_is_fetched_or_overflows(
    name: str, width: int, browser: Browser, pages: dict[str, Path]
) -> None:
    with browser.tab(width, 900, dark=width == 1024) as tab:
        tab.open(pages[name].as_uri())
        assert tab.value("document.documentElement.scrollWidth") <= width
        tab.value("document.querySelectorAll('details').forEach(one => { one.open = true; })")
        assert tab.value("document.documentElement.scrollWidth") <= width
        wide = tab.value(
            "[...document.querySelectorAll('main *')].filter(one => !one.closest('.scroll, svg') && "
            "one.getClientRects().length && one.getBoundingClientRect().right > innerWidth + 1)"
            ".map(one => one.outerHTML.slice(0, 99))"
        )
        assert not wide
        if width == 1400:  # on a desk, no table has to be scrolled sideways
            assert not tab.value(
                "[...document.querySelectorAll('.scroll')].filter(one => one.scrollWidth > one.clientWidth + 1)"
                ".map(one => one.outerHTML.slice(0, 99))"
            )
        assert tab.complaints() == []
        assert [address for address in tab.requests() if not address.startswith("data:")] == [pages[name].as_uri()]
        assert tab.value("window.broken") is None
        assert not tab.value("document.querySelector('main img, main script:not([type])')")


def test_a_script_that_is_not_ours_does_not_run(browser: Browser, pages: dict[str, Path], tmp_path: Path) -> None:
    """What the policy is for: were a name ever written as markup, it would still do nothing."""
    text = pages["report"].read_text(encoding="utf-8")
    planted = tmp_path / "planted.html"
    more = "<script>window.broken = 1</script><img src=x onerror='window.broken = 1'><link rel=stylesheet href=o.css>"
    planted.write_text(text.replace("<main", f"{more}<main", 1), encoding="utf-8")
    with browser.tab() as tab:
        tab.open(planted.as_uri())
        assert tab.value("window.broken") is None
        assert [address for address in tab.requests() if not address.startswith("data:")] == [planted.as_uri()]
        assert len([said for said in tab.complaints() if "Content Security Policy" in said]) >= 2
        failed = "fetch('file:///etc/hostname').then(() => 'sent', () => 'refused')"
        assert tab.value(failed) == "refused"


@pytest.mark.parametrize("dark", [False, True])
def test_charts_are_drawn_in_the_colours_of_the_scheme(dark: bool, browser: Browser, pages: dict[str, Path]) -> None:
    with browser.tab(dark=dark) as tab:
        tab.open(pages["report"].as_uri())
        for selector in ("#overview .wide svg", "#accuracy .wide svg", "#spent svg"):
            assert coloured(tab, selector, "--k0") > 60, selector  # a dot alone has about 80
        assert coloured(tab, "#accuracy .wide svg", "--k2") > 150
        corner = np.asarray(Image.open(io.BytesIO(tab.picture())).convert("L"))[2, 2]
        assert (corner < 60) == dark
    with browser.tab(390, 844, dark=dark) as tab:
        tab.open(pages["report"].as_uri())
        assert coloured(tab, "#accuracy .narrow svg", "--k0") > 100
        assert tab.value("getComputedStyle(document.querySelector('#accuracy .wide')).display") == "none"


def test_a_pointer_and_the_arrow_keys_name_what_is_drawn(browser: Browser, pages: dict[str, Path]) -> None:
    def shown(tab: Tab) -> str:
        return str(tab.value("(tip => tip.hidden ? '' : tip.innerText)(document.querySelector('.tip'))"))

    with browser.tab() as tab:
        tab.open(pages["report"].as_uri())
        tab.move(*tab.middle("#accuracy .wide svg"))
        assert shown(tab).startswith("round ")
        assert "weiavg" in shown(tab)
        assert "±" in shown(tab)
        tab.move(2, 2)
        assert shown(tab) == ""
        tab.move(*tab.middle("#spent .spot"))
        name = tab.value("document.querySelector('#spent .name').textContent")
        assert shown(tab).startswith(name)
        assert "of budget" in shown(tab)
        assert tab.value("window.broken") is None  # the tip of a hostile name is text
        tab.box("#accuracy .wide svg")
        tab.value("document.querySelector('#accuracy .wide svg').focus({preventScroll: true})")
        for _ in range(2):
            tab.call("Input.dispatchKeyEvent", type="keyDown", key="ArrowRight")
        assert shown(tab).startswith("round 2")
        tab.call("Input.dispatchKeyEvent", type="keyDown", key="Escape")
        assert shown(tab) == ""
        assert tab.complaints() == []


def test_tables_are_sorted_and_filtered_and_saved(browser: Browser, pages: dict[str, Path], tmp_path: Path) -> None:
    names = "#clients-table-1 tbody tr:not([hidden]) td:first-child"
    with browser.tab() as tab:
        tab.open(pages["report"].as_uri())
        tab.value("document.querySelector('#clients-1 details').open = true")
        before = tab.texts(names)
        tab.click("#clients-table-1 th:nth-child(2) button")
        budgets = [float(text) for text in tab.texts("#clients-table-1 tbody td:nth-child(2)")]
        assert budgets == sorted(budgets, reverse=True)
        tab.click("#clients-table-1 th:first-child button")
        assert sorted(tab.texts(names)) == sorted(before)
        tab.enter("#find", "CLINIC 1")
        assert set(tab.texts(names)) == {"clinic 1", *(f"clinic {number}" for number in range(10, 20))}
        assert tab.value("document.querySelectorAll('#spent .match').length") >= 11
        assert " of " in tab.value("document.getElementById('found').textContent")
        tab.enter("#only", "weak")
        assert tab.texts(names) == []  # they spent half of budgets below 7: nobody's guarantee is weak
        browser.call("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path))
        tab.value("document.querySelector('a[download=\"clients.csv\"]').click()")
        for _ in range(200):
            if (tmp_path / "clients.csv").exists():
                break
            browser.listen(0.05)
        lines = (tmp_path / "clients.csv").read_text(encoding="utf-8").splitlines()
        assert lines[0].startswith("method,run,seed,client,epsilon")
        assert len(lines) == 1 + 3 * (3 * 23 + 2 + 1)


def test_paper_has_no_navigation_and_open_details(browser: Browser, pages: dict[str, Path]) -> None:
    with browser.tab(794, 1123, media="print") as tab:
        tab.open(pages["report"].as_uri())
        tab.value("dispatchEvent(new Event('beforeprint'))")
        assert tab.value("getComputedStyle(document.querySelector('nav')).display") == "none"
        assert tab.value("document.querySelectorAll('details:not([open])').length") == 0
        assert tab.value("document.documentElement.scrollWidth") <= 794
        assert len(tab.call("Page.printToPDF")["data"]) > 20_000


def test_hundreds_of_clients_and_rounds_are_quick(browser: Browser, tmp_path: Path) -> None:
    journal = new_journal(tmp_path / "large")
    write_large(journal, ["fedavg", "weiavg", "pfa", "pdp-fl", "balanced"], 500, 500, each_answer=False)
    journal.close()
    write_page([tmp_path / "large"], tmp_path / "page.html")
    assert (tmp_path / "page.html").stat().st_size < 6_000_000
    with browser.tab() as tab:
        tab.call("Performance.enable", timeDomain="threadTicks")  # of the processor: other programs do not count
        tab.open((tmp_path / "page.html").as_uri())
        busy = {one["name"]: one["value"] for one in tab.call("Performance.getMetrics")["metrics"]}["TaskDuration"]
        assert 0.01 < busy < 2.0
        tab.move(*tab.middle("#spent svg"))
        assert tab.complaints() == []


# The live view


@contextmanager
def watched(folder: Path) -> Iterator[LiveServer]:
    with LiveServer(LivePage([folder])) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def begun(folder: Path) -> Journal:
    """A run of many clients that has done no round."""
    journal = new_journal(folder)
    clients = [ClientRow(f"ward {n}", 1.0 + n, 1e-5, 1.0 + n, 10, 1.0) for n in range(30)]
    add_job(journal, "fedavg-1", "fedavg", "fedavg", 1, 40)
    journal.begin("fedavg-1", clients, FACTS)
    return journal


def one_round(journal: Journal, number: int) -> None:
    counts = {"invited": 30, "answered": 30, "declined": 0, "active": 30, "seconds": 0.1}
    answers = [(f"ward {n}", True, 100, 100) for n in range(30)]
    journal.write_round("fedavg-1", number, counts, answers, [], {"accuracy": 0.5 + number / 100}, NOWHERE)


def test_the_live_view_follows_a_run_without_losing_the_readers_place(browser: Browser, tmp_path: Path) -> None:
    journal = begun(tmp_path / "run")
    one_round(journal, 0)
    with watched(tmp_path / "run") as server, browser.tab(1024, 700) as tab:
        tab.open(server.address)
        assert "token" not in tab.value("location.href")
        tab.value("window.same = 1")
        assert "has done 1 of 40 rounds" in tab.value("document.body.innerText")
        tab.value("document.querySelector('#clients-1 details').open = true")
        tab.enter("#find", "ward 2")
        tab.click("#clients-table-1 th:nth-child(2) button")
        tab.value("document.querySelector('#clients-1').scrollIntoView({behavior: 'instant'})")
        place = "document.querySelector('#clients-1').getBoundingClientRect().top"
        rows = "#clients-table-1 tbody tr:not([hidden]) td:first-child"
        before, names = tab.value(place), tab.texts(rows)
        assert len(names) == 11
        for number in range(1, 4):
            one_round(journal, number)
        tab.until("document.body.innerText.includes('has done 4 of 40 rounds')")
        assert tab.value("window.same") == 1  # not loaded again
        assert tab.value("document.querySelector('#clients-1 details').open")
        assert tab.value("document.getElementById('find').value") == "ward 2"
        assert tab.texts(rows) == names  # filtered and in the same order
        assert abs(tab.value(place) - before) <= 2
        marks = json.loads(tab.value("document.querySelector('#accuracy .marks').textContent"))
        assert [mark[2] for mark in marks] == ["round 1", "round 2", "round 3", "round 4"]
        tab.move(*tab.middle("#accuracy .wide svg"))
        assert "round " in tab.value("document.querySelector('.tip').innerText")
        for number in range(4, 40):
            one_round(journal, number)
        journal.finish("fedavg-1", {f"ward {n}": 0.5 for n in range(30)}, {})
        tab.until("document.getElementById('live').textContent.startsWith('The run has ended')")
        assert "kept by all" in tab.value("document.body.innerText")
        assert tab.complaints() == []
        port = server.server_address[1]
        assert all(f"127.0.0.1:{port}/" in one for one in tab.requests() if not one.startswith("data:"))


def test_a_link_opens_the_live_view_and_no_other_server_is_sent_its_cookie(browser: Browser, tmp_path: Path) -> None:
    """Links stand in notebooks' terminals and mails; other users' servers share this machine's cookies."""
    begun(tmp_path / "run").close()
    sent: list[str] = []

    class Other(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            sent.append(self.headers.get("Cookie", ""))
            text = f'<!doctype html><title>other</title><a href="{server.address}">the live view</a>'.encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, format: str, *arguments: Any) -> None: ...

    with watched(tmp_path / "run") as server, ThreadingHTTPServer(("127.0.0.1", 0), Other) as other:
        threading.Thread(target=other.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        for host in ("localhost", "127.0.0.1"):
            with browser.tab() as tab:
                tab.call("Page.navigate", url=f"http://{host}:{other.server_address[1]}/")
                tab.until("document.title === 'other'")
                tab.value("document.querySelector('a').click()")
                tab.until("document.documentElement?.dataset.ready === '1'")
                assert "token" not in tab.value("location.href")
                tab.call("Page.navigate", url=f"http://127.0.0.1:{other.server_address[1]}/again")
                tab.until("document.title === 'other'")
        other.shutdown()
    assert len(sent) >= 4
    assert not any(sent)


def test_the_live_view_says_when_it_is_gone_and_when_the_token_is_missing(browser: Browser, tmp_path: Path) -> None:
    journal = begun(tmp_path / "run")
    with browser.tab() as tab:
        with watched(tmp_path / "run") as server:
            tab.open(server.address)
            one_round(journal, 0)
            tab.until("document.body.innerText.includes('has done 1 of 40 rounds')")
        tab.until("document.getElementById('live').textContent.startsWith('The connection is lost')")


def test_other_pages_learn_nothing_from_a_live_view(browser: Browser, tmp_path: Path) -> None:
    begun(tmp_path / "run").close()
    (tmp_path / "other.html").write_text("<!doctype html><title>other</title>")
    with watched(tmp_path / "run") as server, browser.tab() as own, browser.tab() as other:
        own.open(server.address)  # the browser has the cookie now
        port = server.server_address[1]
        other.call("Page.navigate", url=(tmp_path / "other.html").as_uri())
        other.until("document.title === 'other'")
        for path in ("", server.place[1:], f"{server.place[1:]}update"):
            asked = f"fetch('http://127.0.0.1:{port}/{path}', {{credentials: 'include'}})"
            assert other.value(f"{asked}.then(answer => answer.text(), () => 'refused')") == "refused"
        framed = (
            "new Promise(done => { const frame = document.createElement('iframe'); "
            "frame.onload = () => done(frame.contentDocument === null); "
            f"frame.src = 'http://127.0.0.1:{port}{server.place}'; document.body.append(frame); }})"
        )
        assert other.value(framed) is True
        # A name that was rebound to this machine.
        other.call("Page.navigate", url=f"http://rebound.test:{port}/?token={server.token}")
        other.until("document.body && document.body.innerText.includes('on this machine alone')")
        assert other.value("document.cookie") == ""
