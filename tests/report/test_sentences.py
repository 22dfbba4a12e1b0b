"""The report's sentences: effective budgets, guarantees, and the rounds that were tested."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from support.journals import CLIENTS, add_job, new_journal, write_job

from polyeps.experiment.journal import ClientRow
from polyeps.report import sentences
from polyeps.report.page import make_page
from polyeps.report.tables import read_methods

ALIKE = [ClientRow(name, 2.0, 1e-5, 2.0, 100, 1.0) for name in ("a", "b", "c", "d")]


def test_one_budget_for_all_is_each_clients_own_and_guaranteed_once(tmp_path: Path) -> None:
    journal = new_journal(tmp_path / "run")
    write_job(journal, "even", clients=ALIKE)
    write_job(journal, "uneven", clients=ALIKE, spent={"a": 0.2, "b": 1.0, "c": 1.5, "d": 1.9})
    even, uneven = read_methods([journal])
    (one,) = sentences.guarantees(even)
    assert (one.strength, one.allows) == ("strong", "could raise a 50\u00a0% guess to 73.2\u00a0%")
    assert "Each of 4 clients" in one.client
    (one,) = sentences.guarantees(uneven)
    assert "A typical client, b" in one.client
    assert "ε\u00a0=\u00a01" in one.words
    assert sentences.describe_budgets(even) == "each client's own budget, the same for all"
    assert "Every client stayed within its own budget" in sentences.opening([even, uneven])
    assert "each of these 2 spends them anew" in sentences.anew([even, uneven])
    assert sentences.anew([even]) == ""
    text = make_page([journal])
    assert "Dashed" not in text
    assert "chip dashed" not in text


def test_a_client_whose_records_were_not_used_is_promised_nothing_in_figures(tmp_path: Path) -> None:
    journal = new_journal(tmp_path / "run")
    write_job(journal, left={"ward-a": -1}, spent={"ward-a": 0.0, "ward-b": 1.0})
    write_job(journal, "silent", spent={"ward-a": 0.0, "ward-b": 1.0})  # it answered: its answers are covered
    unused, silent = read_methods([journal])
    smallest, _, largest = sentences.guarantees(unused)
    assert smallest.words.endswith("none of its records were used.")
    assert (smallest.strength, largest.strength) == ("", "strong")
    assert "ε\u00a0=\u00a00)" in sentences.guarantees(silent)[0].words


def test_guarantees_in_the_same_terms_are_written_out_once(tmp_path: Path) -> None:
    journal = new_journal(tmp_path / "run")
    for place, label in enumerate(("one", "two", "three")):
        write_job(journal, label, spent={"ward-a": 0.1 + place / 10, "ward-b": 1.0})
    write_job(journal, "whole", facts={"unit": "client"})
    for label in ("bare", "free"):
        write_job(journal, label, clients=[ClientRow("ward-a", None, None, 0.5, 100, None)], facts={"budgets": "none"})
    text = make_page([journal])
    assert text.count("<summary>The same terms as one, with ε ") == 2
    assert "<summary>The same terms as one, with ε 0.2, 0.2 and 1</summary>" in text
    assert text.count("The same terms as") == 2


def test_budgets_that_are_the_clients_own_under_one_seed_alone_are_not(tmp_path: Path) -> None:
    journal = new_journal(tmp_path / "run")
    write_job(journal, seed=0, clients=CLIENTS[:1])
    write_job(journal, seed=1, facts={"budgets": "minimum"})
    (line,) = read_methods([journal])
    assert line.control
    assert sentences.describe_budgets(line) == "control: the smallest budget, for all clients"


@pytest.mark.parametrize(
    ("tested", "rounds", "final", "curve"),
    [
        (range(1, 31), 30, "the last 10 rounds", "each round"),
        (range(1, 4), 3, "the last 3 rounds", "each round"),
        (range(5, 31, 5), 30, "the evaluated ones of the last 10 rounds (2 of them)", "every 5 rounds"),
        ((20, 40, 41), 41, "the evaluated ones of the last 10 rounds (2 of them)", "every 20 rounds, and the last"),
        ((30,), 30, "the evaluated ones of the last 10 rounds (1 of them)", "the last round"),
    ],
)
def test_which_rounds_were_tested(tested: Sequence[int], rounds: int, final: str, curve: str, tmp_path: Path) -> None:
    journal = new_journal(tmp_path / "run")
    write_job(journal, accuracies=[0.5 if number + 1 in tested else None for number in range(rounds)])
    assert sentences.averaged_rounds(read_methods([journal])) == final
    assert sentences.evaluated_rounds(read_methods([journal])) == curve
    text = make_page([journal])
    assert f"Final accuracy: the mean over {final}." in text
    assert f"Test accuracy after {curve}." in text


def test_guarantees_of_different_units_are_distinguished(tmp_path: Path) -> None:
    journal = new_journal(tmp_path / "run")
    write_job(journal, "records")
    write_job(journal, "wholes", facts={"unit": "client"})
    records, wholes = read_methods([journal])
    assert "Some methods protect whole clients" in sentences.units([records, wholes])
    assert sentences.units([records]) == ""
    assert "Some methods protect whole clients" in make_page([journal])


def test_of_a_method_that_has_not_begun_nothing_is_said(tmp_path: Path) -> None:
    journal = new_journal(tmp_path / "run")
    write_job(journal, "begun")
    add_job(journal, "later-0", "uv-fed", "later", 0, 3)
    _, later = read_methods([journal])
    assert sentences.describe_budgets(later) == "not begun yet"
