"""The server's loop: draw a cohort and run a round, until the rounds or the clients' budgets are used up."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

import torch

from polyeps.core import ENTER, Algorithm, Ask, Profile, Replies, Specs, State, SumTerms, Task, Total, check_name
from polyeps.errors import InputError, TaskRefused
from polyeps.messages import usable_rows
from polyeps.participation import Participation, check_secret_cohorts

_log = logging.getLogger(__name__)
_Answer = TypeVar("_Answer", Replies, Total)


class Transport(Ask, Protocol):
    """What carries tasks to clients and replies back."""

    deployed: bool = False  # whether its clients are real: then no secret may be seeded

    def profiles(self) -> tuple[Profile, ...]:
        """Return the profiles of all enrolled clients."""

    def newcomers(self) -> tuple[Profile, ...]:
        """Return the profiles of clients that joined or came back since the last call."""
        return ()


@dataclass(frozen=True)
class Round:
    """The record of one round."""

    number: int
    invited: tuple[str, ...]
    traffic: Mapping[str, tuple[int, int]]  # of each client that answered: bytes (received, sent)
    declined: tuple[str, ...]
    active: tuple[str, ...]  # clients that can afford a further round
    seconds: float
    discarded: tuple[str, ...] = ()  # clients whose reply was malformed or not finite, and was discarded
    left: tuple[str, ...] = ()  # clients that were active before it and are not any more


class _Counted:
    """Ask through a transport, complete tasks, and count answers and traffic."""

    def __init__(self, transport: Ask, algorithm: Algorithm, run: str, round: int) -> None:
        self.transport, self.algorithm = transport, algorithm
        self.run, self.round = run, round
        self.traffic: dict[str, tuple[int, int]] = {}
        self.declined: list[str] = []
        self.discarded: list[str] = []
        self.leaving: set[str] = set()  # clients that cannot afford more; others that are missing may come back
        self.drawn: frozenset[str] = frozenset()  # this round's cohort
        self.paid: set[str] = set()  # clients that paid for an action of this round
        self.refused = ""  # why clients refuse what they are asked

    def __call__(self, task: Task) -> Replies:
        found = self._sent(task, self.transport)
        if found is None:
            return Replies((), {}, ())
        replies, gives = found
        self._heard(replies)
        if self._has_price(task):
            self.paid.update(replies.ids)
        usable = finite_replies(replies, gives)
        self._discard(lost(replies.ids, usable.ids))
        return usable

    def total(self, task: Task, terms: SumTerms) -> Total:
        found = self._sent(task, lambda asked: self.transport.total(asked, terms))
        if found is None:
            return Total((), {})
        total, gives = found
        rows = {name: tensor[None] for name, tensor in total.payload.items()}
        if rows and not bool(usable_rows(rows, 1, gives).all()):
            _log.warning("round %d: the sum of %r is malformed and is discarded", self.round, task.action)
            return replace(total, payload={})
        return total

    def enter(self, clients: Sequence[str]) -> list[str]:
        """Ask clients to pay for the round; return those that could. Traffic of this is not counted."""
        replies = self.transport(Task(ENTER, tuple(clients), {}, self.run, self.round))
        self._heard(replies)
        self.declined += lost(clients, replies.ids)
        paid = set(replies.ids)
        return [client for client in clients if client in paid]

    def _stamped(self, task: Task) -> Task:
        self._check_price(task)
        action = self.algorithm.actions.get(task.action)
        gives = None if action is None or action.gives is None else action.gives(task.payload)
        return replace(task, run=self.run, round=self.round, gives=gives)

    def _has_price(self, task: Task) -> bool:
        action = self.algorithm.actions.get(task.action)
        return action is not None and action.price is not None

    def _check_price(self, task: Task) -> None:
        """Refuse what no price covers: certificates count rounds, simulated noise is that of the round."""
        others = lost(task.to, self.drawn) if self.algorithm.round_price is not None else []
        if others:
            raise InputError(
                f"client {others[0]!r} is asked for {task.action!r} and was not drawn, but the price of a round is "
                "that of its secret cohort; ask clients of the roster alone"
            )
        again = next((client for client in task.to if client in self.paid), None) if self._has_price(task) else None
        if again is not None:
            raise InputError(
                f"client {again!r} is asked for {task.action!r} after it has paid for this round; ask each client for "
                "one priced action a round, or give the algorithm a round_price"
            )

    def _heard(self, replies: Replies) -> None:
        """Note clients that leave and clients whose replies could not be read."""
        self.leaving.update(client for client, ready in zip(replies.ids, replies.ready, strict=True) if not ready)
        self.leaving.update(replies.exhausted)
        self._discard(replies.malformed)

    def _discard(self, clients: Iterable[str]) -> None:
        if some := list(clients):
            named = ", ".join(map(repr, some[:5])) + (", …" if len(some) > 5 else "")
            _log.warning("round %d: %d malformed replies are discarded, of %s", self.round, len(some), named)
            self.discarded += some

    def _sent(self, task: Task, ask: Callable[[Task], _Answer]) -> tuple[_Answer, Specs | None] | None:
        """Count and return answers, with what they were to hold; None where nobody is asked, or all refuse."""
        if not task.to:
            return None
        asked = self._stamped(task)
        try:
            found = ask(asked)
        except TaskRefused as why:
            _log.warning("round %d: all clients refuse %r: %s", self.round, task.action, why)
            self.declined += task.to
            self.refused = str(why)
            return None
        for client in found.ids:
            received, sent = self.traffic.get(client, (0, 0))
            self.traffic[client] = (received + found.received, sent + found.sent)
        self.declined += lost(task.to, found.ids)
        return found, asked.gives


def lost(before: Iterable[str], after: Iterable[str]) -> list[str]:
    """Return the clients of `before` that are not in `after`."""
    left = set(after)
    return [client for client in before if client not in left]


def finite_replies(replies: Replies, gives: Specs | None = None) -> Replies:
    """Return the replies without malformed ones: a single diverged client must not corrupt the average.

    A client whose reply is left out has paid and stays in the federation.
    """
    usable = usable_rows(replies.payload, len(replies.ids), gives) if replies.ids else torch.ones(0, dtype=torch.bool)
    if bool(usable.all()):
        return replies
    rows = usable.nonzero()[:, 0].tolist()
    return replace(
        replies,
        ids=tuple(replies.ids[row] for row in rows),
        payload={name: tensor[rows] for name, tensor in replies.payload.items()} if rows else {},
        ready=tuple(replies.ready[row] for row in rows),
    )


def serve(
    algorithm: Algorithm,
    transport: Transport,
    state: State,
    *,
    rounds: int,
    participation: Participation,
    seed: int | bytes | None,
    run: str = "",
    active: Iterable[str] | None = None,
    observe: Callable[[Round, State], None] = lambda *_: None,
) -> State:
    """Run the rounds from `state` on, and return the last state, with the reason in `stopped`.

    `active` names the clients that were left at that point, when a run is resumed. A seed is public; as bytes it is a
    secret of the server, and without one, cohorts are drawn from the system's entropy. A client that fails to answer is
    asked again in later rounds; one that cannot afford more has left.
    """
    check_name("the name of a run", run)
    _check_entropy(algorithm, transport, participation, seed)
    roster = {profile.id: profile for profile in transport.profiles()}
    check_disclosure(algorithm, roster.values())
    if algorithm.round_price is not None:
        check_secret_cohorts(participation)
    if not isinstance(seed, int) and participation.kind == "epoch":
        seed = secrets.randbits(63)  # not secret, but the same for all rounds
    left = dict.fromkeys([p.id for p in roster.values() if p.ready] if active is None else active)
    everyone, enrolled = tuple(roster), tuple(roster.values())
    state = replace(state, stopped="")
    for number in range(state.round, rounds):
        if new := {profile.id: profile for profile in _admitted(algorithm, transport.newcomers())}:
            left |= dict.fromkeys(client for client, profile in new.items() if profile.ready)
            roster |= new
            everyone, enrolled = tuple(roster), tuple(roster.values())
        if not participation.goes_on(left):
            return replace(state, stopped=_why(participation, left, len(roster), state.round))
        began = time.perf_counter()
        ask = _Counted(transport, algorithm, run, number)
        present = dict.fromkeys(ask.enter(tuple(left))) if algorithm.round_price is not None else left
        invited = participation.draw(everyone, present, seed, number)
        ask.drawn = frozenset(invited)
        state = replace(
            state,
            round=number,
            enrolled=enrolled,
            roster=tuple(roster[client] for client in invited),
            entered=tuple(roster[client] for client in present) if algorithm.round_price is not None else (),
        )
        if present:  # without a client that has paid, there would be noise alone to learn from
            state = algorithm.round(state, ask)
        state = replace(state, round=number + 1, stopped=ask.refused and f"clients refuse the task: {ask.refused}")
        gone = tuple(sorted(client for client in ask.leaving if client in left))
        for client in gone:
            del left[client]
        seconds = time.perf_counter() - began
        declined, discarded = tuple(ask.declined), tuple(ask.discarded)
        observe(Round(number, invited, ask.traffic, declined, tuple(left), seconds, discarded, gone), state)
        if state.stopped:
            return state
    return replace(state, stopped=ALL_ROUNDS)


ALL_ROUNDS = "all rounds were run"


def _why(participation: Participation, left: Collection[str], enrolled: int, done: int) -> str:
    """Return the reason why no round can begin."""
    if not enrolled:
        return "no client is enrolled; connect clients first"
    if len(left) < participation.quorum:
        which = "a further round" if done else "a first round"
        wanted = f", and {participation.quorum} are needed" if participation.quorum > 1 else ""
        return f"{len(left)} of {enrolled} clients can afford {which}{wanted}"
    return "no client that must be in every cohort can afford a round"


def _admitted(algorithm: Algorithm, profiles: Iterable[Profile]) -> Iterator[Profile]:
    """Yield the clients that may join a run under way; others are left out, and the run goes on."""
    for profile in profiles:
        try:
            check_disclosure(algorithm, [profile])
        except InputError as problem:
            _log.warning("%s", problem)
        else:
            yield profile


def _check_entropy(
    algorithm: Algorithm, transport: Transport, participation: Participation, seed: int | bytes | None
) -> None:
    """Refuse seeded secrets where real clients rely on them."""
    if not transport.deployed:
        return
    if algorithm.seeded:
        raise InputError(
            "the server's noise is seeded, which protects no client: the seed is enough to remove it; "
            "build the algorithm with noise from SystemStreams"
        )
    if algorithm.round_price is not None and participation.kind == "poisson" and isinstance(seed, int):
        raise InputError(f"seed = {seed} makes cohorts predictable, but their price assumes secrecy; give seed = None")


def check_disclosure(algorithm: Algorithm, roster: Iterable[Profile]) -> None:
    """Refuse to start an algorithm that needs a field which a client does not disclose."""
    for profile in roster:
        for name in algorithm.needs:
            if getattr(profile, name) is None:
                raise InputError(
                    f"client {profile.id!r} does not disclose its {name}, which this algorithm needs; "
                    "ask the client, or choose an algorithm that does without (pdp-fl)"
                )
        if "group" in algorithm.needs and algorithm.groups and profile.group not in algorithm.groups:
            raise InputError(
                f"client {profile.id!r} is in the group {ascii(profile.group)[:80]}, which this federation does not "
                f"have; its groups are {', '.join(algorithm.groups)}"
            )
