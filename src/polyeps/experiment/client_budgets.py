"""The clients' budgets: as given by name or in order, drawn, or chosen among privacy levels."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import numpy as np
from numpy.typing import NDArray

from polyeps.core import Budget
from polyeps.data.budgets import draw_budgets, read_budgets
from polyeps.data.dataset import Dataset
from polyeps.data.partition import Partition
from polyeps.errors import InputError
from polyeps.experiment import config
from polyeps.experiment.seeds import generator

_Levels = Sequence[config.LevelSettings]


def clients_named(budgets: config.BudgetSettings) -> int | None:
    if budgets.epsilons is not None:
        return len(budgets.epsilons)
    return len(read_budgets(budgets.file, budgets.delta)) if budgets.file is not None else None


def budgets_of(
    wanted: config.BudgetSettings, partition: Partition, dataset: Dataset, seed: int
) -> tuple[tuple[Budget | None, ...], tuple[str, ...] | None]:
    """Return every client's budget and, where there are privacy levels, the name of its level."""
    kinds = ("distribution", "file", "epsilons", "epsilon", "levels")
    if sum(getattr(wanted, name) is not None for name in kinds) != 1:
        raise InputError("budgets: give exactly one of distribution, file, epsilons, epsilon and levels")
    if wanted.levels is None:
        return _given_budgets(wanted, partition, seed), None
    held = partition.counts(dataset.labels, len(dataset.classes))
    # The purpose keeps its first name, on which the draw depends.
    chosen = [wanted.levels[place] for place in choose_levels(wanted.levels, held, generator(seed, "menu"))]
    budgets = [None if level.epsilon is None else Budget(level.epsilon, wanted.delta) for level in chosen]
    return tuple(budgets), tuple(level.name for level in chosen)


def choose_levels(levels: _Levels, held: NDArray[np.int64], rng: np.random.Generator) -> list[int]:
    """Draw the level each client chooses, as its place in `levels`; held (n, classes) counts records of each class.

    The strictest level is the default: clients that are not drawn for another one have it.
    """
    default = strictest_level(levels)
    chosen = np.full(len(held), default)
    for place, level in enumerate(levels):
        if place == default:
            continue
        if level.share is None:
            raise InputError(f"budgets.levels: say which share of the clients chooses {level.name!r}")
        free = chosen == default
        if level.labels is not None:
            if not all(0 <= label < held.shape[1] for label in level.labels):
                raise InputError(f"budgets.levels, {level.name!r}: labels are numbers from 0 to {held.shape[1] - 1}")
            free &= held[:, list(level.labels)].any(axis=1)
        count, candidates = round(level.share * len(held)), np.flatnonzero(free)
        if count > len(candidates):
            raise InputError(
                f"budgets.levels: {count} clients are to choose {level.name!r}, but only {len(candidates)} can; "
                "make its share smaller"
            )
        chosen[rng.choice(candidates, count, replace=False)] = place
    return [int(place) for place in chosen]


def strictest_level(levels: _Levels) -> int:
    """Return the place of the level with the smallest ε; levels without any guarantee are refused."""
    if len({level.name for level in levels}) < len(levels):
        raise InputError("budgets.levels: two levels have the same name; give each its own")
    guaranteed = {level.epsilon: place for place, level in enumerate(levels) if level.epsilon is not None}
    if len(guaranteed) + sum(level.epsilon is None for level in levels) < len(levels):
        raise InputError("budgets.levels: two levels have the same epsilon; one is enough")
    if not guaranteed:
        raise InputError("budgets.levels guarantees nothing: give a level an epsilon, which is then the default")
    default = guaranteed[min(guaranteed)]
    if levels[default].share is not None:
        raise InputError(
            f"budgets.levels: {levels[default].name!r} is the strictest level, for all clients that choose no other; "
            "leave out its share"
        )
    return default


def _given_budgets(wanted: config.BudgetSettings, partition: Partition, seed: int) -> tuple[Budget, ...]:
    clients = partition.ids
    if wanted.file is not None:
        named = {row.client: row.budget for row in read_budgets(wanted.file, wanted.delta)}
        if missing := [client for client in clients if client not in named]:
            raise InputError(f"client {missing[0]!r} has no budget in {wanted.file}; add a line for it")
        return tuple(named[client] for client in clients)
    if wanted.distribution is not None:
        drawn = draw_budgets(
            wanted.distribution, len(clients), generator(seed, "budgets"), stratified=wanted.stratified
        ).epsilons.tolist()
    elif wanted.epsilon is not None:
        drawn = [wanted.epsilon] * len(clients)
    else:
        assert wanted.epsilons is not None
        drawn = list(wanted.epsilons)
        if len(drawn) != len(clients):
            raise InputError(
                f"budgets.epsilons names {len(drawn)} budgets for {len(clients)} clients; list one for each"
            )
    try:
        return tuple(Budget(epsilon, wanted.delta) for epsilon in drawn)
    except InputError as problem:
        client = next(client for client, epsilon in zip(clients, drawn, strict=True) if not 0 < epsilon < inf)
        raise InputError(f"budgets.epsilons, client {client!r}: {problem}") from None
