"""`polyeps audit`: worst-case pairs against what papers claim, and against what we certify."""

from __future__ import annotations

from typing import Annotated

import typer

from polyeps.cli.output import Json, print_json, print_table, progress


def audit(
    trials: Annotated[
        int | None, typer.Option(min=1000, help="Runs of each mechanism; by default as many as a refutation takes.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the simulated runs.")] = 0,
    as_json: Json = False,
) -> None:
    """Try to refute the accounts of FedHDP and CMP-Fed: as published, and as we certify them.

    A mechanism is run many times on the two neighbouring data sets that differ most. "Shown" is a lower bound on its
    true ε with 99 % confidence; a claim below it is refuted. Not being refuted proves nothing.
    """
    import numpy as np

    from polyeps.audit.canary_cases import DELTA, cases, judge

    generator = np.random.default_rng(seed)
    listed = cases()
    verdicts = []
    with progress("auditing") as told:
        for done, case in enumerate(listed, start=1):
            verdicts.append(judge(case, generator, trials))
            told(done, len(listed))
    rows = [
        {
            "mechanism": f"{verdict.case.paper}: {verdict.case.name}",
            "claimed": verdict.claimed,
            "certified": verdict.certified,
            "shown": verdict.finding.epsilon,
            "trials": verdict.finding.trials,
            "refuted": verdict.refuted,
        }
        for verdict in verdicts
    ]
    if as_json:
        print_json({"delta": DELTA, "confidence": verdicts[0].finding.confidence, "seed": seed, "cases": rows})
    else:
        shown = [[*list(row.values())[:-1], "refuted" if row["refuted"] else "stands"] for row in rows]
        print_table(["what is run", "claimed ε", "certified ε", "shown ε", "trials", "claim"], shown)
    if any(verdict.finding.refutes(verdict.certified) for verdict in verdicts):
        raise typer.Exit(1)  # a certificate of ours cannot be true
