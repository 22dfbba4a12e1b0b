"""The client's side: pay, work, remember, reply; written for n clients at a time, and deployed with n = 1."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from polyeps.accounts import Charge
from polyeps.core import (
    ENTER,
    PROGRESS,
    Action,
    Algorithm,
    Field,
    Payload,
    Profile,
    Records,
    Replies,
    Streams,
    Task,
    Work,
)
from polyeps.errors import BudgetExceeded, InputError, UnknownEvent
from polyeps.ledger import Ledger


@dataclass
class Cohort:
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
    _place: dict[str, int] = field(init=False, repr=False)
    _events: dict[tuple[str, float], Any] = field(init=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._place = {client: place for place, client in enumerate(self.ids)}
        if len(self._place) != len(self.ids):
            raise InputError("two clients of the cohort have the same id; give each client its own")
        if self.rows is None:
            self.rows = np.arange(len(self.ids))

    def places(self, ids: Iterable[str]) -> NDArray[np.int64]:
        """Where clients stand in this cohort."""
        try:
            return np.array([self._place[client] for client in ids], dtype=np.int64)
        except KeyError as unknown:
            raise InputError(f"client {unknown.args[0]!r} does not belong to this federation; enrol it first") from None

    def event(self, priced: _Priced, place: int) -> Any:
        """What something costs a client; settled by its scale before any data is touched."""
        assert self.rows is not None
        key = (priced.name, float(self.scale[place]) if priced.alike else place)
        if key not in self._events:
            self._events[key] = priced.price(float(self.scale[place]), int(self.rows[place]))
        return self._events[key]

    def remember(self, name: str, places: NDArray[np.int64], kept: Tensor) -> None:
        """Keep something for some clients."""
        self.memory[name][torch.from_numpy(places)] = kept
        self.changed.setdefault(name, set()).update(places.tolist())

    def alone(self, client: str) -> Cohort:
        """One client as a cohort of its own, on the same data, memory and ledger."""
        (place,) = self.places([client])
        assert self.rows is not None
        return Cohort(
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
        )


@dataclass(frozen=True)
class _Priced:
    """Something clients pay for: an action, or a round."""

    name: str
    price: Callable[[float, int], Any]  # (scale, row) -> DpEvent
    alike: bool  # whether clients with equal scales pay alike


def _priced(algorithm: Algorithm) -> list[_Priced]:
    """All a client may be charged for; if it can afford each of them, it can take part."""
    dues = algorithm.dues
    if dues is not None:
        return [_Priced(ENTER, lambda scale, _: dues(scale), alike=True)]
    return [
        _Priced(name, action.price, action.pure)
        for name, action in algorithm.actions.items()
        if action.price is not None
    ]


def profiles(cohort: Cohort, algorithm: Algorithm, tells: Iterable[Field]) -> tuple[Profile, ...]:
    """The faces clients show: their names, what they choose to tell, and whether they could take part."""
    told = set(tells)
    everyone = np.arange(len(cohort.ids))
    ready = np.ones(len(everyone), dtype=bool)
    for priced in _priced(algorithm):
        ready &= np.isin(everyone, _able(cohort, algorithm, priced, everyone))
    sizes = cohort.data.counts.tolist()
    faces = []
    for place, client in enumerate(cohort.ids):
        epsilon = None
        if cohort.ledger is not None and client not in cohort.open:
            epsilon = cohort.ledger.account(client).terms.budget.epsilon
        if cohort.declared is not None:
            epsilon = cohort.declared[client]
        faces.append(
            Profile(
                id=client,
                examples=sizes[place] if "examples" in told else None,
                epsilon=epsilon if "epsilon" in told else None,
                group=cohort.groups.get(client) if "group" in told else None,
                ready=bool(ready[place]),
            )
        )
    return tuple(faces)


def answer(cohort: Cohort, algorithm: Algorithm, task: Task) -> Replies:
    """Do what the server asks: charge first, work, remember, reply. Who cannot afford it declines by not replying."""
    if task.action == ENTER and algorithm.dues is not None:
        return _enter(cohort, algorithm, task)
    if task.action not in algorithm.actions:
        known = ", ".join(algorithm.actions)
        raise InputError(f"the server asks for {task.action!r}, which this algorithm does not know; it knows {known}")
    action = algorithm.actions[task.action]
    places = _willing(cohort, action, task.payload, cohort.places(task.to))
    if algorithm.dues is not None:
        places = _in_turn(cohort, algorithm, task, places)
    elif cohort.ledger is not None:
        if action.price is None:
            raise UnknownEvent(f"{task.action!r} names no price, so a client with a budget cannot do it")
        places = _pay(cohort, algorithm, _Priced(task.action, action.price, action.pure), task, places)
    elif action.price is not None:
        raise InputError(f"{task.action!r} has a price, but these clients have no ledger to charge; open one")
    ids = tuple(cohort.ids[place] for place in places)
    if not ids:
        return Replies((), {}, ())
    assert cohort.rows is not None
    where = torch.from_numpy(places)
    payload, memory = action.run(
        Work(
            rows=cohort.rows[places],
            payload=task.payload,
            data=cohort.data.select(places),
            scale=cohort.scale[places],
            streams=cohort.streams(ids, task.round),
            memory={name: kept[where] for name, kept in cohort.memory.items()},
        )
    )
    for name, kept in memory.items():
        cohort.remember(name, places, kept)
    able = set(places.tolist())
    for priced in _priced(algorithm):
        if priced.name == task.action:
            able = set(_able(cohort, algorithm, priced, places).tolist())
    return Replies(ids, payload, tuple(place in able for place in places.tolist()))


def _enter(cohort: Cohort, algorithm: Algorithm, task: Task) -> Replies:
    """Pay for a round, whether drawn for it or not; who cannot declines, and does nothing in that round."""
    places = cohort.places(task.to)
    (dues,) = _priced(algorithm)
    if cohort.ledger is not None:
        places = _pay(cohort, algorithm, dues, task, places)
    elif not cohort.open.issuperset(task.to):
        raise InputError("a round has a price, but these clients have no ledger to charge; open one")
    progress = cohort.memory[PROGRESS]
    cohort.remember(PROGRESS, places, torch.tensor([task.round + 1, 0]).to(progress))
    ids = tuple(cohort.ids[place] for place in places)
    able = set(_able(cohort, algorithm, dues, places).tolist())
    ready = tuple(place in able for place in places.tolist())
    return Replies(ids, {"entered": torch.ones(len(ids), dtype=torch.uint8)}, ready)


def _in_turn(cohort: Cohort, algorithm: Algorithm, task: Task, places: NDArray[np.int64]) -> NDArray[np.int64]:
    """Who has paid for this round and comes to this action next; noted before the work, so that none is done twice."""
    progress = cohort.memory[PROGRESS]
    due = torch.tensor([task.round + 1, list(algorithm.actions).index(task.action)], device=progress.device)
    agreed = places[np.flatnonzero((progress[torch.from_numpy(places)] == due).all(1).cpu().numpy())]
    cohort.remember(PROGRESS, agreed, torch.stack([due[0], due[1] + 1]).to(progress))
    return agreed


def _willing(cohort: Cohort, action: Action, payload: Payload, places: NDArray[np.int64]) -> NDArray[np.int64]:
    """Who agrees to an action at this point, by what the server sent and what they remember."""
    if action.allows is None:
        return places
    where = torch.from_numpy(places)
    agreed = action.allows(payload, {name: kept[where] for name, kept in cohort.memory.items()})
    return places[np.flatnonzero(agreed.expand(len(places)).cpu().numpy())]


def _pay(
    cohort: Cohort, algorithm: Algorithm, priced: _Priced, task: Task, places: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Charge all who can afford the task and were promised something; return who can do it."""
    assert cohort.ledger is not None
    purpose = f"{task.run}/{task.round}/{task.action}/{_digest(task.payload)}"
    paid = cohort.ledger.paid(purpose) if cohort.repeatable else set()
    while True:
        able = set(_able(cohort, algorithm, priced, places).tolist())
        answering = [place for place in places.tolist() if place in able or cohort.ids[place] in paid]
        charges = [
            Charge(tuple(cohort.ids[place] for place in payers), event, unit=algorithm.unit)
            for event, payers in _by_event(cohort, priced, answering).items()
        ]
        try:
            cohort.ledger.charge_all(charges, purpose=purpose, once=cohort.repeatable)
        except BudgetExceeded:  # another process has spent it meanwhile, which the ledger knows by now
            continue
        return np.array(answering, dtype=np.int64)


