"""A figure of a paper as cells and methods, with the numbers it prints; and which trials it takes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from polyeps.errors import DataError
from polyeps.population import datasets
from polyeps.studies.cells import FORMS, METHODS, Cell, Method
from polyeps.studies.trials import Trial

Axis = Literal["clients", "budgets", "method"]
Numbers = Mapping[tuple[Cell, str], float]  # by cell and title of the method
QUICK_CLIENTS, QUICK_ROUNDS, QUICK_STEPS = 20, 30, 20


@dataclass(frozen=True)
class Figure:
    """What a figure shows: cells by methods, along an axis, and the paper's own values where we have them."""

    study: str
    number: str
    title: str
    cells: tuple[Cell, ...]
    methods: tuple[Method, ...] = METHODS
    axis: Axis = "clients"
    paper: Numbers = field(default_factory=dict, hash=False, compare=False)
    shows: Literal["accuracy", "traffic"] = "accuracy"
    note: str = ""

    @property
    def name(self) -> str:
        return f"{self.study}-figure-{self.number}"


def trials_of(figure: Figure, seeds: int) -> Iterator[Trial]:
    """All trials of a figure; their learning rates are still open."""
    for cell in figure.cells:
        for seed in range(1, seeds + 1):
            for form in FORMS:
                for method in figure.methods:
                    yield Trial(cell, method, form, seed, learning_rate=0.0)


def quick(figure: Figure, networks: bool = False) -> Figure:
    """The figure in small: 20 clients, 30 rounds of 20 steps, logistic regression unless networks are wanted.

    The paper's numbers are kept where the cell has 20 clients in the paper too, though a short training cannot
    reach them.
    """
    small: dict[Cell, Cell] = {}
    for cell in sorted(figure.cells, key=lambda one: one.clients != QUICK_CLIENTS):
        if cell.data not in ("mnist", "digits") or (cell.model != "logistic" and not networks):
            continue
        changed = replace(cell, clients=min(cell.clients, QUICK_CLIENTS), rounds=QUICK_ROUNDS, local_steps=QUICK_STEPS)
        if changed not in small.values():
            small[cell] = changed
    numbers = {(small[cell], title): value for (cell, title), value in figure.paper.items() if cell in small}
    cells = tuple(small.values())
    methods = tuple(method for method in figure.methods if dict(method.options).get("rank", 1) <= 50)
    return replace(figure, cells=cells, methods=methods, paper=numbers)


def without_missing_data(figure: Figure) -> tuple[Figure, list[str]]:
    """The cells whose records are on this machine, and a sentence for each data set that is not."""
    missing = {}
    for name in dict.fromkeys(cell.data for cell in figure.cells):
        try:
            datasets.load(name, download=None)
        except DataError as problem:
            missing[name] = f"cells on {name} are skipped: {problem}"
    cells = tuple(cell for cell in figure.cells if cell.data not in missing)
    return replace(figure, cells=cells), list(missing.values())


def numbers_of(cells: Sequence[Cell], readings: Sequence[str]) -> dict[tuple[Cell, str], float]:
    """Readings like ".82/.82/.58/…", one per cell, in the order of the methods."""
    return {
        (cell, method.title): float(value)
        for cell, reading in zip(cells, readings, strict=True)
        for method, value in zip(METHODS, reading.split("/"), strict=False)
    }
