import csv
import json
from pathlib import Path

import pytest
from support.commands import refused, run, run_json

from polyeps.accounting.events import Gaussian
from polyeps.core import Budget
from polyeps.ledger import Ledger
from polyeps.ledger.account import BudgetTerms, Charge


@pytest.fixture
def file(tmp_path: Path) -> str:
    return str(tmp_path / "ledger.db")


def test_a_ledgers_life(file: str, tmp_path: Path) -> None:
    state = run_json("ledger", "set-budget", "--file", file, "--client", "ward", "--epsilon", "2", "--delta", "1e-6")
    assert (state["client"], state["epsilon"], state["spent"]) == ("ward", 2.0, 0.0)
    Ledger(file).charge(Gaussian(5.0), purpose="test")
    shown = run_json("ledger", "show", "--file", file)
    (ward,) = shown["clients"]
    assert ward["spent"] + ward["left"] == pytest.approx(2.0)
    assert ward["charges"] == 1
    refused("ledger", "set-budget", "--file", file, "--client", "ward", "--epsilon", "9", naming=("ward", "--raise"))
    refused("ledger", "set-budget", "--file", file, "--client", "ward", "--epsilon", "9", "--raise", naming=("reason",))
    raised = run_json(
        "ledger", "set-budget", "--file", file, "--client", "ward", "--epsilon", "9", "--raise", "--reason", "agreed"
    )
    assert (raised["epsilon"], raised["delta"]) == (9.0, 1e-6)  # raising one leaves the other
    assert raised["schedule"] == "adaptive"
    kinds = [row["kind"] for row in run_json("ledger", "history", "--file", file)]
    assert kinds == ["opened", "budget", "charge", "budget-changed"]
    assert run_json("ledger", "verify", "--file", file)["rows"] == 4
    lines = run("ledger", "export", "--file", file).stdout.splitlines()
    assert [json.loads(line)["seq"] for line in lines] == [1, 2, 3, 4]
    target = tmp_path / "out.csv"
    run("ledger", "export", "--file", file, "--format", "csv", "-o", str(target))
    assert [row["seq"] for row in csv.DictReader(target.read_text().splitlines())] == ["1", "2", "3", "4"]
    for command in ("show", "history", "verify"):
        assert run("ledger", command, "--file", file).stdout


def test_reservations_are_shown(file: str) -> None:
    run("ledger", "set-budget", "--file", file, "--client", "ward", "--epsilon", "2")
    run("ledger", "set-budget", "--file", file, "--client", "other", "--epsilon", "1", "--schedule", "fixed")
    ledger = Ledger(file)
    ledger.reserve("trial", [Charge(("ward",), Gaussian(20.0), 3)])
    ledger.reserve("pilot", [Charge(("other",), Gaussian(20.0), 2)])
    ledger.charge(Gaussian(20.0), clients=["ward"], run="trial")
    ledger.release("pilot")
    shown = run_json("ledger", "show", "--file", file)
    ward, other = shown["clients"]
    assert ward["reserved"] > 0
    assert ward["spent"] + ward["reserved"] + ward["left"] == pytest.approx(2.0)
    assert (other["reserved"], other["left"], other["schedule"]) == (0.0, 1.0, "fixed")
    runs = [{"run": "trial", "state": "open", "clients": 1}, {"run": "pilot", "state": "released", "clients": 1}]
    assert shown["runs"] == runs
    assert run_json("ledger", "show", "--file", file, "--client", "other")["runs"] == runs[1:]
    assert "trial" in run("ledger", "show", "--file", file).stdout
    kinds = [row["kind"] for row in run_json("ledger", "history", "--file", file)]
    assert kinds == ["opened", "budget", "budget", "reserve", "reserve", "charge", "release"]


