"""The client's side: validate, pay, work, remember, reply; for n clients at a time, and deployed with n = 1."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from polyeps.clients import Clients, Priced
from polyeps.core import ENTER, PROGRESS, Action, Algorithm, Field, Payload, Profile, Replies, Task, Work
from polyeps.engine.noise import FLOATS_LEAK
from polyeps.errors import BudgetExceeded, InputError, TaskRefused, UnknownEvent
from polyeps.ledger.account import Charge
from polyeps.messages import check_task


def _priced(algorithm: Algorithm) -> list[Priced]:
    """All a client may be charged for; if it can afford each of them, it can take part."""
    dues = algorithm.dues
    if dues is not None:
        return [Priced(ENTER, lambda scale, _: dues(scale), alike=True)]
    return [
        Priced(name, action.price, action.pure)
        for name, action in algorithm.actions.items()
        if action.price is not None
    ]


def profiles(cohort: Clients, algorithm: Algorithm, tells: Iterable[Field]) -> tuple[Profile, ...]:
    """The faces clients show: their names, what they choose to tell, and whether they could take part."""
    told = set(tells)
    if algorithm.adjacency == "add-remove":  # how many records there are is what this hides
        told.discard("examples")
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


def answer(cohort: Clients, algorithm: Algorithm, task: Task) -> Replies:
    """Decide on what a server asks, and do it: validate, agree, charge, work, remember, reply.

    This is the only gate: whatever carries the task, a task that is not as the action's `takes` says raises TaskRefused
    and costs nobody anything. Clients that do not agree, or cannot afford the task, decline by not replying.
    A deployed client keeps its reply before it is sent; asked for the same again, it repeats it free of charge.
    """
    check_task(algorithm, task)
    if not cohort.repeatable and algorithm.arithmetic == "ideal" and cohort.ledger is not None:
        raise TaskRefused(f"{task.action!r} would be charged and could not be done: {FLOATS_LEAK}")
    places = cohort.places(task.to)
    if cohort.run is not None and task.run != cohort.run:
        raise TaskRefused(f"these clients take part in the run {cohort.run!r}, not in {task.run!r}; name theirs")
    if cohort.keeper is None:
        return _answer_anew(cohort, algorithm, task, places)
    with cohort.keeper.locked():
        replies = cohort.keeper.recall(cohort, task)
        if replies is None:
            replies = _answer_anew(cohort, algorithm, task, places)
            if replies.ids:
                cohort.keeper.keep(cohort, task, replies)
    return replies


def _answer_anew(cohort: Clients, algorithm: Algorithm, task: Task, places: NDArray[np.int64]) -> Replies:
    """Agree, charge, work and remember."""
    cohort.make_room(algorithm)
    if task.action == ENTER:
        return _enter(cohort, algorithm, task, places)
    action = algorithm.actions[task.action]
    places = _willing(cohort, action, task.payload, places)
    if action.recalls:
        places = np.array(
            [p for p in places if cohort.passed_on.has(task, action.recalls, cohort.ids[p])], dtype=np.int64
        )
    exhausted: tuple[str, ...] = ()
    if algorithm.dues is not None:
        places = _in_turn(cohort, algorithm, task, places)
    elif cohort.ledger is not None:
        if action.price is None:
            raise UnknownEvent(f"{task.action!r} names no price, so a client with a budget cannot do it")
        places, exhausted = _pay(cohort, algorithm, Priced(task.action, action.price, action.pure), task, places)
    elif action.price is not None:
        raise InputError(f"{task.action!r} has a price, but these clients have no ledger to charge; open one")
    ids = tuple(cohort.ids[place] for place in places)
    if not ids:
        return Replies((), {}, (), exhausted=exhausted)
    payload = _work(cohort, algorithm, task, places, ids)
    able = set(places.tolist())
    for priced in _priced(algorithm):
        if priced.name == task.action:
            able = set(_able(cohort, algorithm, priced, places).tolist())
    return Replies(ids, payload, tuple(place in able for place in places.tolist()), exhausted=exhausted)


def _work(
    cohort: Clients, algorithm: Algorithm, task: Task, places: NDArray[np.int64], ids: tuple[str, ...]
) -> Payload:
    """Do an action for clients who have paid, keep what they remember, and return what they reply."""
    assert cohort.rows is not None
    action, where = algorithm.actions[task.action], torch.from_numpy(places)
    recalled = {name: cohort.passed_on.take(name, ids) for name in action.recalls}
    payload, memory = action.run(
        Work(
            rows=cohort.rows[places],
            payload=task.payload,
            data=cohort.data.select(places),
            scale=cohort.scale[places],
            streams=cohort.streams(ids, task.round),
            memory={**{name: kept[where] for name, kept in cohort.memory.items()}, **recalled},
        )
    )
    cohort.passed_on.begin(task.run, task.round)
    for name, kept in memory.items():
        if name in algorithm.passed_on:
            cohort.passed_on.keep(name, ids, kept)
        else:
            cohort.remember(name, places, kept)
    return payload


def _enter(cohort: Clients, algorithm: Algorithm, task: Task, places: NDArray[np.int64]) -> Replies:
    """Pay for a round, whether drawn for it or not; clients that cannot decline, and do nothing in that round."""
    (dues,) = _priced(algorithm)
    exhausted: tuple[str, ...] = ()
    if cohort.ledger is not None:
        places, exhausted = _pay(cohort, algorithm, dues, task, places)
    elif not cohort.open.issuperset(task.to):
        raise InputError("a round has a price, but these clients have no ledger to charge; open one")
    if len(places):
        cohort.passed_on.begin(task.run, task.round)
    progress = cohort.memory[PROGRESS]
    cohort.remember(PROGRESS, places, torch.tensor([task.round + 1, 0]).to(progress))
    ids = tuple(cohort.ids[place] for place in places)
    able = set(_able(cohort, algorithm, dues, places).tolist())
    ready = tuple(place in able for place in places.tolist())
    return Replies(ids, {"entered": torch.ones(len(ids), dtype=torch.uint8)}, ready, exhausted=exhausted)


def _in_turn(cohort: Clients, algorithm: Algorithm, task: Task, places: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return who has paid for this round and comes to this action next; noted first, so that none is done twice."""
    progress = cohort.memory[PROGRESS]
    due = torch.tensor([task.round + 1, list(algorithm.actions).index(task.action)], device=progress.device)
    agreed = places[np.flatnonzero((progress[torch.from_numpy(places)] == due).all(1).cpu().numpy())]
    cohort.remember(PROGRESS, agreed, torch.stack([due[0], due[1] + 1]).to(progress))
    return agreed


