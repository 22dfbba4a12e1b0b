"""Output that pages show is what the commands print: `python tools/page_output.py` writes it."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tools"))

import page_output  # noqa: E402


@pytest.mark.parametrize("page", page_output.pages(), ids=lambda page: page.name)
def test_output_is_that_of_the_command(page: Path) -> None:
    assert list(page_output.outdated(page)) == []


def test_other_output_is_found(tmp_path: Path) -> None:
    assert len(page_output.pages()) >= 4
    page = tmp_path / "page.md"
    page.write_text("<!-- output of: polyeps --version -->\n```text\n0.0.1\n```\n")
    ((command, block, now),) = page_output.outdated(page)
    assert (command, block) == ("polyeps --version", "0.0.1\n")
    assert now != block
