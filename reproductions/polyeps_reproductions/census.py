"""Counts made from the results: cells of the papers that were run, values that are near the papers', and misses.

A cell is one training setting of one method in one form, whatever its number of seeds, and counts once, in however many
figures it is shown; a part without training is one cell. A value is a number that the paper prints or that we read off
its plots, compared in the published form. FedHDP, and CMP-Fed's baselines, were trained with sound accounting only;
these values are compared all the same and counted as such.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from polyeps_reproductions import explanations
from polyeps_reproductions.comparison import POINTS, within
from polyeps_reproductions.explanations import UNEXPLAINED, by_chance, explained
from polyeps_reproductions.fedsel_tables import CHOICES
from polyeps_reproductions.fedsel_tables import PAPER as GAINS
from polyeps_reproductions.headlines import Results, numbers, signed
from polyeps_reproductions.studies import STUDIES, Cell, Part, Record, Summary, find

NEAR = 100 * POINTS
# Cells of the papers that the studies lack, by what is missing.
ABSENT = {
    "fedhdp": {"table 2, FEMNIST: no files": 7},
}


class Value(NamedTuple):
    """A number of a paper and ours."""

    study: str
    place: str
    paper: float
    ours: float
    unit: str  # points of accuracy, or MiB
    near: bool
    published: bool
    why: str  # of a miss; empty if it is near


class Count(NamedTuple):
    cells: int
    run: int
    values: int
    near: int
    sound_values: int  # compared in the sound form, since the published one was not trained
    sound_near: int
    explained: int  # of the misses in either


def counted(results: Results) -> dict[str, Count]:
    """Return the counts of every study."""
    found = {}
    for name in STUDIES:
        done = finished(results, name)
        mine = [one for one in values(results) if one.study == name]
        sides = [[one for one in mine if one.published is published] for published in (True, False)]
        missed = sum(not one.near and one.why != UNEXPLAINED for one in mine)
        (published, sound) = sides
        found[name] = Count(
            len(done),
            sum(done.values()),
            len(published),
            sum(one.near for one in published),
            len(sound),
            sum(one.near for one in sound),
            missed,
        )
    return found


def finished(results: Results, study: str) -> dict[Any, bool]:
    """Return every cell of a study, and whether its results are kept."""
    found: dict[Any, bool] = {}
    for part in find(study).choose():
        summary, cells = results.summary(study, part.name), wanted(study, part.name)
        done = shown(summary, part, cells) if summary else set()
        for place, cell in enumerate(cells):
            found[cell.trial] = found.get(cell.trial, False) or place in done
        if not cells:
            found[part.name] = summary is not None
    return found | {(why, place): False for why, count in ABSENT.get(study, {}).items() for place in range(count)}


@lru_cache(maxsize=64)
def wanted(study: str, name: str) -> tuple[Cell, ...]:
    """Return the cells of a part, those without data on this machine too."""
    (part,) = (one for one in find(study).choose() if one.name == name)
    return tuple(part.cells(False))


def shown(summary: Summary, part: Part, cells: Sequence[Cell]) -> set[int]:
    """Return the places of the cells that a summary has in its records or, where none were kept, in its table."""
    if summary["records"]:
        names = list(cells[0].labels) if cells else []
        known = {json.dumps([one.get(name) for name in names]) for one in summary["records"]}
        return {at for at, one in enumerate(cells) if json.dumps([one.labels[name] for name in names]) in known}
    rows = [dict(zip(summary["columns"], row, strict=True)) for row in summary["table"]]
    return {at for at, one in enumerate(cells) if any(_row_of(row, one.labels, part) for row in rows)}


def _row_of(row: Mapping[str, Any], labels: Mapping[str, Any], part: Part) -> bool:
    """Return whether a table's row shows a cell; tables of version 0.1 have no records behind them."""
    if "selection" in row:  # FedSel's table 3: a row is made of several methods
        alpha = "one for all" if labels["rate"] == "shared" else "own"
        select = labels["method"].split("-")[0]
        name = select if labels["form"] == "sound" else f"{select}, published"
        # PM and NP of a form are part of every row of that form.
        fits = select in ("np", "pm", "random") and (labels["form"] == "sound") == ("published" not in row["selection"])
        return (row["α"], row["data"], row["model"]) == (alpha, labels["data"], labels["model"]) and (
            row["selection"] == name or fits
        )
    if "data, model" in row:
        axis = list(row)[1]
        title = f"{labels['data']}, {labels['model']}" + (", one α for all" if labels["rate"] == "shared" else "")
        name = labels["method"] if labels["form"] == "sound" else f"{labels['method']}, published"
        return (row["data, model"], row[axis], row["method"]) == (title, labels[axis], name)
    if "clients" in row and "r" in row:
        ratio = "" if labels["ratio"] is None else labels["ratio"]
        return (row["clients"], row["r"], row["method"]) == (labels["clients"], ratio, labels["method"])
    if "images" in row:  # CMP-Fed's figures, by rank or by method
        at = {"iid": "at random", "labels": "five labels each"}[labels["partition"]]
        largest = labels["rank"] in (0, 16) or part.number == "1"
        name = row.get("method", labels["method"])
        rank = row["rank"] in (labels["rank"], "–")
        return largest and row["images"] == at and name == labels["method"] and rank
    if "rank" in row:
        at = {"iid": "1", "labels": "2"}[labels["partition"]]
        return (part.number, row["method"]) == (at, labels["method"]) and row["rank"] in (labels["rank"] or "–", "–")
    return all(row.get(name) == labels.get(name) for name in ("budgets", "form") if name in row)


