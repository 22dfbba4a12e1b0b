"""Pages link to files that exist, and ARCHITECTURE.md names functions that exist."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/**/*.md"))]
PRIVATE_WORDS = re.compile(
    r"\bpaper 00\d\b|\b(purse|dues|liberal|menu|loudness)\b|\bown coin\b|\bin force\b", re.IGNORECASE
)


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"https?://", link):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), f"{page.name} links to {link}"
        assert not anchor or anchor in anchors(target), f"{page.name} links to {link}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_use_public_words(page: Path) -> None:
    if page.name != "CHANGELOG.md":  # which names what was renamed
        assert not PRIVATE_WORDS.search(page.read_text())


def test_the_architecture_names_files_and_functions_that_exist() -> None:
    table = (ROOT / "ARCHITECTURE.md").read_text().partition("## Where is")[2]
    rows = [row.split("|")[2:4] for row in re.findall(r"^\|.*`.*$", table, re.MULTILINE)]
    assert len(rows) > 10
    for files, functions in rows:
        defined: set[str] = set()
        for file in re.findall(r"`([^`]+)`", files):
            tree = ast.parse((ROOT / "src" / "polyeps" / file).read_text())
            defined |= {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        assert set(re.findall(r"`([^`]+)`", functions)) <= defined, files


def test_the_tests_of_attacks_exist() -> None:
    named = re.findall(r"`([\w/]+\.py)`", (ROOT / "docs" / "reference" / "attacks.md").read_text())
    assert len(named) > 20
    for name in named:
        assert (ROOT / "tests" / name).exists() or (ROOT / name).exists(), name


def test_code_names_pages_that_exist() -> None:
    for folder in ("src", "examples", "benchmarks", "reproductions/polyeps_reproductions"):
        for path in [*(ROOT / folder).rglob("*.py"), *(ROOT / folder).rglob("*.toml")]:
            for page in re.findall(r"\bdocs/[\w/-]+\.md", path.read_text()):
                assert (ROOT / page).exists(), f"{path.name} names {page}"
