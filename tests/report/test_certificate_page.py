"""A client's certificate after a run: figures of the ledger, in words, on a page; refused where they disagree."""

from __future__ import annotations

import json
import math
import re
import shlex
import shutil
import sqlite3
from html import unescape
from pathlib import Path

import pytest

from polyeps import cli
from polyeps.errors import InputError, LedgerTampered
from polyeps.experiment import config
from polyeps.experiment.run import run
from polyeps.ledger import Ledger
from polyeps.report.certificate_page import certificate_of, write_certificate


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certificates") / "run"
    settings = {
        "rounds": 2,
        "budgets": {"epsilons": [0.5, 3.0, 9.0], "delta": 1e-4},
        "training": {"local_steps": 2},
        "algorithm": [{"name": "weiavg"}, {"name": "fedavg", "budgets": "none"}],
    }
    run(config.experiment(settings), folder)
    return folder


def test_its_figures_are_those_of_the_ledger(folder: Path) -> None:
    page = certificate_of(folder, "1")
    ledger = Ledger(folder / "ledgers" / "weiavg-1.db")
    assert page.spent == pytest.approx(ledger.spent("1"), rel=1e-12)
    assert page.spent <= page.epsilon == 3.0
    assert page.ledger["Hash of the last row"] == ledger.head.hash
    assert page.ledger["Charges to this client"] == "2"
    assert "replacing any one record" in page.sentence


@pytest.mark.parametrize(("client", "word"), [("0", "strong"), ("1", "moderate"), ("2", "weak")])
def test_it_says_how_strong_the_guarantee_is(folder: Path, client: str, word: str) -> None:
    page = certificate_of(folder, client)
    assert page.strength == f"A {word} guarantee."
    said = re.search(r"at most ([0-9.]+)\u00a0% sure", page.guess)
    assert said is not None
    odds = 100 / (1 + math.exp(-page.spent))
    assert odds <= float(said[1]) < min(odds + 0.1, 100)  # never less than what the ledger allows


def test_it_says_what_is_not_guaranteed(folder: Path, tmp_path: Path) -> None:
    page = certificate_of(folder, "0")
    assert "simulation" in page.standing
    assert "seed" in page.standing  # nothing protects against those who know it
    assert any("one more time" in limit and "1 of them without a guarantee" in limit for limit in page.limits)
    assert not any("held out" in limit for limit in page.limits)  # digits has public test records
    table = {
        "hospital": ["elm", "fir st"] * 60,
        "x": [float(n % 7) for n in range(120)],
        "outcome": [n % 3 % 2 for n in range(120)],
    }
    settings = {
        "rounds": 1,
        "data": {"client": "hospital", "label": "outcome", "columns": {"x": {"range": [0, 6]}}},
        "budgets": {"epsilon": 30.0},
        "algorithm": "fedavg",
    }
    run(config.experiment(settings), tmp_path / "own", data=table)
    page = certificate_of(tmp_path / "own", "fir st")
    assert any("held out for tests" in limit for limit in page.limits)
    assert not any("more time" in limit for limit in page.limits)
    assert "practically certain" in page.guess  # no figure that reads like a bound
    assert page.checks[1].endswith("--client 'fir st'")


