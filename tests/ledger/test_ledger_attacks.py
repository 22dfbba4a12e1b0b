"""A ledger under attack: triggers, forged rows, old copies, links, flipped bytes, and processes that die anywhere."""

import json
import os
import shutil
import sqlite3
import stat
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from support.crash import flip
from support.forged import forge

from polyeps.accounting.events import Gaussian
from polyeps.core import Budget
from polyeps.errors import InputError, LedgerError, LedgerTampered
from polyeps.ledger import Ledger
from polyeps.ledger.account import BudgetTerms, Charge
from polyeps.ledger.head_file import head_path

TERMS = {"a": BudgetTerms(Budget(1.0, 1e-5))}
EVENT = Gaussian(30.0)
COLUMNS = "time TEXT NOT NULL, kind TEXT NOT NULL, body TEXT NOT NULL, previous TEXT NOT NULL, hash TEXT NOT NULL"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.db"


@pytest.fixture
def ledger(path: Path) -> Ledger:
    made = Ledger.create(path, TERMS)
    made.charge(EVENT)
    return made


def tamper(path: Path, script: str) -> None:
    connection = sqlite3.connect(path)
    connection.executescript(script)
    connection.close()


def remade(table: str) -> str:
    """Put the rows into another table of the same name."""
    return (
        "DROP TRIGGER rows_are_final; DROP TRIGGER rows_stay;"
        f"ALTER TABLE rows RENAME TO old; {table}; INSERT INTO rows SELECT * FROM old; DROP TABLE old;"
    )


SCHEMAS = {
    "ignoring trigger": "CREATE TRIGGER t BEFORE INSERT ON rows BEGIN SELECT RAISE(IGNORE); END",
    "deleting trigger": "DROP TRIGGER rows_stay; CREATE TRIGGER t AFTER INSERT ON rows "
    "BEGIN DELETE FROM rows WHERE seq = NEW.seq; END",
    "moving trigger": "DROP TRIGGER rows_are_final; CREATE TRIGGER t AFTER INSERT ON rows "
    "BEGIN UPDATE rows SET seq = seq + 1000 WHERE seq = NEW.seq; END",
    "trigger under our name": "DROP TRIGGER rows_stay; CREATE TRIGGER rows_stay BEFORE INSERT ON rows "
    "WHEN NEW.kind = 'charge' BEGIN SELECT RAISE(IGNORE); END",
    "other case": "DROP TRIGGER rows_stay; CREATE TRIGGER ROWS_STAY BEFORE DELETE ON rows BEGIN SELECT 1; END",
    "missing trigger": "DROP TRIGGER rows_stay",
    "index": "CREATE INDEX i ON rows (kind)",
    "partial unique index": "CREATE UNIQUE INDEX i ON rows (kind) WHERE kind = 'charge' AND seq > 3",
    "table": "CREATE TABLE notes (x)",
    "view": "CREATE VIEW v AS SELECT * FROM rows",
    "statistics": "ANALYZE",
    "view in place of the table": "ALTER TABLE rows RENAME TO hidden; CREATE VIEW rows AS SELECT * FROM hidden; "
    "CREATE TRIGGER t INSTEAD OF INSERT ON rows BEGIN SELECT 1; END",
    "column": "ALTER TABLE rows ADD COLUMN extra TEXT",
    "generated column": "ALTER TABLE rows ADD COLUMN extra TEXT AS (kind) VIRTUAL",
    "without rowid": remade(f"CREATE TABLE rows (seq INTEGER PRIMARY KEY, {COLUMNS}) STRICT, WITHOUT ROWID"),
    "not strict": remade(f"CREATE TABLE rows (seq INTEGER PRIMARY KEY, {COLUMNS})"),
    "not unique": remade(f"CREATE TABLE rows (seq INTEGER, {COLUMNS}) STRICT"),
    "replacing": remade(f"CREATE TABLE rows (seq INTEGER PRIMARY KEY ON CONFLICT REPLACE, {COLUMNS}) STRICT"),
    "check": remade(f"CREATE TABLE rows (seq INTEGER PRIMARY KEY CHECK (seq < 4), {COLUMNS}) STRICT"),
    "collation": remade(f"CREATE TABLE rows (seq INTEGER PRIMARY KEY, {COLUMNS} COLLATE NOCASE) STRICT"),
    "write-ahead log": "PRAGMA journal_mode = WAL",
}


@pytest.mark.parametrize("trick", SCHEMAS)
def test_a_changed_schema_is_refused_everywhere(path: Path, ledger: Ledger, trick: str) -> None:
    spent = ledger.spent("a")
    tamper(path, SCHEMAS[trick])
    calls: list[Callable[[], object]] = [
        lambda: ledger.charge(EVENT),
        lambda: ledger.reserve("run", [Charge(("a",), EVENT)]),
        ledger.verify,
        lambda: Ledger(path),
    ]
    for call in calls:
        with pytest.raises(LedgerTampered, match=r"tampered with|journal mode"):
            call()
    assert ledger.spent("a") == spent


