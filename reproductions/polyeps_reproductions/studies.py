"""Studies: figures and tables of a paper, each a list of cells and a function that shows their records.

A cell is an experiment by name, with the paper's number where there is one. It is trained with several seeds, and their
results become one record: plain values, with every seed's final accuracy and curve, so that paired differences can be
computed again from a study's JSON. JSON of version 0.1 has no values of single seeds: there `finals` or `records` is
null, and the next run adds them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from importlib import import_module
from statistics import fmean, stdev
from typing import Any, Literal

from polyeps import __version__
from polyeps.data import public_loaders
from polyeps.errors import DataError, InputError, suggest
from polyeps_reproductions.running import settle
from polyeps_reproductions.trials import Result, Store, Trial

STUDIES = ("pfa", "fedsel", "pdp-fl", "fedhdp", "cmp-fed")  # modules of these names have a STUDY
Record = dict[str, Any]
Summary = dict[str, Any]
Panel = dict[str, Any]  # as `panel` makes it
_CURVE_POINTS = 50  # of a longer curve, every tenth round is kept beside the first and the last
_FROM_TRAINING = ("learning_rate", "local_steps", "clip")
_MEANS = ("rounds", "seconds", "up", "down", "up_private", "down_private", "parameters")
_FIRST = ("spent", "spent_share", "noise_multipliers", "norms", "noise", "epsilons")


@dataclass(frozen=True)
class Cell:
    """One experiment of a study."""

    labels: Mapping[str, Any]  # its place in figures and tables, such as {"method": "pfa", "clients": 30}
    trial: Trial
    paper: float | str | None = None  # the paper's number
    value: str = "final"  # the entry of a result that is compared


@dataclass(frozen=True)
class Content:
    """A table, its findings and the panels of its figure."""

    columns: list[str]
    rows: list[list[Any]]
    findings: list[str] = field(default_factory=list)  # sentences
    panels: list[Panel] = field(default_factory=list)
    pairs: bool = False  # two panels in a row share their vertical axis
    alike: bool = False  # all panels share it


@dataclass(frozen=True)
class Part:
    """A figure or a table."""

    kind: Literal["figure", "table"]
    number: str
    title: str
    show: Callable[[Sequence[Record], bool], Content]  # (records, quick)
    cells: Callable[[bool], Sequence[Cell]] = lambda _: ()  # (quick)
    note: str = ""
    partial: bool = False  # whether to show it before all of its trials are finished
    once: bool = False  # whether it shows a single training of each cell

    @property
    def name(self) -> str:
        return f"{self.kind}-{self.number}"


@dataclass(frozen=True)
class Study:
    """All figures and tables of a paper."""

    name: str
    parts: Callable[[bool], Sequence[Part]]  # (quick)
    seeds: int = 5
    # FedSel's trials are folds of repetitions, so several of them belong to one seed: (count, quick) -> seeds
    trial_seeds: Callable[[int, bool], Sequence[int]] = lambda count, _: range(1, count + 1)

    def choose(self, figures: Sequence[str] = (), tables: Sequence[str] = (), quick: bool = False) -> list[Part]:
        """Return the parts by number; all of them, if none is named."""
        parts, wanted = list(self.parts(quick)), {"figure": figures, "table": tables}
        for kind, numbers in wanted.items():
            known = [part.number for part in parts if part.kind == kind]
            for number in numbers:
                if number not in known:
                    raise InputError(f"{self.name} has no {kind} {number} here; choose one of {', '.join(known)}")
        return [part for part in parts if not (figures or tables) or part.number in wanted[part.kind]]

    def trials(self, part: Part, cell: Cell, seeds: int, quick: bool) -> list[Trial]:
        """Return a cell's trials, one for each seed."""
        return [replace(cell.trial, seed=seed) for seed in self.trial_seeds(1 if part.once else seeds, quick)]

    def lacking(self, part: Part, cell: Cell, seeds: int, quick: bool, earlier: Summary | None) -> list[Trial]:
        """Return a cell's trials whose results an earlier summary does not hold, seed by seed."""
        known = _seeds(_earlier(cell, earlier))
        return [one for one in self.trials(part, cell, seeds, quick) if str(one.seed) not in known]

    def summary(
        self, part: Part, store: Store, seeds: int, quick: bool, command: str = "", earlier: Summary | None = None
    ) -> Summary:
        """Return a part as plain values, from its finished trials.

        A cell keeps what an earlier summary holds of other seeds, whose trials may be gone, unless its settings have
        changed since; without any seed of its own, it keeps that record as it is.
        """
        cells, missing = available(part.cells(quick))[0], 0
        records: list[Record] = []
        kept: list[Record] = []
        for cell in cells:
            trials = self.trials(part, cell, seeds, quick)
            results = [found for one in settle(trials, store) if (found := store.read(one)) is not None]
            settled = cell.trial.settled(store)
            old = _earlier(cell, earlier)
            old = None if old and not _same_setting(old, settled) else old
            done = {str(result["seed"]) for result in results} | _seeds(old)
            missing += sum(str(one.seed) not in done for one in trials)
            kept += [{**old, "paper": cell.paper}] if old and not results else []
            new = record(cell, results, settled) if results else None
            records += [joined(new, old)] if new else kept[-1:] if old else []
        ready = (records or not cells) and (part.partial or not missing)
        content = part.show(records, quick) if ready else Content([], [])
        if kept and ready:
            versions = ", ".join(sorted({one["version"] for one in kept}))
            content.findings.append(f"{len(kept)} of {len(records)} records are kept from version {versions}")
        return {
            "study": self.name,
            "kind": part.kind,
            "number": part.number,
            "title": part.title,
            "note": part.note,
            "command": command,
            "version": __version__,
            "seeds": seeds if cells and not part.once else 1,
            "missing": missing,
            "columns": content.columns,
            "table": content.rows,
            "findings": content.findings,
            "pairs": content.pairs,
            **({"alike": True} if content.alike else {}),
            "panels": content.panels,
            "records": records,
        }


