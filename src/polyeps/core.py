"""The types that every other module uses; imports nothing of polyeps but the errors."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args

from polyeps.errors import InputError

if TYPE_CHECKING:  # torch takes seconds to import; the command line must start without it
    import numpy as np
    import torch
    from numpy.typing import NDArray
    from torch import Tensor

# How two neighbouring data sets differ.
# zero-out: one unit is replaced by an empty one that contributes nothing; the number of units is public.
# add-remove: one unit is present or absent; nothing that is public may depend on the number of units.
# replace-one: one unit has another value; the number of units is public.
Adjacency = Literal["zero-out", "add-remove", "replace-one"]
# What one guarantee protects: a record inside a client, all records of a person there, or everything a client holds.
Unit = Literal["record", "person", "client"]
_UNITS = get_args(Unit)
# Whether a guarantee holds for the very bits that are released, or for ideal real numbers in their place.
# exact-when-deployed: simulations draw noise in floating point, deployed clients on a grid of integers.
Arithmetic = Literal["exact", "exact-when-deployed", "ideal"]
Trust = Literal["nobody", "secure-sum", "server"]  # who sees values without noise and must be trusted with them
Field = Literal["examples", "epsilon", "group"]  # of a profile, that a client may leave undisclosed
LONGEST_NAME = 255  # bytes of the name of a client or a run
_LONGEST_WORD = 30  # letters of what a person is called
Payload = Mapping[str, "Tensor"]  # all that crosses the wire, and all a client keeps between rounds
# Public numbers by name that may differ between clients, (n,) each: "records", "batch", "steps", …
PerClient = Mapping[str, "NDArray[Any]"]


@dataclass(frozen=True, order=True, slots=True)
class Budget:
    """The most privacy a client is willing to lose in total.

    >>> Budget(1.0, 1e-5)
    Budget(epsilon=1.0, delta=1e-05)
    """

    epsilon: float
    delta: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.epsilon) and self.epsilon > 0):
            raise InputError(f"epsilon must be a finite number above 0, not {self.epsilon}")
        check_delta(self.delta)


def check_delta(delta: float) -> None:
    """Refuse a δ that is not a probability below one."""
    if not 0 <= delta < 1:  # NaN fails every comparison
        raise InputError(f"delta must be at least 0 and below 1, not {delta}")


def clip_norms_moved(adjacency: Adjacency) -> int:
    """Return how far one unit can move a clipped sum, in clip norms."""
    return 2 if adjacency == "replace-one" else 1


def check_name(what: str, *names: Any) -> None:
    """Refuse names that messages, files or a screen cannot show."""
    plain = len(names) > 1 and set(map(type, names)) == {str} and max(map(len, names)) <= LONGEST_NAME // 4
    for name in () if plain and "".join(names).isprintable() else names:
        if not isinstance(name, str) or not name.isprintable():  # a lone surrogate is not printable
            raise InputError(f"{what} must be printable text, not {ascii(name)[:80]}; choose another name")
        if len(size := name.encode()) > LONGEST_NAME:
            raise InputError(f"{what} has {len(size)} bytes, and at most {LONGEST_NAME} are allowed; shorten it")


def check_person(word: Any) -> None:
    """Refuse a word for persons that sentences and pages cannot show as it is."""
    if not isinstance(word, str) or not word.isalpha() or len(word) > _LONGEST_WORD:
        raise InputError(
            f"the word for a person is {ascii(word)[:80]}; it must be 1 to {_LONGEST_WORD} letters, such as patient"
        )


def person_of(unit: Unit, word: str) -> str:
    """Return what a person is called where the unit is one, "person" by default; "" elsewhere."""
    if unit not in _UNITS:
        raise InputError(f"the unit is {ascii(unit)[:80]}; it must be one of {', '.join(_UNITS)}")
    if unit != "person":
        if word:
            raise InputError(f"{ascii(word)[:80]} is a word for persons, but the unit is a {unit}; leave it out")
        return ""
    word = word or "person"
    check_person(word)
    return word


@dataclass(frozen=True)
class Records:
    """The records of n clients in one block: client i owns rows offsets[i] up to offsets[i + 1].

    Offsets may also be (n, 2), first row and end of each client, to select a few of many clients.

    Where all records of a person are one example, offsets and counts are those of persons. Person p then holds the rows
    units[p, 0] up to units[p, 1] or, in a padded block with labels (P, L, ...), row p.
    """

    features: Tensor  # (R, ...)
    labels: Tensor  # (R, ...): a class, or whatever the model's loss takes
    offsets: Tensor  # (n + 1,) or (n, 2) int64
    units: Tensor | None = None  # (P, 2) int64
    padded: bool = False  # whether rows are persons, padded to one number of records

    @property
    def of_persons(self) -> bool:
        """Whether an example is all records of a person."""
        return self.units is not None or self.padded

    @property
    def clients(self) -> int:
        return len(self.offsets) - (self.offsets.ndim == 1)

    @property
    def spans(self) -> Tensor:
        """The first row and the end of each client, (n, 2)."""
        return self.offsets.unfold(0, 2, 1) if self.offsets.ndim == 1 else self.offsets

    @property
    def counts(self) -> NDArray[np.int64]:
        """The number of records of each client, or of persons, (n,)."""
        held: NDArray[np.int64] = self.spans.diff(dim=1)[:, 0].cpu().numpy()
        return held

    def select(self, rows: Sequence[int] | slice | NDArray[np.int64]) -> Records:
        """Return the records of some of the clients, on the same block."""
        return replace(self, offsets=self.spans[rows])


class Streams(Protocol):
    """n independent random streams; row i is client i's."""

    @property
    def clients(self) -> int: ...

    @property
    def exact(self) -> bool:
        """Whether noise must be drawn on integers, as for a deployed client; normals are then refused."""

    def uniforms(self, count: int) -> NDArray[np.float64]:
        """Return the next `count` uniforms in (0, 1] of every client's batch stream, (n, count)."""

    def normals(self, out: Tensor, rows: Sequence[int]) -> None:
        """Fill out[i] (steps, d) with the next standard normals of client i's noise stream, for i in rows."""

    def select(self, rows: Sequence[int]) -> Streams:
        """Return the streams of some of the clients."""


