"""The tables a run ends with."""

import json
from pathlib import Path

import pytest
from support.journals import new_journal, write_job

from polyeps.cli.run_output import print_outcome
from polyeps.experiment.journal import ClientRow


def printed(tmp_path: Path, capsys: pytest.CaptureFixture[str], clients: list[ClientRow]) -> list[str]:
    journal = new_journal(tmp_path / "run")
    write_job(journal, clients=clients)
    print_outcome(journal, tmp_path / "run", as_json=False)
    return capsys.readouterr().out.splitlines()


def clients(names: list[str], epsilon: float = 2.0) -> list[ClientRow]:
    return [ClientRow(name, epsilon, 1e-5, epsilon, 77, 1.0, None) for name in names]


def test_many_clients_alike_are_one_line_and_results_come_last(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = printed(tmp_path, capsys, [*clients(["strict"], 0.5), *clients([str(number) for number in range(140)])])
    rows = [line.split() for line in lines if " 77 " in line]
    assert [" ".join(row[:-3]) for row in rows] == ["strict", "140 clients: 0, 1, 2, …"]
    assert [row[-3:] for row in rows] == [["77", "0.5", "0.25"], ["77", "2", "1"]]
    (spent,), (accuracy,) = (
        [number for number, line in enumerate(lines) if title in line]
        for title in ("The ε each client", "Test accuracy")
    )
    assert spent < accuracy
    assert "over the last 3 rounds" in lines[accuracy]


def test_a_few_clients_are_listed_as_people_count(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(tmp_path, capsys, clients(["ward 10", "ward 9", "lab"]))
    assert [line.rsplit(maxsplit=3)[0].strip() for line in lines if " 77 " in line] == ["lab", "ward 9", "ward 10"]


def test_programs_hear_of_every_client_and_of_budgets_in_force(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    journal = new_journal(tmp_path / "run")
    liberal = [ClientRow(str(number), 2.0, 1e-5, 0.5, 77, 1.0, None) for number in range(5)]
    write_job(journal, "maximum", clients=liberal, facts={"budgets": "maximum"})
    print_outcome(journal, tmp_path / "run", as_json=True)
    rows = json.loads(capsys.readouterr().out)["clients"]["maximum-0"]
    # Each spent 1 of the 2 in force: more than its own budget, which a control does not promise.
    assert [(row["spent"], row["exceeded"]) for row in rows] == [(1.0, False)] * 5
