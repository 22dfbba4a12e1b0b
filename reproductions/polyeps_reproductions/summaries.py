"""What came out of a figure's trials beside what the paper printed: numbers, verdicts, orderings, as plain values."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from polyeps import __version__
from polyeps.accounting.certificate import Form
from polyeps_reproductions.cells import FORMS, Cell
from polyeps_reproductions.figures import Figure, trials_of
from polyeps_reproductions.running import settle
from polyeps_reproductions.trials import Result, Store

POINTS = 0.04  # accuracy this near to the paper's counts as reproduced
MEBIBYTES = 1.5  # uplink this near: the paper truncates, and its number of public clients in a round is random
TIE = 0.005  # an order holds unless the lower method is ahead by more than half a point
CONTROL = "public-only"
# (higher, lower): what the paper's text says of all its accuracy figures; the last one is our control.
ORDERINGS = (
    ("pfa", "weiavg"),
    ("pfa-plus", "weiavg"),
    ("weiavg", "fedavg"),
    ("pfa", "fedavg"),
    ("pfa", "minimum"),
    ("maximum", "pfa"),
    ("non-private", "maximum"),
    ("pdp-fl", "fedavg"),
    ("pdp-fl", "minimum"),
    ("non-private", "pdp-fl"),
    ("pfa", CONTROL),
)
Summary = dict[str, Any]
Found = dict[tuple[Cell, str, Form], list[Result]]  # by cell, title of the method and form
_TRAFFIC = ("up", "down", "up_private", "down_private")
_CURVE_EVERY = 10  # rounds kept of a curve, beside its first and last


def summarise(figure: Figure, store: Store, seeds: int, grid: Sequence[float], command: str = "") -> Summary:
    """The figure as far as its trials are done; `missing` says how many are not.

    A cell in which none is done is left out; `left_out` counts such cells. Methods of a cell are compared over the
    seeds that all of them have finished, as far as there are such.
    """
    trials = list(trials_of(figure, seeds))
    found: Found = {}
    for trial in settle(trials, store, grid):
        result = store.read(trial)
        if result is not None:
            found.setdefault((trial.cell, trial.method.title, trial.form), []).append(result)
    measured = {cell for cell, _, _ in found}
    paired = _paired(found)
    cells = [_cell(figure, cell, paired) for cell in figure.cells if cell in measured]
    verdicts = [method["verdict"] for cell in cells for method in cell["methods"].values() if method["verdict"]]
    orderings = [ordering for cell in cells for ordering in cell["orderings"]]
    return {
        "study": figure.study,
        "figure": figure.number,
        "title": figure.title,
        "axis": figure.axis,
        "shows": figure.shows,
        "note": figure.note,
        "command": command,
        "version": __version__,
        "seeds": seeds,
        "missing": len(trials) - sum(map(len, found.values())),
        "left_out": len(figure.cells) - len(cells),
        "compared": len(verdicts),
        "reproduced": sum(verdict["holds"] for verdict in verdicts),
        "orderings": {form: _share_held(orderings, form) for form in ("paper", *FORMS)},
        "cells": cells,
    }


def _paired(found: Found) -> Found:
    """Of every cell and form only the seeds that all its methods have, if there is one."""
    seeds: dict[tuple[Cell, Form], set[int]] = {}
    for (cell, _, form), results in found.items():
        own = {result["trial"]["seed"] for result in results}
        seeds[cell, form] = seeds.get((cell, form), own) & own
    kept = {}
    for (cell, title, form), results in found.items():
        common = [result for result in results if result["trial"]["seed"] in seeds[cell, form]]
        kept[cell, title, form] = common or results
    return kept


def _cell(figure: Figure, cell: Cell, found: Found) -> Summary:
    methods: dict[str, Summary] = {}
    for method in figure.methods:
        measured: Summary = {form: _measured(figure, found.get((cell, method.title, form), [])) for form in FORMS}
        paper = figure.paper.get((cell, method.title))
        methods[method.title] = {
            "paper": paper,
            **measured,
            "verdict": verdict(figure, paper, measured["published"]),
        }
    return {
        "title": cell.title,
        "cell": cell.as_dict(),
        "methods": methods,
        "orderings": orderings(methods) if figure.shows == "accuracy" else [],
        "gain": {form: _gain(cell, form, found) for form in FORMS} if figure.shows == "accuracy" else {},
    }


def _gain(cell: Cell, form: Form, found: Found) -> Summary | None:
    """PFA minus the public clients alone, seed by seed: the mean of the differences and its standard error."""
    ours, control = (
        {result["trial"]["seed"]: result["final"] for result in found.get((cell, name, form), [])}
        for name in ("pfa", CONTROL)
    )
    differences = [ours[seed] - control[seed] for seed in sorted(ours.keys() & control.keys())]
    if not differences:
        return None
    error = statistics.stdev(differences) / len(differences) ** 0.5 if len(differences) > 1 else None
    mean = round(statistics.fmean(differences), 5)
    return {"mean": mean, "error": None if error is None else round(error, 5), "seeds": len(differences)}


def _measured(figure: Figure, results: Sequence[Result]) -> Summary | None:
    if not results:
        return None
    bytes_of: dict[str, float] = {name: statistics.fmean(one[name] for one in results) for name in _TRAFFIC}
    values = [result["up_values"] / 2**20 if figure.shows == "traffic" else result["final"] for result in results]
    return {
        "mean": round(statistics.fmean(values), 5),
        "deviation": round(statistics.stdev(values), 5) if len(values) > 1 else 0.0,
        "seeds": len(values),
        "learning_rate": results[0]["trial"]["learning_rate"],
        "rounds": round(statistics.fmean(result["rounds"] for result in results), 2),
        "spent_share": None if (spent := results[0]["spent_share"]) is None else round(spent, 5),
        "seconds": round(statistics.fmean(result["seconds"] for result in results), 1),
        **{name: round(value) for name, value in bytes_of.items()},
        "curve": _curve(results),
    }


def _curve(results: Sequence[Result]) -> dict[str, float]:
    """Mean accuracy in some of the rounds, over the seeds that reached them."""
    rounds = sorted({number for result in results for number in result["accuracy"]}, key=int)
    kept = [number for number in rounds if number in (rounds[0], rounds[-1]) or int(number) % _CURVE_EVERY == 0]
    reached = {number: [one["accuracy"][number] for one in results if number in one["accuracy"]] for number in kept}
    return {number: round(statistics.fmean(values), 4) for number, values in reached.items()}


def verdict(figure: Figure, paper: float | None, measured: Summary | None) -> Summary | None:
    """Whether the published form comes near the paper's value; nothing where one of them is not known."""
    if paper is None or measured is None or not figure.judged:
        return None
    off = round(measured["mean"] - paper, 5)
    # Readings have two digits: a difference of exactly the limit is not undone by rounding.
    return {"off": off, "holds": abs(off) <= (POINTS if figure.shows == "accuracy" else MEBIBYTES) + 1e-9}


