"""Contract 10: public names, commands, settings and algorithms are what the documents say they are."""

import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from pydantic import BaseModel

import polyeps
from polyeps import cli
from polyeps.algorithms import ALGORITHMS
from polyeps.experiment.config import Experiment, Method
from polyeps.experiment.registry import checked_options

ROOT = Path(__file__).parent.parent.parent
PAGES = {
    str(page.relative_to(ROOT)): page.read_text() for page in (ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md")))
}
COMMANDS: dict[str, Any] = typer.main.get_command(cli.app).commands  # type: ignore[attr-defined]


def test_public_names_are_sorted_and_few() -> None:
    assert polyeps.__all__ == sorted(polyeps.__all__)
    assert set(polyeps.__all__) == set(polyeps._HOMES)
    assert set(polyeps.__all__) <= set(dir(polyeps))


@pytest.mark.parametrize("name", polyeps.__all__)
def test_public_names_can_be_imported_and_say_what_they_are(name: str) -> None:
    found = getattr(polyeps, name)
    assert found.__name__ == name
    assert inspect.getdoc(found)
    assert found.__module__.startswith("polyeps.")


def test_a_name_that_is_not_there_is_missed() -> None:
    with pytest.raises(AttributeError, match="'polyeps' has no attribute 'nothing'"):
        polyeps.nothing  # noqa: B018


def test_importing_polyeps_loads_nothing_heavy() -> None:
    script = "import sys, polyeps; assert not {'torch', 'numpy', 'pydantic'} & set(sys.modules); polyeps.Experiment"
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_is_in_the_documents(command: str) -> None:
    assert any(f"polyeps {command}" in text for text in PAGES.values())


def shown_commands() -> list[tuple[str, list[str]]]:
    """Every `polyeps …` in blocks and code spans, with its page."""
    found = []
    for page, text in PAGES.items():
        blocks = [block for kind, block in re.findall(r"```(\w*)\n(.*?)```", text, re.DOTALL) if kind != "python"]
        lines = [line.removeprefix("$ ") for block in blocks for line in block.splitlines()]
        spans = re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
        found += [(page, line.split()[1:]) for line in [*lines, *spans] if re.match(r"polyeps [a-z]", line)]
    return found


def test_the_documents_show_only_commands_and_options_that_exist() -> None:
    shown = shown_commands()
    assert len(shown) > 15
    for page, words in shown:
        assert words[0] in COMMANDS, (page, words)
        command = COMMANDS[words[0]]
        if hasattr(command, "commands") and len(words) > 1:
            chosen = "file" if words[1].endswith(".toml") else words[1]
            assert chosen in command.commands, (page, words)
            command = command.commands[chosen]
        known = {option for parameter in command.params for option in parameter.opts}
        for word in words[1:]:
            if re.match(r"--?[a-z]", word):
                assert word in known, (page, words)


def keys(kind: type[BaseModel], before: str = "") -> list[str]:
    found = []
    for name, field in kind.model_fields.items():
        inner = field.annotation
        if name == "algorithm" and kind is Experiment:
            found += keys(Method, "algorithm.")
        elif isinstance(inner, type) and issubclass(inner, BaseModel):
            found += keys(inner, f"{name}.")
        else:
            found.append(before + name)
    return found


def test_every_setting_is_described_and_every_described_one_exists() -> None:
    page = PAGES["docs/reference/experiment.md"].split("## Run folder")[0]
    described = re.findall(r"^\| `([a-z_]+(?:\.[a-z_]+)?)` \|", page, re.MULTILINE)
    assert sorted(described) == sorted(keys(Experiment))
    assert len(described) > 30


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_and_its_options_are_described(name: str) -> None:
    (row,) = re.findall(rf"^\| `{name}` \|.*$", PAGES["docs/reference/algorithms.md"], re.MULTILINE)
    entry = ALGORITHMS[name]
    options = set(checked_options(Method(name=name), entry)) - set(entry.options)
    assert set(entry.idle) <= options
    _, _, _, budgets, described, _ = row.split("|")
    assert re.findall(r"`([a-z]+)`", budgets) == [whose for whose in entry.budgets if whose != "exceeded"]
    if "as `pdp-fl`" not in described:
        assert set(re.findall(r"`([a-z_]+)`", described)) == options
