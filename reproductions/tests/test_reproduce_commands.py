import json
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
import small_studies
from polyeps_reproductions import pfa
from polyeps_reproductions.studies import STUDIES, Study
from support.commands import refused, run, run_json

from polyeps.data import public_loaders
from polyeps.errors import DataError

RESULTS = Path(__file__).parents[1] / "results"


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> tuple[str, ...]:
    """Options of a study with one tiny figure."""
    monkeypatch.setattr(pfa, "STUDY", Study("pfa", lambda _: (small_studies.figure(),)))
    folders = ("--work", str(tmp_path / "work"), "--output", str(tmp_path / "results"))
    return ("reproduce", "pfa", "--quick", "--figure", "1", *folders)


def test_a_figure_is_run_shown_and_written(small: tuple[str, ...], tmp_path: Path) -> None:
    spoken = run(*small)
    assert "public-only" in spoken.stdout
    assert "PFA over public-only" in spoken.stdout
    kept = json.loads((tmp_path / "results" / "pfa-figure-1-quick.json").read_text())
    assert kept["missing"] == 0
    assert kept["command"] == "polyeps reproduce pfa --figure 1 --quick --work WORK"  # no folder of this machine
    assert {str(one["clients"]) for one in kept["records"]} == {"6"}
    assert all(set(one["finals"]) == set(one["curves"]) == {"1"} for one in kept["records"])
    assert len(list((tmp_path / "work").glob("*.json"))) == 3 * 2 * (2 + 1)
    assert run_json(*small) == [json.loads((tmp_path / "results" / "pfa-figure-1-quick.json").read_text())]


