"""Lint, check types and run the tests of what changed: `python tools/check.py [BASE]`.

Compares the working tree with BASE, by default the commit at which this branch left main. `src/polyeps/ROOM/x.py` is
tested by `tests/ROOM/test_x.py` and `test_x_*.py`, else by the tests of its room that import it, else by its room.
"""

import re
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path, PurePath

ROOT = Path(__file__).parent.parent
PACKAGES = {"src/polyeps": "tests", "reproductions/polyeps_reproductions": "reproductions/tests"}


def git(*arguments: str) -> list[str]:
    """Return the lines that a git command prints; none if it fails."""
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True).stdout.splitlines()


def changed(base: str | None) -> list[str]:
    """Return the files that differ from the base, untracked ones included."""
    if base is None:
        (base,) = git("merge-base", "HEAD", "main") or git("merge-base", "HEAD", "origin/main") or ["HEAD"]
    return sorted({*git("diff", "--name-only", base), *git("ls-files", "--others", "--exclude-standard")})


def tests_of(name: str) -> set[str]:
    """Return the test files, folders and modules with doctests that concern one changed file."""
    path = PurePath(name)
    if path.suffix == ".md" or path.parts[0] == "examples":
        return {"tests/test_docs.py", "tests/test_package.py", "tests/contract/test_agreement.py"}
    if path.suffix != ".py":
        return set()
    for package, tests in PACKAGES.items():
        if path.is_relative_to(package):
            module = path.relative_to(PurePath(package).parent)
            return {name, *_tests_of_module(module, ROOT / tests), "tests/test_architecture.py"}
    if path.stem.startswith("test_"):
        return {name}
    for tests in PACKAGES.values():
        if path.is_relative_to(tests) and path.stem != "conftest":
            return _importing(
                ".".join(path.relative_to(tests).with_suffix("").parts), (ROOT / tests).rglob("test_*.py")
            )
    return set()


def _tests_of_module(module: PurePath, tests: Path) -> set[str]:
    room = tests / module.relative_to(module.parts[0]).parent
    stem = module.stem.removeprefix("_")
    named = {*room.glob(f"test_{stem}.py"), *room.glob(f"test_{stem}_*.py")}
    if named:
        return {str(path.relative_to(ROOT)) for path in named}
    whole = list(room.glob("test_*.py")) or list(tests.glob("test_*.py"))
    dotted = ".".join(module.with_suffix("").parts).removesuffix(".__init__")
    return _importing(dotted, whole) or {str(path.relative_to(ROOT)) for path in whole}


def _importing(dotted: str, files: Iterable[Path]) -> set[str]:
    """Return the test files that import a module, as `import a.b`, `from a.b import` or `from a import b`."""
    parent, _, last = dotted.rpartition(".")
    pattern = re.compile(
        rf"^\s*(import|from) {re.escape(dotted)}\b|^\s*from {re.escape(parent)} import .*\b{last}\b", re.M
    )
    return {str(path.relative_to(ROOT)) for path in files if pattern.search(path.read_text())}


def main() -> int:
    files = changed(sys.argv[1] if len(sys.argv) > 1 else None)
    tests = sorted(test for test in set().union(*map(tests_of, files)) if (ROOT / test).exists())
    python = [sys.executable, "-m"]
    began, status = time.monotonic(), 0
    for command in ([*python, "ruff", "format", "--check", "."], [*python, "ruff", "check", "."]):
        status |= subprocess.run(command, cwd=ROOT).returncode
    types = subprocess.Popen([*python, "mypy"], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if tests:
        print("tests:", *tests, flush=True)
        status |= subprocess.run([*python, "pytest", *tests], cwd=ROOT).returncode
    print(types.communicate()[0], end="")
    status |= types.returncode
    print(f"{len(files)} changed files checked in {time.monotonic() - began:.0f} s: {'failed' if status else 'passed'}")
    return int(status != 0)


if __name__ == "__main__":
    sys.exit(main())
