"""Sweeps of `polyeps run`: every combination of the values given with --set, and a table of what differed."""

from __future__ import annotations

import shlex
import sys
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from polyeps.cli.output import figure, print_json, print_table, progress, remark, showing
from polyeps.cli.run_output import method_cells

if TYPE_CHECKING:
    from polyeps.experiment.sweep import Sweep
    from polyeps.report.tables import MethodSummary


def begin_sweep(sweep: Sweep, folder: Path, device: str, as_json: bool) -> None:
    """Check all runs of a sweep, make its folder, and do them."""
    from polyeps.experiment.sweep import check_runs, create_sweep

    with progress(f"checking {len(sweep.runs)} runs") as report:
        check_runs(sweep, report)
    create_sweep(folder, sweep)
    continue_sweep(sweep, folder, device, as_json)


def continue_sweep(sweep: Sweep, folder: Path, device: str, as_json: bool) -> None:
    """Do the runs of a sweep that are not done, and print what differed."""
    from polyeps.experiment.sweep import do_run

    jobs = sum(len(one.experiment.seeds) * len(one.experiment.algorithm) for one in sweep.runs)
    command = shlex.join(["polyeps", *sys.argv[1:]])
    trust = " --trust-code" if sweep.code_folder else ""
    try:
        with showing(jobs) as watch:
            for place, one in enumerate(sweep.runs, start=1):
                remark(f"run {place} of {len(sweep.runs)}: {one.folder}")
                do_run(folder, one, sweep.code_folder, command, device=device, watch=watch)
    except KeyboardInterrupt:
        remark(f"stopped; continue with: polyeps run --resume {shlex.quote(str(folder))}{trust}")
        raise typer.Exit(130) from None
    print_sweep(sweep, folder, as_json)


def print_sweep(sweep: Sweep, folder: Path, as_json: bool) -> None:
    """Print the results of a sweep: a line for each run and method, with the values in which runs differ."""
    from polyeps.experiment.journal import Journal
    from polyeps.report.tables import read_methods, summarise

    found: list[list[MethodSummary]] = []
    for one in sweep.runs:
        with closing(Journal(folder / one.folder / "journal.db")) as journal:
            found.append([summarise(line) for line in read_methods([journal])])
    notes = _notes(sweep, any(row.largest_ratio is not None for rows in found for row in rows))
    if as_json:
        runs = [
            {"folder": str(folder / one.folder), "values": dict(one.values), "methods": [asdict(row) for row in rows]}
            for one, rows in zip(sweep.runs, found, strict=True)
        ]
        print_json({"folder": str(folder), "differs": list(sweep.runs[0].values), "runs": runs, "notes": notes})
        return
    keys = list(sweep.runs[0].values)
    metrics = list(dict.fromkeys(name for rows in found for row in rows for name in row.metrics))
    measure = next((row.measure for rows in found for row in rows), "accuracy")
    print_table(
        [*keys, "method", measure, *metrics, "rounds", "most spent\nof a budget"],
        [
            [*(_cell(one.values[key]) for key in keys), *method_cells(row, metrics)]
            for one, rows in zip(sweep.runs, found, strict=True)
            for row in rows
        ],
        title=f"{sweep.name}: {len(sweep.runs)} runs that differ in {', '.join(keys)}",
    )
    for note in notes:
        print(note)
    print(f"Everything is in {folder}; compare the runs with: polyeps report {shlex.quote(str(folder))}")


def _cell(value: Any) -> Any:
    return value if isinstance(value, int | float) and not isinstance(value, bool) else figure(value)


def _notes(sweep: Sweep, private: bool) -> list[str]:
    """Return what to keep in mind before a run is chosen."""
    notes = []
    if not all(one.experiment.data.validation for one in sweep.runs):
        notes.append(
            "Accuracy is that on the test records: choosing a run by it is selection on them, so that they are no fair "
            "test of the chosen run any more. Choose with data.validation=0.2, then test the chosen run alone."
        )
    if private:
        notes.append(
            "Budgets pay for the training of one run, not for this comparison: a sweep on real private records would "
            f"spend {len(sweep.runs)} times each client's budget."
        )
    return notes
