"""The server's loop: who takes part, round by round, until the rounds or the clients' budgets are used up."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal, Protocol

import numpy as np
import torch

from polyeps.core import ENTER, Algorithm, Ask, Profile, Replies, State, Task, Total
from polyeps.errors import InputError


class Transport(Ask, Protocol):
    """What carries tasks to clients and replies back."""

    def profiles(self) -> tuple[Profile, ...]:
        """The faces of all enrolled clients."""


@dataclass(frozen=True)
class Participation:
    """How a round's cohort is drawn among the clients that can still afford a round.

    uniform: a fixed share of all clients, without replacement; poisson: every client by its own coin; full: all;
    epoch: all clients are shuffled into cohorts of about that share, each asked once before anybody is asked again.
    Each client's lot depends on the seed, the round and the set of all clients alone, so methods that are
    compared under one seed draw the same cohorts as long as the same clients are left.
    """

    kind: Literal["uniform", "poisson", "full", "epoch"] = "full"
    share: float = 1.0
    quorum: int = 1  # the run ends when fewer clients than this can afford a round
    including: frozenset[str] = frozenset()  # at least one of these is in every cohort; without any, the run ends

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise InputError(f"participation.share must be above 0 and at most 1, not {self.share}")
        if self.quorum < 1:
            raise InputError(f"participation.quorum must be at least 1, not {self.quorum}")
        if self.kind == "epoch" and self.including:
            raise InputError("participation: in an epoch every client is asked once, so nobody can be in every cohort")

    def goes_on(self, active: Sequence[str]) -> bool:
        """Whether a round can begin with those who are left: enough of them, and one that must be in every cohort."""
        missing = bool(self.including) and self.including.isdisjoint(active)
        return len(active) >= self.quorum and not missing

    def batches(self, clients: int) -> int:
        """In how many rounds an epoch asks every client once; a round is an epoch of its own where chance decides."""
        return clients // cohort_size(self.share, clients) if self.kind == "epoch" else 1

    def draw(self, everyone: Sequence[str], active: Sequence[str], seed: int, round: int) -> tuple[str, ...]:
        """This round's cohort, in the order of `active`."""
        if self.kind == "full":
            return tuple(active)
        if self.kind == "epoch":
            batches = self.batches(len(everyone))
            cohort = _shuffled(tuple(everyone), seed, round // batches, batches)[round % batches]
            return tuple(client for client in active if client in cohort)
        names = sorted(everyone)  # the order in which clients are listed must not matter
        lots = dict(zip(names, np.random.default_rng([seed, round]).random(len(names)).tolist(), strict=True))
        ordered = sorted(active, key=lots.__getitem__)
        if self.kind == "poisson":
            chosen = {client for client in ordered if lots[client] < self.share}
        else:
            chosen = set(ordered[: cohort_size(self.share, len(names))])
        wanted = [client for client in ordered if client in self.including]
        if wanted and chosen.isdisjoint(wanted):
            if self.kind == "uniform" and chosen:
                chosen.remove(max(chosen, key=lots.__getitem__))
            chosen.add(wanted[0])
        return tuple(client for client in active if client in chosen)


@lru_cache(maxsize=2)
def _shuffled(everyone: tuple[str, ...], seed: int, epoch: int, batches: int) -> list[frozenset[str]]:
    """An epoch's cohorts, their sizes equal but for one; the order in which clients are listed does not matter."""
    names = np.array(sorted(everyone), dtype=object)
    np.random.default_rng([seed, epoch]).shuffle(names)
    return [frozenset(part) for part in np.array_split(names, batches)]


def cohort_size(share: float, clients: int) -> int:
    """How many clients a share is, at least one; 0.8 of 50 is 40 whatever floats say."""
    return max(1, int(share * clients + 1e-9))


@dataclass(frozen=True)
class Round:
    """What happened in a round."""

    number: int
    invited: tuple[str, ...]
    traffic: Mapping[str, tuple[int, int]]  # of each client that answered: bytes (received, sent)
    declined: tuple[str, ...]
    active: tuple[str, ...]  # clients that can afford a further round
    seconds: float
    discarded: tuple[str, ...] = ()  # clients whose reply held a number that is not finite


@dataclass
class _Counted:
    """Asks through a transport, stamps tasks, and keeps count of who answered and what it took."""

    transport: Ask
    run: str
    round: int
    dues: bool  # whether clients have paid for the round: then who fails to answer is missed, but not gone

    def __post_init__(self) -> None:
        self.traffic: dict[str, tuple[int, int]] = {}
        self.declined: list[str] = []
        self.discarded: list[str] = []
        self.leaving: set[str] = set()

    def __call__(self, task: Task) -> Replies:
        if not task.to:
            return Replies((), {}, ())
        replies = self.transport(replace(task, run=self.run, round=self.round))
        self._count(task, replies)
        self.leaving.update(client for client, ready in zip(replies.ids, replies.ready, strict=True) if not ready)
        usable = finite_replies(replies)
        self.discarded += [client for client in replies.ids if client not in set(usable.ids)]
        return usable

    def total(self, task: Task, least: int = 1, bits: int | None = None) -> Total:
        if not task.to:
            return Total((), {})
        total = self.transport.total(replace(task, run=self.run, round=self.round), least, bits)
        self._count(task, total)
        return total

    def enter(self, clients: Sequence[str]) -> list[str]:
        """Have clients pay for the round; those who could. What this takes on the wire is not counted."""
        replies = self.transport(Task(ENTER, tuple(clients), {}, self.run, self.round))
        self.leaving.update(client for client, ready in zip(replies.ids, replies.ready, strict=True) if not ready)
        paid = set(replies.ids)
        self.declined += [client for client in clients if client not in paid]
        return [client for client in clients if client in paid]

    def _count(self, task: Task, replies: Replies | Total) -> None:
        answered = set(replies.ids)
        for client in replies.ids:
            received, sent = self.traffic.get(client, (0, 0))
            self.traffic[client] = (received + replies.received, sent + replies.sent)
        missing = [client for client in task.to if client not in answered]
        self.declined += missing
        if not self.dues:
            self.leaving.update(missing)


def finite_replies(replies: Replies) -> Replies:
    """The replies without those that hold a NaN or an infinity: one diverged client must not take all with it.

    Such a client has paid, its bytes have travelled and it stays in the federation; the round goes on without it.
    """
    finite = torch.ones(len(replies.ids), dtype=torch.bool)
    for tensor in replies.payload.values():
        if len(replies.ids) and tensor.is_floating_point():
            finite &= torch.isfinite(tensor).reshape(len(finite), -1).all(1).cpu()
    if bool(finite.all()):
        return replies
    rows = finite.nonzero()[:, 0].tolist()
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
    seed: int,
    run: str = "",
    active: Iterable[str] | None = None,
    observe: Callable[[Round, State], None] = lambda *_: None,
) -> State:
    """Run the rounds from `state` on; `active` says who was left at that point, when a run is resumed."""
    roster = {profile.id: profile for profile in transport.profiles()}
    check_disclosure(algorithm, roster.values())
    if algorithm.dues is not None:
        check_secret_cohorts(participation)
    state = replace(state, enrolled=tuple(roster.values()))
    left = [p.id for p in roster.values() if p.ready] if active is None else list(active)
    for number in range(state.round, rounds):
        if not participation.goes_on(left):
            break
        began = time.perf_counter()
        ask = _Counted(transport, run, number, algorithm.dues is not None)
        if algorithm.dues is not None:
            left = ask.enter(left)
        invited = participation.draw(tuple(roster), left, seed, number)
        entered = tuple(roster[client] for client in left) if algorithm.dues is not None else ()
        state = replace(state, round=number, roster=tuple(roster[client] for client in invited), entered=entered)
        state = replace(algorithm.round(state, ask), round=number + 1)
        left = [client for client in left if client not in ask.leaving]
        seconds = time.perf_counter() - began
        observe(
            Round(number, invited, ask.traffic, tuple(ask.declined), tuple(left), seconds, tuple(ask.discarded)), state
        )
    return state


def check_secret_cohorts(participation: Participation) -> None:
    """Refuse cohorts whose price is not the one clients pay: theirs is that of every client's own coin."""
    if participation.kind not in ("poisson", "full") or participation.including:
        raise InputError(
            "participation: noise on a sum is priced for cohorts in which every client is or is not by its own coin; "
            f"drawn as {participation.kind}{' with chosen clients' if participation.including else ''}, one client "
            'takes the place of another, which costs more; use kind = "poisson" or "full", without with_public'
        )


def check_disclosure(algorithm: Algorithm, roster: Iterable[Profile]) -> None:
    """Refuse to start an algorithm that needs to know what a client keeps to itself."""
    for profile in roster:
        for name in algorithm.needs:
            if getattr(profile, name) is None:
                raise InputError(
                    f"client {profile.id!r} does not disclose its {name}, which this algorithm needs; "
                    "ask the client, or choose an algorithm that does without (pdp-fl)"
                )
