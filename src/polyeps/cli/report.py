"""`polyeps report`: one offline page about one or more runs."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from polyeps.cli.client_output import client_json
from polyeps.cli.output import Json, print_json, progress, remark


def report(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs or of sweeps.", metavar="RUN...")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The page to write.")] = Path("report.html"),
    as_json: Json = False,
) -> None:
    """Write a page with the tables, pictures and guarantees of one or more runs; with --json, print the figures too."""
    from polyeps.experiment.sweep import run_folders
    from polyeps.report.page import open_journals, write_page
    from polyeps.report.tables import read_methods, summarise

    runs = run_folders(runs)
    with progress("writing the page"):
        write_page(runs, output)
    remark(f"wrote {output}")
    if as_json:
        with ExitStack() as stack:
            methods = read_methods(open_journals(runs, stack))
        print_json(
            {
                "methods": [asdict(summarise(method)) for method in methods],
                "clients": [
                    {"label": method.label, "run": method.run, "seed": job.seed, **asdict(row)}
                    for method in methods
                    for job in method.jobs
                    for row in job.clients
                ],
                **client_json(methods),
            }
        )
