"""Sections of the page about single clients, confusion matrices and calibration."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from polyeps.experiment.evaluation import MOST_MEASURED
from polyeps.report.client_figures import client_figures, measured_jobs
from polyeps.report.formatting import counted, percent, plural
from polyeps.report.joining import JoiningTable, Verdict, best_table, joining_tables
from polyeps.report.sentences import joining_caption
from polyeps.report.svg import GRID, MUTED, inline, new_figure, place_axes, styled
from polyeps.report.tables import MethodRuns

MOST_SHOWN = 300  # clients of a table; clients.csv has them all
MOST_CLASSES = 30  # of a confusion matrix
_WIDTH, _HEIGHT = 420, 300  # pixels: two side by side on a desk, one on a phone


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
                "rows": rows[:MOST_SHOWN],
                "all": len(rows),
                "names": list(rows[0].metrics),
                "units": f"{method.facts.get('person') or 'record'}s",
                "personal": any(job["personal"] for job in jobs),
                "verdicts": {row.client: row.against_home.text for row in joined if row.against_home},
                "undefined": "; ".join(
                    f"{name} of {plural(times, 'client')}, {why}" for (name, why), times in whys.most_common(5)
                ),
                "left_out": max((job["left_out"] for job in jobs if "left_out" in job), default=0),
                "computed": MOST_MEASURED,
            }
        )
    return found


def joining_sections(methods: Sequence[MethodRuns]) -> list[dict[str, Any]]:
    """Return the tables about joining, that of the best method first and open."""
    tables = joining_tables(methods)
    best = best_table(tables)
    ordered = sorted(tables, key=lambda table: table is not best)
    return [
        {
            "table": table,
            "rows": table.rows[:MOST_SHOWN],
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
                (name, [(counted(count), f"{weight:.0f}") for count, weight in zip(counts, of_row, strict=True)])
                for name, counts, of_row in zip(jobs[0]["classes"], total.tolist(), weights.tolist(), strict=True)
            ]
            found.append({"method": entry, "classes": jobs[0]["classes"], "rows": rows})
    return found


def reliability_picture(method: MethodRuns, colour: str) -> str:
    """Draw how often predictions are right against the probability that a model gives them; over seeds."""
    jobs = [job.facts["reliability"] for job in method.counted if "reliability" in job.facts]
    if not jobs:
        return ""
    bins = np.array(jobs)  # (seeds, bins, 3): records, mean probability, share that is right
    records = bins[:, :, 0].sum(0)
    used = records > 0
    sure, right = ((bins[:, :, 0] * bins[:, :, part]).sum(0)[used] / records[used] for part in (1, 2))
    shares = records[used] / records.sum()
    with styled():
        figure = new_figure(_WIDTH, _HEIGHT)
        axes = place_axes(figure, left=46, right=12, bottom=44, top=24)
        axes.plot([0, 1], [0, 1], color=GRID, linewidth=1.5, linestyle=(0, (3, 1.6)))
        axes.plot(sure, right, color=colour, linewidth=1.5)
        axes.scatter(sure, right, s=20 + 300 * shares, color=colour, clip_on=False, zorder=3)
        axes.set_xlim(0, 1)
        axes.set_ylim(0, 1)
        axes.set_xlabel("probability of the predicted class", fontsize=12)
        axes.set_title("share that is right", loc="left", fontsize=12, color=MUTED, pad=8, x=0)
        axes.grid(axis="y")
        said = "; ".join(f"{percent(r)} at {percent(p)}" for p, r in zip(sure.tolist(), right.tolist(), strict=True))
        return inline(figure, f"reliability-{method.label}", f"Share of right predictions by probability: {said}.")
