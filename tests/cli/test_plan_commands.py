from pathlib import Path

import pytest
from support.commands import refused, run, run_json

SCHEDULE = ["--batch", "8", "--local-steps", "10", "--rounds", "20", "--participation", "0.8"]


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYEPS_CACHE", str(tmp_path_factory.mktemp("cache")))


def test_a_drawn_federation() -> None:
    options = ["--distribution", "mixgauss1", "--clients", "8", "--records", "1200", "--seed", "1"]
    shown = run_json("plan", *options, *SCHEDULE)
    assert shown["seed"] == 1
    assert len(shown["clients"]) == 8
    for row in shown["clients"]:
        assert row["rounds_expected"] == 16
        assert 0.99 * row["epsilon"] <= row["spent"] <= row["epsilon"]
    assert shown == run_json("plan", *options, *SCHEDULE)
    spoken = run("plan", *options, *SCHEDULE)
    assert "█" in spoken.stdout
    assert "0.9·N(0.1, 0.01) + 0.1·N(10, 0.1)" in spoken.stderr


def test_an_unseeded_draw_tells_its_seed() -> None:
    shown = run_json("plan", "--distribution", "uniform", "--clients", "2", "--records", "1200", *SCHEDULE)
    assert isinstance(shown["seed"], int)


def test_many_clients_are_grouped() -> None:
    options = ["--distribution", "uniform", "--clients", "200", "--records", "1200", "--seed", "1", "--sigma", "1"]
    spoken = run("plan", *options, *SCHEDULE)
    assert len(spoken.stdout.splitlines()) < 45
    assert "200 by the number of rounds" in spoken.stdout


def test_a_file_of_budgets(tmp_path: Path) -> None:
    file = tmp_path / "budgets.csv"
    file.write_text("client,epsilon,records\nward a,1.5,300\nward b,0.2,\n")
    shown = run_json("plan", "--budgets", str(file), "--records", "1200", *SCHEDULE)
    assert [(row["client"], row["records"]) for row in shown["clients"]] == [("ward a", 300), ("ward b", 1200)]
    refused("plan", "--budgets", str(file), *SCHEDULE, naming=("'ward b'", "records"))
    refused("plan", "--budgets", str(file), "--records", "5", *SCHEDULE, naming=("'ward b'", "batch"))


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([], "--budgets"),
        (["--distribution", "uniform", "--records", "9"], "--clients"),
        (["--distribution", "zipf", "--clients", "3", "--records", "9"], "zipf"),
        (["--distribution", "uniform", "--clients", "0", "--records", "9"], "clients"),
        (["--budgets", "absent.csv"], "absent.csv"),
    ],
)
def test_bad_input_is_one_sentence(arguments: list[str], named: str) -> None:
    refused("plan", *arguments, *SCHEDULE, naming=(named,))
