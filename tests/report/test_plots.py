import itertools
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.journals import CLIENTS, new_journal, write_job

from polyeps.experiment.journal import ClientRow
from polyeps.report.client_plots import bytes_picture, spent_picture
from polyeps.report.round_plots import _ROW, _apart, accuracy_picture, active_picture
from polyeps.report.svg import METHODS, NARROW, WIDE
from polyeps.report.tables import MethodRuns, read_methods


@given(st.lists(st.floats(0, 330), min_size=1, max_size=10).map(sorted))
def test_names_at_the_ends_of_lines_never_touch(spots: list[float]) -> None:
    heights = _apart(spots, 330)
    assert all(after - before >= _ROW - 1e-9 for before, after in itertools.pairwise(heights))
    assert heights[0] >= 0
    assert heights[-1] <= 330 + 1e-9
    if all(after - before >= _ROW for before, after in itertools.pairwise(spots)):
        assert heights == pytest.approx(spots)


@pytest.fixture
def lines(tmp_path: Path) -> tuple[MethodRuns, ...]:
    journal = new_journal(tmp_path / "run")
    for seed in (0, 1):
        write_job(journal, "pfa", seed, accuracies=[0.5, 0.6 + seed / 10, 0.7], left={"ward-a": 0})
        write_job(journal, "weiavg", seed, left={"ward-a": 0})
        write_job(journal, "minimum", seed, facts={"budgets": "minimum"})
    return read_methods([journal])


def test_only_controls_are_dashed(lines: tuple[MethodRuns, ...]) -> None:
    for width in (WIDE, NARROW):
        picture = accuracy_picture(lines, width)
        dashed = re.findall(
            r"stroke-dasharray: [\d.]+[^;]*; [^\"]*var\(--(\S+?)\)|var\(--(\S+?)\)[^\"]*dasharray", picture
        )
        assert {first or second for first, second in dashed} == {"method-2"}
        assert picture.count("fill-opacity: 0.16") == 1  # the one method whose seeds differ
    assert all(f">{label}</text>" in accuracy_picture(lines) for label in ("pfa", "weiavg", "minimum"))


def rounds_written(picture: str) -> list[str]:
    """The numbers under the axis, which come before those at its side."""
    written = re.findall(r">([\d.]+)</text>", picture)
    return [text for text in written if text.isdigit()]


def test_rounds_are_written_where_points_are_while_these_are_few(tmp_path: Path) -> None:
    journal = new_journal(tmp_path / "run")
    write_job(journal, accuracies=[0.5 if number % 7 == 6 else None for number in range(21)])
    assert rounds_written(accuracy_picture(read_methods([journal]))) == ["7", "14", "21"]
    journal = new_journal(tmp_path / "close")  # the last two would be written over each other
    write_job(journal, accuracies=[0.5 if number in (19, 39, 40) else None for number in range(41)])
    assert "41" not in rounds_written(accuracy_picture(read_methods([journal]), NARROW))


def test_long_names_are_wrapped_and_not_cut(tmp_path: Path) -> None:
    journal = new_journal(tmp_path / "run")
    long = "federated averaging of whole clients with directions from the public model, clipped"
    write_job(journal, long)
    for number in range(12):
        write_job(journal, f"other-{number}")
    lines = read_methods([journal])
    for picture in (bytes_picture, accuracy_picture):
        for few in (lines[:2], lines):
            for width in (WIDE, NARROW):
                drawn = re.sub(r"<title>.*?</title>", "", picture(few, width))
                written = re.findall(r">([^<>]+)</(?:text|tspan)>", drawn)
                assert all(word in " ".join(written).split() for word in long.split())
                assert "…" not in drawn


def test_clients_alike_share_a_bar(tmp_path: Path) -> None:
    journal = new_journal(tmp_path / "run")
    clients = [ClientRow(f"ward-{number}", 2.0, 1e-5, 2.0, 100, 1.0) for number in range(200)]
    write_job(journal, clients=[*clients, *CLIENTS])
    picture = spent_picture(read_methods([journal])[0], METHODS[0])
    names = re.findall(r">([^<>]+ clients|ward-[^<>]*)</text>", picture)
    assert names == ["ward-a", "201 clients"]  # ward-b has the same budget and spent the same


def test_methods_that_lost_the_same_clients_share_a_line(lines: tuple[MethodRuns, ...]) -> None:
    picture = active_picture(lines)
    assert ">pfa, weiavg</text>" in picture
    assert "pfa, weiavg from 2 to 1; minimum from 2 to 2" in picture