def _able(cohort: Cohort, algorithm: Algorithm, priced: _Priced, places: NDArray[np.int64]) -> NDArray[np.int64]:
    """Which of some clients could pay for something now: the exact cost after it, within their budgets."""
    if cohort.ledger is None:
        return places
    able = [place for place in places.tolist() if cohort.ids[place] in cohort.open]
    for event, payers in _by_event(cohort, priced, places.tolist()).items():
        charge = Charge(tuple(cohort.ids[place] for place in payers), event, unit=algorithm.unit)
        able += [place for place, can in zip(payers, cohort.ledger.can_afford(charge), strict=True) if can]
    return np.array(able, dtype=np.int64)


def _by_event(cohort: Cohort, priced: _Priced, places: Sequence[int]) -> dict[Any, list[int]]:
    """Clients with equal costs together, so that a ledger judges and writes each cost once; open ones pay nothing."""
    together: dict[Any, list[int]] = {}
    if cohort.open:
        places = [place for place in places if cohort.ids[place] not in cohort.open]
    if not priced.alike:
        for place in places:
            together.setdefault(cohort.event(priced, place), []).append(place)
        return together
    here = np.array(places, dtype=np.int64)
    _, group = np.unique(cohort.scale[here], return_inverse=True)
    ordered = here[np.argsort(group, kind="stable")]
    for alike in np.split(ordered, np.cumsum(np.bincount(group))[:-1]):
        if len(alike):
            together.setdefault(cohort.event(priced, int(alike[0])), []).extend(alike.tolist())
    return together


def _digest(payload: Payload) -> str:
    """Tells requests apart: work is only repeated for free when it is the same work."""
    hashed = hashlib.blake2b(digest_size=16)
    for name, tensor in sorted(payload.items()):
        hashed.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)};".encode())
        hashed.update(np.ascontiguousarray(tensor.detach().cpu().numpy()).tobytes())
    return hashed.hexdigest()
