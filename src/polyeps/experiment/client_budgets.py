"""The clients' budgets: as given by name or in order, drawn, or chosen among privacy levels.

A δ that nobody gives is 1e-5, as in the papers, and for a client of one's own table with over 10 000 units (persons, or
records) the largest power of ten that is at most 1/(10 · units): well below 1/units, as δ must be, and in steps so
coarse that it tells no more than the order of magnitude of their number. Where that number is hidden (training.rate)
it is 1e-5 for all: one unit more or less must not change it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import inf
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from polyeps.core import Budget
from polyeps.data.budgets import draw_budgets, read_budgets
from polyeps.data.dataset import Dataset
from polyeps.data.partition import Partition, unit_sizes
from polyeps.data.schema import toml_key
from polyeps.data.schema_files import nearest
from polyeps.errors import InputError
from polyeps.experiment import config
from polyeps.experiment.seeds import generator

_Levels = Sequence[config.LevelSettings]
_Given = TypeVar("_Given")
USUAL_DELTA = 1e-5


def clients_named(budgets: config.BudgetSettings) -> int | None:
    """Return the number of clients that budgets are given for, if it is known."""
    if budgets.epsilons is not None:
        return len(budgets.epsilons)
    if isinstance(budgets.epsilon, Mapping):
        return len(budgets.epsilon)
    return len(read_budgets(budgets.file, USUAL_DELTA)) if budgets.file is not None else None


def usual_delta(units: int) -> float:
    """Return the δ of a client of one's own table, by its number of persons or records.

    >>> usual_delta(70), usual_delta(10_000), usual_delta(10_001), usual_delta(1_000_000)
    (1e-05, 1e-05, 1e-06, 1e-07)
    """
    zeros = len(str(units - 1)) if units > 1 else 0  # 10^zeros is the least power of ten that is no smaller
    return min(USUAL_DELTA, float(f"1e-{zeros + 1}"))


def deltas_of(
    wanted: config.BudgetSettings, partition: Partition, dataset: Dataset, *, hidden: bool = False
) -> list[float]:
    """Return every client's δ: as given for it or for all clients, else the usual one.

    `hidden`: nothing may depend on the number of a client's units.
    """
    if isinstance(wanted.delta, float):
        return [wanted.delta] * len(partition.ids)
    given = wanted.delta or {}
    _check_known("budgets.delta", given, partition.ids)
    known = dataset.own and not hidden
    units = unit_sizes(dataset, partition).tolist() if known else [1] * len(partition.ids)
    return [given.get(client, usual_delta(held)) for client, held in zip(partition.ids, units, strict=True)]


def budgets_of(
    wanted: config.BudgetSettings, partition: Partition, dataset: Dataset, seed: int, *, hidden: bool = False
) -> tuple[tuple[Budget | None, ...], tuple[str, ...] | None]:
    """Return every client's budget and, where there are privacy levels, the name of its level.

    `hidden`: nothing may depend on the number of a client's units.
    """
    kinds = ("distribution", "file", "epsilons", "epsilon", "levels")
    if sum(getattr(wanted, name) is not None for name in kinds) != 1:
        raise InputError("budgets: give exactly one of distribution, file, epsilons, epsilon and levels")
    deltas = deltas_of(wanted, partition, dataset, hidden=hidden)
    if wanted.levels is None:
        return _given_budgets(wanted, partition, dataset, deltas, seed), None
    if dataset.target != "class":
        if any(level.labels for level in wanted.levels):
            raise InputError("budgets.levels: labels are for classes, which are not what is predicted; leave them out")
        held = np.zeros((len(partition.ids), len(dataset.classes)), np.int64)
    else:
        held = partition.counts(dataset.labels, len(dataset.classes))
    # The purpose keeps its first name, on which the draw depends.
    chosen = [wanted.levels[place] for place in choose_levels(wanted.levels, held, generator(seed, "menu"))]
    budgets = [
        None if level.epsilon is None else Budget(level.epsilon, delta)
        for level, delta in zip(chosen, deltas, strict=True)
    ]
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


def _given_budgets(
    wanted: config.BudgetSettings, partition: Partition, dataset: Dataset, deltas: Sequence[float], seed: int
) -> tuple[Budget, ...]:
    clients = partition.ids
    if wanted.file is not None:
        usual = wanted.delta if isinstance(wanted.delta, float) else USUAL_DELTA
        rows = {row.client: row for row in read_budgets(wanted.file, usual)}
        found = _by_name(str(wanted.file), rows, clients, "add a line for it")
        return tuple(
            row.budget if row.own_delta or row.budget.delta == delta else Budget(row.budget.epsilon, delta)
            for row, delta in zip(found, deltas, strict=True)
        )
    if wanted.distribution is not None:
        drawn = draw_budgets(
            wanted.distribution, len(clients), generator(seed, "budgets"), stratified=wanted.stratified
        ).epsilons.tolist()
    elif isinstance(wanted.epsilon, Mapping):
        drawn = _by_name("budgets.epsilon", wanted.epsilon, clients, "add one")
    elif wanted.epsilon is not None:
        drawn = [wanted.epsilon] * len(clients)
    else:
        assert wanted.epsilons is not None
        drawn = list(wanted.epsilons)
        if dataset.own and set(clients) <= set(dataset.group_names):
            named = ", ".join(f"{toml_key(client)} = ..." for client in clients[:3])
            raise InputError(
                f"budgets.epsilons is a list, which does not say whose each number is, but the clients of "
                f"{dataset.name} have names; write budgets.epsilon = {{ {named} }}"
            )
        if len(drawn) != len(clients):
            raise InputError(
                f"budgets.epsilons names {len(drawn)} budgets for {len(clients)} clients; list one for each"
            )
    try:
        return tuple(Budget(epsilon, delta) for epsilon, delta in zip(drawn, deltas, strict=True))
    except InputError as problem:
        client = next(client for client, epsilon in zip(clients, drawn, strict=True) if not 0 < epsilon < inf)
        raise InputError(f"budgets.epsilons, client {client!r}: {problem}") from None


def _by_name(place: str, given: Mapping[str, _Given], clients: Sequence[str], remedy: str) -> list[_Given]:
    """Return what is given for each client; refuse clients without it, and names that no client has."""
    _check_known(place, given, clients)
    if missing := [client for client in clients if client not in given]:
        raise InputError(f"client {missing[0]!r} has no budget in {place}; {remedy}")
    return [given[client] for client in clients]


def _check_known(place: str, given: Iterable[str], clients: Sequence[str]) -> None:
    known = set(clients)
    if unknown := [name for name in given if name not in known]:
        free = [client for client in clients if client not in set(given)]
        hint = nearest(unknown[0], free or clients[:10])
        raise InputError(f"{place} names {unknown[0]!r}, but no client has that name; {hint}")
