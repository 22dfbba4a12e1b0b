"""The nouns every other module speaks in; imports nothing of ours but the errors."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol

from polyeps.errors import InputError

if TYPE_CHECKING:  # torch takes seconds to import; the command line must start without it
    import numpy as np
    import torch
    from numpy.typing import NDArray
    from torch import Tensor

# What two neighbouring data sets differ by.
# zero-out: one unit is replaced by an empty one that contributes nothing; the number of units is public.
# add-remove: one unit is present or absent; nothing that is public may depend on the number of units.
# replace-one: one unit has another value; the number of units is public.
Adjacency = Literal["zero-out", "add-remove", "replace-one"]
# What one guarantee protects: a record inside a client, or everything a client holds.
Unit = Literal["record", "client"]
# Whether a guarantee holds for the very bits that are released, or for ideal real numbers in their place.
# exact-when-deployed: simulations draw noise in floating point, deployed clients on a grid of integers.
Arithmetic = Literal["exact", "exact-when-deployed", "ideal"]
# Whom the protected must trust with un-noised values.
Trust = Literal["nobody", "secure-sum", "server"]
# The fields of a profile a client may keep to itself.
Field = Literal["examples", "epsilon", "group"]
LONGEST_NAME = 255  # bytes of the name of a client or a run
# Named tensors: all that crosses the wire, and all a client keeps between rounds.
Payload = Mapping[str, "Tensor"]


@dataclass(frozen=True, order=True)
class Budget:
    """The most privacy a client is willing to lose, all told.

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


def check_name(what: str, name: Any) -> None:
    """Refuse a name that cannot be written down everywhere: in messages, in files and on a screen."""
    if not isinstance(name, str) or not name.isprintable():  # a lone surrogate is not printable
        raise InputError(f"{what} must be printable text, not {ascii(name)[:80]}; choose another name")
    if len(name.encode()) > LONGEST_NAME:
        raise InputError(f"{what} has {len(name.encode())} bytes, and at most {LONGEST_NAME} are allowed; shorten it")


@dataclass(frozen=True)
class Records:
    """The records of n clients in one block: client i owns rows offsets[i] up to offsets[i + 1].

    Offsets may also be (n, 2), first row and end of each client: then a few of many clients share the block.
    """

    features: Tensor  # (R, ...)
    labels: Tensor  # (R,)
    offsets: Tensor  # (n + 1,) or (n, 2) int64

    @property
    def clients(self) -> int:
        return len(self.offsets) - (self.offsets.ndim == 1)

    @property
    def spans(self) -> Tensor:
        """First row and end of each client, (n, 2)."""
        return self.offsets.unfold(0, 2, 1) if self.offsets.ndim == 1 else self.offsets

    @property
    def counts(self) -> NDArray[np.int64]:
        """How many records each client has, (n,)."""
        held: NDArray[np.int64] = self.spans.diff(dim=1)[:, 0].cpu().numpy()
        return held

    def select(self, rows: Sequence[int] | slice | NDArray[np.int64]) -> Records:
        """Some of the clients, on the same block."""
        return replace(self, offsets=self.spans[rows])


class Streams(Protocol):
    """n independent random streams; row i is client i's."""

    @property
    def clients(self) -> int: ...

    @property
    def exact(self) -> bool:
        """Whether noise must be drawn on integers, as for a deployed client; normals are refused then."""

    def uniforms(self, count: int) -> NDArray[np.float64]:
        """The next `count` uniforms in (0, 1] of every client's batch stream, (n, count)."""

    def normals(self, out: Tensor, rows: Sequence[int]) -> None:
        """Fill out[i] (steps, d) with the next standard normals of client i's noise stream, for i in rows."""

    def select(self, rows: Sequence[int]) -> Streams:
        """The streams of some of the clients."""


@dataclass(frozen=True)
class Profile:
    """The face a client shows the server; None means that it does not say."""

    id: str
    examples: int | None = None
    epsilon: float | None = None
    group: str | None = None
    ready: bool = True  # it could pay for a first task


@dataclass(frozen=True)
class Spec:
    """What one tensor of a message must be; NaN and infinities are never allowed.

    >>> Spec((2,), "float32", lowest=0.0)
    Spec(shape=(2,), dtype='float32', lowest=0.0, highest=1.7976931348623157e+308, optional=False)
    """

    shape: tuple[int | None, ...]  # None: any length
    dtype: str = "float32"
    lowest: float = -sys.float_info.max
    highest: float = sys.float_info.max
    optional: bool = False  # whether a message may go without it


Specs = Mapping[str, Spec]


@dataclass(frozen=True)
class Task:
    """One request to some clients; the server's loop stamps it with run, round and the replies it expects."""

    action: str
    to: tuple[str, ...]
    payload: Payload
    run: str = ""
    round: int = 0
    summed: bool = False  # set by the transport: replies go into a sum, and nobody sees a single one
    gives: Specs | None = None  # what each reply must hold, by the server's reckoning; it is not sent to clients


@dataclass(frozen=True)
class Replies:
    """What came back: row i of every tensor is from client ids[i]. Clients that were asked and are missing declined."""

    ids: tuple[str, ...]
    payload: Payload
    ready: tuple[bool, ...]  # whether each could pay for the same task once more
    received: int = 0  # bytes of the task, for each client
    sent: int = 0  # bytes of one reply
    exhausted: tuple[str, ...] = ()  # clients that declined because they cannot afford the task
    malformed: tuple[str, ...] = ()  # clients whose reply the transport could not use


