"""Pages are in plain words and rightly spelt, and the checks of both can fail."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tools"))

import prose  # type: ignore[import-not-found, unused-ignore]  # noqa: E402


def test_pages_and_code_pass() -> None:
    assert list(prose.findings()) == []


@pytest.mark.parametrize(
    "wrong",
    [
        "Keep your own purse.",
        "As in paper 003, clients pay their dues.",
        "The server draws by its own coin.",
        "Use it in order to train.",
        "This is obviously right.",
        "The the noise is large.",
        "Which rule is best depends on the data.",
        "All is well. Who must hide that, must not choose.",
        "A long sentence " + "goes on and " * 16 + "ends.",
    ],
)
def test_a_fault_is_found_with_its_line(wrong: str) -> None:
    found = list(prose.check_page(f"# A page\n\nFine words.\n\n{wrong}\n"))
    assert {number for number, _ in found} == {5}


@pytest.mark.parametrize(
    "right",
    [
        "Which rule is best?",
        "`e.g. a menu` and [a link](https://example.org/menu)",
        "```sh\nutilize the purse\n```",
        "| a table | in order to |",
        "Two of two clients answered.",
    ],
)
def test_what_is_right_passes(right: str) -> None:
    assert list(prose.check_page(right)) == []


def test_words_of_the_code_are_checked() -> None:
    assert list(prose.check_code("# the noise in force\n")) == [(1, "'in force': write effective")]
    assert list(prose.check_code('draw("menu")\n')) == []


def test_spelling_is_checked(tmp_path: Path) -> None:
    spell = [sys.executable, "-m", "codespell_lib"]
    (tmp_path / "page.md").write_text("Privacy is " + "garan" + "teed.\n")
    assert subprocess.run([*spell, str(tmp_path / "page.md")], capture_output=True).returncode != 0
    assert subprocess.run([*spell, "docs", "README.md", "src"], cwd=ROOT, capture_output=True).returncode == 0
