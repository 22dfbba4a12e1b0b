"""The documentation site builds offline without a warning, and asks no other server for anything."""

import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
import typer

from polyeps import __all__ as public_names
from polyeps.cli import app

ROOT = Path(__file__).parent.parent
BUILD = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going"]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("furo")
    folder = tmp_path_factory.mktemp("site")
    command = [*BUILD, "-c", "docs", "-d", str(folder / "trees"), ".", str(folder / "html")]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    assert not built.stderr
    return folder / "html"


class Loaded(HTMLParser):
    """What a browser fetches when it opens a page."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = dict(attributes)
        fetched = given.get("src") or (given.get("href") if tag == "link" else None)
        if fetched:
            self.found.append(fetched)


def test_it_is_whole_and_loads_nothing_from_elsewhere(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 70
    for page in pages:
        parser = Loaded()
        parser.feed(page.read_text(encoding="utf-8"))
        for fetched in parser.found:
            assert not re.match(r"(https?:)?//", fetched), f"{page.name} loads {fetched}"
    for style in site.rglob("*.css"):
        assert not re.search(r"(@import|url\()[\"' ]*(https?:)?//", style.read_text(encoding="utf-8")), style.name
    assert "url=docs/README.html" in (site / "index.html").read_text()


def test_the_references_are_complete(site: Path) -> None:
    commands = (site / "docs" / "reference" / "commands.html").read_text(encoding="utf-8")
    for name in typer.main.get_command(app).commands:  # type: ignore[attr-defined]
        assert f"polyeps {name}" in commands
    assert "--quiet" in commands
    python = (site / "docs" / "reference" / "python.html").read_text(encoding="utf-8")
    for name in public_names:
        assert f'id="polyeps.{name}"' in python, name


@pytest.mark.parametrize("fault", ["[nowhere](nothing.md)", "![none](none.svg)"])
def test_a_fault_fails_the_build(fault: str, tmp_path: Path) -> None:
    pytest.importorskip("furo")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "README.md").write_text(f"# Documentation\n\n{fault}\n")
    command = [*BUILD, "-c", str(ROOT / "docs"), str(tmp_path), str(tmp_path / "html")]
    assert subprocess.run(command, capture_output=True).returncode != 0