@dataclass(frozen=True, slots=True)
class Profile:
    """What a client discloses to the server; None: not disclosed."""

    id: str
    examples: int | None = None
    epsilon: float | None = None
    group: str | None = None
    ready: bool = True  # whether it can afford a first task


@dataclass(frozen=True)
class Spec:
    """The specification of one tensor of a message; NaN and infinities are never allowed.

    >>> Spec((2,), "float32", lowest=0.0)
    Spec(shape=(2,), dtype='float32', lowest=0.0, highest=1.7976931348623157e+308, optional=False)
    """

    shape: tuple[int | None, ...]  # None: any length
    dtype: str = "float32"
    lowest: float = -sys.float_info.max
    highest: float = sys.float_info.max
    optional: bool = False  # whether a message may omit it


Specs = Mapping[str, Spec]


@dataclass(frozen=True)
class Task:
    """One request to some clients; the server's loop adds the run, the round and the replies it expects."""

    action: str
    to: tuple[str, ...]
    payload: Payload
    run: str = ""
    round: int = 0
    summed: bool = False  # set by the transport: replies are only summed, and nobody sees a single one
    gives: Specs | None = None  # what the server expects of each reply; not sent to clients


@dataclass(frozen=True)
class Replies:
    """The replies to a task: row i of every tensor is from client ids[i]; clients that are missing declined."""

    ids: tuple[str, ...]
    payload: Payload
    ready: tuple[bool, ...]  # whether each can afford the same task again
    received: int = 0  # bytes of the task, for each client
    sent: int = 0  # bytes of one reply
    exhausted: tuple[str, ...] = ()  # clients that declined because they cannot afford the task
    malformed: tuple[str, ...] = ()  # clients whose reply the transport could not read


@dataclass(frozen=True)
class Total:
    """The sum over the clients that answered; no row of it was seen by the server."""

    ids: tuple[str, ...]  # the clients that answered
    payload: Payload  # (...) each, without a row per client; empty where too few answered for a sum
    received: int = 0  # bytes of the task, for each client
    sent: int = 0  # bytes of one reply


@dataclass(frozen=True)
class SumTerms:
    """The terms of one secure sum that a client has agreed to; nothing the server says can loosen them."""

    clients: int  # the most that are in it
    least: int  # the fewest answers with which it is opened
    colluders: int  # how many of the clients may help the server
    bits: int | None  # the sum is of integers modulo 2^bits; None: it is of floats


class Ask(Protocol):
    """How a server's round reaches clients."""

    def __call__(self, task: Task) -> Replies: ...

    def total(self, task: Task, terms: SumTerms) -> Total:
        """Return the sum of the replies, if at least `terms.least` clients reply.

        Sums of integers are modulo 2^bits, which masks can hide completely. A transport may have no secure sums.
        """
        raise InputError(
            f"{task.action!r} is to be summed{' as integers' if terms.bits else ''}, over {terms.least} clients or "
            "more, without the server seeing a single reply, "
            "which this transport cannot do; run it in memory, or choose an algorithm that trusts the server or nobody"
        )


@dataclass(frozen=True)
class Work:
    """What an action works on: n clients, stacked. Everything but the payload belongs to the clients."""

    payload: Payload  # what the server sent to all of them
    data: Records
    noise_multiplier: NDArray[np.float64]  # (n,)
    streams: Streams
    settings: PerClient = field(default_factory=dict)  # (n,) each
    groups: tuple[str, ...] = ()  # the privacy group of each client, where there are groups
    memory: Payload = field(default_factory=dict)  # (n, ...) each

    @property
    def clients(self) -> int:
        return len(self.noise_multiplier)


