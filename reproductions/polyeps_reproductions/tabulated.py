"""Tables, and figures that are no comparison of methods: made by a function from its own trials, if it needs any."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from polyeps import __version__
from polyeps_reproductions.trials import Result, Store


@dataclass(frozen=True)
class Content:
    """Columns and rows; and lines to draw, by panel and name: over rounds, or as points of anything else."""

    columns: list[str]
    rows: list[list[Any]]
    lines: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    points: dict[str, dict[str, list[tuple[float, float]]]] = field(default_factory=dict)
    findings: list[str] = field(default_factory=list)  # sentences, without their full stops
    axis: str = ""  # what points lie along; the second column, if nothing is said


@dataclass(frozen=True)
class Tabulated:
    """What to show, from which trials; both take whether it is to be quick."""

    study: str
    kind: Literal["figure", "table"]
    number: str
    title: str
    make: Callable[[Sequence[Result], bool], Content]
    trials: Callable[[bool], tuple[Any, ...]] = lambda _: ()
    note: str = ""

    @property
    def name(self) -> str:
        return f"{self.study}-{self.kind}-{self.number}"


def tabulate(wanted: Tabulated, store: Store, quick: bool, command: str = "") -> dict[str, Any]:
    """The table as plain values; without rows while trials of it are missing."""
    trials = wanted.trials(quick)
    results = [result for trial in trials if (result := store.read(trial)) is not None]
    return summary_of(wanted, results, len(trials) - len(results), quick, command)


def summary_of(
    wanted: Tabulated, results: Sequence[Result], missing: int, quick: bool, command: str = ""
) -> dict[str, Any]:
    """What a table's function makes of its results, as plain values."""
    content = Content([], []) if missing else wanted.make(results, quick)
    return {
        "study": wanted.study,
        "kind": wanted.kind,
        "figure": wanted.number,
        "title": wanted.title,
        "note": ". ".join([*([wanted.note] if wanted.note else []), *content.findings]),
        "command": command,
        "version": __version__,
        "missing": missing,
        "columns": content.columns,
        "table": content.rows,
        "lines": content.lines,
        **({"points": content.points, "axis": content.axis or content.columns[1]} if content.points else {}),
    }
