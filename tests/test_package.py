"""The built wheel works outside the source tree; every example runs."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from support.commands import run

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"


def test_the_wheel_installs_and_runs_elsewhere(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    target = tmp_path / "installed"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(target)]
    subprocess.run([*install, str(wheel)], check=True, capture_output=True)
    script = (
        "import polyeps, sys; print(polyeps.__file__); from polyeps.cli import execute; sys.exit(execute(sys.argv[1:]))"
    )
    arguments = ["certify", "dp-sgd", "--records", "1200", "--batch", "8", "--steps", "100", "--sigma", "2", "--json"]
    ran = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(target)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert ran.stdout.startswith(str(target))
    assert '"certified"' in ran.stdout
    assert (target / "polyeps" / "py.typed").exists()


def shown_python() -> list[str]:
    """Return the README's blocks of Python, without the first example, which runs as a file."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    return [block for block in blocks if block not in (EXAMPLES / "first_federation.py").read_text()]


@pytest.mark.parametrize("block", shown_python())
def test_shown_python_runs(block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(block, "README.md", "exec"), {"__name__": "__main__"})


def examples(ending: str) -> list[str]:
    """Return all examples, also those in folders, but not the modules that other examples import."""
    texts = {path: path.read_text() for path in EXAMPLES.rglob("*") if path.suffix in (".py", ".toml")}
    modules = set(re.findall(r'^(?:from|import) (\w+)|"(\w+):\w+"', "\n".join(texts.values()), re.MULTILINE))
    names = {name for found in modules for name in found}
    return sorted(str(p.relative_to(EXAMPLES)) for p in texts if p.suffix == f".{ending}" and p.stem not in names)


@pytest.mark.parametrize("name", examples("py"))
def test_examples_run_without_a_warning(name: str, tmp_path: Path) -> None:
    script = [sys.executable, "-W", "error", str(EXAMPLES / name)]
    ran = subprocess.run(script, cwd=tmp_path, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout
    assert list(tmp_path.iterdir()) == []


SHOWN = "".join(page.read_text() for page in [ROOT / "README.md", *ROOT.glob("docs/**/*.md")])  # see test_page_commands


@pytest.mark.parametrize("name", [name for name in examples("toml") if f"polyeps run examples/{name}" not in SHOWN])
def test_example_experiments_run(name: str, tmp_path: Path) -> None:
    options = ["--trust-code"] if "/" in name else []
    if "mnist" in name:  # whose files may be missing, and take a minute to encode
        options = ["--set", "data.name=digits", "--set", "rounds=2"]
    ran = run("run", str(EXAMPLES / name), "--output", str(tmp_path / "run"), *options)
    assert "Every client stayed within" in ran.stdout


def test_the_first_example_is_short_and_is_the_readmes() -> None:
    source = (EXAMPLES / "first_federation.py").read_text()
    code = source.split('"""')[2].strip()
    assert len([line for line in code.splitlines() if line.strip()]) <= 12
    assert f"```python\n{code}\n```" in (ROOT / "README.md").read_text()


def test_the_methods_of_the_cmp_fed_example_can_be_compared() -> None:
    methods = tomllib.loads((ROOT / "examples" / "cmp_fed.toml").read_text())["algorithm"]
    private = [method for method in methods if method.get("budgets") != "none"]
    assert len(private) == 4
    assert len({(method["noise"], method["dropouts"], method["colluders"]) for method in private}) == 1