def find(name: str) -> Study:
    """Return a study by name."""
    if name not in STUDIES:
        raise InputError(f"there is no study {name!r}; {suggest(name, STUDIES)}")
    found: Study = import_module(f"polyeps_reproductions.{name.replace('-', '_')}").STUDY
    return found


def available(cells: Iterable[Cell]) -> tuple[list[Cell], list[str]]:
    """Return the cells whose data sets are on this machine, and a sentence for each data set that is not."""
    kept: list[Cell] = []
    missing: dict[str, str] = {}
    for cell in cells:
        data = json.loads(cell.trial.settings)["data"].get("name", "syn-")
        problem = "" if data.startswith("syn-") else _problem(data, public_loaders.load_dataset)
        kept += [] if problem else [cell]
        missing |= {data: f"cells on {data} are skipped: {problem}"} if problem else {}
    return kept, list(missing.values())


@lru_cache(maxsize=32)
def _problem(data: str, load: Callable[..., Any]) -> str:
    try:
        load(data, download=None)
    except DataError as problem:
        return str(problem)
    return ""


def _earlier(cell: Cell, earlier: Summary | None) -> Record | None:
    """Return a cell's record in an earlier summary."""
    known = earlier or {"records": None}
    some = [one for one in known["records"] or () if same_labels(one, cell.labels)]
    return {"version": known["version"], **some[0]} if some else None


def same_labels(one: Record, labels: Mapping[str, Any]) -> bool:
    """Return whether a record, perhaps read from JSON, is of the cell with these labels."""
    return all(json.dumps(one.get(name)) == json.dumps(value) for name, value in labels.items())


def _seeds(one: Record | None) -> set[str]:
    return set((one or {}).get("finals") or ())


def _same_setting(old: Record, settled: Trial | None) -> bool:
    if settled is None:
        return True
    if "setting" in old:
        return bool(old["setting"] == setting_of(settled))
    return bool(old["learning_rate"] == settled.experiment().training.learning_rate)


def setting_of(settled: Trial) -> str:
    """Return a name of all that a trial's settings say, whatever its seed."""
    return replace(settled, seed=0).key.rsplit("-", 1)[-1]


def joined(new: Record, old: Record | None) -> Record:
    """Return a new record with the seeds that only an earlier one has."""
    others = _seeds(old) - _seeds(new)
    if old is None or not others:
        return new
    seeds = sorted({*new["finals"], *others}, key=int)
    found = {**new, "version": ", ".join(sorted({new["version"], old["version"]}))}
    for name in ("finals", "curves", "own"):
        if name in new:
            found[name] = {seed: {**(old.get(name) or {}), **new[name]}[seed] for seed in seeds}
    return {**found, **spread_of(list(found["finals"].values()))}


