"""The client's side: validate, pay, work, remember, reply; for n clients at a time, and deployed with n = 1."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from polyeps.clients import Clients, CohortCharges, Priced
from polyeps.core import ENTER, PROGRESS, Algorithm, Field, Payload, Profile, Replies, Task, Work
from polyeps.engine.noise import FLOATS_LEAK
from polyeps.errors import BudgetExceeded, InputError, TaskRefused, UnknownEvent
from polyeps.ledger.account import Charge
from polyeps.messages import check_task

_Places = NDArray[np.int64]  # rows of some of the clients
_MANY = 10_000  # clients whose charges are not kept
_Paid = tuple[_Places, tuple[str, ...]]  # clients that have paid, and the ids of those that cannot


def _priced(algorithm: Algorithm) -> list[Priced]:
    """Return all that a client may be charged for; a client that can afford each of them can take part."""
    if algorithm.round_price is not None:
        return [Priced(ENTER, algorithm.round_price, by_settings=False)]
    return [Priced(name, action.price) for name, action in algorithm.actions.items() if action.price is not None]


def profiles(clients: Clients, algorithm: Algorithm, discloses: Iterable[Field]) -> tuple[Profile, ...]:
    """Return what clients disclose: their ids, the fields named, and whether they can afford to take part."""
    disclosed = set(discloses)
    if algorithm.adjacency == "add-remove":  # this guarantee hides the number of records
        disclosed.discard("examples")
    everyone = np.arange(len(clients.ids))
    ready = np.ones(len(everyone), dtype=bool)
    for priced in _priced(algorithm):
        able = np.zeros(len(everyone), dtype=bool)
        able[_able(clients, algorithm, priced, everyone)] = True
        ready &= able
    nothing = (None,) * len(everyone)
    epsilons: Sequence[float | None] = nothing
    if "epsilon" in disclosed and clients.declared is not None:
        epsilons = clients.declared.tolist()
    elif "epsilon" in disclosed and (ledger := clients.ledger) is not None:
        having = zip(clients.ids, clients.guaranteed.tolist(), strict=True)
        epsilons = [ledger.account(client).epsilon if guaranteed else None for client, guaranteed in having]
    counts: Sequence[int | None] = clients.data.counts.tolist() if "examples" in disclosed else nothing
    groups: Sequence[str | None] = clients.groups if clients.groups and "group" in disclosed else nothing
    return tuple(map(Profile, clients.ids, counts, epsilons, groups, ready.tolist()))


def answer(clients: Clients, algorithm: Algorithm, task: Task) -> Replies:
    """Decide on a server's task, and do it: validate, agree, charge, work, remember, reply.

    This is the only gate, whatever carries the task. A task that is not as the action's `takes` says raises TaskRefused
    and costs no client anything. Clients that do not agree, or cannot afford the task, decline by not replying.
    A deployed client keeps its reply before it is sent; asked for the same again, it repeats it free of charge. If its
    process ends between the charge and the reply, the same task is done under the same charge: nothing was sent yet.
    """
    check_task(algorithm, task)
    if not clients.repeatable and algorithm.arithmetic == "ideal" and clients.ledger is not None:
        raise TaskRefused(f"{task.action!r} would be charged and could not be done: {FLOATS_LEAK}")
    if algorithm.unit != "client" and clients.data.of_persons != (algorithm.unit == "person"):
        held = "persons with all their records" if clients.data.of_persons else "single records"
        raise TaskRefused(
            f"{task.action!r} protects each {algorithm.person or algorithm.unit}, but these clients hold {held}; give "
            "the algorithm the unit and person of its training"
        )
    places = clients.places(task.to)
    if clients.run is not None and task.run != clients.run:
        raise TaskRefused(f"these clients take part in the run {clients.run!r}, not in {task.run!r}; name theirs")
    if clients.keeper is None:
        return _answer_anew(clients, algorithm, task, places)
    with clients.keeper.locked():
        replies = clients.keeper.recall(clients, task)
        if replies is None:
            attempt = "" if clients.repeatable else clients.keeper.begin(task)
            replies = _answer_anew(clients, algorithm, task, places, attempt)
            if replies.ids:
                clients.keeper.keep(clients, task, replies)
    return replies


def _answer_anew(clients: Clients, algorithm: Algorithm, task: Task, places: _Places, attempt: str = "") -> Replies:
    """Agree, charge, work and remember; an attempt is charged once."""
    clients.make_room(algorithm)
    if task.action == ENTER:
        return _enter(clients, algorithm, task, places, attempt)
    action = algorithm.actions[task.action]
    places = _in_turn(clients, algorithm, task, places)
    if action.recalls:
        recalling = [place for place in places if clients.passed_on.has(task, action.recalls, clients.ids[place])]
        places = np.array(recalling, dtype=np.int64)
    exhausted: tuple[str, ...] = ()
    if algorithm.round_price is not None:
        pass  # paid for when the round was entered
    elif clients.ledger is not None:
        if action.price is None:
            raise UnknownEvent(f"{task.action!r} names no price, so a client with a budget cannot do it")
        places, exhausted = _pay(clients, algorithm, Priced(task.action, action.price), task, places, attempt)
    elif action.price is not None:
        raise InputError(f"{task.action!r} has a price, but these clients have no ledger to charge; open one")
    ids = tuple(clients.ids[place] for place in places)
    if not ids:
        return Replies((), {}, (), exhausted=exhausted)
    payload = _work(clients, algorithm, task, places, ids)
    able = set(places.tolist())
    for priced in _priced(algorithm):
        if priced.name == task.action:
            able = set(_able(clients, algorithm, priced, places).tolist())
    return Replies(ids, payload, tuple(place in able for place in places.tolist()), exhausted=exhausted)


def _work(clients: Clients, algorithm: Algorithm, task: Task, places: _Places, ids: tuple[str, ...]) -> Payload:
    """Do an action for clients that have paid, keep what they remember, and return their replies."""
    if (period := algorithm.period(task)) is not None:  # noted first, so that no action is done twice
        done = list(algorithm.actions).index(task.action) + 1
        clients.remember(PROGRESS, places, torch.tensor([period, done]).to(clients.memory[PROGRESS]))
    action, where = algorithm.actions[task.action], torch.from_numpy(places)
    recalled = {name: clients.passed_on.take(name, ids) for name in action.recalls}
    work = Work(
        payload=task.payload,
        data=clients.data.select(places),
        noise_multiplier=clients.noise_multiplier[places],
        streams=clients.streams(ids, task.round),
        settings=clients.settings_of(places),
        groups=() if clients.groups is None else tuple(clients.groups[place] for place in places),
        memory={**{name: kept[where] for name, kept in clients.memory.items()}, **recalled},
    )
    if clients.workers is None:
        payload, memory = action.run(work)
    else:
        payload, memory = clients.workers.work(task, ids, places, work)
    clients.passed_on.begin(task.run, task.round)
    for name, kept in memory.items():
        if name in algorithm.passed_on:
            clients.passed_on.keep(name, ids, kept)
        else:
            clients.remember(name, places, kept)
    return payload


def _enter(clients: Clients, algorithm: Algorithm, task: Task, places: _Places, attempt: str) -> Replies:
    """Pay for a round, drawn or not; clients that cannot afford it decline, and do nothing in that round."""
    (priced,) = _priced(algorithm)
    exhausted: tuple[str, ...] = ()
    if clients.ledger is not None:
        places, exhausted = _pay(clients, algorithm, priced, task, places, attempt)
    elif clients.guaranteed[places].any():
        raise InputError("a round has a price, but these clients have no ledger to charge; open one")
    entering = places
    if clients.repeatable and clients.passed_on.of == (task.run, task.round):  # paid for already: not done again
        entering = places[(clients.memory[PROGRESS][torch.from_numpy(places), 0] != task.round + 1).cpu().numpy()]
    if len(places):
        clients.passed_on.begin(task.run, task.round)
    clients.remember(PROGRESS, entering, torch.tensor([task.round + 1, 0]).to(clients.memory[PROGRESS]))
    ids = tuple(clients.ids[place] for place in places)
    able = set(_able(clients, algorithm, priced, places).tolist())
    ready = tuple(place in able for place in places.tolist())
    return Replies(ids, {"entered": torch.ones(len(ids), dtype=torch.uint8)}, ready, exhausted=exhausted)


def _in_turn(clients: Clients, algorithm: Algorithm, task: Task, places: _Places) -> _Places:
    """Return the clients for which this action comes next in its period; a paid round begins when it is entered."""
    period = algorithm.period(task)
    if period is None:
        return places
    last, done = clients.memory[PROGRESS][torch.from_numpy(places)].cpu().T
    before = list(algorithm.actions).index(task.action)
    agreed = (last == period) & (done == before)
    if algorithm.round_price is None and before == 0:
        agreed |= last < period
    return places[np.flatnonzero(agreed.numpy())]


def _pay(clients: Clients, algorithm: Algorithm, priced: Priced, task: Task, places: _Places, attempt: str) -> _Paid:
    """Charge all clients with a guarantee that can afford the task; return who can do it, and who cannot."""
    assert clients.ledger is not None
    purpose = f"{task.run}/{task.round}/{task.action}/{digest(task.payload)}{attempt and f'/{attempt}'}"
    once = clients.repeatable or bool(attempt)
    paid = clients.ledger.paid(purpose) if once else set()
    while True:
        able = set(_able(clients, algorithm, priced, places).tolist())
        answering = [place for place in places.tolist() if place in able or clients.ids[place] in paid]
        charges, _ = _charges(clients, algorithm, priced, np.array(answering, dtype=np.int64))
        try:
            clients.ledger.charge_all(charges, purpose=purpose, once=once, run=clients.reservation)
        except BudgetExceeded:  # another process has spent it meanwhile, and the ledger has noticed
            continue
        paying = set(answering)
        return np.array(answering, dtype=np.int64), tuple(clients.ids[p] for p in places.tolist() if p not in paying)


def _able(clients: Clients, algorithm: Algorithm, priced: Priced, places: _Places) -> _Places:
    """Return the clients that could pay for something now: the exact cost after it is within their budgets."""
    if clients.ledger is None:
        return places
    charges, payers = _charges(clients, algorithm, priced, places)
    if clients.ledger.surely_affords(charges, run=clients.reservation):
        return places
    able = places[~clients.guaranteed[places]].tolist()
    for charge, paying in zip(charges, payers, strict=True):
        can_pay = clients.ledger.can_afford(charge, run=clients.reservation)
        able += [place for place, can in zip(paying, can_pay, strict=True) if can]
    return np.array(able, dtype=np.int64)


def _charges(clients: Clients, algorithm: Algorithm, priced: Priced, places: _Places) -> CohortCharges:
    """Return one charge for all clients with equal costs, and its clients: a ledger computes and writes it once.

    Clients that cost what they did when they were last looked at have the same charges as then, as objects.
    """
    settings = clients.settings_of(places).values() if priced.by_settings else ()
    columns = (places, clients.guaranteed[places], clients.noise_multiplier[places], *settings)
    protected = algorithm.unit, algorithm.adjacency, algorithm.person
    alike = (priced, protected, *(np.asarray(column, np.float64).tobytes() for column in columns))
    if clients.asked is not None and clients.asked[0] == alike:
        return clients.asked[1]
    charges, payers = [], []
    for event, paying in clients.by_event(priced, places).items():
        unit, adjacency, person = protected
        charges.append(Charge(tuple(clients.ids[place] for place in paying), event, 1, unit, adjacency, person))
        payers.append(paying)
    found = tuple(charges), tuple(payers)
    clients.asked = (alike, found) if len(places) <= _MANY else None
    return found


def digest(payload: Payload) -> str:
    """Return a fingerprint of a payload: only the very same work is repeated for free."""
    hashed = hashlib.blake2b(digest_size=16)
    for name, tensor in sorted(payload.items()):
        hashed.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)};".encode())
        hashed.update(np.ascontiguousarray(tensor.detach().cpu().numpy()).tobytes())
    return hashed.hexdigest()