@dataclass(frozen=True)
class Action:
    """What clients do when asked, and what it costs each of them."""

    run: Callable[[Work], tuple[Payload, Payload]]  # replies and memory to keep, a row per client
    # (noise multiplier, a client's settings) -> DpEvent; None: it gives no guarantee and charges nothing
    price: Callable[[float, Mapping[str, float]], Any] | None
    # The tensors a task must hold, no more and no fewer; anything else is refused before any client pays.
    takes: Specs = field(default_factory=dict)
    fits: Callable[[Payload], None] | None = None  # raises InputError where tensors do not fit together
    # payload -> the tensors of each reply; servers discard replies that differ. None: replies must only be alike
    gives: Callable[[Payload], Specs] | None = None
    recalls: tuple[str, ...] = ()  # memory of an earlier action of the same round; clients without it decline


@dataclass(frozen=True)
class State:
    """What the server keeps from round to round."""

    model: Tensor  # (d,)
    kept: Payload = field(default_factory=dict)  # whatever else an algorithm needs next round
    enrolled: tuple[Profile, ...] = ()  # all clients of the federation
    roster: tuple[Profile, ...] = ()  # the cohort of this round
    entered: tuple[Profile, ...] = ()  # the clients that paid for this round, where every round has a price
    round: int = 0
    stopped: str = ""  # why the rounds ended, in a sentence

    def to(self, device: torch.device) -> State:
        """Return the same state on another device."""
        return replace(
            self, model=self.model.to(device), kept={name: kept.to(device) for name, kept in self.kept.items()}
        )


# In a task: the fingerprint of all that the clients of a secure sum have agreed to.
AGREED = "agreed"
# The task in which every enrolled client pays for a round, before the cohort is drawn.
ENTER = "enter"
# Memory of clients: the last period in which they acted, counted from 1, and how many of its actions they have done.
PROGRESS = "progress"


@dataclass(frozen=True)
class Algorithm:
    """One method: the actions of clients, the server's round, and the guarantee."""

    actions: Mapping[str, Action]
    round: Callable[[State, Ask], State]
    # noise multiplier -> DpEvent of a round. Where a secret cohort amplifies noise on a sum, every enrolled client pays
    # this price for every round, drawn or not; actions then have no price of their own.
    round_price: Callable[[float], Any] | None = None
    # The period in which a client does each action at most once, in the order listed: "round", or the name of a counter
    # in the task, counted from 1. None: as often as it can pay. A round that is paid for is always such a period.
    once_per: str | None = None
    needs: tuple[Field, ...] = ()
    trust: Trust = "nobody"
    unit: Unit = "record"
    person: str = ""  # what a person is called, where the unit is one: "patient"
    adjacency: Adjacency = "zero-out"
    arithmetic: Arithmetic = "ideal"
    conditions: tuple[str, ...] = ()  # sentences: what must hold for the guarantee to hold
    # (noise multiplier, rounds, δ, a client's settings) -> the ε that the paper states; None: it states none
    claimed: Callable[[float, int, float, Mapping[str, float]], float] | None = None
    # (action, what the server sent) -> the terms that a client agreed to for a sum of this action's replies
    sums: Callable[[str, Payload], SumTerms] | None = None
    largest_sums: Mapping[str, tuple[SumTerms, ...]] = field(default_factory=dict)  # by group; "": there are none
    memory: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # shapes of what clients keep, zero at first
    groups: tuple[str, ...] = ()  # the groups a client may be in, where groups are needed
    seeded: bool = False  # whether the server's own noise can be repeated: in simulation only

    def __post_init__(self) -> None:
        object.__setattr__(self, "person", person_of(self.unit, self.person))

    def claim(self, noise_multiplier: float, rounds: int, delta: float, settings: Mapping[str, float]) -> float | None:
        """Return the ε that the paper states for a client, if it states one."""
        return None if self.claimed is None else self.claimed(noise_multiplier, rounds, delta, settings)

    @property
    def passed_on(self) -> frozenset[str]:
        """The names of what clients keep from one action of a round to the next, and no longer."""
        return frozenset(name for action in self.actions.values() for name in action.recalls)

    @property
    def keeps(self) -> Mapping[str, tuple[int, ...]]:
        """The shapes of all that a client keeps between rounds, zero at first."""
        limited = self.round_price is not None or self.once_per is not None
        return {**self.memory, PROGRESS: (2,)} if limited else self.memory

    def period(self, task: Task) -> int | None:
        """Return the number of a task's period; None where actions may be repeated."""
        if self.round_price is not None or self.once_per == "round":
            return task.round + 1
        return None if self.once_per is None else int(task.payload[self.once_per])