@dataclass(frozen=True)
class Total:
    """The sum over the clients that answered; no row of it was seen by the server."""

    ids: tuple[str, ...]  # who answered
    payload: Payload  # (...) each, without a row per client; empty where too few answered, so that nothing was summed
    received: int = 0  # bytes of the task, for each client
    sent: int = 0  # bytes of one reply


class Ask(Protocol):
    """How a server's round reaches clients."""

    def __call__(self, task: Task) -> Replies: ...

    def total(self, task: Task, least: int = 1, bits: int | None = None) -> Total:
        """The sum of the replies, if at least `least` clients reply; a transport may be unable to add up unseen.

        Given `bits`, replies are integers and the sum is modulo 2^bits: what masks can hide to the last digit.
        """
        raise InputError(
            f"{task.action!r} is to be summed{' as integers' if bits else ''}, over {least} clients or more, without "
            "the server seeing a single reply, "
            "which this transport cannot do; run it in memory, or choose an algorithm that trusts the server or nobody"
        )


@dataclass(frozen=True)
class Work:
    """What an action works on: n clients, stacked. Everything but the payload is private to them."""

    rows: NDArray[np.int64]  # which clients of the population these are
    payload: Payload  # what the server sent to all of them
    data: Records
    scale: NDArray[np.float64]
    streams: Streams
    memory: Payload  # (n, ...) each


@dataclass(frozen=True)
class Action:
    """What clients do when asked, and what it costs each of them."""

    run: Callable[[Work], tuple[Payload, Payload]]  # replies and memory to keep, a row per client
    price: Callable[[float, int], Any] | None  # (scale, row) -> DpEvent; None: no guarantee is given, none charged
    # (payload, memory) -> (n,) bool: who agrees to do it now; asked before anybody pays. None: everybody, always
    allows: Callable[[Payload, Payload], Tensor] | None = None
    # The price is one pure ε, of 1/scale where the form is sound, whatever the row: it needs no search, and clients
    # with equal scales pay alike.
    pure: bool = False
    # The tensors a task must hold, no more and no fewer; anything else is refused before anybody pays.
    takes: Specs = field(default_factory=dict)
    fits: Callable[[Payload], None] | None = None  # raises InputError where tensors do not fit together
    # payload -> the tensors of each reply; servers discard replies that differ. None: replies must only be alike
    gives: Callable[[Payload], Specs] | None = None
    recalls: tuple[str, ...] = ()  # what it needs of an earlier action of the same round; clients without it decline


@dataclass(frozen=True)
class State:
    """What the server carries from round to round."""

    model: Tensor  # (d,)
    kept: Payload = field(default_factory=dict)  # whatever else an algorithm needs next round
    enrolled: tuple[Profile, ...] = ()  # all clients of the federation
    roster: tuple[Profile, ...] = ()  # those who take part in this round
    entered: tuple[Profile, ...] = ()  # those of whom they were drawn, where clients pay for every round
    round: int = 0
    stopped: str = ""  # why the rounds ended, in a sentence

    def to(self, device: torch.device) -> State:
        """The same state on another device."""
        return replace(
            self, model=self.model.to(device), kept={name: kept.to(device) for name, kept in self.kept.items()}
        )


# In a task: the fingerprint of all that a secure sum's clients have agreed to.
AGREED = "agreed"


@dataclass(frozen=True)
class SumTerms:
    """What a client has agreed to for one secure sum; nothing the server says can loosen it."""

    clients: int  # at most so many are in it
    least: int  # with fewer answers it must not be opened
    colluders: int  # so many of them may be on the server's side
    bits: int | None  # the sum is modulo 2^bits; None: it is not of integers


# The task in which every enrolled client pays for a round, before anybody is drawn for it.
ENTER = "enter"
# What clients remember of that: the round they paid for, counted from 1, and how many of its actions they have done.
PROGRESS = "progress"


@dataclass(frozen=True)
class Algorithm:
    """One paper: what clients do, and what the server makes of it."""

    actions: Mapping[str, Action]
    round: Callable[[State, Ask], State]
    # scale -> DpEvent. Where noise on a sum is amplified by a secret cohort, every enrolled client pays this for
    # every round, drawn or not; for it, it does each of the actions at most once, in the order they are listed.
    dues: Callable[[float], Any] | None = None
    needs: tuple[Field, ...] = ()
    trust: Trust = "nobody"
    unit: Unit = "record"
    adjacency: Adjacency = "zero-out"
    arithmetic: Arithmetic = "ideal"
    conditions: tuple[str, ...] = ()  # sentences on what its guarantee assumes
    # (noise multiplier, rounds, δ, row) -> the ε that the paper states for a client; None: it states none.
    claimed: Callable[[float, int, float, int], float] | None = None
    # What a client agreed to for a sum of what it is asked for: (action, what the server sent) -> terms.
    sums: Callable[[str, Payload], SumTerms] | None = None
    memory: Mapping[str, tuple[int, ...]] = field(
        default_factory=dict
    )  # shape of what each client keeps, zero at first
    groups: tuple[str, ...] = ()  # those a client may be in, where groups are needed
    seeded: bool = False  # whether the server's own noise can be repeated: in simulation only

    def claim(self, scale: float, rounds: int, delta: float, row: int) -> float | None:
        """Return the ε that the paper states for a client, if it states one."""
        return None if self.claimed is None else self.claimed(scale, rounds, delta, row)

    @property
    def passed_on(self) -> frozenset[str]:
        """What clients keep from one action of a round to the next, and no longer."""
        return frozenset(name for action in self.actions.values() for name in action.recalls)

    @property
    def keeps(self) -> Mapping[str, tuple[int, ...]]:
        """All that a client keeps between rounds, zero at first."""
        return self.memory if self.dues is None else {**self.memory, PROGRESS: (2,)}
