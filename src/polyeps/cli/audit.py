"""`polyeps audit`: attacks on everything that has a certificate, and on what papers claim."""

from __future__ import annotations

from typing import Annotated

import typer

from polyeps.cli.output import Json, print_json, print_table, progress


def audit(
    quick: Annotated[
        bool, typer.Option("--quick", help="Fewer trials: two minutes instead of a quarter hour.")
    ] = False,
    only: Annotated[
        str | None, typer.Option(help="Only rows whose name contains this; * and ? match anything.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of what is simulated; deployed noise is never repeated.")] = 0,
    as_json: Json = False,
) -> None:
    """Try to refute every certificate, and every figure that a paper claims.

    Each row is one attack. "Audited" is a lower bound on the true ε; all bounds together hold with 99 % confidence. A
    sound form is refuted if its certificate is below the bound, a published one if its claim is. That a row holds
    proves nothing. Exit code 1: a sound form was refuted.
    """
    from polyeps.audit.catalogue import cases
    from polyeps.audit.rows import CONFIDENCE, audit_all, selected

    chosen = selected(cases(), only)
    with progress("auditing") as told:
        rows = audit_all(chosen, seed, quick, told)
    if as_json:
        print_json({"confidence": CONFIDENCE, "seed": seed, "quick": quick, "rows": [row.as_dict() for row in rows]})
    else:
        columns = ["what", "form", "attack", "δ", "claimed ε", "certified ε", "audited ε", "verdict"]
        shown = [
            [
                row.what,
                row.form,
                row.attack,
                row.shown.delta,
                row.shown.claimed,
                row.shown.certified,
                row.shown.audited,
                row.verdict,
            ]
            for row in rows
        ]
        print_table(columns, shown)
    if any(row.refuted and row.form == "sound" for row in rows):
        raise typer.Exit(1)
