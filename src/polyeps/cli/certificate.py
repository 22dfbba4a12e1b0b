"""`polyeps certificate`: one client's certificate after a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from polyeps.cli.output import Json, print_facts, print_json, progress, remark


def certificate(
    run: Annotated[Path, typer.Argument(help="Folder of a run.", metavar="RUN")],
    client: Annotated[str, typer.Argument(help="The client's name.")],
    method: Annotated[str | None, typer.Option(help="The method, where the run has several.")] = None,
    seed: Annotated[int | None, typer.Option(help="The seed, where the run has several.")] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write it as a page.")] = None,
    as_json: Json = False,
) -> None:
    """State what a client is guaranteed after a run, verified against its ledger, for a data-protection officer."""
    from polyeps.report.certificate_page import certificate_of, write_certificate

    with progress("verifying the ledger"):
        page = certificate_of(run, client, method, seed)
    if output is not None:
        write_certificate(page, output)
        remark(f"wrote {output}")
    if as_json:
        print_json(page.as_dict())
    elif output is None:
        print(f"{page.standing}\n\n{page.strength} {page.guess}\n\n{page.sentence}\n")
        print_facts(page.facts | page.ledger)
        print("\n".join(page.limits))
