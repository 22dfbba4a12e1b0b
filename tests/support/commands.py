"""Runs the command line in this process, as `main` would, and keeps what it said."""

import io
import json
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from typing import Any

from polyeps import cli


@dataclass(frozen=True)
class Spoken:
    status: int
    stdout: str
    stderr: str


def run(*arguments: str, status: int = 0) -> Spoken:
    """Run one command that must end with the given status."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        ended = cli.execute(list(arguments))
    spoken = Spoken(ended, out.getvalue(), err.getvalue())
    assert ended == status, spoken
    return spoken


def run_json(*arguments: str) -> Any:
    return json.loads(run(*arguments, "--json").stdout)


def refused(*arguments: str, naming: tuple[str, ...] = (), status: int = 2) -> None:
    """A command that must refuse in one sentence holding all of `naming`, and print no figures."""
    spoken = run(*arguments, status=status)
    sentences = spoken.stderr.strip().splitlines()
    assert len(sentences) == 1, spoken.stderr
    assert sentences[0].startswith("polyeps: ")
    assert spoken.stdout == ""
    for part in naming:
        assert part in sentences[0], spoken.stderr
