from __future__ import annotations

import gzip
import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support import commands
from support.commands import Spoken

from polyeps.data.public_catalogue import PUBLIC_DATASETS, DataFile


@pytest.fixture(autouse=True)
def nothing_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("POLYEPS_DATA", raising=False)
    monkeypatch.setattr("polyeps.data.public_files.SYSTEM_FOLDER", tmp_path / "system")


def run(*arguments: str, code: int = 0) -> Spoken:
    return commands.run("data", *arguments, status=code)


def run_json(*arguments: str) -> Any:
    return commands.run_json("data", *arguments)


def one_sentence(result: Spoken, *parts: str) -> None:
    lines = result.stderr.strip().splitlines()
    assert lines[-1].startswith("polyeps: ")
    assert "Traceback" not in result.stderr
    for part in parts:
        assert part in lines[-1]


def test_list_names_every_set_and_its_state() -> None:
    listed = run_json("list")
    assert [entry["name"] for entry in listed] == list(PUBLIC_DATASETS)
    states = {entry["name"]: entry["state"] for entry in listed}
    assert states["digits"] == "built in"
    assert states["mnist"] == "missing"
    ways = {entry["name"]: entry["how_to_get"] for entry in listed}
    assert ways["digits"] is None
    assert "polyeps data fetch mnist" in ways["mnist"]
    result = run("list")
    assert "mnist-writers" in result.stdout
    assert "polyeps data fetch mnist" in result.stderr


def test_check_of_everything_tells_how_to_get_what_is_missing() -> None:
    checked = {entry["name"]: entry for entry in run_json("check")}
    assert checked["digits"]["state"] == "built in"
    assert "apt-get install dataset-fashion-mnist" in checked["fashion-mnist"]["detail"]


def test_check_of_a_named_missing_set_fails() -> None:
    one_sentence(run("check", "bank", code=2), "bank", "polyeps data fetch bank")


def test_check_names_a_damaged_file(tmp_path: Path) -> None:
    (tmp_path / "bank").mkdir()
    (tmp_path / "bank/bank-full.csv.gz").write_bytes(gzip.compress(b"something else"))
    result = run("check", "--data-dir", str(tmp_path), code=2)
    one_sentence(result, "bank-full.csv.gz", "not the published file", "delete it")
    assert "damaged" in result.stdout


def test_fetch_puts_a_file_where_it_is_told_and_says_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(file: DataFile, folder: Path, progress: Callable[[int, int], None]) -> Path:
        target = folder / file.download
        target.parent.mkdir(parents=True)
        target.write_bytes(gzip.compress(b"content"))
        progress(7, 7)
        return target

    file = DataFile("bank/file", hashlib.sha256(b"content").hexdigest(), "https://example.org/file.gz")
    monkeypatch.setitem(PUBLIC_DATASETS, "bank", replace(PUBLIC_DATASETS["bank"], files=(file,)))
    monkeypatch.setattr("polyeps.data.public_files.download", download)
    (tmp_path / "target").mkdir()
    into = ("--data-dir", str(tmp_path / "target"))
    path = tmp_path / "target" / "bank" / "file.gz"
    assert run_json("fetch", "bank", *into) == {"bank": [str(path)]}
    said = run("fetch", "bank", "digits", *into).stdout.splitlines()  # now here: not downloaded again
    assert said == [f"bank: {path}", "digits: built in, nothing to fetch"]


def test_show_describes_and_draws() -> None:
    arguments = ("show", "digits", "--partition", "dirichlet", "--clients", "20", "--seed", "1")
    result = run(*arguments)
    assert "CC BY 4.0" in result.stdout
    assert "20 clients, 1,500 of 1,500 records" in result.stdout
    drawn = run_json(*arguments)
    assert drawn == run_json(*arguments)
    assert drawn["records"] == 1500
    assert sum(drawn["label_counts"]) == 1500
    partition = drawn["partition"]
    assert len(partition["clients"]) == len(partition["sizes"]) == 20
    assert [sum(column) for column in zip(*partition["label_counts"], strict=True)] == drawn["label_counts"]
    assert all(str(size) in result.stdout for size in partition["sizes"])
    other = run_json(*arguments[:-1], "2")
    assert other["partition"] != partition


def test_show_draws_some_of_many_clients() -> None:
    result = run("show", "digits", "--partition", "iid", "--clients", "50", "--seed", "1", "--rows", "3")
    assert "50 clients (3 drawn)" in result.stdout
    assert sum(line.startswith(("  0 ", "  1 ", "  2 ", "  3 ")) for line in result.stdout.splitlines()) == 3


def test_show_of_your_own_files(tmp_path: Path) -> None:
    (tmp_path / "all.csv").write_text("x,who,y\n1,ann,no\n2,bob,yes\n3,ann,no\n")
    arguments = ("show", str(tmp_path / "all.csv"), "--label-column", "y", "--client-column", "who")
    shown = run_json(*arguments, "--partition", "as-in-file")
    assert shown["partition"] == {
        "clients": ["ann", "bob"],
        "sizes": [2, 1],
        "label_counts": [[2, 0], [0, 1]],
    }


def test_your_own_files_are_not_taken_for_a_public_set(tmp_path: Path) -> None:
    (tmp_path / "bank").mkdir()
    (tmp_path / "bank" / "ann.csv").write_text("x,label\n1,0\n2,1\n")
    shown = run_json("show", str(tmp_path / "bank"))
    assert shown["name"] == "own:bank"
    assert "licence" not in shown


def test_names_in_brackets_are_shown_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "all.csv").write_text("x,client,label\n1,[bold]ann,[red]\n2,bob,[/]\n")
    shown = run("show", str(tmp_path / "all.csv"), "--partition", "as-in-file").stdout
    assert "[bold]ann" in shown
    assert "[red]" in shown
    assert "[/]" in shown


def test_show_of_synthetic_data_needs_a_seed() -> None:
    one_sentence(run("show", "syn-l", code=2), "syn-l", "--seed")
    assert run_json("show", "syn-l", "--seed", "3")["shape"] == [100]


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (("show", "minst"), ("no data set 'minst'", "mnist")),
        (("fetch", "minst"), ("no data set 'minst'", "mnist")),
        (("check", "minst"), ("no data set 'minst'", "mnist")),
        (("show", "mnist", "--offline"), ("mnist is not here", "polyeps data fetch mnist")),
        (("list", "--data-dir", "no-such-folder"), ("no-such-folder, does not exist",)),
        (("show", "digits", "--partition", "iit", "--clients", "2", "--seed", "1"), ("'iit'", "iid")),
        (("show", "digits", "--partition", "iid", "--clients", "2"), ("give a seed",)),
        (("show", "digits", "--partition", "iid", "--clients", "2", "--seed", "-1"), ("seed", "-1")),
        (
            ("show", "digits", "--partition", "iid", "--clients", "2000", "--seed", "1"),
            ("client 1500", "at most"),
        ),
        (("show", "digits", "--partition", "by-writer"), ("does not name the owners",)),
    ],
)
def test_bad_input_is_answered_in_one_sentence(arguments: tuple[str, ...], parts: tuple[str, ...]) -> None:
    one_sentence(run(*arguments, code=2), *parts)
