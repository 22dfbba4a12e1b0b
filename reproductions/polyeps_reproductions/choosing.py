"""Learning rates: one grid for all methods, judged on a sixth of the training records, never on test data.

One rate serves all numbers of clients of a row (data, model, partition, budgets), as chosen with 30 of them, and
separately for every method and form, with one seed. It follows from the trials kept in the store, so a second call
does not choose again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from polyeps_reproductions.cells import Cell
from polyeps_reproductions.trials import Store, Trial

GRID = (0.1, 0.05, 0.025, 0.01, 0.005, 0.001)
QUICK_GRID = (0.05, 0.01)
NETWORK_GRID = (0.05, 0.025, 0.01, 0.005)  # networks are dear to train: of the grid, all but its ends
VALIDATION = 1 / 6
SEED = 1


def choice_of(trial: Trial, grid: Iterable[float]) -> tuple[Trial, ...]:
    """The trials that decide a trial's learning rate."""
    cell = tuned(trial.cell)
    linear = cell.model in ("logistic", "linear_svm")
    return tuple(
        replace(trial, cell=cell, seed=SEED, learning_rate=rate, validation=VALIDATION, norms=False)
        for rate in grid
        if linear or rate in NETWORK_GRID
    )


def tuned(cell: Cell) -> Cell:
    """The cell of a row that its learning rates are chosen in: the one with 30 clients, if nothing else is said."""
    return replace(cell, clients=cell.choice_clients) if cell.epsilons is None else cell


def chosen(store: Store, trial: Trial, grid: Iterable[float]) -> Trial | None:
    """The trial with its learning rate, or nothing while some rate of the grid is not tried; ties go to the first."""
    results = [(store.read(one), one.learning_rate) for one in choice_of(trial, grid)]
    if any(result is None for result, _ in results):
        return None
    finals = [(result["final"], rate) for result, rate in results if result is not None]
    best = max(finals, key=lambda pair: pair[0])
    return replace(trial, learning_rate=best[1])
