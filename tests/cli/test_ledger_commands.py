import csv
import json
from pathlib import Path

import pytest
from commands import refused, run, run_json

from polyeps.accounting.events import Gaussian
from polyeps.ledger import Ledger


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
    assert raised["epsilon"] == 9.0
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