def test_the_page_shows_it_and_escapes_names(folder: Path, tmp_path: Path) -> None:
    from dataclasses import replace

    page = replace(certificate_of(folder, "0"), client="<script>alert(1)</script>")
    write_certificate(page, tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "<script>alert" not in text
    assert page.sentence in unescape(text)
    assert text.index(page.standing) < text.index(page.strength)
    assert not re.findall(r'(?:src|href)="(?!#|data:)', text)  # nothing is fetched
    assert "default-src &#39;none&#39;" in text


def test_a_changed_journal_or_ledger_is_noticed(folder: Path, tmp_path: Path) -> None:
    forged = tmp_path / "forged"
    shutil.copytree(folder, forged)
    with sqlite3.connect(forged / "journal.db") as journal:
        journal.execute("UPDATE clients SET spent = spent / 2 WHERE client = '1'")
    with pytest.raises(LedgerTampered, match="the ledger says that 1 spent"):
        certificate_of(forged, "1")
    (forged / "ledgers" / "weiavg-1.db").unlink()
    with pytest.raises(InputError, match="nothing backs a certificate"):
        certificate_of(forged, "1")


def test_what_is_not_there_is_refused(folder: Path) -> None:
    with pytest.raises(InputError, match="no client 'elm'; it has 0, 1, 2"):
        certificate_of(folder, "elm")
    with pytest.raises(InputError, match="--method: weiavg"):
        certificate_of(folder, "0", method="fedavg (none)")
    with pytest.raises(InputError, match="--seed: 1"):
        certificate_of(folder, "0", seed=7)


def test_the_command(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.execute(["certificate", str(folder), "0", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["epsilon"] == 0.5
    assert cli.execute(["certificate", str(folder), "0", "-o", str(tmp_path / "0.html")]) == 0
    assert (tmp_path / "0.html").exists()
    assert cli.execute(["certificate", str(folder), "9"]) == 2


def test_other_trainings_on_the_same_records_are_said_to_spend_more(folder: Path, tmp_path: Path) -> None:
    first = certificate_of(folder, "0").limits[0]
    assert "trained one more time on these records" in first
    assert "1 of them without a guarantee" in first
    settings = {"rounds": 1, "budgets": {"epsilons": [0.5]}, "training": {"local_steps": 1}, "algorithm": "fedavg"}
    run(config.experiment(settings), tmp_path / "one")
    assert not any("The same run trained" in said for said in certificate_of(tmp_path / "one", "0").limits)
    run(config.experiment({**settings, "seeds": [1, 2]}), tmp_path / "two")
    assert "trained one more time on these records" in certificate_of(tmp_path / "two", "0", seed=2).limits[0]


@pytest.mark.parametrize("forged", ["delta = delta / 1000", "epsilon = epsilon / 2"])
def test_terms_other_than_the_ledgers_are_noticed(forged: str, folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "forged")
    with sqlite3.connect(tmp_path / "forged" / "journal.db") as journal:
        journal.execute(f"UPDATE clients SET {forged} WHERE client = '1'")
    with pytest.raises(LedgerTampered, match="has other terms"):
        certificate_of(tmp_path / "forged", "1")


def test_a_unit_other_than_the_ledgers_is_noticed(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "forged")
    with sqlite3.connect(tmp_path / "forged" / "journal.db") as journal:
        changed = journal.execute("""UPDATE jobs SET facts = replace(facts, '"unit": "record"', '"unit": "client"')""")
        assert changed.rowcount
    with pytest.raises(LedgerTampered, match="has other terms"):
        certificate_of(tmp_path / "forged", "1")


def test_a_number_of_records_that_is_hidden_is_not_shown(folder: Path, tmp_path: Path) -> None:
    assert certificate_of(folder, "0").facts["What the client trained on"].endswith("records")
    settings = {
        "rounds": 1,
        "algorithm": "fedavg",
        "budgets": {"epsilons": [3.0]},
        "training": {"local_steps": 1, "rate": 0.1, "batch": 8},
    }
    run(config.experiment(settings), tmp_path / "run")
    page = certificate_of(tmp_path / "run", "0")
    assert "adding or removing any one record" in page.sentence
    assert page.facts["What the client trained on"] == ""
    assert not any("is public" in said for said in page.limits)


def test_who_must_be_trusted_is_said(tmp_path: Path) -> None:
    settings = {
        "rounds": 1,
        "algorithm": "fedhdp",
        "budgets": {"epsilon": 3.0},
        "data": {"clients": 6},
        "training": {"local_steps": 1},
    }
    run(config.experiment(settings), tmp_path / "run")
    page = certificate_of(tmp_path / "run", "0")
    assert not page.guess.startswith("Somebody who thinks")  # updates reach a sum, or the server, without noise
    assert "this client's data were used" in page.guess


def test_commands_hold_hostile_names(tmp_path: Path) -> None:
    client = "a; rm -rf ~ $(x)"
    table = {"client": [client] * 40 + ["b"] * 40, "x": [0.0, 1.0] * 40, "label": [0, 1] * 40}
    settings = {"rounds": 1, "algorithm": "fedavg", "budgets": {"epsilon": 3.0}, "training": {"local_steps": 1}}
    run(config.experiment(settings), tmp_path / "run", data=table)
    command = certificate_of(tmp_path / "run", client).checks[1]
    assert shlex.split(command)[-1] == client
