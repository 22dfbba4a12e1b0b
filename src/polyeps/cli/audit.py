"""`polyeps audit`: attacks on every certificate and on the papers' claims."""

from __future__ import annotations

from typing import Annotated

import typer

from polyeps.cli.output import Json, print_json, print_table, progress


def audit(
    quick: Annotated[
        bool, typer.Option("--quick", help="Fewer trials: two minutes instead of a quarter of an hour.")
    ] = False,
    only: Annotated[
        str | None, typer.Option(help="Only attacks whose name contains this; * and ? match anything.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of simulations; deployed noise is never repeated.")] = 0,
    as_json: Json = False,
) -> None:
    """Try to refute every certificate, and every figure that a paper claims.

    Each row is one attack. "Audited" is a lower bound on the true ε; all bounds together hold with 99 % confidence. A
    sound form is refuted if its certificate is below the bound, a published form if its claim is. A row that holds
    proves nothing. Exit code 1: a sound form was refuted.
    """
    from polyeps.audit.attacks import all_attacks
    from polyeps.audit.results import CONFIDENCE, run_attacks, select_attacks

    chosen = select_attacks(all_attacks(), only)
    with progress("auditing") as report:
        results = run_attacks(chosen, seed, quick, report)
    rows = [result.as_dict() for result in results]
    if as_json:
        print_json({"confidence": CONFIDENCE, "seed": seed, "quick": quick, "rows": rows})
    else:
        columns = {"name": "name", "form": "form", "attack": "attack", "delta": "δ", "claimed": "claimed ε"}
        columns |= {"certified": "certified ε", "audited": "audited ε", "verdict": "verdict"}
        print_table(list(columns.values()), [[row[key] for key in columns] for row in rows])
    if any(result.refuted and result.form == "sound" for result in results):
        raise typer.Exit(1)
