"""ARCHITECTURE.md's direction of imports, held by reading the sources."""

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "polyeps"

# A module may import from its own layer and from layers above it in this list.
LAYERS = [
    {"errors"},
    {"core"},
    {"accounting"},
    {"mechanisms", "engine", "models", "data", "aggregation", "messages"},
    {"training", "ledger"},
    {"methods", "plan", "algorithms"},
    {"clients", "participation", "client", "server"},
    {"secagg", "transport"},
    {"experiment"},
    {"audit", "report"},
    {"cli", "__main__"},
]
MODULES = sorted(SOURCE.rglob("*.py"))


def unit(path: Path) -> str:
    """The part of the package a file belongs to: a module or a folder at the top."""
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def layer(name: str) -> int:
    for number, names in enumerate(LAYERS):
        if name in names:
            return number
    raise AssertionError(f"{name} has no place in ARCHITECTURE.md; give it one, there and here")


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_point_one_way(path: Path) -> None:
    if path == SOURCE / "__init__.py":
        return
    here = layer(unit(path))
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module:
            base = node.module.split(".")
            names = [".".join([*base, alias.name]) for alias in node.names] if base == ["polyeps"] else [node.module]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        for name in names:
            parts = name.split(".")
            if parts[0] == "polyeps" and len(parts) > 1 and not parts[1].startswith("__version"):
                assert layer(parts[1]) <= here, f"{path.name} imports {name}"


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_files_are_short_and_say_what_they_are_for(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= 360
    assert ast.get_docstring(ast.parse(text))
    assert len(path.relative_to(SOURCE).parts) <= 2  # folders one deep


def test_the_page_names_every_part() -> None:
    page = (SOURCE.parent.parent / "ARCHITECTURE.md").read_text()
    for name in {unit(path) for path in MODULES} - {"__init__", "__main__"}:
        assert f"`{name}" in page, f"ARCHITECTURE.md does not mention {name}"
