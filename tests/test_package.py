"""The built wheel works outside the source tree; every example, and every command that the documents show, runs."""

import os
import re
import shlex
import shutil
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


def shown_commands() -> list[str]:
    found = []
    for page in [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]:
        if page.name == "six-hospitals.md":  # whose commands build on each other: `test_tutorial`
            continue
        for block in re.findall(r"```console\n(.*?)```", page.read_text(), re.DOTALL):
            found += [line.removeprefix("$ ") for line in block.splitlines() if line.startswith("$ polyeps ")]
    return list(dict.fromkeys(found))


def test_the_documents_show_commands() -> None:
    assert len(shown_commands()) >= 5


@pytest.mark.parametrize("command", shown_commands())
def test_shown_commands_run(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("POLYEPS_CACHE", str(tmp_path / "cache"))
    shutil.copytree(EXAMPLES, tmp_path / "examples")
    if "adult" in command:  # three seeds take a minute
        if not Path(os.environ.get("POLYEPS_DATA", ""), "adult").is_dir():
            pytest.skip("POLYEPS_DATA names no folder with Adult's files")
        command += " --set seeds=1 --set rounds=2"
    if command.startswith("polyeps deploy"):  # it starts other programs; a process of its own, as a user has it
        pytest.importorskip("flwr")
        ran = subprocess.run([sys.executable, "-m", *shlex.split(command)], capture_output=True, text=True, timeout=300)
        assert ran.returncode == 0, ran.stderr
        return
    if "runs/digits" in command:
        run("run", "examples/digits.toml", "--set", "rounds=2")
    if "ledger" in command and "set-budget" not in command:
        run("ledger", "set-budget", "--file", "ward.ledger", "--client", "ward", "--epsilon", "2")
    run(*shlex.split(command)[1:])


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


@pytest.mark.parametrize(
    "name", [name for name in examples("toml") if f"polyeps run examples/{name}" not in shown_commands()]
)
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
