"""Sections of the page about single clients, and confusion matrices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from polyeps.experiment.evaluation import MOST_MEASURED
from polyeps.report.client_figures import ClientFigures, Spread, client_figures, measured_jobs
from polyeps.report.client_plots import gains
from polyeps.report.formatting import bound, counted, plural, three_digits
from polyeps.report.joining import Joining, JoiningTable, Verdict, best_table, joining_tables
from polyeps.report.page_tables import PageRow, PageTable, condensed
from polyeps.report.sentences import joining_caption
from polyeps.report.tables import MethodRuns

MOST_SHOWN = 300  # clients of a table; clients.csv has them all
MOST_CLASSES = 30  # of a confusion matrix


def client_tables(methods: Sequence[MethodRuns], shown: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a table of clients' figures on their own test records for each method that has some."""
    verdicts = {table.label: table for table in joining_tables(methods)}
    found = []
    for method, entry in zip(methods, shown, strict=True):
        rows = client_figures(method)
        if not rows:
            continue
        jobs = measured_jobs(method)
        joined = verdicts[method.label].rows if method.label in verdicts else ()
        whys = Counter((name, why) for row in rows for name, why in row.undefined.items())
        found.append(
            {
                "method": entry,
                "table": _figures_table(rows[:MOST_SHOWN], method, joined),
                "shown": min(len(rows), MOST_SHOWN),
                "all": len(rows),
                "personal": any(job["personal"] for job in jobs),
                "undefined": "; ".join(
                    f"{name} of {plural(times, 'client')}, {why}" for (name, why), times in whys.most_common(5)
                ),
                "left_out": max((job["left_out"] for job in jobs if "left_out" in job), default=0),
                "computed": MOST_MEASURED,
            }
        )
    return found


def _figures_table(rows: Sequence[ClientFigures], method: MethodRuns, joined: Sequence[Joining]) -> PageTable:
    """Return each client's figures on its own test records."""
    verdicts = {row.client: row.against_home.text for row in joined if row.against_home}
    names = list(rows[0].metrics)
    units = f"{method.facts.get('person') or 'record'}s"
    columns = [
        "client", units, "own ε", "spent ε", "test records", *names, "majority class (accuracy)",
        "joining, against alone at home",
    ]  # fmt: skip
    cells = [
        (
            row.client,
            counted(row.records),
            three_digits(row.own_epsilon),
            bound(row.spent),
            counted(row.test_records or 0),
            *(_spread(row.metrics.get(name), name) for name in names),
            _spread(row.majority, "accuracy"),
            verdicts.get(row.client, "–"),
        )
        for row in rows
    ]
    return condensed(columns, map(PageRow, cells))


def _spread(value: Spread | None, metric: str) -> str:
    return "–" if value is None else value.text(metric)


def _joining_table(table: JoiningTable, rows: Sequence[Joining]) -> PageTable:
    """Return what each client reaches jointly and alone, and the verdicts."""
    columns = [
        "client", *(["joint model, own records"] if table.own_records else []), "joint model, all records",
        "alone, its budget", "alone at home, no noise", "majority class", "joint against alone, its budget",
        "joint against alone at home",
    ]  # fmt: skip
    return condensed(columns, [PageRow(table.cells(row)) for row in rows])


def joining_sections(methods: Sequence[MethodRuns]) -> list[dict[str, Any]]:
    """Return the tables about joining, that of the best method first and open."""
    tables = joining_tables(methods)
    best = best_table(tables)
    ordered = sorted(tables, key=lambda table: table is not best)
    return [
        {
            "table": table,
            "rows": _joining_table(table, table.rows[:MOST_SHOWN]),
            "chart": gains(table),
            "open": table is best,
            "summary": _summary(table),
            "caption": joining_caption(table),
        }
        for table in ordered
    ]


def _summary(table: JoiningTable) -> str:
    """Count the clients that gain, lose or cannot be judged: against training with their budgets, and at home."""
    compared = {
        "alone with their budgets": [row.against_alone for row in table.rows if row.against_alone],
        "alone at home": [row.against_home for row in table.rows if row.against_home],
    }
    parts = [f"against training {alone}, {_counts(verdicts)}" for alone, verdicts in compared.items() if verdicts]
    return f"of {plural(len(table.rows), 'client')}, {'; '.join(parts)}"


def _counts(verdicts: Sequence[Verdict]) -> str:
    times: Counter[str] = Counter(verdict.outcome for verdict in verdicts)
    said = {"gains": "gain", "loses": "lose", "same": "cannot be told apart", "unknown": "not judged"}
    return ", ".join(
        f"{counted(times[outcome])} {outcome if times[outcome] == 1 and outcome in ('gains', 'loses') else words}"
        for outcome, words in said.items()
        if times[outcome]
    )


def matrices(methods: Sequence[MethodRuns], shown: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return each method's confusion matrix, summed over seeds, where it was asked for."""
    found = []
    for method, entry in zip(methods, shown, strict=True):
        jobs = [job.facts for job in method.counted if "confusion" in job.facts]
        if jobs and len(jobs[0]["classes"]) <= MOST_CLASSES:
            total = np.sum([job["confusion"] for job in jobs], axis=0)
            weights = 100 * total / np.maximum(total.sum(1, keepdims=True), 1)
            rows = [
                (name, [(counted(count), round(weight / 10)) for count, weight in zip(counts, of_row, strict=True)])
                for name, counts, of_row in zip(jobs[0]["classes"], total.tolist(), weights.tolist(), strict=True)
            ]
            found.append({"method": entry, "classes": jobs[0]["classes"], "rows": rows})
    return found
