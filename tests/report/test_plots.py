"""Charts: what is drawn, what a pointer finds, and how names and axes fit."""

import itertools
import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.journals import CLIENTS, new_journal, write_job

from polyeps.experiment.journal import ClientRow
from polyeps.report.client_plots import spending
from polyeps.report.plots import accuracy_chart, active_chart, privacy_chart
from polyeps.report.svg import Chart, Scale, apart
from polyeps.report.tables import MethodRuns, read_methods

ROW = 17


def drawn(chart: Chart | None) -> Chart:
    assert chart is not None
    return chart


def written(picture: str) -> list[str]:
    return re.findall(r">([^<>]+)</text>", picture)


@given(st.lists(st.floats(0, 330), min_size=1, max_size=10).map(sorted))
def test_names_at_the_ends_of_lines_never_touch(spots: list[float]) -> None:
    heights = apart(spots, 330, ROW)
    assert all(after - before >= ROW - 1e-9 for before, after in itertools.pairwise(heights))
    assert heights[0] >= 0
    assert heights[-1] <= 330 + 1e-9
    if all(after - before >= ROW for before, after in itertools.pairwise(spots)):
        assert heights == pytest.approx(spots)


@given(st.floats(1e-6, 1e6), st.floats(1.001, 1e9), st.integers(2, 12), st.booleans(), st.booleans())
def test_ticks_are_few_round_and_on_the_axis(low: float, times: float, most: int, log: bool, whole: bool) -> None:
    scale = Scale(low, low * times, log=log)
    ticks = scale.ticks(most, whole=whole and not log)
    assert len(ticks) <= most + 1
    for tick in ticks:
        slack = 1e-9 if log else 1e-8 * (low * times - low)
        assert low * (1 - 1e-6) - slack <= tick <= low * times * (1 + 1e-6) + slack
        assert 0 <= scale.part(tick) <= 1
        if whole and not log:
            assert tick == round(tick)


@pytest.fixture
def lines(tmp_path: Path) -> tuple[MethodRuns, ...]:
    journal = new_journal(tmp_path / "run")
    for seed in (0, 1):
        write_job(journal, "pfa", seed, accuracies=[0.5, 0.6 + seed / 10, 0.7], left={"ward-a": 0})
        write_job(journal, "weiavg", seed, left={"ward-a": 0})
        write_job(journal, "minimum", seed, facts={"budgets": "minimum"})
    return read_methods([journal])


def test_only_controls_are_dashed(lines: tuple[MethodRuns, ...]) -> None:
    chart = drawn(accuracy_chart(lines))
    for picture in (chart.wide, chart.narrow or ""):
        assert re.findall(r'class="line (c\d dashed)"', picture) == ["c2 dashed"]
        assert re.findall(r'class="area (c\d)"', picture) == ["c0"]  # the one method whose seeds differ
    assert all(label in written(chart.wide) for label in ("pfa", "weiavg", "minimum"))
    assert [name for _, name in chart.legend] == ["pfa", "weiavg", "minimum"]  # below, on a phone


def test_a_pointer_finds_every_method_in_a_round(lines: tuple[MethodRuns, ...]) -> None:
    marks = json.loads(drawn(accuracy_chart(lines)).marks)
    assert [mark[2] for mark in marks] == ["round 1", "round 2", "round 3"]
    assert [mark[0] for mark in marks] == [0, 0.5, 1]
    assert ["c0", "pfa", "65.0 ± 7.1\u00a0%"] in marks[1][3]
    assert [row[1] for row in marks[1][3]] == ["pfa", "weiavg", "minimum"]  # the highest first


def rounds_written(picture: str) -> list[str]:
    return [text for text in written(picture) if text.isdigit()]


def test_rounds_are_written_where_points_are_while_these_are_few(tmp_path: Path) -> None:
    journal = new_journal(tmp_path / "run")
    write_job(journal, accuracies=[0.5 if number % 7 == 6 else None for number in range(21)])
    assert rounds_written(drawn(accuracy_chart(read_methods([journal]))).wide) == ["7", "14", "21"]
    journal = new_journal(tmp_path / "close")  # the last two would be written over each other
    write_job(journal, accuracies=[0.5 if number in (19, 39, 40) else None for number in range(41)])
    assert "41" not in rounds_written(drawn(accuracy_chart(read_methods([journal]))).narrow or "")


def test_long_names_are_not_cut(tmp_path: Path) -> None:
    journal = new_journal(tmp_path / "run")
    long = "federated averaging of whole clients with directions from the public model, clipped"
    write_job(journal, long)
    for number in range(12):
        write_job(journal, f"other-{number}")
    for few in (read_methods([journal])[:2], read_methods([journal])):
        for chart in map(drawn, (accuracy_chart(few), privacy_chart(few))):
            assert chart.always
            assert long in [name for _, name in chart.legend]


def test_accuracy_stands_against_the_epsilon_that_was_spent(lines: tuple[MethodRuns, ...]) -> None:
    chart = drawn(privacy_chart(lines))
    assert {"strong", "moderate", "weak"} <= set(written(chart.wide))
    assert "no guarantee" not in written(chart.wide)
    marks = json.loads(chart.marks)
    assert {mark[2] for mark in marks} == {"pfa", "weiavg", "minimum"}
    assert all(row[2].endswith("ε 0.25 to 1") for mark in marks for row in mark[3][:1])
    # No dot hides another one, though weiavg and minimum reached the same with the same ε.
    dots = re.findall(r'<circle class="spot [^"]*" cx="([\d.]+)" cy="([\d.]+)"', chart.wide)
    spots = [(float(x), float(y)) for x, y in dots]
    assert len(spots) == 3
    assert all(abs(a[0] - b[0]) + abs(a[1] - b[1]) > 9 for a, b in itertools.combinations(spots, 2))


def test_clients_alike_share_a_bar_and_methods_alike_a_chart(tmp_path: Path) -> None:
    journal = new_journal(tmp_path / "run")
    clients = [ClientRow(f"ward-{number}", 2.0, 1e-5, 2.0, 100, 1.0) for number in range(200)]
    write_job(journal, clients=[*clients, *CLIENTS])
    write_job(journal, "alike", clients=[*clients, *CLIENTS])
    write_job(journal, "other", clients=[*clients, *CLIENTS], spent={"ward-a": 0.5, "ward-b": 2.0})
    charts = spending(read_methods([journal]))
    assert [numbers for numbers, _ in charts] == [[0, 1], [2]]
    names = re.findall(r">([^<>]+ clients|ward-[^<>]*)</text>", charts[0][1].wide)
    assert names == ["ward-a", "201 clients"]  # ward-b has the same budget and spent the same
    assert [mark[2] for mark in json.loads(charts[0][1].marks)] == ["ward-a", "201 clients"]


def test_charts_of_methods_have_the_same_axes(tmp_path: Path) -> None:
    journal = new_journal(tmp_path / "run")
    write_job(journal, "low", spent={"ward-a": 0.01, "ward-b": 0.02})
    write_job(journal, "high")
    first, second = (chart.wide for _, chart in spending(read_methods([journal])))
    ticks = [[text for text in written(picture) if text[0].isdigit()] for picture in (first, second)]
    assert ticks[0] == ticks[1]


def test_methods_that_lost_the_same_clients_share_a_line(lines: tuple[MethodRuns, ...]) -> None:
    picture = drawn(active_chart(lines)).wide
    assert "pfa, weiavg" in written(picture)
    assert "pfa, weiavg from 2 to 1; minimum from 2 to 2" in picture