def values(results: Results) -> list[Value]:
    """Return all values that a paper states and that were run."""
    return [*_pfa(results), *_fedsel(results), *_fedhdp(results), *_cmp_fed(results)]


def _pfa(results: Results) -> Iterator[Value]:
    found: dict[tuple[Any, ...], Record] = {}
    for part in ("figure-3", "figure-10", "figure-6", "figure-7"):
        for one in results.records("pfa", part, form="published"):
            if one["paper"] is not None:
                found[part == "figure-7", *explanations.of_pfa(one)] = one
    plain = {key[1:]: (100 * one["paper"], 100 * one["mean"]) for key, one in found.items() if not key[0]}
    experiments = list(explanations.experiments_of_pfa(results))
    for (sent, *rest), one in found.items():
        scale, key = 1 if sent else 100, tuple(rest)
        near = within(round(one["mean"] - one["paper"], 5), sent)
        why = ""
        if not near:
            why = explanations.uplink(one, results) if sent else explained(key, plain, experiments, _near)
            why = why or by_chance(one["paper"], one["mean"], one["deviation"], one["count"]) or UNEXPLAINED
        paper, ours = scale * one["paper"], scale * one["mean"]
        yield Value("pfa", f"{one['cell']}, {one['method']}", paper, ours, "MiB" if sent else "%", near, True, why)


def _near(paper: float, ours: float) -> bool:
    return abs(round(ours - paper, 5)) <= NEAR


def _fedsel(results: Results) -> Iterator[Value]:
    """Gains and losses with one α for all; PE in its published form, the others are the same in both."""
    plain: dict[tuple[Any, ...], tuple[float, float]] = {}
    for row in results.rows("fedsel", "table-3", α="one for all"):
        name = row["selection"]
        if name in ("exp", "ps", "pe, published"):
            printed = GAINS[row["data"], row["model"]][CHOICES.index(name.partition(",")[0])]
            for word, paper in zip(("gain", "loss"), printed, strict=True):
                plain[word, name, (row["data"], row["model"])] = paper, numbers(row[word])[0]
    experiments = list(explanations.experiments_of_fedsel(results))
    for key, (paper, ours) in plain.items():
        word, name, (data, model) = key
        near = _near(paper, ours)
        why = "" if near else explained(key, plain, experiments, _near) or UNEXPLAINED
        place = f"table 3: {data}, {model}, {name}, {word}"
        yield Value("fedsel", place, paper, ours, "points", near, True, why)


def _fedhdp(results: Results) -> Iterator[Value]:
    columns = ("Acc_g", "Acc_g,p", "Acc_g,np", "Acc_l,p", "Acc_l,np")
    found: dict[tuple[Any, ...], tuple[float, list[float], int]] = {}
    for table in ("1", "2"):
        seeds = (results.summary("fedhdp", f"table-{table}") or {"seeds": 0})["seeds"]
        for row in results.rows("fedhdp", f"table-{table}"):
            printed = list(row.values())[-1]
            first, *pairs = printed.split(";") if printed else ("",)
            wanted = [first, *(value for pair in pairs for value in pair.split(","))]
            for column, text in zip(columns, wanted, strict=False):
                if numbers(text) and numbers(row[column]):
                    key = table, row["clients"], row["r"], column, row["method"]
                    found[key] = numbers(text)[0], numbers(row[column]), seeds
    plain = {key: (paper, ours[0]) for key, (paper, ours, _) in found.items()}
    experiments = list(explanations.experiments_of_fedhdp(results))
    for key, (paper, (ours, *spread), seeds) in found.items():
        table, clients, ratio, column, method = key
        near = _near(paper, ours)
        why = "" if near else explained(key, plain, experiments, _near) or _chance(paper, ours, spread, seeds)
        place = f"table {table}: {clients}, {method} {ratio}".rstrip() + f", {column}"
        yield Value("fedhdp", place, paper, ours, "%", near, False, why)


def _chance(paper: float, ours: float, spread: Sequence[float], seeds: int) -> str:
    return by_chance(paper, ours, spread[0] if spread else 0.0, seeds) or UNEXPLAINED


def _cmp_fed(results: Results) -> Iterator[Value]:
    noiseless = ("FedAvg", "UV-Fed")
    for table in ("1", "2"):
        for row in results.rows("cmp-fed", f"table-{table}"):
            if row["paper"] == "–" or row["method"] == "CMP-Fed":  # whose published form is a row of its own
                continue
            paper, (ours, *spread) = float(row["paper"]), numbers(row["accuracy %"])
            published = row["method"] == "CMP-Fed, published" or row["method"] in noiseless
            near = _near(paper, ours)
            why = "" if near else _chance(paper, ours, spread, row["seeds"])
            place = f"table {'I' * int(table)}: {row['method']}, rank {row['rank']}"
            yield Value("cmp-fed", place, paper, ours, "%", near, published, why)


def missed(some: Iterable[Value]) -> list[Value]:
    return [one for one in some if not one.near]


def distance(one: Value) -> str:
    return signed(one.ours - one.paper)
