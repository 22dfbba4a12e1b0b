"""The tables a run ends with."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyeps.cli.client_output import client_json, print_client_figures, print_joining
from polyeps.cli.output import print_json, print_table, remark

if TYPE_CHECKING:
    from polyeps.experiment.journal import Journal
    from polyeps.report.tables import MethodRuns, MethodSummary

_MOST_CLIENTS = 60  # lines of the printed table; the page and --json have them all
_FEW_ALIKE = 3  # clients whose lines are printed although they are the same


def print_outcome(journal: Journal, folder: Path, as_json: bool) -> None:
    """Print what each client spent and then, last, the results."""
    from polyeps.experiment.journal_entries import said_of
    from polyeps.report.tables import read_methods, summarise

    lines = read_methods([journal])
    if as_json:
        clients = {job.name: [asdict(row) for row in job.clients] for line in lines for job in line.jobs}
        methods = [asdict(summarise(line)) for line in lines]
        stopped = {job["job"]: job["facts"].get("reason", "") for job in journal.jobs()}
        figures = {"methods": methods, "clients": clients, "stopped": stopped, "remarks": said_of(journal)}
        print_json({"folder": str(folder), **figures, **client_json(lines)})
        return
    print_clients(journal)
    print_client_figures(lines)
    print_joining(lines)
    print_methods(lines)
    for job in journal.jobs():
        if job["facts"].get("stopped") == "early":
            print(f"{job['job']} ended early: {job['facts']['reason']}.")
    for said in said_of(journal):
        remark(said)
    print(f"Everything is in {folder}; see it with: polyeps report {folder}")


def method_cells(row: MethodSummary, metrics: Sequence[str]) -> list[Any]:
    """Return the cells that tables of methods have in common."""
    from polyeps.report.formatting import reached, share, short

    return [
        row.label,
        reached(row.measure, row.final_accuracy, row.final_accuracy_deviation),
        *(short(row.metrics.get(name)) for name in metrics),
        row.rounds_run,
        share(row.largest_ratio) if row.largest_ratio is not None else "no guarantee",
    ]


def print_methods(lines: Sequence[MethodRuns]) -> None:
    """Print one line per method."""
    from polyeps.report.formatting import byte_size, counted, percent, short
    from polyeps.report.sentences import averaged_rounds, undefined_metrics
    from polyeps.report.tables import summarise

    rows = [summarise(line) for line in lines]
    metrics = list(dict.fromkeys(name for row in rows for name in row.metrics))
    measure = rows[0].measure if rows else "accuracy"
    columns = ["method", measure, *metrics, "rounds", "most spent\nof a budget", "left\nearly"]
    print_table(
        [*columns, "sent per client\nand round", "s/round"],
        [
            [
                *method_cells(row, metrics),
                counted(row.left_early),
                byte_size(row.bytes_up_per_client_round),
                short(row.seconds_per_round, 2),
            ]
            for row in rows
        ],
        title=f"Test {measure}: the mean over {averaged_rounds(lines)}",
    )
    guessed = next((row.majority_accuracy for row in rows if row.majority_accuracy is not None), None)
    if guessed is not None:
        print(f"Always guessing the class with most training records: {percent(guessed)}.")
    for note in undefined_metrics(lines):
        print(note)


def print_clients(journal: Journal) -> None:
    """Print, for the first seed, one line per client or group of equal clients: own ε, and what each method spent."""
    from polyeps.accounting.certificate import rounded_up

    jobs = journal.jobs()
    first = jobs[0]["seed"]
    paying = [job for job in jobs if job["seed"] == first and job["facts"].get("budgets", "none") != "none"]
    if not paying:
        return
    table: dict[str, list[Any]] = {}
    over = 0
    person = paying[0]["facts"].get("person")
    columns = ["client", f"{person}s" if person else "records", "own ε"]
    for job in paying:
        key = (job["job"],)
        alike = journal.query("SELECT min(epsilon) AS low, max(epsilon) AS high FROM clients WHERE job = ?", key)
        common = job["facts"]["budgets"] != "own" and alike[0]["low"] == alike[0]["high"]
        columns.append(f"{job['label']}\nof {alike[0]['low']:.4g}" if common else job["label"])
        for row in sorted(journal.query("SELECT * FROM clients WHERE job = ?", key), key=_strictest_first):
            line = table.setdefault(row["client"], [row["client"], row["records"], row["own_epsilon"] or "none"])
            effective, spent = row["epsilon"], row["spent"] or 0.0
            if effective is None:
                line.append("no guarantee")
                continue
            of = "" if common or job["facts"]["budgets"] == "own" else f" of {effective:.4g}"
            over += spent > effective
            line.append(f"{rounded_up(spent)}{of}")
    shown = _together(list(table.values()))
    print_table(columns, shown[:_MOST_CLIENTS], title=f"The ε each client spent under each method (seed {first})")
    if len(shown) > _MOST_CLIENTS:
        print(f"{len(shown) - _MOST_CLIENTS} more lines are in the report.")
    if over:
        print(f"{over} times a client spent more than its effective budget: do not trust this run.")
    else:
        kept = "Every client stayed within its effective budget"
        print(f'{kept} (budgets = "minimum" and "maximum" replace clients\' own).')


def _strictest_first(row: Mapping[str, Any]) -> tuple[float, list[tuple[int, str]]]:
    """Return a client's place in the table: by its own ε, then by name, 9 before 10."""
    own = math.inf if row["own_epsilon"] is None else row["own_epsilon"]
    return own, [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", row["client"])]


def _together(rows: Sequence[list[Any]]) -> list[list[Any]]:
    """Merge clients with equal figures into one line, with their number and the first of their names."""
    alike: dict[tuple[Any, ...], list[list[Any]]] = {}
    for row in rows:
        alike.setdefault(tuple(row[1:]), []).append(row)
    shown = []
    for figures, some in alike.items():
        if len(some) <= _FEW_ALIKE:
            shown += some
        else:
            first = ", ".join(str(row[0]) for row in some[:_FEW_ALIKE])
            shown.append([f"{len(some)} clients: {first}, …", *figures])
    return shown
