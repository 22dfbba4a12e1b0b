"""The private side of n clients, stacked: records, noise, ledger, and what they keep from one task to the next."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from polyeps.core import Algorithm, Payload, PerClient, Records, Replies, Streams, Task, Work, check_name
from polyeps.errors import InputError, TaskRefused
from polyeps.ledger import Ledger
from polyeps.ledger.account import Charge


class Priced(NamedTuple):
    """Something clients pay for: an action, or a round."""

    name: str
    price: Callable[..., Any]  # (noise multiplier, settings) -> DpEvent
    by_settings: bool = True  # whether it takes settings; the price of a round does not


CohortCharges = tuple[tuple[Charge, ...], tuple[list[int], ...]]  # charges, and the places of the clients that pay each


class RoundMemory:
    """What clients keep from one action of a round to the next, and no longer: updates, for example.

    It is separate from memory, which simulations write to disk after every round. Only the cohort of a round has any;
    written for thousands of clients it would be tens of gigabytes.
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
        """Return whether a client has all of these from an earlier action of the task's round."""
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
        """Lock everything for one task: two processes of a client must not answer at the same time."""

    def recall(self, clients: Clients, task: Task) -> Replies | None:
        """Restore the client's memory of a run, and return its earlier reply to this very task, if any."""

    def begin(self, task: Task) -> str:
        """Return the name of the attempt at a task, on disk: the same until a reply is kept, then another."""

    def keep(self, clients: Clients, task: Task, replies: Replies) -> None:
        """Write memory and reply to the disk before returning."""

    def forget(self, task: Task) -> None:
        """Keep of a reply only that it was given: what was in it is kept elsewhere."""


class Workers(Protocol):
    """Who does what clients have paid for, elsewhere than in this process."""

    def work(self, task: Task, ids: Sequence[str], places: NDArray[np.int64], work: Work) -> tuple[Payload, Payload]:
        """Return replies and memory, a row per client; of a task to be summed, rows with the same sum will do."""


def rows_alike(columns: Iterable[NDArray[Any]], rows: int) -> list[NDArray[np.int64]]:
    """Return the rows that are equal in all columns, (rows,) each, together."""
    group = np.zeros(rows, dtype=np.int64)
    for column in columns:
        if len(column) and (column == column[0]).all():
            continue
        values, inside = np.unique(column, return_inverse=True)
        group = np.unique(group * len(values) + inside, return_inverse=True)[1]
    ordered = np.argsort(group, kind="stable")
    return np.split(ordered, np.flatnonzero(np.diff(group[ordered])) + 1) if rows else []


def check_units(records: Records) -> None:
    """Refuse persons that share a record: it would count for each of them, and one clip would not bound it."""
    if records.units is None:
        return
    spans = records.units[records.units[:, 0] < records.units[:, 1]]
    spans = spans[spans[:, 0].argsort()]
    outside = len(spans) and (int(spans[0, 0]) < 0 or int(spans[:, 1].max()) > len(records.labels))
    if outside or bool((spans[1:, 0] < spans[:-1, 1]).any()) or bool((records.units[:, 0] > records.units[:, 1]).any()):
        raise InputError("the records of two persons overlap, or are not there; give every person rows of its own")


