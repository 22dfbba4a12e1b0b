"""Renders a template as one HTML file that needs nothing else, and writes it whole or not at all.

A page carries a content security policy: it runs the one script and the one style sheet that it was made with, named by
their hashes, and fetches nothing. Whatever names clients, methods and runs have, they are escaped.
"""

from __future__ import annotations

import base64
import hashlib
import os
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup

from polyeps.errors import InputError
from polyeps.report import formatting


def template(name: str) -> Template:
    """Return a template of this folder; everything put into it is escaped."""
    environment = Environment(
        loader=PackageLoader("polyeps.report", "."), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    environment.globals |= {"formatting": formatting}
    return environment.get_template(name)


def render(name: str, *, live: str = "", **values: Any) -> str:
    """Return a page with its script and style; with `live`, the version of a page that asks for newer ones."""
    return template(name).render(
        live=live, policy=policy(live=bool(live)), style=Markup(_text("page.css")), script=Markup(_text("page.js")),
        **values,
    )  # fmt: skip


def policy(*, live: bool = False) -> str:
    """Return the content security policy of a page."""
    rules = [
        "default-src 'none'",
        f"script-src '{_digest('page.js')}'",
        f"style-src '{_digest('page.css')}'",
        "img-src data:",
        *(["connect-src 'self'"] if live else []),
        "base-uri 'none'",
        "form-action 'none'",
    ]
    return "; ".join(rules)


@cache
def _text(name: str) -> str:
    return resources.files("polyeps.report").joinpath(name).read_text(encoding="utf-8")


def _digest(name: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(_text(name).encode()).digest()).decode()}"


def write_whole(text: str, output: Path, mode: int = 0o666) -> None:
    """Write a page as a whole or not at all; its mode is `mode` without what the umask takes away."""
    if output.is_dir() or not output.parent.is_dir():
        problem = "is a folder" if output.is_dir() else "lies in a folder that does not exist"
        raise InputError(f"the page cannot be written: {output} {problem}; give the name of a file (report.html)")
    unfinished = output.with_name(f".{output.name}.{os.getpid()}.new")
    try:
        new = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)  # follows no link
        with os.fdopen(new, "w", encoding="utf-8") as file:
            file.write(text)
        unfinished.replace(output)
    except OSError as problem:
        unfinished.unlink(missing_ok=True)
        raise InputError(f"{output} cannot be written ({problem}); choose another place") from problem
