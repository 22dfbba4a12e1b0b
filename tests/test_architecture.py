"""Check the structure of the source: import directions, file lengths, one meaning per public name."""

import ast
import re
import tomllib
from collections import defaultdict
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "polyeps"

# A module may import from its own layer and from the layers before it.
LAYERS = [
    {"errors"},
    {"core"},
    {"accounting"},
    {"mechanisms", "engine", "models", "data", "aggregation", "messages", "model_files", "encoders"},
    {"training", "ledger"},
    {"algorithms"},
    {"clients", "participation", "client", "server"},
    {"secagg", "transport"},
    {"experiment"},
    {"audit", "report", "deploy"},
    {"private_federation"},
    {"cli", "__main__"},
]
MODULES = sorted(SOURCE.rglob("*.py"))


def unit(path: Path) -> str:
    """Return the top-level module or folder of a file."""
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def layer(name: str) -> int:
    for number, names in enumerate(LAYERS):
        if name in names:
            return number
    raise AssertionError(f"{name} has no layer; add it to LAYERS in this file and to ARCHITECTURE.md")


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


def public_names(path: Path) -> set[str]:
    """Return the public names that a module defines at its top level: functions, classes, constants, type aliases."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {part.id for target in targets for part in ast.walk(target) if isinstance(part, ast.Name)}
    return {name for name in found if not name.startswith("_")}


def test_a_public_name_has_one_home() -> None:
    homes = defaultdict(list)
    for path in MODULES:
        for name in public_names(path):
            homes[name].append(str(path.relative_to(SOURCE)))
    several = {name: paths for name, paths in homes.items() if len(paths) > 1}
    assert not several, f"rename all but one of {several}"


def test_make_check_finds_tests_of_every_module() -> None:
    root = SOURCE.parent.parent
    specification = spec_from_file_location("check", root / "tools" / "check.py")
    assert specification
    assert specification.loader
    check = module_from_spec(specification)
    specification.loader.exec_module(check)
    for path in [*MODULES, *(root / "reproductions" / "polyeps_reproductions").rglob("*.py")]:
        name = str(path.relative_to(root))
        assert name in check.tests_of(name)
        assert any("/test_" in test for test in check.tests_of(name) - {"tests/test_architecture.py"}), name


def test_every_package_is_typed_and_has_the_same_version() -> None:
    root = SOURCE.parent.parent
    version = re.search(r'__version__ = "(.*)"', (SOURCE / "__init__.py").read_text())
    assert version
    assert tomllib.loads((root / "reproductions" / "pyproject.toml").read_text())["project"]["version"] == version[1]
    assert f"version: {version[1]}\n" in (root / "CITATION.cff").read_text()
    assert re.search(rf"^## ({version[1]}|Unreleased)$", (root / "CHANGELOG.md").read_text(), re.MULTILINE)
    for package in (SOURCE, root / "reproductions" / "polyeps_reproductions"):
        assert (package / "py.typed").exists()
