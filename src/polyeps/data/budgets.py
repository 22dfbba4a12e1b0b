"""Where clients' ε come from: the distributions of papers 000 and 002, and a file of one's own.

Three families carry the same names with different contents, so ours say whose they are: plain names are as
printed in paper 000 (table 1), `pdp-fl-…` as printed in paper 002, `pfa-code-…` as the reference code of 000
draws them: its files are numbered differently from the paper, one standard deviation differs, and a
whole draw is repeated until at least one client is liberal. The second parameter of N(·,·) is a standard
deviation, as in that code.
"""

import csv
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from polyeps.core import Budget
from polyeps.errors import InputError

Array = NDArray[np.float64]
# (generator, clients, stratified) -> ε
Draw = Callable[[np.random.Generator, int, bool], Array]

LOWEST = 0.01  # a draw below it, which no noise could serve usefully, is moved up to it


@dataclass(frozen=True)
class Distribution:
    """How ε is spread over clients; the draw is repeated until some ε exceeds `until_above`."""

    summary: str
    draw: Draw
    until_above: float = -math.inf


@dataclass(frozen=True)
class DrawnBudgets:
    """Positive ε, and how many draws had to be moved up to be so."""

    epsilons: Array
    moved: int

    @property
    def warning(self) -> str | None:
        if not self.moved:
            return None
        return f"{self.moved} of {len(self.epsilons)} drawn budgets were below {LOWEST} and were moved up to it"


def mixture(*parts: tuple[float, float, float]) -> Draw:
    """Normals (weight, mean, deviation); every client picks its part by weight.

    Stratified, as many clients have each part as its weight says, the first part taking what rounding leaves.
    """
    weights, means, deviations = (np.array(column) for column in zip(*parts, strict=True))

    def draw(rng: np.random.Generator, clients: int, stratified: bool) -> Array:
        if stratified:
            counts = np.rint(weights * clients).astype(int)
            counts[0] = clients - counts[1:].sum()
            part = rng.permutation(np.repeat(np.arange(len(parts)), counts))
        else:
            part = rng.choice(len(parts), size=clients, p=weights)
        drawn: Array = rng.normal(means[part], deviations[part])
        return drawn

    return draw


def _mixed(*parts: tuple[float, float, float], until_above: float = -math.inf) -> Distribution:
    summary = " + ".join(f"{weight:g}·N({mean:g}, {deviation:g})" for weight, mean, deviation in parts)
    return Distribution(summary, mixture(*parts), until_above)


DISTRIBUTIONS: dict[str, Distribution] = {
    "uniform": Distribution("U(1, 10)", lambda rng, clients, _: rng.uniform(1, 10, clients)),
    "gauss": Distribution("N(3, 1)", lambda rng, clients, _: rng.normal(3, 1, clients)),
    # Paper 000 names no parameters; these are its code's: (Pareto(1) + 1)·0.5.
    "pareto": Distribution("(Pareto(1) + 1)·0.5", lambda rng, clients, _: (rng.pareto(1, clients) + 1) * 0.5),
    "mixgauss1": _mixed((0.9, 0.1, 0.01), (0.1, 10, 0.1)),
    "mixgauss2": _mixed((0.9, 0.5, 0.01), (0.1, 10, 0.1)),
    "mixgauss3": _mixed((0.9, 1, 0.1), (0.1, 10, 0.1)),
    "mixgauss4": _mixed((0.5, 0.1, 0.01), (0.4, 1, 0.1), (0.1, 10, 1)),
    "pdp-fl-mixgauss1": _mixed((0.9, 0.1, 0.01), (0.1, 10, 0.1)),
    "pdp-fl-mixgauss2": _mixed((0.9, 1, 0.1), (0.1, 10, 0.1)),
    "pdp-fl-mixgauss3": _mixed((0.5, 0.1, 0.01), (0.4, 1, 0.1), (0.1, 10, 0.1)),
    "pfa-code-mixgauss1": _mixed((0.9, 0.5, 0.01), (0.1, 10, 0.1), until_above=1),
    "pfa-code-mixgauss2": _mixed((0.9, 1, 0.1), (0.1, 10, 1), until_above=2),
    "pfa-code-mixgauss3": _mixed((0.9, 0.1, 0.01), (0.1, 10, 0.1), until_above=1),
}


def draw_budgets(name: str, clients: int, rng: np.random.Generator, *, stratified: bool = False) -> DrawnBudgets:
    """Draw one ε per client.

    >>> draw_budgets("uniform", 3, np.random.default_rng(1)).epsilons.round(2)
    array([5.61, 9.55, 2.3 ])
    """
    if name not in DISTRIBUTIONS:
        raise InputError(f"there is no budget distribution {name!r}; choose one of {', '.join(DISTRIBUTIONS)}")
    if clients < 1:
        raise InputError(f"clients must be at least 1, not {clients}")
    distribution = DISTRIBUTIONS[name]
    epsilons = distribution.draw(rng, clients, stratified)
    while not epsilons.max() > distribution.until_above:
        epsilons = distribution.draw(rng, clients, stratified)
    low = epsilons < LOWEST
    return DrawnBudgets(np.where(low, LOWEST, epsilons), int(low.sum()))


@dataclass(frozen=True)
class ClientRow:
    """One client's line in a budgets file."""

    client: str
    budget: Budget
    records: int | None


def read_budgets(path: Path, delta: float | None) -> list[ClientRow]:
    """Read a CSV with the columns client, epsilon and, if wanted, delta and records; all rows or none."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            columns = reader.fieldnames or []
            for needed in ("client", "epsilon"):
                if needed not in columns:
                    raise InputError(f"{path} has no column {needed!r}; its first line must name client and epsilon")
            rows = [_row(path, reader.line_num, line, delta) for line in reader]
    except (OSError, UnicodeDecodeError, csv.Error) as problem:
        raise InputError(f"{path} cannot be read as a CSV file: {problem}") from None
    if not rows:
        raise InputError(f"{path} names no clients")
    names = [row.client for row in rows]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise InputError(f"{path} names client {twice!r} twice; keep one line per client")
    return rows


def _row(path: Path, line_number: int, line: dict[str, str], delta: float | None) -> ClientRow:
    client = (line["client"] or "").strip()
    if not client:
        raise InputError(f"line {line_number} of {path} has no client name")
    own_delta = (line.get("delta") or "").strip()
    if not own_delta and delta is None:
        raise InputError(f"client {client!r} in {path} has no delta; add a delta column or give one for all")
    records = (line.get("records") or "").strip()
    try:
        budget = Budget(float(line["epsilon"]), float(own_delta) if own_delta else float(delta or 0))
        return ClientRow(client, budget, int(records) if records else None)
    except (ValueError, TypeError) as problem:
        raise InputError(f"client {client!r} in {path}: {problem}") from None