def orderings(methods: Mapping[str, Summary]) -> list[Summary]:
    """Which method is ahead of which: in the paper, in the published form, in the sound one."""
    rows = []
    for higher, lower in ORDERINGS:
        if higher not in methods or lower not in methods:
            continue
        row: Summary = {"higher": higher, "lower": lower}
        for side in ("paper", *FORMS):
            values = [methods[name][side] for name in (higher, lower)]
            ahead, behind = (value["mean"] if isinstance(value, dict) else value for value in values)
            row[side] = None if ahead is None or behind is None else bool(ahead >= behind - TIE)
        rows.append(row)
    return rows


def _share_held(orderings: Sequence[Summary], side: str) -> str:
    known = [ordering[side] for ordering in orderings if ordering[side] is not None]
    return f"{sum(known)} of {len(known)}"


def table_rows(summary: Summary) -> tuple[list[str], list[list[str]]]:
    """Columns and rows of the table: paper · published form · sound form · public-only control · verdict."""
    unit = "MiB" if summary["shows"] == "traffic" else "%"
    columns = ["cell", "method", f"paper, {unit}", "published form", "sound form", "control (published · sound)", ""]
    rows = []
    for cell in summary["cells"]:
        control = cell["methods"].get(CONTROL)
        beside = " · ".join(_shown(summary, control[form]) for form in FORMS) if control else "–"
        for name, method in cell["methods"].items():
            found = method["verdict"]
            said = "" if found is None else "within" if found["holds"] else f"off by {_points(summary, found['off'])}"
            paper = "–" if method["paper"] is None else _number(summary, method["paper"])
            sides = [_shown(summary, method[form]) for form in FORMS]
            rows.append([cell["title"], name, paper, *sides, "" if name == CONTROL else beside, said])
    return columns, rows


