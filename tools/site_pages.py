"""What the documentation site adds to the pages: its menu, the reference of commands, the reference of Python names."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import typer

HOME = "docs/README"
RESULTS = "reproductions/results/"
COMMANDS, PYTHON = "docs/reference/commands", "docs/reference/python"

# The menu: pages or patterns under each heading. A page stands where it is named first.
MENU = {
    "Start": ["README", "docs/tutorial/ten-minutes", "docs/tutorial/*", "docs/guides/new", "docs/faq"],
    "Concepts": ["docs/concepts/privacy", "docs/concepts/*"],
    "Budgets and guarantees": [
        "docs/guides/choose-epsilon",
        "docs/guides/budgets",
        "docs/guides/unit",
        "docs/guides/certificates",
        "docs/guides/calibrate",
        "docs/guides/ledger",
        "docs/guides/audit",
    ],
    "Data and experiments": [
        "docs/guides/own-data",
        "docs/guides/data",
        "docs/guides/experiments",
        "docs/guides/better-recipe",
        "docs/guides/metrics",
        "docs/guides/report",
        "docs/guides/sweeps",
        "docs/guides/notebook",
        "docs/guides/trackers",
        "docs/guides/use-the-model",
        "docs/guides/reproduce",
    ],
    "Your own parts": ["docs/guides/own-*", "docs/guides/inputs-and-targets", "docs/guides/encoders"],
    "Deployment": ["docs/guides/deploy*", "docs/guides/runbook*", "docs/guides/secure-sums", "SECURITY"],
    "Further guides": ["docs/guides/*"],
    "Papers": ["docs/papers/pfa", "docs/papers/fedsel", "docs/papers/pdp-fl", "docs/papers/fedhdp*", "docs/papers/*"],
    "Reference": [
        "docs/reference/experiment",
        "docs/reference/algorithms",
        "docs/reference/command*",
        "docs/reference/*",
    ],
    "Project": ["ARCHITECTURE", "CONTRIBUTING", "CHANGELOG", "docs/decisions/*"],
}


def linked_results(root: Path) -> list[str]:
    """Return the tables of results that pages link to."""
    pages = "".join(page.read_text(encoding="utf-8") for page in root.glob("docs/**/*.md"))
    return sorted(set(re.findall(rf"{RESULTS}[\w.-]+\.md", pages)))


def complete(app: Any, page: str, source: list[str]) -> None:
    """Add to a page, as Sphinx reads it, what is generated; a link to a folder becomes plain text."""
    folder = Path(app.srcdir, page).parent
    source[0] = re.sub(
        r"\[([^\]]+)\]\(([^)\s:#]+)\)", lambda link: link[1] if (folder / link[2]).is_dir() else link[0], source[0]
    )
    if page.startswith(RESULTS):
        source[0] = f"---\norphan: true\n---\n{source[0]}"
    elif page == HOME:
        source[0] += "\n" + "\n".join(_menu(sorted(app.env.found_docs - {HOME})))
    elif page == COMMANDS:
        source[0] += "\n" + "\n".join(command_reference())
    elif page == PYTHON:
        members = "```{eval-rst}\n.. automodule:: \\1\n   :members:\n```"
        source[0] = re.sub(r"<!-- module: (\S+) -->", members, source[0])


def _menu(pages: list[str]) -> Iterator[str]:
    """Yield a hidden table of contents for each heading of the menu."""
    listed: set[str] = set()
    for heading, patterns in MENU.items():
        found = [page for pattern in patterns for page in fnmatch.filter(pages, pattern)]
        new = [page for page in dict.fromkeys(found) if page not in listed]
        listed.update(new)
        yield f"```{{toctree}}\n:hidden:\n:caption: {heading}\n" + "".join(f"\n/{page}" for page in new) + "\n```\n"


def command_reference() -> Iterator[str]:
    """Yield the reference of every command, as Markdown."""
    from polyeps.cli import app

    root = typer.main.get_command(app)
    assert isinstance(root, click.Group)
    for path, command in _commands(root, ("polyeps",)):
        yield f"## `{' '.join(path)}`\n"
        yield f"{_plain(command.help or '')}\n"
        arguments = " ".join(one.make_metavar(click.Context(command)) for one in command.params if _is_argument(one))
        yield f"```text\n{' '.join(path)} {arguments} [OPTIONS]\n```\n".replace("  ", " ")
        yield "| option | meaning | default |\n|---|---|---|"
        for one in command.params:
            yield _row(one)
        yield ""


def _commands(group: click.Group, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    for name, command in sorted(group.commands.items()):
        if isinstance(command, click.Group):
            yield from _commands(command, (*path, name))
        elif not command.hidden:
            yield (*path, name), command


def _is_argument(one: click.Parameter) -> bool:
    return one.param_type_name == "argument"


def _row(one: click.Parameter) -> str:
    """Return the row of an argument or option: its names, its meaning and choices, and its default."""
    names = ", ".join(f"`{name}`" for name in (*one.opts, *one.secondary_opts))
    if _is_argument(one):
        names = f"`{one.human_readable_name}`"
    choices = getattr(one.type, "choices", ())
    meaning = _plain(getattr(one, "help", None) or "")
    if choices:
        meaning += f" One of {', '.join(f'`{choice}`' for choice in choices)}."
    if one.multiple:
        meaning += " May be repeated."
    default = "required" if one.required else "" if one.default is None or one.default is False else f"`{one.default}`"
    return f"| {names} | {meaning} | {default} |"


def _plain(text: str) -> str:
    """Return a help text as Markdown that shows it as it stands."""
    for sign in "\\*_<|":
        text = text.replace(sign, f"\\{sign}")
    return " ".join(text.split())


def shorten(_app: Any, _what: str, _name: str, found: object, *_rest: Any) -> tuple[str, str | None] | None:
    """Return a short signature for a class of settings, whose keys have a page of their own."""
    return ("(**settings)", None) if hasattr(found, "model_fields") else None


def skip(_app: Any, _what: str, name: str, *_rest: Any) -> bool | None:
    """Leave out what scikit-learn and pydantic add to their classes."""
    return True if re.fullmatch(r"set_\w+_request|model_config", name) else None


def add_front_page(app: Any, problem: Exception | None) -> None:
    """Write index.html, which leads to the home page."""
    if problem is None:
        home = f"{HOME}.html"
        Path(app.outdir, "index.html").write_text(
            f'<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="0; url={home}">'
            f'<title>polyeps</title><a href="{home}">polyeps: documentation</a>\n',
            encoding="utf-8",
        )
