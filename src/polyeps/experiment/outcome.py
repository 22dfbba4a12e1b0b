"""The results of a run: by method and seed, as data frames, as a picture, and as a summary in a notebook."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from html import escape
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

from torch import Tensor

from polyeps.errors import InputError
from polyeps.experiment.journal import COUNTED, Journal
from polyeps.model_files import read_vector

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Of every client in every job: its effective budget and its own one, what it spent, and the rounds it answered.
_CLIENTS = """
  SELECT jobs.label AS method, jobs.seed, c.client, c.records, c.level, c.own_epsilon, c.epsilon, c.delta, c.spent,
         c.noise_multiplier, COALESCE(a.joined, 0) AS joined, COALESCE(a.declined, 0) AS declined,
         c.left_after + 1 AS left_after
  FROM clients c JOIN jobs USING (job) LEFT JOIN (
    SELECT job, client, SUM(answered) AS joined, SUM(1 - answered) AS declined FROM answers GROUP BY job, client) a
    USING (job, client)
  ORDER BY jobs.rowid, c.rowid"""
_CLIENT_COLUMNS = (
    "method", "seed", "client", "records", "level", "own_epsilon", "epsilon", "delta", "spent", "noise_multiplier",
    "joined", "declined", "left_after",
)  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """Results of a run, by method and seed."""

    folder: Path
    accuracy: dict[tuple[str, int], list[float]]  # or whatever `measure` names
    spent: dict[tuple[str, int], dict[str, float]]  # of every client that has a guarantee
    models: dict[tuple[str, int], Tensor]
    measure: str = "accuracy"  # where no classes are predicted: "r2", "token accuracy", "exact match"

    def __repr__(self) -> str:
        rows = {f"{method} seed {seed}": row for (method, seed), row in self.accuracy.items() if row}
        last = ", ".join(f"{name} {_reached(self.measure, row[-1])}" for name, row in rows.items())
        return f"Outcome({str(self.folder)!r}, last {self.measure}: {last or 'none'})"

    def to_frame(self) -> Any:
        """Return a pandas frame with one row per method, seed and round, and a column per metric.

        Rounds are counted from 1. Metrics of rounds in which the model was not evaluated are missing.
        """
        pandas = _pandas()
        with self._journal() as journal:
            rows, names = journal.rounds()
        rows = [{**row, "round": row["round"] + 1} for row in rows]
        return pandas.DataFrame(rows, columns=["method", "seed", "round", *COUNTED, *names])

    def clients_frame(self) -> Any:
        """Return a pandas frame with one row per method, seed and client: budgets, spent ε, records and rounds."""
        pandas = _pandas()
        with self._journal() as journal:
            return pandas.DataFrame(journal.query(_CLIENTS), columns=list(_CLIENT_COLUMNS))

    def plot(self, metric: str | None = None, axes: Axes | None = None) -> Figure:
        """Draw a metric over the rounds: a line per method, the mean over seeds, and a band of one standard deviation.

        The picture is a new figure, or part of the one to which `axes` belongs. Without a metric, it is the accuracy.
        """
        metric = self.measure if metric is None else metric
        from matplotlib import pyplot
        from matplotlib.ticker import MaxNLocator

        with self._journal() as journal:
            curves = _curves(journal, metric)
            known = sorted({row["name"] for row in journal.query("SELECT DISTINCT name FROM metrics")})
        if not curves:
            raise InputError(f"there is no metric {metric!r} in {self.folder}; it has {', '.join(known) or 'none yet'}")
        if axes is None:
            made, axes = pyplot.subplots(figsize=(7, 4))
            pyplot.close(made)  # a notebook shows what a cell returns, and would show an open figure a second time
        for label, points in curves.items():
            rounds = list(points)
            mean = [fmean(points[number]) for number in rounds]
            spread = [stdev(some) if len(some) > 1 else 0.0 for some in points.values()]
            (line,) = axes.plot(rounds, mean, label=label, marker="o" if len(rounds) == 1 else None)
            if any(spread):
                low = [m - s for m, s in zip(mean, spread, strict=True)]
                high = [m + s for m, s in zip(mean, spread, strict=True)]
                axes.fill_between(rounds, low, high, color=line.get_color(), alpha=0.16, linewidth=0)
        axes.set_xlabel("round")
        axes.set_ylabel(metric)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.legend()
        figure = axes.get_figure(root=True)
        assert figure is not None
        return figure

    def _repr_html_(self) -> str:
        """Return a table of the methods: accuracy after the last round, and whether every budget was kept."""
        with self._journal() as journal:
            name, rows = str(journal.about().get("name", "")), _summary(journal, self.measure)
        titles = ("method", "seeds done", self.measure, "most spent of a budget")
        head = "".join(f"<th>{title}</th>" for title in titles)
        body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
        return (
            f"<p><b>{escape(name)}</b> in {escape(str(self.folder))}</p>"
            f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
        )

    def _journal(self) -> closing[Journal]:
        return closing(Journal(self.folder / "journal.db"))


def read(folder: Path | str) -> Outcome:
    """Return the results of a run so far."""
    folder = Path(folder)
    journal = Journal(folder / "journal.db")
    accuracy: dict[tuple[str, int], list[float]] = {}
    spent: dict[tuple[str, int], dict[str, float]] = {}
    models: dict[tuple[str, int], Tensor] = {}
    measure = str(journal.about().get("headline", "accuracy"))
    for row in journal.jobs():
        key, job = (row["label"], row["seed"]), row["job"]
        metrics = journal.query("SELECT value FROM metrics WHERE job = ? AND name = ? ORDER BY round", (job, measure))
        accuracy[key] = [metric["value"] for metric in metrics]
        clients = journal.query("SELECT client, spent FROM clients WHERE job = ? AND spent IS NOT NULL", (job,))
        spent[key] = {client["client"]: client["spent"] for client in clients}
        # Clients that train alone have no common model.
        if row["status"] == "done" and (path := model_path(folder, job)).exists():
            models[key] = read_vector(path)
    journal.close()
    return Outcome(folder, accuracy, spent, models, measure)


def model_path(folder: Path, job: str) -> Path:
    """Return where the final model of a job is."""
    return folder / "models" / f"{job}.safetensors"


def _pandas() -> Any:
    try:
        import pandas
    except ImportError:
        raise InputError("data frames need pandas, which is not installed; pip install 'polyeps[notebook]'") from None
    return pandas


def _curves(journal: Journal, metric: str) -> dict[str, dict[int, list[float]]]:
    """Return the values of a metric by method and round, one for each seed; those that are not finite are left out."""
    statement = """
      SELECT label, round, value FROM metrics JOIN jobs USING (job)
      WHERE name = ? AND value IS NOT NULL ORDER BY jobs.rowid, round"""
    found: dict[str, dict[int, list[float]]] = {}
    for row in journal.query(statement, (metric,)):
        found.setdefault(row["label"], {}).setdefault(row["round"] + 1, []).append(row["value"])
    return {label: dict(sorted(points.items())) for label, points in found.items()}


def _reached(measure: str, value: float | None) -> str:
    if value is None:  # undefined, such as R² where all targets are equal
        return "–"
    return f"{value:.3f}" if measure == "r2" else f"{value:.1%}"


def _summary(journal: Journal, measure: str) -> list[Sequence[str]]:
    """Return the cells of each method: name, seeds done, accuracy after the last round, largest share of a budget."""
    labels: dict[str, list[dict[str, Any]]] = {}
    for job in journal.jobs():
        labels.setdefault(job["label"], []).append(job)
    rows: list[Sequence[str]] = []
    for label, jobs in labels.items():
        last, shares = [], []
        for job in jobs:
            measured = "SELECT value FROM metrics WHERE job = ? AND name = ? ORDER BY round DESC LIMIT 1"
            found = journal.query(measured, (job["job"], measure))
            last += [row["value"] for row in found if row["value"] is not None]
            paid = "SELECT spent / epsilon AS share FROM clients WHERE job = ? AND spent IS NOT NULL AND epsilon > 0"
            shares += [row["share"] for row in journal.query(paid, (job["job"],))]
        accuracy = _reached(measure, fmean(last)) if last else "–"
        if len(last) > 1:
            accuracy += f" ± {_reached(measure, stdev(last))}"
        most = max(shares, default=math.nan)
        spent = "no guarantee" if not shares else f"{most:.1%}, {'kept' if most <= 1 else 'EXCEEDED'}"
        if not shares and not any(job["status"] == "done" for job in jobs):
            spent = "not done"
        rows.append((label, f"{sum(job['status'] == 'done' for job in jobs)} of {len(jobs)}", accuracy, spent))
    return rows
