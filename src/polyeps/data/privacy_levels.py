"""Privacy levels that clients choose from, and the draw of their choices in simulation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from polyeps.errors import InputError


class PrivacyLevel(Protocol):
    """A level: its name, its ε, the share of clients that choose it, and the labels these clients hold."""

    @property
    def name(self) -> str: ...

    @property
    def epsilon(self) -> float | None: ...

    @property
    def share(self) -> float | None: ...

    @property
    def labels(self) -> tuple[int, ...] | None: ...


def choose_levels(levels: Sequence[PrivacyLevel], held: NDArray[np.int64], generator: np.random.Generator) -> list[int]:
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
        chosen[generator.choice(candidates, count, replace=False)] = place
    return [int(place) for place in chosen]


def strictest_level(levels: Sequence[PrivacyLevel]) -> int:
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
