import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import pytest
from support.journals import ABOUT, CLIENTS, add_job, new_journal, write_job

from polyeps.experiment.journal import ClientRow, Journal
from polyeps.report.curves import accuracy_curve, active_curve, traffic, worst_rows
from polyeps.report.tables import MethodSummary, read_methods, summarise, summarise_clients


def summaries(journals: Sequence[Journal]) -> list[MethodSummary]:
    return [summarise(method) for method in read_methods(journals)]


def test_final_accuracy_is_over_the_last_ten_rounds_as_far_as_evaluated_then_over_seeds(tmp_path: Path) -> None:
    journal = new_journal(tmp_path / "run")
    # Evaluated in every other round; of the ten up to the last evaluated one these are 20, 22, ..., 28.
    write_job(journal, seed=0, accuracies=[number / 100 if number % 2 == 0 else None for number in range(30)])
    write_job(journal, seed=1, accuracies=[0.25] * 30)
    (row,) = summaries([journal])
    assert row.final_accuracy == pytest.approx((0.24 + 0.25) / 2)
    assert row.final_accuracy_deviation == pytest.approx(0.01 / math.sqrt(2))  # n - 1 in the denominator
    assert row.last_accuracy == pytest.approx((0.28 + 0.25) / 2)
    assert (row.seeds, row.finished, row.rounds_run, row.rounds) == (2, 2, 30, 30)


def test_one_seed_has_no_deviation(tmp_path: Path) -> None:
    journal = new_journal(tmp_path / "run")
    write_job(journal)
    (row,) = summaries([journal])
    assert row.final_accuracy == pytest.approx(0.6)
    assert row.final_accuracy_deviation is None
    assert row.seconds_per_round == 0.25


def test_bytes_ratios_and_departures(tmp_path: Path) -> None:
    journal = new_journal(tmp_path / "run")
    job = write_job(journal, spent={"ward-a": 0.45, "ward-b": 1.0}, left={"ward-a": 1, "ward-b": 2})
    (row,) = summaries([journal])
    assert (row.bytes_up, row.bytes_down) == (500, 1500)  # ward-a joined two rounds, ward-b three
    assert row.bytes_up_per_client_round == 100
    assert row.largest_ratio == pytest.approx(0.9)
    assert row.left_early == 1  # ward-b ended with the last planned round
    strict, loose = summarise_clients(journal, job)
    assert asdict(strict) == {
        "client": "ward-a",
        "epsilon": 0.5,
        "own_epsilon": 0.5,
        "delta": 1e-5,
        "records": 100,
        "noise_multiplier": 4.0,
        "spent": 0.45,
        "ratio": 0.9,
        "exceeded": False,
        "joined": 2,
        "declined": 0,
        "left_after": 2,
        "sent": 200,
        "received": 600,
    }
    assert (loose.client, loose.left_after, loose.joined) == ("ward-b", 3, 3)
    (line,) = read_methods([journal])
    assert active_curve(line).rounds == (1, 2, 3)
    assert active_curve(line).mean == (2, 2, 1)  # who could afford each round
    found = traffic(line)
    assert found is not None
    assert found.sent == (250, 200, 300)


def test_a_run_that_stops_early_shows_who_was_left(tmp_path: Path) -> None:
    journal = new_journal(tmp_path / "run")
    write_job(journal, planned=5, left={"ward-a": 0, "ward-b": 1}, accuracies=[0.1, 0.2])
    (line,) = read_methods([journal])
    assert active_curve(line).mean == (2, 1, 0)


def test_declining_is_counted(tmp_path: Path) -> None:
    journal = new_journal(tmp_path / "run")
    job = write_job(journal)
    with journal._writing() as db:
        db.execute("UPDATE answers SET answered = 0, sent = 0 WHERE client = 'ward-a' AND round = 2")
    assert (summarise_clients(journal, job)[0].joined, summarise_clients(journal, job)[0].declined) == (2, 1)


def test_what_is_not_a_number_is_not_averaged_away(tmp_path: Path) -> None:
    journal = new_journal(tmp_path / "run")
    write_job(journal, seed=0, accuracies=[0.5, math.nan, 0.7])
    write_job(journal, seed=1)
    (row,) = summaries([journal])
    assert row.final_accuracy is not None
    assert math.isnan(row.final_accuracy)
    assert row.final_accuracy_deviation is not None
    assert math.isnan(row.final_accuracy_deviation)
    (line,) = read_methods([journal])
    assert [math.isnan(mean) for mean in accuracy_curve(line).mean] == [False, True, False]


def test_half_a_job_is_not_averaged_with_whole_ones(tmp_path: Path) -> None:
    journal = new_journal(tmp_path / "run")
    write_job(journal, seed=0, accuracies=[0.1], planned=3, finished=False)
    (row,) = summaries([journal])
    assert (row.final_accuracy, row.finished, row.largest_ratio) == (0.1, 0, None)
    write_job(journal, seed=1)
    add_job(journal, "fedavg-2", "fedavg", "fedavg", 2, 3)
    (row,) = summaries([journal])
    assert row.final_accuracy == pytest.approx(0.6)
    assert (row.finished, row.seeds, row.rounds_run) == (1, 3, 3)


def test_more_than_the_budget_is_noticed(tmp_path: Path) -> None:
    journal = new_journal(tmp_path / "run")
    job = write_job(journal, spent={"ward-a": math.nextafter(0.5, 1), "ward-b": 2.0})
    assert [row.exceeded for row in summarise_clients(journal, job)] == [True, False]
    assert summaries([journal])[0].exceeded == 1


def test_a_client_guaranteed_its_own_budget_may_not_be_given_a_larger_one(tmp_path: Path) -> None:
    journal = new_journal(tmp_path / "run")
    larger = [ClientRow("ward-a", 5.0, 1e-5, 0.5, 100, 1.0)]
    write_job(journal, "own", clients=larger, spent={"ward-a": 0.6})
    write_job(journal, "maximum", clients=larger, spent={"ward-a": 0.6}, facts={"budgets": "maximum"})
    own, control = summaries([journal])
    assert (own.exceeded, control.exceeded) == (1, 0)


def test_the_worst_seed_of_each_client(tmp_path: Path) -> None:
    journal = new_journal(tmp_path / "run")
    write_job(journal, seed=0, spent={"ward-a": 0.4, "ward-b": 0.1})
    write_job(journal, seed=1, spent={"ward-a": 0.3, "ward-b": 1.9})
    (line,) = read_methods([journal])
    assert [(row.client, row.spent) for row in worst_rows(line)] == [("ward-a", 0.4), ("ward-b", 1.9)]


def test_controls_come_last_and_labels_that_collide_bear_the_run(tmp_path: Path) -> None:
    first, second = new_journal(tmp_path / "a"), new_journal(tmp_path / "b", {**ABOUT, "name": "other"})
    write_job(first, "minimum", facts={"budgets": "minimum"})
    write_job(first, "fedavg")
    write_job(second, "fedavg")
    assert [row.label for row in summaries([first, second])] == ["fedavg (small)", "fedavg (other)", "minimum"]
    third = new_journal(tmp_path / "c")
    write_job(third, "fedavg", clients=CLIENTS[:1])
    assert summaries([first, third])[0].label == f"fedavg (small, {tmp_path / 'a'})"


def test_an_empty_journal(tmp_path: Path) -> None:
    journal = new_journal(tmp_path / "run")
    assert summaries([journal]) == []
    add_job(journal, "fedavg-0", "fedavg", "fedavg", 0, 3)
    (row,) = summaries([journal])
    assert (row.clients, row.final_accuracy, row.bytes_up_per_client_round) == (0, None, None)
