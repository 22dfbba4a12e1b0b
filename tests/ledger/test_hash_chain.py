import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest
from support.forged import forge

from polyeps.errors import LedgerError, LedgerTampered
from polyeps.ledger import hash_chain as chain
from polyeps.ledger.hash_chain import Chain, LedgerRow
from polyeps.ledger.head_file import StoredHead, head_path, read_head


@pytest.fixture
def path(tmp_path: Path) -> Path:
    place = tmp_path / "chain.db"
    Chain.create(place, [("opened", {"n": 0})])
    chain = Chain(place, lambda _: None)
    for number in range(1, 6):
        chain.append(lambda number=number: [("note", {"n": number})])  # type: ignore[misc]
    chain.close()
    return place


def open_chain(path: Path) -> Chain:
    return Chain(path, lambda _: None)


def tamper(path: Path, *statements: str) -> None:
    with sqlite3.connect(path) as connection:
        connection.executescript("DROP TRIGGER rows_are_final; DROP TRIGGER rows_stay;" + ";".join(statements))
    connection.close()


def test_rows_are_replayed_once_and_in_order(path: Path) -> None:
    seen: list[LedgerRow] = []
    chain = Chain(path, seen.append)
    chain.append(lambda: [("note", {"n": 6}), ("note", {"n": 7})])
    assert [row.content["n"] for row in seen] == list(range(8))
    assert chain.head == (8, seen[-1].hash)
    assert chain.verify() == chain.head


def test_nothing_is_written_when_making_rows_fails(path: Path) -> None:
    chain = open_chain(path)

    def fail() -> list[tuple[str, dict[str, int]]]:
        raise KeyError("no")

    with pytest.raises(KeyError):
        chain.append(fail)
    assert len(chain.rows()) == 6
    chain.append(lambda: [("note", {})])  # and the lock is free again


def test_the_file_itself_refuses_changes(path: Path) -> None:
    with sqlite3.connect(path) as connection:
        with pytest.raises(sqlite3.IntegrityError, match="never changed"):
            connection.execute("UPDATE rows SET body = '{}' WHERE seq = 3")
        with pytest.raises(sqlite3.IntegrityError, match="never deleted"):
            connection.execute("DELETE FROM rows WHERE seq = 3")
    connection.close()


@pytest.mark.parametrize(
    ("statement", "named"),
    [
        ("UPDATE rows SET body = '{\"n\":30}' WHERE seq = 4", "row 4"),
        ("UPDATE rows SET body = body || ' ' WHERE seq = 4", "row 4"),
        ("UPDATE rows SET time = '2020-01-01' WHERE seq = 2", "row 2"),
        ("UPDATE rows SET kind = 'other' WHERE seq = 1", "row 1"),
        ("UPDATE rows SET previous = hash WHERE seq = 5", "row 5"),
        ("UPDATE rows SET hash = upper(hash) WHERE seq = 6", "row 6"),
        ("DELETE FROM rows WHERE seq = 3", "row 3 is missing"),
        ("DELETE FROM rows WHERE seq = 1", "row 1 is missing"),
        ("DELETE FROM rows WHERE seq = 6", "row 6 is missing"),
        ("DELETE FROM rows WHERE seq > 2", "row 3 is missing"),
        ("DELETE FROM rows", "row 1 is missing"),
        (
            "UPDATE rows SET seq = 100 WHERE seq = 3; UPDATE rows SET seq = 3 WHERE seq = 4; "
            "UPDATE rows SET seq = 4 WHERE seq = 100",
            "row 3",
        ),
        ("INSERT INTO rows SELECT 7, time, kind, body, previous, hash FROM rows WHERE seq = 6", "row 7"),
    ],
)
def test_tampering_is_found_and_named(path: Path, statement: str, named: str) -> None:
    tamper(path, statement)
    with pytest.raises(LedgerTampered, match=named):
        open_chain(path)


def test_tampering_under_an_open_chain_stops_the_next_row(path: Path) -> None:
    chain = open_chain(path)
    tamper(path, "UPDATE rows SET body = '{\"n\":30}' WHERE seq = 4")
    with pytest.raises(LedgerTampered, match="row 4"):
        chain.append(lambda: [("note", {})])
    with pytest.raises(LedgerTampered, match="row 4"):
        chain.verify()


def test_every_byte_of_every_row_is_guarded(path: Path) -> None:
    """Flip bytes all over the file, of unused space only a few: either it is refused, or no part of a row was hit."""
    good = open_chain(path).rows()
    original = path.read_bytes()
    refused = 0
    for offset in range(0, len(original), 4):
        if offset % 256 and not any(original[max(0, offset - 16) : offset + 16]):
            continue
        path.write_bytes(original[:offset] + bytes([original[offset] ^ 1]) + original[offset + 1 :])
        try:
            chain = open_chain(path)
        except LedgerError:
            refused += 1
        else:
            assert chain.rows() == good
            chain.close()
    stored = sum(len(row.time + row.kind + row.body + row.previous + row.hash) for row in good)
    assert refused > 0.9 * stored / 4
    path.write_bytes(original)
    assert open_chain(path).rows() == good