def test_showing_needs_no_device(small: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    (nothing,) = run_json(*small, "--show", "--device", "cuda", "--processes", "10")
    assert nothing["command"] == "polyeps reproduce pfa --figure 1 --quick --device cuda --processes 10 --work WORK"
    assert (nothing["records"], nothing["missing"]) == ([], 6)
    assert not (tmp_path / "results").exists()


def test_what_is_refused_leaves_no_folders(small: tuple[str, ...], tmp_path: Path) -> None:
    assert "no folder of finished trials" in run(*small, "--show", status=2).stderr
    assert "figure" in run(*small, "--figure", "99", status=2).stderr
    assert list(tmp_path.iterdir()) == []


def test_where_nothing_is_finished_earlier_results_stay(small: tuple[str, ...], tmp_path: Path) -> None:
    results = tmp_path / "results"
    results.mkdir()
    (tmp_path / "work").mkdir()
    other = ("reproduce", "cmp-fed", "--table", "1", "--work", str(tmp_path / "work"), "--output", str(results))
    for command, file in ((small, "pfa-figure-1-quick.md"), (other, "cmp-fed-table-1.md")):
        (results / file).write_text("of an earlier run")
        assert "nothing is finished yet" in run(*command, "--show").stderr
        assert (results / file).read_text() == "of an earlier run"


@pytest.mark.parametrize("study", ["pfa", "fedsel", "pdp-fl", "fedhdp", "cmp-fed"])
def test_committed_results_are_drawn_again_from_their_json(study: str, tmp_path: Path) -> None:
    names = sorted(path.name for path in RESULTS.glob(f"{study}-*.json"))
    for name in names:
        (tmp_path / name).write_bytes((RESULTS / name).read_bytes())
    found = run_json("reproduce", study, "--show", "--output", str(tmp_path))
    assert len(found) == len(names)
    for name in names:
        assert (tmp_path / name).read_bytes() == (RESULTS / name).read_bytes()
        written = (tmp_path / name).with_suffix(".md").read_bytes()
        assert written == (RESULTS / name).with_suffix(".md").read_bytes()
        assert (tmp_path / name).with_suffix(".svg").exists() == (RESULTS / name).with_suffix(".svg").exists()


def test_a_part_without_json_is_named(tmp_path: Path) -> None:
    refused("reproduce", "pfa", "--show", "--figure", "3", "--output", str(tmp_path), naming=("pfa-figure-3", "--show"))
    for study, folder in (("all", tmp_path / "absent"), ("pfa", tmp_path)):
        refused("reproduce", study, "--show", "--output", str(folder), naming=("holds no results", str(folder)))
    assert not (tmp_path / "absent").exists()


def test_results_go_to_the_repository_when_it_is_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    command = ("reproduce", "pfa", "--table", "1", "--work", str(tmp_path / "work"))
    run(*command)
    assert (tmp_path / "results" / "pfa-table-1.md").exists()
    (tmp_path / "reproductions" / "results").mkdir(parents=True)
    run(*command)
    assert (tmp_path / "reproductions" / "results" / "pfa-table-1.md").exists()


def test_a_shard_leaves_the_rest_to_others(small: tuple[str, ...], tmp_path: Path) -> None:
    assert run_json(*small, "--shard", "2/6")[0]["missing"] == 5
    for number in (1, 3, 4, 5, 6):
        last = run_json(*small, "--shard", f"{number}/6")
    assert last[0]["missing"] == 0


def test_a_table_needs_no_training(tmp_path: Path) -> None:
    options = ("--table", "1", "--work", str(tmp_path / "work"), "--output", str(tmp_path / "results"))
    (table,) = run_json("reproduce", "pfa", *options)
    assert table["columns"][0] == "budgets"
    assert (tmp_path / "results" / "pfa-table-1.md").read_text().startswith("# pfa, table 1: Distributions")


def test_cells_without_data_are_skipped_with_a_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def load(name: str, **_: object) -> None:
        raise DataError(f"{name} is not here; fetch it")

    monkeypatch.setattr(public_loaders, "load_dataset", load)
    lacking = small_studies.figure(settings=(replace(small_studies.SETTING, data="mnist"),))
    monkeypatch.setattr(pfa, "STUDY", Study("pfa", lambda _: (lacking,)))
    work = ("--work", str(tmp_path / "work"), "--output", str(tmp_path / "results"))
    said = run("reproduce", "pfa", *work).stderr
    assert "figure 1: cells on mnist are skipped: mnist is not here; fetch it" in said
    assert "nothing is finished yet" in said


def test_every_study_is_listed() -> None:
    pages = [page.read_text() for page in (Path(__file__).parents[2] / "docs").rglob("*.md")]
    shown = " ".join(run("reproduce", "--help").stdout.split())
    for study in STUDIES:
        assert any(f"reproduce {study}" in page for page in pages)
        assert f"{study} (" in shown


def test_only_what_is_missing_is_run_within_the_time(small: tuple[str, ...], tmp_path: Path) -> None:
    (nothing,) = run_json(*small, "--missing", "--minutes", "0")
    assert (nothing["records"], nothing["missing"]) == ([], 6)
    (first,) = run_json(*small)
    for path in (tmp_path / "work").glob("*.json"):
        path.unlink()
    (same,) = run_json(*small, "--missing", "--minutes", "5")
    assert list((tmp_path / "work").glob("*.json")) == []
    assert [one["finals"] for one in same["records"]] == [one["finals"] for one in first["records"]]
    (more,) = run_json(*small, "--missing", "--minutes", "5", "--seeds", "2")
    assert all(set(one["finals"]) == {"1", "2"} for one in more["records"])
    assert all(
        one["finals"]["1"] == old["finals"]["1"] for one, old in zip(more["records"], first["records"], strict=True)
    )


def test_all_studies_end_in_a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in STUDIES:
        module = import_module(f"polyeps_reproductions.{name.replace('-', '_')}")
        monkeypatch.setattr(module, "STUDY", Study(name, lambda _: (replace(small_studies.figure(), number="0"),)))
    folders = ("--work", str(tmp_path / "work"), "--output", str(tmp_path / "results"))
    said = run("reproduce", "all", "--quick", *folders)
    page = (tmp_path / "results" / "reproduced-quick.md").read_text()
    assert "reproduced-quick.md" in said.stderr
    assert all(f"## {name}\n" in page for name in STUDIES)
    assert "**not run**" in page
    assert {path.name for path in (tmp_path / "work").iterdir()} == set(STUDIES)
    refused("reproduce", "all", "--figure", "3", naming=("--figure", "all"))
    refused("reproduce", "pfa", "--show", "--missing", naming=("--show", "--missing"))


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    work = ("--work", str(tmp_path))
    refused("reproduce", "nothing", *work, naming=("'nothing'", "pfa, fedsel, pdp-fl, fedhdp, cmp-fed"))
    refused("reproduce", "pfa", "--figure", "14", *work, naming=("no figure 14",))
    refused("reproduce", "pfa", "--shard", "third", *work, naming=("--shard", "3/8", "'third'"))
    for study in ("pfa", "cmp-fed"):
        refused("reproduce", study, "--shard", "9/8", "--table", "1", *work, naming=("3/8", "9/8"))
    refused(
        "reproduce", "pfa", "--table", "1", "--output", "/dev/null/here", *work, naming=("/dev/null/here", "another")
    )
    refused("reproduce", "pfa", "--device", "nonsense", *work, naming=("nonsense", "use cpu"))