def test_a_head_kept_elsewhere(file: str, tmp_path: Path) -> None:
    run("ledger", "set-budget", "--file", file, "--epsilon", "2")
    kept = tmp_path / "kept.json"
    kept.write_text(run("ledger", "verify", "--file", file, "--json").stdout)
    Ledger(file).charge(Gaussian(20.0))
    assert run_json("ledger", "verify", "--file", file, "--head", str(kept))["rows"] == 3
    for name in (file, f"{file}.head"):
        Path(name).unlink()
    run("ledger", "set-budget", "--file", file, "--epsilon", "2")
    run("ledger", "verify", "--file", file)
    refused("ledger", "verify", "--file", file, "--head", str(kept), naming=("row 2", "kept"), status=1)
    kept.write_text("no head")
    refused("ledger", "verify", "--file", file, "--head", str(kept), naming=("kept.json", "is not a head"))
    Path(file).unlink()
    refused("ledger", "set-budget", "--file", file, "--epsilon", "2", naming=("is missing", "records"), status=1)


def test_names_that_are_no_text_are_refused(file: str) -> None:
    refused("ledger", "set-budget", "--file", file, "--epsilon", "2", "--client", "\udcff", naming=("printable",))
    run("ledger", "set-budget", "--file", file, "--epsilon", "2")
    refused("ledger", "show", "--file", file, "--client", "\udcff", naming=("no budget",))


def test_tampering_is_told_with_another_status(file: str) -> None:
    run("ledger", "set-budget", "--file", file, "--epsilon", "2")
    path = Path(file)
    path.write_bytes(path.read_bytes().replace(b'"epsilon":2.0', b'"epsilon":9.0'))
    for command in ("verify", "show", "history", "export"):
        refused("ledger", command, "--file", file, naming=("row 2",), status=1)


@pytest.mark.parametrize("bad", [["0"], ["-1"], ["nan"], ["inf"], ["1", "--delta", "1"], ["1", "--unit", "planet"]])
def test_bad_budgets_write_nothing(file: str, bad: list[str]) -> None:
    refused("ledger", "set-budget", "--file", file, "--epsilon", *bad)
    assert not list(Path(file).parent.iterdir())


def test_missing_ledgers_are_named(file: str) -> None:
    for command in ("show", "history", "verify", "export"):
        refused("ledger", command, "--file", file, naming=("ledger.db", "set a budget"))
    run("ledger", "set-budget", "--file", file, "--epsilon", "2")
    refused("ledger", "show", "--file", file, "--client", "nobody", naming=("nobody",))
    refused("ledger", "export", "--file", file, "-o", "/nowhere/at/all", naming=("/nowhere/at/all",))


def test_history_is_in_words(file: str) -> None:
    run(
        "ledger",
        "set-budget",
        "--file",
        file,
        "--client",
        "ward",
        "--epsilon",
        "2",
        "--person",
        "patient",
        "--unit",
        "person",
    )
    ledger = Ledger(file)
    ledger.reserve("trial", [Charge(("ward",), Gaussian(20.0), 3, "person", person="patient")])
    ledger.release("trial")
    run("ledger", "set-budget", "--file", file, "--client", "ward", "--epsilon", "3", "--raise", "--reason", "agreed")
    said = run("ledger", "history", "--file", file).stdout
    for part in (
        "budget ε = 2, δ = 1e-5 per patient",
        "reserved 3 × Gaussian noise 20 (trial)",
        "run trial ended; what it did not use is free again",
        "budget changed to ε = 3, δ = 1e-5: agreed",
    ):
        assert part in said
    assert "{" not in said


def test_history_names_few_clients_and_counts_many(file: str) -> None:
    names = [f"c{number}" for number in range(40)]
    terms = BudgetTerms(Budget(2.0, 1e-5))
    ledger = Ledger.create(Path(file), dict.fromkeys(names, terms))
    ledger.charge(Gaussian(5.0), clients=names, purpose="all/0123456789abcdef0123456789abcdef")
    ledger.charge(Gaussian(5.0), clients=names[:2])
    said = run("ledger", "history", "--file", file).stdout
    assert "40 clients" in said
    assert "c0, c1 " in said
    assert "(all)" in said
