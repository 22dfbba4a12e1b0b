"""Headline claims of the papers, each judged by results: the paper's number, ours in both forms, verdict and reason.

A claim counts the cells in which it holds, by form. Verdicts follow from these counts and are never written by hand:
"holds" everywhere, "does not hold" anywhere, "holds in part" otherwise. The reason is ours.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from polyeps_reproductions.comparison import FORMS, paired
from polyeps_reproductions.presenting import path_of
from polyeps_reproductions.studies import Record, Summary, grouped

HOLDS, PART, NOT, NOT_RUN = "holds", "holds in part", "does not hold", "not run"
TIE = 0.5  # points: a method is above another if it leads by more
_NUMBER = re.compile(r"[-+−]?\d+(?:\.\d+)?")


class Outcome(NamedTuple):
    """What one form shows: in how many cells a claim holds, and a sentence of numbers."""

    held: int
    cells: int
    text: str


Outcomes = Mapping[str, Outcome]  # by form: "published", "sound"; a form that was not run is absent


@dataclass(frozen=True)
class Results:
    """The results of a folder, in full or quick."""

    folder: Path
    quick: bool = False

    def summary(self, study: str, part: str) -> Summary | None:
        path = path_of(self.folder, study, part, self.quick)
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None

    def rows(self, study: str, part: str, **wanted: Any) -> list[dict[str, Any]]:
        """Return the rows of a part's table by column, those with the wanted values; none if it was not run."""
        found = self.summary(study, part) or {"columns": [], "table": []}
        rows = [dict(zip(found["columns"], row, strict=True)) for row in found["table"]]
        return [row for row in rows if all(row[name] == value for name, value in wanted.items())]

    def records(self, study: str, *parts: str, **labels: Any) -> list[Record]:
        """Return the records of some parts, over the seeds that a cell's methods share."""
        found = [one for part in parts for one in paired((self.summary(study, part) or {}).get("records") or ())]
        return [one for one in found if all(one[name] == value for name, value in labels.items())]


@dataclass(frozen=True)
class Headline:
    """A claim of a paper."""

    study: str
    claim: str
    paper: str  # its number, or its words
    where: str  # the paper's figure or table
    measure: Callable[[Results], Outcomes]
    reason: str
    limited: str = ""  # why one form alone is judged

    def judged(self, results: Results) -> tuple[Outcomes, str]:
        """Return the outcomes and the verdict."""
        found = self.measure(results)
        return found, verdict(found.values())


def verdict(outcomes: Iterable[Outcome]) -> str:
    """Return what all outcomes together say."""
    some = [one for one in outcomes if one.cells]
    held, cells = sum(one.held for one in some), sum(one.cells for one in some)
    return NOT_RUN if not cells else HOLDS if held == cells else PART if held else NOT


def outcome(values: Sequence[float], holds: Callable[[float], bool], unit: str = "points", digits: int = 1) -> Outcome:
    """Return how many values satisfy a claim, and their range."""
    if not values:
        return Outcome(0, 0, "not run")
    held = sum(map(holds, values))
    low, high = (signed(value, digits) if unit == "points" else f"{value:.{digits}f}" for value in extremes(values))
    shown = low if low == high else f"{low} to {high}"
    return Outcome(held, len(values), f"{shown} {unit}; {held} of {len(values)} cells")


def extremes(values: Iterable[float]) -> tuple[float, float]:
    some = list(values)
    return min(some), max(some)


def signed(value: float, digits: int = 1) -> str:
    """Return a number of points with its sign."""
    text = f"{abs(value):.{digits}f}"
    return text if not float(text) else f"{'+' if value > 0 else '−'}{text}"


def leads(records: Iterable[Record], higher: str, lower: str) -> list[float]:
    """Return how many points a method is ahead of another, in every cell that has both."""
    found = []
    for cell in grouped(records, "cell", "form").values():
        means = {one["method"]: one["mean"] for one in cell if one["count"]}
        if higher in means and lower in means:
            found.append(100 * (means[higher] - means[lower]))
    return found


def by_form(measure: Callable[[str], Outcome]) -> Outcomes:
    """Return the outcomes of both forms, without those not run."""
    found = {form: measure(form) for form in FORMS}
    return {form: one for form, one in found.items() if one.cells}


def number(text: Any) -> float:
    """Return the first number of a table's cell, such as 92.08 of "92.08 ± 0.59"."""
    found = _NUMBER.search(str(text))
    assert found, f"{text!r} has no number"
    return float(found[0].replace("−", "-"))


def numbers(text: Any) -> list[float]:
    return [float(one.replace("−", "-")) for one in _NUMBER.findall(str(text))]


def headlines() -> Iterator[Headline]:
    """Return all claims, paper by paper."""
    for name in ("pfa", "fedsel", "clients"):
        yield from import_module(f"polyeps_reproductions.headlines_{name}").HEADLINES


def table(results: Results, studies: Iterable[str]) -> list[list[str]]:
    """Return a row for every claim of some studies: claim, paper, both forms, verdict, reason."""
    rows = [["claim", "paper", "published form", "sound form", "verdict", "why"]]
    wanted = set(studies)
    for one in (one for one in headlines() if one.study in wanted):
        found, judged = one.judged(results)
        sides = [found[form].text if form in found else one.limited or "not run" for form in FORMS]
        rows.append([one.claim, f"{one.paper} ({one.where})", *sides, f"**{judged}**", one.reason])
    return rows
