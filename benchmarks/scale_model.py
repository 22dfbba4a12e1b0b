"""A model of a run's time and memory, fitted to `scale.py`, and the tables of docs/reference/scale.md.

CPU seconds of one process. The model is fitted to the runs of `growth`, of at most 100 000 clients, and to secure sums
of at most 1 000; the run of a million clients, which it has not seen, is predicted beside what was measured.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy.optimize import nnls

RESULTS = Path(__file__).resolve().parent / "results" / "scale.json"
_RUN = re.compile(r"(\d+) clients, (\d+) a round, (\d+) parameters: (.+)")
_SUM = re.compile(r"(\d+) clients, (\d+) may fail, (\d+) collude: (.+)")
Found = dict[str, float]


class Term(NamedTuple):
    """One term of a quantity: its coefficient, in the unit that is said."""

    name: str
    value: float


def results() -> dict[str, Found]:
    """Return what `scale.py --keep` has written, by part."""
    found: dict[str, Found] = json.loads(RESULTS.read_text("utf-8"))
    return found


def grouped(part: Found, pattern: re.Pattern[str]) -> dict[tuple[int, ...], Found]:
    """Return the figures of a part by the numbers in their names."""
    together: dict[tuple[int, ...], Found] = {}
    for name, value in part.items():
        if (found := pattern.fullmatch(name)) is not None:
            *numbers, what = found.groups()
            together.setdefault(tuple(map(int, numbers)), {})[what] = value
    return together


def fitted(names: Sequence[str], rows: Iterable[Sequence[float]], values: Sequence[float]) -> list[Term]:
    """Return coefficients, none negative, with the least squares of relative errors."""
    wanted = np.array(values)
    matrix = np.array(list(rows), float) / wanted[:, None]
    scale = np.maximum(matrix.max(0), 1e-300)
    found = nnls(matrix / scale, np.ones(len(wanted)))[0] / scale
    return [Term(name, float(value)) for name, value in zip(names, found, strict=True)]


def start_model(runs: dict[tuple[int, ...], Found]) -> list[Term]:
    """The start, s: what every run takes, and what a client takes."""
    return fitted(("a run", "a client"), [(1, n) for n, _, _ in runs], [one["start, s"] for one in runs.values()])


def round_model(runs: dict[tuple[int, ...], Found]) -> list[Term]:
    """A round, ms: what every round takes, a client enrolled, a client asked, and each of its parameters."""
    names = ("a round", "a client enrolled", "a client asked", "a parameter of a client asked")
    rows = [(1, n, m, m * d) for n, m, d in runs]
    return fitted(names, rows, [one["a round, ms"] for one in runs.values()])


def memory_model(runs: dict[tuple[int, ...], Found]) -> list[Term]:
    """Memory, MB: of the process, of a client, and of a parameter of a client asked."""
    names = ("the process", "a client", "a parameter of a client asked")
    return fitted(names, [(1, n, m * d) for n, m, d in runs], [one["peak MB"] for one in runs.values()])


def sums_model(sums: dict[tuple[int, ...], Found]) -> list[Term]:
    """A secure sum of 1000 numbers, s: of a client, of a pair of neighbours, and of a signature a client checks."""
    rows = [(n, n * one["neighbours"], n * n) for (n, _, _), one in sums.items()]
    names = ("a client", "a client's neighbour", "a client's signature of another")
    return fitted(names, rows, [one["s"] for one in sums.values()])


def predicted(model: Iterable[Term], numbers: Sequence[float]) -> float:
    return sum(term.value * number for term, number in zip(model, numbers, strict=True))


def short(value: float) -> str:
    """Return a number in two digits.

    >>> short(0.01234), short(123456.0), short(7.0), short(0.0)
    ('0.012', '120 000', '7', '0')
    """
    if not value:
        return "0"
    rounded = float(f"{value:.2g}")
    return f"{rounded:,.0f}".replace(",", " ") if rounded >= 10 else f"{rounded:.6f}".rstrip("0").rstrip(".")


def figures(part: str) -> list[tuple[str, str]]:
    """Return a part's figures as they are."""
    return [(name, f"{value:,}".replace(",", " ")) for name, value in results().get(part, {}).items()]


def growth_rows() -> list[tuple[str, ...]]:
    """Return the runs of `growth`, one a row."""
    return [
        (f"{n:,}".replace(",", " "), f"{m:,}".replace(",", " "), str(d), *(f"{value:g}" for value in one.values()))
        for (n, m, d), one in grouped(results()["growth"], _RUN).items()
    ]


def sum_rows() -> list[tuple[str, ...]]:
    """Return the secure sums, one a row."""
    return [
        (f"{n:,}".replace(",", " "), str(lost), str(bad), *(f"{value:g}" for value in one.values()))
        for (n, lost, bad), one in grouped(results()["secure_sums"], _SUM).items()
    ]


def model_rows() -> list[tuple[str, str]]:
    """Return the terms of the model, each in its unit."""
    found = results()
    runs, sums = grouped(found["growth"], _RUN), grouped(found["secure_sums"], _SUM)
    said = []
    for what, model, unit, factor in (
        ("start", start_model(runs), "µs", 1e6),
        ("a round", round_model(runs), "µs", 1e3),
        ("memory", memory_model(runs), "kB", 1e3),
        ("a secure sum", sums_model(sums), "µs", 1e6),
    ):
        said += [(f"{what}: {term.name}", f"{short(term.value * factor)} {unit}") for term in model]
    return said


def forecast_rows() -> list[tuple[str, ...]]:
    """Return what the model says of a million clients, beside what was measured, and of 10⁸."""
    found = results()
    runs = grouped(found["growth"], _RUN)
    start, each, memory = start_model(runs), round_model(runs), memory_model(runs)
    measured = found.get("million", {})
    rows: list[tuple[str, ...]] = []
    for what, clients, seen in (("10⁶", 10**6, measured), ("10⁸", 10**8, dict[str, float]())):
        for name, value, key in (
            ("to the first round, s", predicted(start, (1, clients)), "to the end of the first round, s"),
            ("a further round of 1 000, s", predicted(each, (1, clients, 1000, 42_000)) / 1000, "a further round, s"),
            ("memory, MB", predicted(memory, (1, clients, 42_000)), "peak MB after the first round"),
        ):
            rows.append((what, name, short(value), f"{seen[key]:g}" if key in seen else ""))
    return rows