def test_a_trigger_that_comes_after_the_check_loses_no_acknowledged_charge(
    path: Path, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even without comparing schemas: what cannot be read back is not acknowledged."""
    monkeypatch.setattr("polyeps.ledger.hash_chain.check_schema", lambda *_: None)
    for trick in ("ignoring trigger", "deleting trigger", "moving trigger"):
        tamper(path, SCHEMAS[trick])
        with pytest.raises(LedgerTampered, match="row 4 cannot be read back"):
            ledger.charge(EVENT)
        tamper(path, "DROP TRIGGER t")
    ledger.charge(EVENT)
    assert Ledger(path).account("a").charges == ledger.account("a").charges == 2


FORGED: dict[str, list[tuple[str, dict[str, object]]]] = {
    "a raised budget": [("budget-changed", {"client": "a", "epsilon": 1000.0, "delta": 1e-5, "reason": "forged"})],
    "a client": [("budget", {"client": "b", "epsilon": 9.0, "delta": 1e-5, "unit": "record", "schedule": "adaptive"})],
    "a released run": [("release", {"run": "run"})],
    "a charge": [("charge", {"clients": ["a"], "event": {"kind": "none"}, "uses": 1, "unit": "record"})],
    "a new beginning": [("opened", {"ledger": "0" * 32})],
    "two rows": [("cohort", {"clients": ["a"]}), ("release", {"run": "run"})],
    "nonsense": [("charge", {})],
}


@pytest.mark.parametrize("what", FORGED)
@pytest.mark.parametrize("opened", [False, True])
def test_rows_forged_past_the_head_are_named(path: Path, ledger: Ledger, what: str, opened: bool) -> None:
    ledger.reserve("run", [Charge(("a",), EVENT, 5)])
    for kind, content in FORGED[what]:
        forge(path, content, kind=kind)
    for call in (lambda: ledger.charge(EVENT), ledger.verify) if opened else (lambda: Ledger(path),):
        with pytest.raises(LedgerTampered, match="row 5 was not written by polyeps"):
            call()
    assert ledger.account("a").terms.budget.epsilon == 1.0


@pytest.mark.parametrize("opened", [False, True])
@pytest.mark.parametrize("how", ["renamed", "written"])
def test_an_older_copy_is_named(path: Path, ledger: Ledger, opened: bool, how: str) -> None:
    old = path.with_name("old")
    shutil.copy(path, old)
    ledger.charge(EVENT, uses=5)
    if how == "renamed":
        old.replace(path)
    else:
        path.write_bytes(old.read_bytes())
    with pytest.raises(LedgerTampered, match=r"row 4 is missing|was replaced"):
        ledger.charge(EVENT) if opened else Ledger(path)
    with pytest.raises(LedgerTampered, match="row 4 is missing"):
        Ledger(path)


def test_a_planted_journal_that_rolls_rows_back_is_named(path: Path, ledger: Ledger) -> None:
    """SQLite restores the pages of a journal it finds, and so forgets what was written since."""
    journal = path.with_name("ledger.db-journal")
    attacker = sqlite3.connect(path, isolation_level=None)
    attacker.executescript("PRAGMA synchronous = OFF; PRAGMA cache_size = 1; BEGIN IMMEDIATE")
    for number in range(100, 200):  # so many that the journal is written out
        attacker.execute("INSERT INTO rows VALUES (?, ?, '', '', '', '')", (number, "x" * 1000))
    planted = journal.read_bytes()
    attacker.execute("ROLLBACK")
    attacker.close()
    ledger.charge(EVENT, uses=7)
    journal.write_bytes(planted)
    with pytest.raises(LedgerTampered, match="row 4 is missing"):
        Ledger(path)
    with pytest.raises(LedgerTampered):
        ledger.charge(EVENT)


def test_a_vanished_ledger_is_not_made_anew(path: Path, ledger: Ledger) -> None:
    ledger.close()
    path.unlink()
    for make in (Ledger.create, Ledger.open_or_create, lambda path, _: Ledger(path)):
        with pytest.raises(LedgerTampered, match=r"is missing, but ledger.db.head records 3 rows"):
            make(path, TERMS)


def test_a_head_kept_elsewhere_finds_a_ledger_made_anew(path: Path, ledger: Ledger, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    shutil.copy(head_path(path), kept)
    head = ledger.head
    ledger.charge(EVENT)
    assert ledger.verify(kept) == ledger.verify(head) == ledger.head  # it only grew
    ledger.close()
    path.unlink()
    head_path(path).unlink()
    again = Ledger.create(path, TERMS)
    with pytest.raises(LedgerTampered, match=r"does not continue the head .* row 3 is missing"):
        again.verify(kept)
    again.charge(EVENT)
    for form in (kept.read_text(), json.dumps({"rows": 3, "head": head.hash}), f"3 {head.hash}\n"):
        kept.write_text(form)
        with pytest.raises(LedgerTampered, match="row 3 is not the one"):
            again.verify(str(kept))
    for wrong in ("", "{}", "[]", "3", "null", '{"seq": -1, "hash": ""}', '{"seq": 1.0, "hash": "x"}', "\x00"):
        kept.write_text(wrong)
        with pytest.raises(InputError, match="is not a head"):
            again.verify(kept)
    kept.write_bytes(b"\xff")
    with pytest.raises(InputError, match="is not a head"):
        again.verify(kept)
    with pytest.raises(InputError, match="cannot be read"):
        again.verify(tmp_path / "absent")


@pytest.mark.parametrize("mask", [0o000, 0o022, 0o777])
def test_only_the_owner_may_read(tmp_path: Path, mask: int) -> None:
    old = os.umask(0)
    seen: set[tuple[str, int]] = set()
    try:
        path = tmp_path / "ledger.db"
        os.umask(mask)
        ledger = Ledger.create(path, TERMS)
        with ledger._chain._writing() as connection:
            connection.execute("INSERT INTO rows VALUES (99, '', '', '', '', '')")
            seen |= {(file.name, stat.S_IMODE(file.stat().st_mode)) for file in tmp_path.iterdir()}
        ledger.charge(EVENT)
    finally:
        os.umask(old)
    seen |= {(file.name, stat.S_IMODE(file.stat().st_mode)) for file in tmp_path.iterdir()}
    assert seen == {(f"ledger.db{end}", 0o600) for end in ("", ".head", "-journal")}


def test_links_are_not_followed(path: Path, ledger: Ledger, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    for name in ("ledger.db.head.new", "ledger.db-journal"):
        path.with_name(name).symlink_to(victim)
    with pytest.raises(LedgerError, match=r"ledger.db-journal is a symbolic link"):
        ledger.charge(EVENT)
    path.with_name("ledger.db-journal").unlink()
    ledger.charge(EVENT)
    assert victim.read_text() == "precious"
    link = tmp_path / "link.db"
    link.symlink_to(path)
    shutil.copy(head_path(path), head_path(link))
    for make in (Ledger.create, Ledger.open_or_create, lambda path, _: Ledger(path)):
        with pytest.raises(LedgerError, match=r"link.db is a symbolic link"):
            make(link, TERMS)
    dangling = tmp_path / "dangling.db"
    dangling.symlink_to(tmp_path / "nowhere")
    with pytest.raises(LedgerError, match="symbolic link"):
        Ledger.create(dangling, TERMS)
    assert not (tmp_path / "nowhere").exists()
    moved = tmp_path / "moved.head"
    head_path(path).rename(moved)
    head_path(path).symlink_to(moved)
    for call in (lambda: Ledger(path), lambda: ledger.charge(EVENT)):
        with pytest.raises(LedgerTampered, match=r"ledger.db.head is a symbolic link"):
            call()


def test_flipped_bytes_end_in_a_sentence(tmp_path: Path) -> None:
    refused = flip(tmp_path, 150, 5)
    assert refused > 50  # the others hit what is no part of a row


@pytest.mark.parametrize(
    "body", ["{}", "[]", "null", '{"clients":["nobody"],"event":{"kind":"pure","epsilon":1},"uses":1}']
)
@pytest.mark.parametrize(
    "kind", ["opened", "budget", "budget-changed", "cohort", "charge", "reserve", "release", "again", "x"]
)
def test_whole_forgeries_that_make_no_sense_end_in_a_sentence(path: Path, ledger: Ledger, kind: str, body: str) -> None:
    """Whoever writes file and head can forge both, but cannot make the ledger stumble."""
    forge(path, json.loads(body), kind=kind)
    with sqlite3.connect(path) as connection:
        seq, digest = connection.execute("SELECT seq, hash FROM rows ORDER BY seq DESC").fetchone()
    connection.close()
    head_path(path).write_text(json.dumps({"seq": seq, "hash": digest}))
    if kind == "cohort" and "clients" in body:
        assert Ledger(path).verify().seq == 4  # a group that nobody refers to
        return
    for call in (lambda: Ledger(path), lambda: ledger.charge(EVENT)):
        with pytest.raises(LedgerError, match="row 4"):
            call()


def test_threads_that_race_create_one_ledger(path: Path) -> None:
    gate = threading.Barrier(8)
    outcomes: list[str] = []

    def create() -> None:
        gate.wait()
        try:
            Ledger.create(path, TERMS).close()
            outcomes.append("won")
        except LedgerError as problem:
            outcomes.append(str(problem))

    threads = [threading.Thread(target=create) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes.count("won") == 1
    assert all("exists already" in outcome for outcome in outcomes if outcome != "won")
    assert sorted(file.name for file in path.parent.iterdir()) == ["ledger.db", "ledger.db.head"]
