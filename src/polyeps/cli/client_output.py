"""Printed tables of each client's figures, and of what joining brings it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from polyeps.cli.output import print_table

if TYPE_CHECKING:
    from polyeps.report.client_figures import ClientFigures
    from polyeps.report.tables import MethodRuns

_MOST_ROWS = 30  # clients of a printed table; the page, clients.csv and --json have them all


def client_json(lines: Sequence[MethodRuns]) -> dict[str, Any]:
    """Return each client's figures and what joining brings it, for --json."""
    from polyeps.report.client_figures import client_figures
    from polyeps.report.joining import joining_tables

    figures = {line.label: [asdict(row) for row in client_figures(line)] for line in lines}
    joined = [asdict(table) for table in joining_tables(lines)]
    shown = {"confusion", "reliability", "classes", "undefined"}
    last = {
        job.name: {key: job.facts[key] for key in shown & job.facts.keys()} for line in lines for job in line.counted
    }
    return {"on_own_records": figures, "joining": joined, "final": last}


def print_client_figures(lines: Sequence[MethodRuns]) -> None:
    """Print, for each client, a metric on its own test records under each method."""
    from polyeps.report.client_figures import client_figures
    from polyeps.report.joining import joining_tables

    tables = {line.label: {row.client: row for row in client_figures(line)} for line in lines}
    tables = {label: rows for label, rows in tables.items() if rows}
    if not tables or joining_tables(lines):
        return  # the table about joining has them
    first = next(iter(tables.values()))
    asked = [name for name in next(iter(first.values())).metrics if name in ("auc", "roc_auc")]
    metric = asked[0] if asked else lines[0].measure
    guessed = any(row.majority for row in first.values())
    rows = [
        [
            client,
            None if row.test_records is None else round(row.test_records, 1),  # a mean over seeds
            *([row.majority.text("accuracy") if row.majority else None] if guessed else []),
            *(_figure(of.get(client), metric) for of in tables.values()),
        ]
        for client, row in first.items()
    ]
    columns = ["client", "test\nrecords", *(["majority class\n(accuracy)"] if guessed else []), *tables]
    print_table(columns, rows[:_MOST_ROWS], title=f"On each client's own test records, {metric} (simulation only)")
    _rest(len(rows))


def _figure(row: ClientFigures | None, metric: str) -> str | None:
    if row is None:
        return None
    found = row.metrics.get(metric)
    return row.undefined.get(metric) if found is None else found.text(metric)


def print_joining(lines: Sequence[MethodRuns]) -> None:
    """Print whether joining is worth it for each client, under the best method of those with clients' own budgets."""
    from polyeps.report.joining import best_table, joining_tables
    from polyeps.report.sentences import joining_caption

    table = best_table(joining_tables(lines))
    if table is None:
        return
    columns = ["client", *(["joint, own\nrecords"] if table.own_records else []), "joint, all\nrecords"]
    columns += ["alone,\nits budget", "alone at home,\nno noise"]
    columns += ["majority\nclass", "against alone,\nits budget", "against alone\nat home"]
    rows = map(table.cells, table.rows[:_MOST_ROWS])
    print_table(columns, rows, title=f"Is joining {table.label} worth it? {table.metric}")
    _rest(len(table.rows))
    print(joining_caption(table))


def _rest(rows: int) -> None:
    if rows > _MOST_ROWS:
        print(f"{rows - _MOST_ROWS} more clients are in the report and in clients.csv.")
