"""The figures of the page as CSV, in links that hold them: nothing is fetched."""

from __future__ import annotations

import base64
import csv
import io
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from polyeps.report.tables import ClientSummary, MethodRuns, MethodSummary, summarise

MOST_LINES = 20_000  # of one file; `polyeps report --json` has all
_FORMULA = tuple("=+-@\t\r\n＝＋－＠")  # a spreadsheet would run a name that begins so


@dataclass(frozen=True)
class CsvLink:
    """One file."""

    name: str
    address: str  # data:
    lines: int
    all: int


def downloads(methods: Sequence[MethodRuns]) -> list[CsvLink]:
    """Return the figures of methods, clients and rounds."""
    if not methods:
        return []
    summaries = [summarise(method) for method in methods]
    named = [one.name for one in fields(MethodSummary) if one.name != "metrics"]
    metrics = list(dict.fromkeys(name for row in summaries for name in row.metrics))
    rows = [
        [*(getattr(row, name) for name in named), *(row.metrics.get(name) for name in metrics)] for row in summaries
    ]
    jobs = [(method, job) for method in methods for job in method.jobs]
    clients = [
        [method.label, method.run, job.seed, *asdict(row).values()] for method, job in jobs for row in job.clients
    ]
    columns = ["method", "run", "seed", *(one.name for one in fields(ClientSummary))]
    return [
        as_csv("methods.csv", [*named, *metrics], rows),
        as_csv("clients.csv", columns, clients),
        as_csv(
            "rounds.csv", ["method", "run", "seed", "round", "measure", "value", "active", "seconds"], _rounds(methods)
        ),
    ]


def _rounds(methods: Sequence[MethodRuns]) -> list[list[Any]]:
    found: list[list[Any]] = []
    for method in methods:
        for job in method.jobs:
            for number, active, seconds in job.rounds:
                known = {job.measure: job.accuracy, **job.metrics}
                measured = {name: values[number] for name, values in known.items() if number in values}
                for name, value in measured.items() or [("", None)]:
                    found.append([method.label, method.run, job.seed, number, name, value, active, seconds])
    return found


def as_csv(name: str, columns: Sequence[str], rows: Sequence[Iterable[Any]]) -> CsvLink:
    """Return a file; names that a spreadsheet would take for formulas are quoted."""
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow([_plain(column) for column in columns])
    writer.writerows([_plain(value) for value in row] for row in rows[:MOST_LINES])
    content = base64.b64encode(text.getvalue().encode("utf-8", "replace")).decode()
    address = f"data:text/csv;charset=utf-8;base64,{content}"
    return CsvLink(name, address, min(len(rows), MOST_LINES), len(rows))


def _plain(value: Any) -> Any:
    """Quote text that begins like a formula.

    >>> _plain("=1+1"), _plain("ward"), _plain(-1.0)
    ("'=1+1", 'ward', -1.0)
    """
    return f"'{value}" if isinstance(value, str) and value.startswith(_FORMULA) else value
