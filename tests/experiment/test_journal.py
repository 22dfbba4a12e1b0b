"""The journal: whole rounds or none, whatever stops it, and a sentence for a file that is not one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.journals import ABOUT, CLIENTS, new_journal, write_job

from polyeps.errors import InputError, JournalError
from polyeps.experiment.journal import VERSION, Checkpoint, Journal

COUNTS = {"invited": 2, "answered": 2, "declined": 0, "active": 2, "seconds": 0.1}
ANSWERS = [("ward-a", True, 300, 100), ("ward-b", True, 300, 100)]


def write_round(journal: Journal, round: int, state: bytes = b"state") -> None:
    point = Checkpoint(round + 1, ("ward-a",), state, {"residual": b"memory"})
    journal.write_round("fedavg-1", round, COUNTS, ANSWERS, ["ward-b"], {"accuracy": 0.5}, point)


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    journal = Journal.create(tmp_path / "journal.db", ABOUT, [("fedavg-1", "fedavg", "fedavg", 1, 5)])
    journal.begin("fedavg-1", CLIENTS, {"trust": "nobody"})
    return journal


def test_a_journal_begins_with_all_its_jobs(tmp_path: Path) -> None:
    jobs = [("b-1", "fedavg", "b", 1, 5), ("a-1", "fedavg", "a", 1, 5)]
    journal = Journal.create(tmp_path / "journal.db", ABOUT, jobs)
    assert [(row["job"], row["status"]) for row in journal.jobs()] == [("b-1", "waiting"), ("a-1", "waiting")]
    assert journal.about() == ABOUT
    assert journal.checkpoint("b-1") is None


def test_nothing_is_there_when_the_beginning_fails(tmp_path: Path) -> None:
    twice = [("a-1", "fedavg", "a", 1, 5)] * 2
    with pytest.raises(JournalError, match="cannot be written"):
        Journal.create(tmp_path / "journal.db", ABOUT, twice)
    assert not (tmp_path / "journal.db").exists()
    Journal.create(tmp_path / "journal.db", ABOUT, twice[:1])  # what was left does not stand in the way


def test_a_round_moves_the_place_to_go_on(journal: Journal) -> None:
    write_round(journal, 0)
    write_round(journal, 1, b"later")
    assert journal.checkpoint("fedavg-1") == Checkpoint(2, ("ward-a",), b"later", {"residual": b"memory"})
    journal.finish("fedavg-1", {"ward-a": 0.4}, {"stopped": "rounds"})
    assert journal.checkpoint("fedavg-1") is None
    assert journal.jobs()[0]["facts"] == {"trust": "nobody", "stopped": "rounds"}
    assert journal.query("SELECT client, spent, left_after FROM clients") == [
        {"client": "ward-a", "spent": 0.4, "left_after": None},
        {"client": "ward-b", "spent": None, "left_after": 1},
    ]


def test_a_round_is_written_whole_or_not_at_all(journal: Journal) -> None:
    write_round(journal, 0)
    bad = Checkpoint(2, (), None, {})  # type: ignore[arg-type]  # refused by the last statement of a round
    with pytest.raises(JournalError):
        journal.write_round("fedavg-1", 1, COUNTS, ANSWERS, ["ward-a"], {"accuracy": 1.0}, bad)
    assert [row["round"] for row in journal.query("SELECT round FROM rounds")] == [0]
    assert len(journal.query("SELECT * FROM answers")) == 2
    assert len(journal.query("SELECT * FROM metrics")) == 1
    write_round(journal, 1)  # and it can be written again


def test_a_full_disk_leaves_whole_rounds(journal: Journal) -> None:
    (pages,) = journal._connection.execute("PRAGMA page_count").fetchone()
    journal._connection.execute(f"PRAGMA max_page_count = {pages + 4}")

    def fill() -> None:
        for round in range(10_000):
            write_round(journal, round, bytes(2000))

    with pytest.raises(JournalError, match=r"journal.db cannot be used \(database or disk is full\); make room"):
        fill()
    point = journal.checkpoint("fedavg-1")
    done = journal.query("SELECT round FROM rounds ORDER BY round")
    assert (0 if point is None else point.round) == len(done)
    journal._connection.execute("PRAGMA max_page_count = 100000")
    write_round(journal, len(done))  # usable again


def test_what_is_no_journal_is_said_to_be_none(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"there is no run at .*absent: journal.db is missing"):
        Journal(tmp_path / "absent" / "journal.db")
    (tmp_path / "text.db").write_text("not a database at all, but long enough to be read as one" * 20)
    with pytest.raises(JournalError, match=r"text.db cannot be used \(file is not a database\)"):
        Journal(tmp_path / "text.db")
    (tmp_path / "empty.db").touch()
    with pytest.raises(JournalError, match=r"empty.db is not a journal this version reads"):
        Journal(tmp_path / "empty.db")


def test_another_versions_journal_is_refused(journal: Journal) -> None:
    journal._connection.execute(f"PRAGMA user_version = {VERSION + 1}")
    journal.close()
    with pytest.raises(JournalError, match=rf"schema {VERSION + 1}, not {VERSION}"):
        Journal(journal.path)


def test_a_journal_is_never_overwritten(journal: Journal) -> None:
    with pytest.raises(InputError, match="holds a run already; resume it, or choose another folder"):
        Journal.create(journal.path, ABOUT)


def as_nobody(script: str, folder: Path) -> str:
    """What a script prints under an account that owns nothing."""
    for place in (folder, *folder.parents):
        if place.stat().st_uid == os.getuid() and place != Path("/"):
            place.chmod(place.stat().st_mode | 0o055)
    begin = (
        "import os, sys\nfrom pathlib import Path\nfrom polyeps.errors import PolyepsError\n"
        "from polyeps.experiment.journal import Journal\nos.setuid(65534)\nfolder = Path(sys.argv[1])\n"
    )
    ran = subprocess.run([sys.executable, "-c", begin + script, str(folder)], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become somebody without write permission")
def test_a_read_only_run_can_be_read_but_not_written(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    journal = new_journal(folder)
    write_job(journal)
    journal.close()
    said = as_nobody(
        "journal = Journal(folder / 'journal.db')\nprint(len(journal.jobs()))\n"
        "try: journal.begin('x-1', [], {})\nexcept PolyepsError as e: print(e)\n",
        folder,
    ).splitlines()
    assert said[0] == "1"
    assert "journal.db cannot be used" in said[1]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become somebody without write permission")
def test_no_journal_is_begun_where_nothing_can_be_written(tmp_path: Path) -> None:
    said = as_nobody("try: Journal.create(folder / 'journal.db', {})\nexcept PolyepsError as e: print(e)\n", tmp_path)
    assert "journal.db cannot be written" in said
    assert "choose another folder" in said
    assert list(tmp_path.iterdir()) == []
