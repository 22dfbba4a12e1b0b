"""Who chooses which level of a menu of privacy levels, in simulation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from polyeps.errors import InputError


class Level(Protocol):
    """An entry of a menu."""

    @property
    def name(self) -> str: ...

    @property
    def epsilon(self) -> float | None: ...

    @property
    def share(self) -> float | None: ...

    @property
    def labels(self) -> tuple[int, ...] | None: ...


def choose(menu: Sequence[Level], held: NDArray[np.int64], generator: np.random.Generator) -> list[int]:
    """The level each client chooses, as places in the menu; held (n, classes) are its records of each class.

    Private is the default: whoever is not drawn for a level has the strictest one.
    """
    default = strictest(menu)
    chosen = np.full(len(held), default)
    for place, level in enumerate(menu):
        if place == default:
            continue
        if level.share is None:
            raise InputError(f"budgets.levels: say which share of the clients chooses {level.name!r}")
        free = chosen == default
        if level.labels is not None:
            if not all(0 <= label < held.shape[1] for label in level.labels):
                raise InputError(f"budgets.levels, {level.name!r}: labels are numbers from 0 to {held.shape[1] - 1}")
            free &= held[:, list(level.labels)].any(axis=1)
        wanted, candidates = round(level.share * len(held)), np.flatnonzero(free)
        if wanted > len(candidates):
            raise InputError(
                f"budgets.levels: {wanted} clients are to choose {level.name!r}, but only {len(candidates)} can; "
                "make its share smaller"
            )
        chosen[generator.choice(candidates, wanted, replace=False)] = place
    return [int(place) for place in chosen]


def strictest(menu: Sequence[Level]) -> int:
    """The place of the level that promises most; a menu without any promise is refused."""
    if len({level.name for level in menu}) < len(menu):
        raise InputError("budgets.levels: two levels have the same name; give each its own")
    promised = {level.epsilon: place for place, level in enumerate(menu) if level.epsilon is not None}
    if len(promised) + sum(level.epsilon is None for level in menu) < len(menu):
        raise InputError("budgets.levels: two levels have the same epsilon; one is enough")
    if not promised:
        raise InputError("budgets.levels guarantees nothing: give a level an epsilon, which is then the default")
    default = promised[min(promised)]
    if menu[default].share is not None:
        raise InputError(
            f"budgets.levels: {menu[default].name!r} is the strictest level, for all clients that choose no other; "
            "leave out its share"
        )
    return default