def _willing(cohort: Clients, action: Action, payload: Payload, places: NDArray[np.int64]) -> NDArray[np.int64]:
    """Who agrees to an action at this point, by what the server sent and what they remember."""
    if action.allows is None:
        return places
    where = torch.from_numpy(places)
    agreed = action.allows(payload, {name: kept[where] for name, kept in cohort.memory.items()})
    return places[np.flatnonzero(agreed.expand(len(places)).cpu().numpy())]


def _pay(
    cohort: Clients, algorithm: Algorithm, priced: Priced, task: Task, places: NDArray[np.int64]
) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    """Charge all who can afford the task and were promised something; return who can do it, and who cannot."""
    assert cohort.ledger is not None
    purpose = f"{task.run}/{task.round}/{task.action}/{digest(task.payload)}"
    paid = cohort.ledger.paid(purpose) if cohort.repeatable else set()
    while True:
        able = set(_able(cohort, algorithm, priced, places).tolist())
        answering = [place for place in places.tolist() if place in able or cohort.ids[place] in paid]
        charges = [
            Charge(tuple(cohort.ids[place] for place in payers), event, 1, algorithm.unit, algorithm.adjacency)
            for event, payers in _by_event(cohort, priced, answering).items()
        ]
        try:
            cohort.ledger.charge_all(charges, purpose=purpose, once=cohort.repeatable)
        except BudgetExceeded:  # another process has spent it meanwhile, which the ledger knows by now
            continue
        paying = set(answering)
        return np.array(answering, dtype=np.int64), tuple(cohort.ids[p] for p in places.tolist() if p not in paying)


def _able(cohort: Clients, algorithm: Algorithm, priced: Priced, places: NDArray[np.int64]) -> NDArray[np.int64]:
    """Which of some clients could pay for something now: the exact cost after it, within their budgets."""
    if cohort.ledger is None:
        return places
    able = [place for place in places.tolist() if cohort.ids[place] in cohort.open]
    for event, payers in _by_event(cohort, priced, places.tolist()).items():
        charge = Charge(tuple(cohort.ids[place] for place in payers), event, 1, algorithm.unit, algorithm.adjacency)
        able += [place for place, can in zip(payers, cohort.ledger.can_afford(charge), strict=True) if can]
    return np.array(able, dtype=np.int64)


def _by_event(cohort: Clients, priced: Priced, places: Sequence[int]) -> dict[Any, list[int]]:
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


def digest(payload: Payload) -> str:
    """Tells requests apart: work is only repeated for free when it is the same work."""
    hashed = hashlib.blake2b(digest_size=16)
    for name, tensor in sorted(payload.items()):
        hashed.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)};".encode())
        hashed.update(np.ascontiguousarray(tensor.detach().cpu().numpy()).tobytes())
    return hashed.hexdigest()
