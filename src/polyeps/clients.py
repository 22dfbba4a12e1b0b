"""The private side of n clients, stacked: records, noise, ledger, and what they keep from one task to the next."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from polyeps.core import Algorithm, Records, Replies, Streams, Task, check_name
from polyeps.errors import InputError, TaskRefused
from polyeps.ledger import Ledger


@dataclass(frozen=True)
class Priced:
    """Something clients pay for: an action, or a round."""

    name: str
    price: Callable[[float, int], Any]  # (scale, row) -> DpEvent
    alike: bool  # whether clients with equal scales pay alike


class RoundMemory:
    """What clients pass on from one action of a round to the next, and no longer: updates, for example.

    It is kept apart from memory, which simulations write down after every round: of thousands of clients that would be
    tens of gigabytes, though only a round's cohort has any.
    """

    def __init__(self) -> None:
        self.of: tuple[str, int] = ("", -1)  # run and round
        self.rows: dict[str, dict[str, tuple[Tensor, int]]] = {}  # by name and client: a tensor, and the row of it

    def begin(self, run: str, round: int) -> None:
        """Forget everything of another round."""
        if self.of != (run, round):
            self.of, self.rows = (run, round), {}

    def keep(self, name: str, clients: Sequence[str], kept: Tensor) -> None:
        """Keep row i of a tensor for clients[i], in the round that was begun."""
        self.rows.setdefault(name, {}).update({client: (kept, row) for row, client in enumerate(clients)})

    def has(self, task: Task, names: Iterable[str], client: str) -> bool:
        """Say whether a client has all of these from an earlier action of the task's round."""
        return self.of == (task.run, task.round) and all(client in self.rows.get(name, ()) for name in names)

    def take(self, name: str, clients: Sequence[str]) -> Tensor:
        """Return the rows of some clients, and forget them."""
        found = [self.rows[name].pop(client) for client in clients]
        together = found[0][0]
        if len(found) == len(together) and all(kept is together and row == i for i, (kept, row) in enumerate(found)):
            return together
        return torch.stack([kept[row] for kept, row in found])


class Keeper(Protocol):
    """Where a deployed client keeps what must survive its process."""

    def locked(self) -> AbstractContextManager[None]:
        """Hold everything for one task: two processes of a client must not answer at the same time."""

    def recall(self, cohort: Clients, task: Task) -> Replies | None:
        """Give the client back its memory of a run, and the reply it gave to this very task before, if any."""

    def keep(self, cohort: Clients, task: Task, replies: Replies) -> None:
        """Write down memory and reply, on the disk when this returns."""


@dataclass
class Clients:
    """The private side of n clients, stacked; none of it is ever sent."""

    ids: tuple[str, ...]
    data: Records
    scale: NDArray[np.float64]  # noise multipliers (n,)
    streams: Callable[[Sequence[str], int], Streams]  # (ids, round) -> this round's random numbers
    repeatable: bool  # whether the streams give the same numbers when asked again: in simulation only
    ledger: Ledger | None  # None: nobody here has a budget, and nothing is promised
    declared: Mapping[str, float] | None = None  # the ε clients say they have; None: what their ledgers say
    groups: Mapping[str, str] = field(default_factory=dict)  # what each chose from a menu, where there is one
    open: frozenset[str] = frozenset()  # clients that chose to be promised nothing: they have no account
    rows: NDArray[np.int64] | None = None  # which clients of the population these are; None: all, in order
    memory: dict[str, Tensor] = field(default_factory=dict)  # (n, ...) each
    changed: dict[str, set[int]] = field(default_factory=dict)  # of that, the places written to since it was emptied
    passed_on: RoundMemory = field(default_factory=RoundMemory)  # from one action of a round to the next
    keeper: Keeper | None = None  # where a deployed client keeps memory and replies; None: in this process alone
    run: str | None = None  # the one run these clients agreed to; None: any
    _place: dict[str, int] = field(init=False, repr=False)
    _events: dict[tuple[str, float], Any] = field(init=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._place = {client: place for place, client in enumerate(self.ids)}
        if len(self._place) != len(self.ids):
            raise InputError("two clients of the cohort have the same id; give each client its own")
        for client in self.ids:
            check_name("a client's id", client)
        if self.keeper is not None and len(self.ids) != 1:
            raise InputError(f"a keeper is one client's own, and this cohort has {len(self.ids)}; give each its own")
        if self.rows is None:
            self.rows = np.arange(len(self.ids))

    def places(self, ids: Iterable[str]) -> NDArray[np.int64]:
        """Where clients stand in this cohort."""
        try:
            return np.array([self._place[client] for client in ids], dtype=np.int64)
        except KeyError as unknown:
            known = f"client {unknown.args[0]!r} does not belong to this federation; enrol it first"
            raise TaskRefused(known) from None

    def event(self, priced: Priced, place: int) -> Any:
        """What something costs a client; settled by its scale before any data is touched."""
        assert self.rows is not None
        key = (priced.name, float(self.scale[place]) if priced.alike else place)
        if key not in self._events:
            self._events[key] = priced.price(float(self.scale[place]), int(self.rows[place]))
        return self._events[key]

    def make_room(self, algorithm: Algorithm) -> None:
        """Begin with zeros what an algorithm keeps and these clients do not have yet."""
        for name, shape in algorithm.keeps.items():
            if name not in self.memory:
                self.memory[name] = torch.zeros(len(self.ids), *shape, device=self.data.features.device)

    def remember(self, name: str, places: NDArray[np.int64], kept: Tensor) -> None:
        """Keep something for some clients."""
        self.memory[name][torch.from_numpy(places)] = kept
        self.changed.setdefault(name, set()).update(places.tolist())

    def alone(self, client: str) -> Clients:
        """One client as a cohort of its own, on the same data, memory and ledger."""
        (place,) = self.places([client])
        assert self.rows is not None
        return Clients(
            ids=(client,),
            data=self.data.select([int(place)]),
            scale=self.scale[place : place + 1],
            streams=self.streams,
            repeatable=self.repeatable,
            ledger=self.ledger,
            declared=self.declared,
            groups=self.groups,
            open=self.open,
            rows=self.rows[place : place + 1],
            memory={name: kept[place : place + 1] for name, kept in self.memory.items()},
            passed_on=self.passed_on,
            run=self.run,
        )