def sentences(summary: Summary) -> list[str]:
    """The outcome in words: how many cells came out, which orders did not hold, what is missing."""
    near = f"{100 * POINTS:g} points" if summary["shows"] == "accuracy" else f"{MEBIBYTES:g} MiB"
    said = []
    if summary["compared"]:
        said.append(f"{summary['reproduced']} of {summary['compared']} values are within {near} of the paper's.")
    for form in FORMS:
        broken = [
            f"{row['higher']} over {row['lower']} ({cell['title']})"
            for cell in summary["cells"]
            for row in cell["orderings"]
            if row[form] is False and row["lower"] != CONTROL
        ]
        if broken:
            said.append(f"Orders that do not hold in the {form} form: {'; '.join(broken)}.")
    if gains := projection_gains(summary):
        said.append(gains)
    if counted := seed_counts(summary):
        said.append(counted)
    if summary["left_out"]:
        said.append(f"{summary['left_out']} of the figure's {summary['left_out'] + len(summary['cells'])} cells have "
                    "no finished training yet and are left out.")  # fmt: skip
    if summary["missing"]:
        said.append(f"{summary['missing']} trainings are missing; the same command goes on with them.")
    return said


def seed_counts(summary: Summary) -> str:
    """Over how many seeds values are means: a study may be shown before all of them are done."""
    said = []
    for form in FORMS:
        measured = [method[form] for cell in summary["cells"] for method in cell["methods"].values() if method[form]]
        if counts := {one["seeds"] for one in measured}:
            least, most = min(counts), max(counts)
            said.append(f"{least if least == most else f'{least} to {most}'} in the {form} form")
    return f"Values are means over seeds, ± their standard deviation; seeds: {', '.join(said)}." if said else ""


def projection_gains(summary: Summary) -> str:
    """What PFA has over averaging the public clients alone: what projection itself buys."""
    said = []
    for form in FORMS:
        gains = [(cell["title"], cell["gain"][form]) for cell in summary["cells"] if cell["gain"].get(form)]
        if gains:
            values = [100 * gain["mean"] for _, gain in gains]
            each = [
                f"{title} {100 * gain['mean']:+.1f} ± {100 * gain['error']:.1f}"
                for title, gain in gains
                if gain["error"] is not None
            ]
            paired = f" ({'; '.join(each)})" if each else ""
            said.append(f"{min(values):+.1f} to {max(values):+.1f} in the {form} form{paired}")
    pairs = ", ± the standard error over paired seeds" if any("±" in one for one in said) else ""
    return f"PFA over the public clients alone, in points{pairs}: {', '.join(said)}." if said else ""


def _shown(summary: Summary, measured: Summary | None) -> str:
    if measured is None:
        return "–"
    number = _number(summary, measured["mean"])
    return f"{number} ± {_number(summary, measured['deviation'])}" if measured["seeds"] > 1 else number


def _number(summary: Summary, value: float) -> str:
    return f"{value:.1f}" if summary["shows"] == "traffic" else f"{100 * value:.1f}"


def _points(summary: Summary, value: float) -> str:
    return f"{value:+.1f} MiB" if summary["shows"] == "traffic" else f"{100 * value:+.1f}"


def methods_of(summary: Summary) -> list[str]:
    return list(dict.fromkeys(name for cell in summary["cells"] for name in cell["methods"]))