def record(cell: Cell, results: Sequence[Result], settled: Trial | None = None) -> Record:
    """Return a cell's record: its labels, the paper's number, and the results of its seeds."""
    first = results[0]
    values = {str(result["seed"]): round(result[cell.value], 6) for result in results}
    return {
        **cell.labels,
        "paper": cell.paper,
        **spread_of(list(values.values())),
        **{name: first["settings"]["training"].get(name) for name in _FROM_TRAINING},
        **{name: round(fmean(one[name] for one in results), 2) for name in _MEANS if name in first},
        **{name: first[name] for name in _FIRST if name in first},
        "finals": values,
        "curves": {str(result["seed"]): _curve(result["accuracy"], cell.trial.folds) for result in results},
        "version": ", ".join(sorted({result["version"] for result in results})),
        **({"setting": setting_of(settled)} if settled else {}),
        **({"own": {str(result["seed"]): result["own"] for result in results}} if first.get("own") else {}),
    }


def spread_of(values: Sequence[float]) -> dict[str, Any]:
    """Return mean, standard deviation and count."""
    deviation = round(stdev(values), 6) if len(values) > 1 else 0.0
    return {"mean": round(fmean(values), 6), "deviation": deviation, "count": len(values)}


def _curve(curve: Mapping[Any, float], whole: bool) -> dict[str, float]:
    numbers = sorted(map(int, curve))
    if len(numbers) > _CURVE_POINTS and not whole:
        numbers = [number for number in numbers if number % 10 == 0 or number in (numbers[0], numbers[-1])]
    values = {int(number): value for number, value in curve.items()}
    return {str(number): round(values[number], 4) for number in numbers}


def curve_of(one: Record) -> list[tuple[int, float]]:
    """Return the mean accuracy over seeds, after every round that all of them were evaluated at."""
    curves = list(one["curves"].values())
    common = set(curves[0]).intersection(*curves[1:])
    return [(number, fmean(curve[str(number)] for curve in curves)) for number in sorted(map(int, common))]


def band_of(one: Record) -> list[tuple[int, float, float]]:
    """Return the mean accuracy over seeds and its standard deviation, after every round of `curve_of`."""
    curves = list(one["curves"].values())
    return [
        (number, mean, stdev(curve[str(number)] for curve in curves) if len(curves) > 1 else 0.0)
        for number, mean in curve_of(one)
    ]


def percent(one: Record, digits: int = 2) -> str:
    """Return a record's mean and standard deviation over seeds, in per cent."""
    spread = f" ± {100 * one['deviation']:.{digits}f}" if one["count"] > 1 else ""
    return f"{100 * one['mean']:.{digits}f}{spread}"


def difference(higher: Record, lower: Record) -> tuple[float, float | None, int]:
    """Return mean and standard error of the differences over the seeds that both have, in points, and their count."""
    common = [seed for seed in higher["finals"] or () if seed in (lower["finals"] or ())]
    points = [100 * (higher["finals"][seed] - lower["finals"][seed]) for seed in common]
    error = stdev(points) / math.sqrt(len(points)) if len(points) > 1 else None
    return fmean(points) if points else math.nan, error, len(points)


def signed(higher: Record, lower: Record) -> str:
    """Return a difference in points with its standard error."""
    mean, error, _ = difference(higher, lower)
    return f"{mean:+.2f}" + ("" if error is None else f" ± {error:.2f}")


def grouped(records: Iterable[Record], *labels: str) -> dict[tuple[Any, ...], list[Record]]:
    """Return records by the values of some labels."""
    groups: dict[tuple[Any, ...], list[Record]] = {}
    for one in records:
        groups.setdefault(tuple(one[name] for name in labels), []).append(one)
    return groups


def panel(title: str, x: str, y: str, series: Sequence[Mapping[str, Any]], **others: Any) -> Panel:
    """Return a panel of a figure: its axes and its series, each with a name, x, y, and `look` where it is no line.

    Others: log ("x", "y", "xy"), ticks (names along x), bars (their width).
    """
    return {"title": title, "x": x, "y": y, "series": list(series), **others}


def line(name: str, points: Iterable[Sequence[float]], **others: Any) -> dict[str, Any]:
    """Return a series of points (x, y), or (x, y, deviation)."""
    some = list(points)
    errors = [one[2] for one in some if len(one) == 3]
    found = {"name": name, "x": [one[0] for one in some], "y": [one[1] for one in some]}
    return {**found, **({"error": errors} if errors else {}), **others}
