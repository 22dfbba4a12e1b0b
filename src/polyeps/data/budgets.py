"""Clients' ε: drawn from the distributions of PFA and PDP-FL, or read from a CSV file.

Three families carry the same names with different contents, so ours name their source: plain names are as printed in
PFA's table 1 (Liu et al., "Projected Federated Averaging with Heterogeneous Differential Privacy", VLDB 2022,
https://doi.org/10.14778/3503585.3503592), `pdp-fl-…` as printed for PDP-FL (Liu et al., "Personalized Differentially
Private Federated Learning without Exposing Privacy Budgets", CIKM 2023, https://doi.org/10.1145/3583780.3615247), and
`pfa-code-…` as PFA's reference code draws them: its files are numbered differently from the paper, one standard
deviation differs, and a whole draw is repeated until at least one client has a high ε. The second parameter of N(·,·)
is a standard deviation, as in that code.
"""

import csv
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from polyeps.core import Budget
from polyeps.data.table_readers import delimiter_of
from polyeps.errors import InputError, suggest

Epsilons = NDArray[np.float64]
DrawEpsilons = Callable[[np.random.Generator, int, bool], Epsilons]  # generator, clients, stratified

_NOWHERE = 1 << 30  # the place of a column that a file lacks
LOWEST = 0.01  # a smaller draw, which allows no useful model, is raised to it


@dataclass(frozen=True)
class Distribution:
    """A distribution of ε over clients; the draw is repeated until some ε exceeds `until_above`."""

    summary: str
    draw: DrawEpsilons
    until_above: float = -math.inf


@dataclass(frozen=True)
class DrawnBudgets:
    """Positive ε, and how many draws were raised to `LOWEST`."""

    epsilons: Epsilons
    raised: int

    @property
    def warning(self) -> str | None:
        if not self.raised:
            return None
        return f"{self.raised} of {len(self.epsilons)} drawn budgets were below {LOWEST} and were raised to it"


def _mixture(*parts: tuple[float, float, float]) -> DrawEpsilons:
    """Return a mixture of normals (weight, mean, deviation); every client draws its component by weight.

    Stratified, each component has as many clients as its weight says; the first one takes the rounding.
    """
    weights, means, deviations = (np.array(column) for column in zip(*parts, strict=True))

    def draw(rng: np.random.Generator, clients: int, stratified: bool) -> Epsilons:
        if stratified:
            counts = np.rint(weights * clients).astype(int)
            counts[0] = clients - counts[1:].sum()
            part = rng.permutation(np.repeat(np.arange(len(parts)), counts))
        else:
            part = rng.choice(len(parts), size=clients, p=weights)
        drawn: Epsilons = rng.normal(means[part], deviations[part])
        return drawn

    return draw


def _mixed(*parts: tuple[float, float, float], until_above: float = -math.inf) -> Distribution:
    summary = " + ".join(f"{weight:g}·N({mean:g}, {deviation:g})" for weight, mean, deviation in parts)
    return Distribution(summary, _mixture(*parts), until_above)


DISTRIBUTIONS: dict[str, Distribution] = {
    "uniform": Distribution("U(1, 10)", lambda rng, clients, _: rng.uniform(1, 10, clients)),
    "gauss": Distribution("N(3, 1)", lambda rng, clients, _: rng.normal(3, 1, clients)),
    # The paper gives no parameters; these are its code's: (Pareto(1) + 1)·0.5.
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
        raise InputError(f"there is no budget distribution {name!r}; {suggest(name, DISTRIBUTIONS)}")
    if clients < 1:
        raise InputError(f"clients must be at least 1, not {clients}")
    distribution = DISTRIBUTIONS[name]
    epsilons = distribution.draw(rng, clients, stratified)
    while not epsilons.max() > distribution.until_above:
        epsilons = distribution.draw(rng, clients, stratified)
    low = epsilons < LOWEST
    return DrawnBudgets(np.where(low, LOWEST, epsilons), int(low.sum()))


@dataclass(frozen=True, slots=True)
class BudgetRow:
    """A client's line in a budgets file."""

    client: str
    budget: Budget
    records: int | None
    own_delta: bool = True  # whether the line has a delta; the budget has that of all clients otherwise


def read_budgets(path: Path, delta: float | None) -> list[BudgetRow]:
    """Read a CSV file with the columns client, epsilon and, optionally, delta (else `delta`) and records."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            first = delimiter_of(file.readline())
            file.seek(0)
            reader = csv.reader(file, delimiter=first)
            header = {name.strip(): place for place, name in enumerate(next(reader, []))}
            for needed in ("client", "epsilon"):
                if needed not in header:
                    raise InputError(f"{path} has no column {needed!r}; its first line must name client and epsilon")
            places = [header.get(name, _NOWHERE) for name in ("client", "epsilon", "delta", "records")]
            rows = []
            for line in reader:
                if line:
                    cells = [line[place].strip() if place < len(line) else "" for place in places]
                    rows.append(_row(path, reader.line_num, cells, delta))
    except (OSError, UnicodeDecodeError, csv.Error) as problem:
        raise InputError(f"{path} cannot be read as a CSV file: {problem}") from None
    if not rows:
        raise InputError(f"{path} names no clients; add a line for each")
    name, times = Counter(row.client for row in rows).most_common(1)[0]
    if times > 1:
        raise InputError(f"{path} names client {name!r} twice; keep one line per client")
    return rows


def _row(path: Path, line: int, cells: Sequence[str], delta: float | None) -> BudgetRow:
    client, epsilon, own, records = cells
    if not client:
        raise InputError(f"line {line} of {path} has no client name; add it")
    if not own and delta is None:
        raise InputError(f"client {client!r} in {path} has no delta; add a delta column or give one for all")
    try:
        chosen = _number("delta", own) if own else float(delta or 0)
        return BudgetRow(
            client, Budget(_number("epsilon", epsilon), chosen), int(records) if records else None, bool(own)
        )
    except (ValueError, TypeError) as problem:
        raise InputError(f"client {client!r} in {path}: {problem}") from None


def _number(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{name} is {text!r}; it must be a number, with a point for decimals") from None
