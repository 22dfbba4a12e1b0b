"""A figure of a paper as cells and methods, with the numbers it prints; and which trials it takes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from polyeps.data import public_loaders
from polyeps.errors import DataError
from polyeps_reproductions.cells import FORMS, METHODS, Cell, Method
from polyeps_reproductions.trials import Trial

Axis = Literal["clients", "budgets", "method"]
Numbers = Mapping[tuple[Cell, str], float]  # by cell and title of the method
QUICK_CLIENTS, QUICK_ROUNDS, QUICK_STEPS, QUICK_CHOICE = 20, 30, 20, 5
QUICK_WITHOUT = ("gauss", "pareto", "uniform", "mixgauss2")  # budgets much like others that stay


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
    judged: bool = True  # whether to say how near the values come to the paper's
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


def quick(figure: Figure) -> Figure:
    """The figure in small: MNIST, logistic regression, 20 clients, 30 rounds of 20 steps.

    The paper's numbers are shown where it has the same cell, but a short training is not judged by them.
    """
    numbers: dict[tuple[Cell, str], float] = {}
    cells: list[Cell] = []
    for cell in figure.cells:
        if cell.data in ("mnist", "digits") and cell.budgets not in QUICK_WITHOUT:
            small = in_small(replace(cell, model="logistic"))
            cells.append(small)
            if cell.model == small.model and cell.clients == small.clients:
                numbers |= {(small, title): value for (of, title), value in figure.paper.items() if of == cell}
    methods = tuple(method for method in figure.methods if dict(method.options).get("rank", 1) <= 10)
    few = tuple(dict.fromkeys(cells))
    title = f"{figure.title}; in small, 20 clients at most"
    return replace(figure, title=title, cells=few, methods=methods, paper=numbers, judged=False)


def in_small(cell: Cell) -> Cell:
    """A cell that takes seconds."""
    clients = min(cell.clients, QUICK_CLIENTS)
    return replace(
        cell,
        clients=clients,
        choice_clients=clients,
        choice_rounds=QUICK_CHOICE,
        rounds=min(cell.rounds, QUICK_ROUNDS),
        local_steps=min(cell.local_steps, QUICK_STEPS),
    )


def without_missing_data(figure: Figure) -> tuple[Figure, list[str]]:
    """The cells whose records are on this machine, and a sentence for each data set that is not."""
    missing = {}
    for name in dict.fromkeys(cell.data for cell in figure.cells):
        try:
            public_loaders.load_dataset(name, download=None)
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