def test_an_old_copy_put_back_is_found(path: Path) -> None:
    old = path.with_name("old")
    shutil.copy(path, old)
    open_chain(path).append(lambda: [("note", {"n": 6})])
    shutil.copy(old, path)
    with pytest.raises(LedgerTampered, match="row 7 is missing; the tail was cut or an old copy was put back"):
        open_chain(path)


def test_another_history_of_the_same_length_is_found(path: Path) -> None:
    old = path.with_name("old")
    shutil.copy(path, old)
    shutil.copy(f"{path}.head", f"{old}.head")
    open_chain(path).append(lambda: [("note", {"n": 6})])
    open_chain(old).append(lambda: [("note", {"n": 600})])
    shutil.copy(old, path)
    with pytest.raises(LedgerTampered, match="row 7 is not the one its head file records"):
        open_chain(path)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda head: head.unlink(), "missing"),
        (lambda head: head.write_text("{"), "not as it was written"),
        (lambda head: head.write_text('{"seq": 6, "hash": "0"}'), "row 6"),
    ],
)
def test_a_damaged_head_is_found(path: Path, damage: Callable[[Path], None], words: str) -> None:
    damage(path.with_name(path.name + ".head"))
    with pytest.raises(LedgerTampered, match=words):
        open_chain(path)


@pytest.mark.parametrize("notes", [1, 3])
@pytest.mark.parametrize("committed", [False, True])
def test_a_crash_within_an_append_is_no_tampering(path: Path, notes: int, committed: bool) -> None:
    """The head announces rows before they are committed, and they are confirmed after."""
    head, before = head_path(path), path.read_bytes()
    open_chain(path).append(lambda: [("note", {"n": 6})] * notes)
    announced = head.read_text().replace('"pending": 0', '"pending": 1')
    assert announced != head.read_text()
    head.write_text(announced)
    if not committed:
        path.write_bytes(before)
    chain = open_chain(path)
    assert len(chain.rows()) == 6 + notes * committed
    chain.append(lambda: [("note", {"n": 7})])
    assert open_chain(path).verify().seq == 7 + notes * committed


def test_only_what_was_announced_may_follow_a_crash(path: Path) -> None:
    head, before = head_path(path), path.read_bytes()
    open_chain(path).append(lambda: [("note", {"n": 6}), ("note", {"n": 7})])
    head.write_text(head.read_text().replace('"pending": 0', '"pending": 1'))
    tamper(path, "DELETE FROM rows WHERE seq = 8")
    with pytest.raises(LedgerTampered, match="row 8 is missing"):
        open_chain(path)
    path.write_bytes(before)
    forge(path, {"n": 6}, {"n": 70})
    with pytest.raises(LedgerTampered, match="row 8 is not the one its head file records"):
        open_chain(path)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_row_appended_while_another_process_opens_is_no_tampering(
    path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    busy = open_chain(path)
    waiting = [6, 7, 8]

    def read_beside_an_append(place: Path) -> StoredHead | None:
        kept = read_head(place)
        if waiting and not busy._open().in_transaction and not late_holds_the_lock():
            number = waiting.pop()
            busy.append(lambda: [("note", {"n": number})])
        return kept if when == "after" else read_head(place)

    def late_holds_the_lock() -> bool:
        return any(chain._connection is not None and chain._connection.in_transaction for chain in opened)

    opened: list[Chain] = []
    real = Chain._open

    def noted(self: Chain) -> sqlite3.Connection:
        opened.append(self)
        return real(self)

    monkeypatch.setattr(Chain, "_open", noted)
    monkeypatch.setattr(chain, "read_head", read_beside_an_append)
    late = open_chain(path)
    late.verify()
    late.verify()
    assert not waiting
    assert len(late.rows()) == 9


def test_a_vanished_chain_is_not_started_anew(path: Path) -> None:
    path.unlink()
    with pytest.raises(LedgerTampered, match="records 6 rows"):
        Chain.create(path, [("opened", {})])


def test_existing_chains_are_not_overwritten(path: Path) -> None:
    with pytest.raises(LedgerError, match="exists already"):
        Chain.create(path, [("opened", {})])
    assert len(open_chain(path).rows()) == 6


def test_foreign_files_are_refused(tmp_path: Path) -> None:
    text = tmp_path / "notes.txt"
    text.write_text("not a database " * 100)
    with pytest.raises(LedgerError, match="not a polyeps ledger"):
        open_chain(text)
    other = tmp_path / "other.db"
    with sqlite3.connect(other) as connection:
        connection.execute("CREATE TABLE t (x)")
    connection.close()
    with pytest.raises(LedgerError, match="not a polyeps ledger"):
        open_chain(other)
    with pytest.raises(LedgerError, match="no ledger"):
        open_chain(tmp_path / "absent.db")


@pytest.mark.parametrize(("schema", "age"), [(0, "older"), (99, "newer")])
def test_other_schemas_are_refused(path: Path, schema: int, age: str) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute(f"PRAGMA user_version = {schema}")
    connection.close()
    with pytest.raises(LedgerError, match=age):
        open_chain(path)
