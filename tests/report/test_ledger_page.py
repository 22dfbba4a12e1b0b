"""A ledger's own page: figures against the ledger, refusals, words; nothing of a ledger that was tampered with."""

from __future__ import annotations

import json
import math
import re
import shutil
import sqlite3
import stat
from html import unescape
from pathlib import Path

import pytest
from support.commands import refused, run_json
from support.pages import words

from polyeps import cli
from polyeps.accounting.events import Gaussian
from polyeps.core import Budget
from polyeps.errors import LedgerError, LedgerTampered
from polyeps.ledger import Ledger
from polyeps.ledger.account import BudgetTerms, Charge
from polyeps.report.ledger_history import read_history
from polyeps.report.ledger_page import SiloRecords, refusals, write_ledger_page

STEP = Gaussian(40.0)
EVIL = "<script>alert(1)</script>"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A silo's ledger: one run that has ended, one that is open, and a budget that was raised."""
    path = tmp_path / "ledger.db"
    terms = BudgetTerms(Budget(6.0, 1e-5))
    ledger = Ledger.create(path, {"aspen": terms, "signer: lab": terms})
    for run, uses in (("first/1", 3), ("second/2", 2)):
        ledger.reserve(run, [Charge(("aspen", "signer: lab"), STEP, 5)])
        for _ in range(uses):
            ledger.charge(STEP, clients=["aspen"], run=run, purpose=f"train for {EVIL}")
    ledger.release("first/1")
    ledger.change_budget("aspen", Budget(8.0, 1e-5), "a second year")
    ledger.close()
    return path


def test_figures_are_those_of_the_ledger(path: Path, tmp_path: Path) -> None:
    shown = write_ledger_page(path, tmp_path / "page.html")
    ledger = Ledger(path)
    account = ledger.account("aspen")
    aspen, signer = shown["accounts"]
    assert aspen["spent"] == account.spent()
    assert aspen["spent"] + aspen["reserved"] == pytest.approx(account.spent(account.committed))
    assert aspen["left"] == pytest.approx(8.0 - account.spent(account.committed))
    assert (aspen["charges"], signer["account"]) == (5, "signer: lab")
    assert [(run["run"], run["charges"], run["open"], run["signers"]) for run in shown["runs"]] == [
        ("second/2", 2, True, ["lab"]),
        ("first/1", 3, False, ["lab"]),
    ]
    # By itself, three of the same charges in a ledger of their own.
    alone = Ledger.create(tmp_path / "alone.db", {"aspen": BudgetTerms(Budget(6.0, 1e-5))})
    alone.charge(STEP, uses=3)
    assert shown["runs"][1]["epsilon"] == pytest.approx(alone.spent("aspen"))


def test_the_curve_goes_up_to_what_was_spent(path: Path) -> None:
    history = read_history(path)
    assert history.main is not None
    spent = [figure for _, _, figure, _ in history.curve]
    assert spent == sorted(spent)
    assert spent[-1] == history.main.spent
    assert [budget for *_, budget in history.curve][-1] == 8.0


def test_the_page_says_it_in_words(path: Path, tmp_path: Path) -> None:
    log = tmp_path / "events.jsonl"
    events = [{"time": f"2026-01-0{day}T10:00:00+00:00", "event": "refused", "reason": "too many"} for day in (1, 2)]
    events += [{"time": "2026-01-03T10:00:00+00:00", "event": "refused", "reason": EVIL}]
    events += [{"time": "2026-01-03T10:00:00+00:00", "event": "answered", "run": "first/1"}]
    log.write_text("\n".join(map(json.dumps, events)) + "\nnot json\n[1]\n")
    assert refusals(log) == ([("2026-01-03 10:00:00", 1, EVIL), ("2026-01-02 10:00:00", 2, "too many")], 2)
    note = {"contract": "readmission", "signer": "lab", "algorithm": "fedavg", "rounds": "3", "ends": "2100-01-01"}
    write_ledger_page(path, tmp_path / "page.html", SiloRecords("aspen", {"second/2": note}, log))
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    said = unescape(words(text))
    assert "Privacy ledger of aspen" in said
    assert "readmission (2)" in said
    assert "budget changed to ε = 8, δ = 1e-5: a second year" in said
    assert "too many 2 2026-01-02 10:00:00" in said
    assert "2 lines of the log cannot be read" in said
    spent = Ledger(path).spent("aspen")
    found = re.search(r"released so far could raise a 50.% guess to ([\d.]+).%", said)
    assert found is not None
    assert 100 / (1 + math.exp(-spent)) <= float(found[1]) < 100 / (1 + math.exp(-spent)) + 0.1
    assert Ledger(path).head.hash in said
    assert EVIL not in text


def test_of_a_ledger_that_was_changed_nothing_is_drawn(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    forged = tmp_path / "forged"
    for change in (
        "UPDATE rows SET body = replace(body, '6.0', '60.0') WHERE kind = 'budget'",
        "DELETE FROM rows WHERE kind = 'charge'",
        "UPDATE rows SET time = '2020' WHERE seq = 3",
    ):
        forged.mkdir()
        for part in tmp_path.glob("ledger.db*"):
            shutil.copy(part, forged)
        with sqlite3.connect(forged / "ledger.db") as connection:
            guards = connection.execute("SELECT name, sql FROM sqlite_master WHERE type = 'trigger'").fetchall()
            for name, _ in guards:
                connection.execute(f"DROP TRIGGER {name}")
            assert connection.execute(change).rowcount
            for _, sql in guards:
                connection.execute(sql)
        with pytest.raises((LedgerTampered, LedgerError)):
            write_ledger_page(forged / "ledger.db", tmp_path / "page.html")
        assert (
            cli.execute(["ledger", "page", "--file", str(forged / "ledger.db"), "-o", str(tmp_path / "page.html")]) == 1
        )
        assert "ledger.db" in capsys.readouterr().err
        assert not (tmp_path / "page.html").exists()
        shutil.rmtree(forged)


def test_a_ledger_of_many_clients(tmp_path: Path) -> None:
    terms = {f"client {number}": BudgetTerms(Budget(0.5 + number / 20, 1e-5)) for number in range(200)}
    ledger = Ledger.create(tmp_path / "many.db", terms)
    for number in (1, 2):
        ledger.charge(Gaussian(90.0), clients=list(terms), purpose=f"weiavg-1/{number}/train")
    ledger.close()
    shown = write_ledger_page(tmp_path / "many.db", tmp_path / "page.html")
    assert len(shown["accounts"]) == 200
    said = words((tmp_path / "page.html").read_text(encoding="utf-8"))
    assert "client 199" in said
    assert "weiavg-1 200 2 20" in said  # the job that they were for, its clients, its charges and the first time
    assert "ε by itself" not in said  # each client has its own


def test_the_command(path: Path, tmp_path: Path) -> None:
    shown = run_json("ledger", "page", "--file", str(path), "-o", str(tmp_path / "page.html"))
    assert shown["rows"] == Ledger(path).head.seq
    assert (tmp_path / "page.html").stat().st_size < 200_000
    assert stat.S_IMODE((tmp_path / "page.html").stat().st_mode) == 0o600  # reasons of refusals may quote records
    refused("ledger", "page", "-o", str(tmp_path / "page.html"), naming=("--policy",))
    refused("ledger", "page", "--file", str(tmp_path / "absent.db"), naming=("absent.db",))
