import itertools
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from journals import new_journal, write_job

from polyeps.report.plots import _ROW, _apart, accuracy_picture, active_picture
from polyeps.report.svg import NARROW, WIDE
from polyeps.report.tables import Line, read


@given(st.lists(st.floats(0, 330), min_size=1, max_size=10).map(sorted))
def test_names_at_the_ends_of_lines_never_touch(spots: list[float]) -> None:
    heights = _apart(spots, 330)
    assert all(after - before >= _ROW - 1e-9 for before, after in itertools.pairwise(heights))
    assert heights[0] >= 0
    assert heights[-1] <= 330 + 1e-9
    if all(after - before >= _ROW for before, after in itertools.pairwise(spots)):
        assert heights == pytest.approx(spots)


@pytest.fixture
def lines(tmp_path: Path) -> tuple[Line, ...]:
    journal = new_journal(tmp_path / "run")
    for seed in (0, 1):
        write_job(journal, "pfa", seed, accuracies=[0.5, 0.6 + seed / 10, 0.7], left={"ward-a": 0})
        write_job(journal, "weiavg", seed, left={"ward-a": 0})
        write_job(journal, "minimum", seed, facts={"budgets": "strictest"})
    return read([journal])


def test_only_controls_are_dashed(lines: tuple[Line, ...]) -> None:
    for width in (WIDE, NARROW):
        picture = accuracy_picture(lines, width)
        dashed = re.findall(
            r"stroke-dasharray: [\d.]+[^;]*; [^\"]*var\(--(\S+?)\)|var\(--(\S+?)\)[^\"]*dasharray", picture
        )
        assert {first or second for first, second in dashed} == {"method-2"}
        assert picture.count("fill-opacity: 0.16") == 1  # the one method whose seeds differ
    assert all(f">{label}</text>" in accuracy_picture(lines) for label in ("pfa", "weiavg", "minimum"))


def test_methods_that_lost_the_same_clients_share_a_line(lines: tuple[Line, ...]) -> None:
    picture = active_picture(lines)
    assert ">pfa, weiavg</text>" in picture
    assert "pfa, weiavg from 2 to 1; minimum from 2 to 2" in picture
