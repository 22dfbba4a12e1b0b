"""`polyeps new`: a folder to begin with."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from polyeps.cli.output import Json, print_json


def new(
    name: Annotated[Path, typer.Argument(help="The folder to make; its name is that of the experiment.")],
    as_json: Json = False,
) -> None:
    """Make a folder with an experiment, its schema and budgets, tiny data of six hospitals, and commands to try."""
    from polyeps.experiment.scaffold import COMMANDS, scaffold

    files = scaffold(name)
    commands = [command.format(name=shlex.quote(name.name)) for command in COMMANDS]
    if as_json:
        print_json({"folder": str(name), "files": [str(file) for file in files], "commands": commands})
        return
    print(f"{name} holds {', '.join(file.name for file in files)}. Try:")
    print(f"  cd {shlex.quote(str(name))}")
    for command in commands:
        print(f"  {command}")