@dataclass
class Clients:
    """The private side of n clients, stacked; none of it is ever sent."""

    ids: tuple[str, ...]
    data: Records
    noise_multiplier: NDArray[np.float64]  # (n,)
    streams: Callable[[Sequence[str], int], Streams]  # (ids, round) -> this round's random numbers
    repeatable: bool  # whether the streams give the same numbers when asked again: in simulation only
    ledger: Ledger | None  # None: no client has a budget, and none has a guarantee
    settings: PerClient = field(default_factory=dict)  # each client's own public numbers, (n,) each
    groups: tuple[str, ...] | None = None  # the privacy group of each client, where there are groups
    guaranteed: NDArray[np.bool_] = field(default_factory=lambda: np.array(True))  # (n,) False: chose no guarantee
    declared: NDArray[np.float64] | None = None  # (n,) the ε clients disclose; None: that of their accounts
    memory: dict[str, Tensor] = field(default_factory=dict)  # (n, ...) each
    changed: dict[str, set[int]] = field(default_factory=dict)  # places of memory written to since this was emptied
    passed_on: RoundMemory = field(default_factory=RoundMemory)  # from one action of a round to the next
    keeper: Keeper | None = None  # where a deployed client keeps memory and replies; None: in this process alone
    run: str | None = None  # the one run these clients agreed to; None: any
    workers: Workers | None = None  # None: this process does the work
    asked: tuple[tuple[Any, ...], CohortCharges] | None = None  # the last charges, and all that they follow from
    reservation: str = ""  # the run whose reserved price pays for everything; "": each charge is met by the budget
    _place: dict[str, int] = field(init=False, repr=False)
    _events: dict[tuple[Any, ...], Any] = field(init=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._place = {client: place for place, client in enumerate(self.ids)}
        if len(self._place) != len(self.ids):
            raise InputError("two clients have the same id; give each client its own")
        check_name("a client's id", *self.ids)
        if self.keeper is not None and len(self.ids) != 1:
            raise InputError(f"a keeper belongs to one client, and these are {len(self.ids)}; give each its own")
        check_units(self.data)
        # The number of records is read from the data, so that no price can assume another one.
        self.settings = {**self.settings, "records": self.data.counts}
        if not self.guaranteed.ndim:
            self.guaranteed = np.full(len(self.ids), self.guaranteed)
        stacked = {**self.settings, "noise_multiplier": self.noise_multiplier, "guaranteed": self.guaranteed}
        for name, values in stacked.items():
            if np.shape(values) != (len(self.ids),):
                raise InputError(f"{name} must be one number for each of {len(self.ids)} clients, not {values!r:.80}")

    def places(self, ids: Iterable[str]) -> NDArray[np.int64]:
        """Return the rows of some clients."""
        try:
            return np.array([self._place[client] for client in ids], dtype=np.int64)
        except KeyError as unknown:
            known = f"client {unknown.args[0]!r} does not belong to this federation; enrol it first"
            raise TaskRefused(known) from None

    def settings_of(self, places: slice | NDArray[np.int64]) -> dict[str, NDArray[Any]]:
        """Return the settings of some clients."""
        return {name: np.asarray(values)[places] for name, values in self.settings.items()}

    def by_event(self, priced: Priced, places: NDArray[np.int64]) -> dict[Any, list[int]]:
        """Return clients with a guarantee by what something costs them.

        The cost depends on a client's noise multiplier and settings alone, so it is known before any data is touched.
        Clients that are equal in both share one price, which is computed once.
        """
        places = places[self.guaranteed[places]]
        settings = self.settings_of(places) if priced.by_settings else {}
        multipliers = self.noise_multiplier[places]
        together: dict[Any, list[int]] = {}
        for sharing in rows_alike((multipliers, *settings.values()), len(places)):
            first = sharing[0]
            own = {name: float(values[first]) for name, values in settings.items()}
            key = (priced.price, float(multipliers[first]), *own.values())
            if key not in self._events:
                self._events[key] = priced.price(float(multipliers[first]), *([own] if priced.by_settings else []))
            together.setdefault(self._events[key], []).extend(places[sharing].tolist())
        return together

    def make_room(self, algorithm: Algorithm) -> None:
        """Begin with zeros what an algorithm keeps and these clients do not have yet."""
        for name, shape in algorithm.keeps.items():
            if name not in self.memory:
                self.memory[name] = torch.zeros(len(self.ids), *shape, device=self.data.features.device)

    def remember(self, name: str, places: NDArray[np.int64], kept: Tensor) -> None:
        """Keep something for some clients."""
        self.memory[name][torch.from_numpy(places)] = kept
        self.changed.setdefault(name, set()).update(places.tolist())
