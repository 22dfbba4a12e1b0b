"""Releases of a round that are summed unseen: what each client clips and adds, and what the server then knows.

A release of share s costs s of a round's privacy: its noise multiplier is scale/√s, so that releases whose shares add
up to one cost, together, one Gaussian of multiplier `scale`, the client's own. Who has no scale is promised nothing,
and sends values as they are.

How many were drawn is known to them, n. Each adds its part of noise that the honest among those who stay make up: n
times 1 - dropouts - colluders, and not rounded. So when all answer, the noise of a sum is the same whoever and however
many were drawn: in a vector of thousands of coordinates the size of the noise could be read off, and with it whether
one more was there. If fewer stay than promised, nothing is opened. If nobody was drawn, the server puts noise in the
place of a sum: a round that changes nothing would tell that nobody was. For the same reason integers have as many bits
whoever was drawn: sums that wrap around elsewhere would tell of a larger cohort.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from polyeps.accounting.events import Gaussian
from polyeps.algorithms.blocks import LEARNING, RATE
from polyeps.certificate import SECRET_COHORT
from polyeps.core import Ask, Payload, Spec, Specs, State, Streams, Task, Work
from polyeps.engine.noise import normals_for
from polyeps.errors import InputError
from polyeps.mechanisms.clipping import clip_to_norm
from polyeps.mechanisms.integer import Grid, event_of_parts, padded
from polyeps.mechanisms.lattice_noise import LARGEST, SMALLEST, NoiseName
from polyeps.mechanisms.rounding import decode, encode
from polyeps.mechanisms.words import words_of
from polyeps.messages import MOST_ROUNDS, vector, whole_number

HONEST = "honest"  # in a task: how many clients' noise makes up all of it, not always a whole number
DRAWN, ROTATION, BITS = "drawn", "rotation", "bits"  # in a task, where noise is on integers: their grid hangs on them
# gaussian: ideal, in floating point. Others: on integers, which a secure sum can hide, with the price of what is sent.
NoiseKind = Literal["gaussian", "skellam", "discrete-gaussian"]
FINE = 4096  # steps of the integers' grid in a clip norm: finer ones save no privacy worth having
_REMEDY = {
    True: "give a larger budgets.epsilon or smaller budgets.scale, run fewer rounds",
    False: "give a smaller budgets.epsilon or larger budgets.scale",
}
_SPREAD = 6  # deviations above its mean that a cohort's size is reckoned with


@dataclass(frozen=True)
class Release:
    """One vector of every client, clipped as a whole, summed with noise."""

    action: str  # in which it is made; the tensor has the same name
    size: int
    clip: float
    share: float = 1.0  # of the round's privacy
    noise: NoiseKind = "gaussian"
    agents: int = 1  # most that may ever add noise to one sum: only sums of discrete Gaussians depend on it

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise InputError(f"the share of a round's privacy must be above 0 and at most 1, not {self.share}")
        if self.noise not in get_args(NoiseKind):
            raise InputError(f"noise must be one of {', '.join(get_args(NoiseKind))}, not {self.noise!r}")

    def deviation(self, scale: float) -> float:
        """Of the noise that its price is for, where the round's multiplier is `scale`."""
        return scale / math.sqrt(self.share) * self.clip

    def event(self, scale: float) -> Any:
        """What it costs, before sampling; whatever noise is added beyond what is promised is not counted."""
        if self.noise == "gaussian":
            return Gaussian(scale / math.sqrt(self.share))
        step, dimension = self.clip / FINE, padded(self.size)
        return event_of_parts(self._lattice, self.clip, step, dimension, self.deviation(scale), self.agents)

    def from_clients(self, work: Work, values: Tensor) -> Payload:
        """What clients send of values (n, size): clipped, with their part of the noise."""
        if not work.scale.any():
            return {self.action: values}
        honest = float(work.payload[HONEST])
        if self.noise == "gaussian":
            deviations = torch.from_numpy(work.scale * self.deviation(1.0))[:, None]
            return {self.action: with_parts_of_noise(work, clip_to_norm(values, self.clip), deviations, self.action)}
        drawn, rotation, bits = (int(work.payload[name]) for name in (DRAWN, ROTATION, BITS))
        grid = self._grid(float(work.scale.max()), honest, drawn, bits, rotation)
        return {self.action: torch.from_numpy(encode(grid, values, words_of(work.streams, self.action)))}

    def gives(self, scale: float) -> Specs:
        """What a client, or the sum over clients, sends of it."""
        if self.noise == "gaussian" or not scale:
            return {self.action: vector(self.size, sys.float_info.max)}
        return {self.action: Spec((padded(self.size),), "int64", 0, 2**62)}

    def takes(self, scale: float) -> Specs:
        """What clients are told to make it."""
        if self.noise == "gaussian" or not scale:
            return {}
        return {
            DRAWN: whole_number(1, self.agents),
            ROTATION: whole_number(0, MOST_ROUNDS),
            BITS: whole_number(2, 62),
        }

    def to_ask(self, state: State, bits: int | None) -> Payload:
        """What clients must know to make it, besides what they work on."""
        if bits is None:
            return {}
        numbers = {DRAWN: len(state.roster), ROTATION: state.round, BITS: bits}
        return {name: torch.tensor(number) for name, number in numbers.items()}

    def bits(self, scale: float, honest_share: float, most: int) -> int | None:
        """Of a number that is sent, so that sums over `most` clients fit; nothing where it is not an integer."""
        if self.noise == "gaussian" or not scale:
            return None
        everybodys = self.deviation(scale) / math.sqrt(honest_share)
        return Grid.fitting(self.clip, self.clip / FINE, self.size, most, most, everybodys, noise=self._lattice).bits

    def check_drawable(self, scale: float, honest_share: float, drawn: int) -> None:
        """Refuse noise of which an agent of so many could not draw its part."""
        if self.noise == "gaussian" or not scale:
            return
        part = self.deviation(scale) / math.sqrt(drawn * honest_share) / (self.clip / FINE)
        if not SMALLEST <= part <= LARGEST:
            raise InputError(
                f'noise = "{self.noise}" can be drawn for deviations of {SMALLEST:g} to {LARGEST:g} steps of the grid, '
                f"and each of {drawn} clients would need {part:g}; {_REMEDY[part > LARGEST]}"
                + (", move split nearer to 0.5" if self.share < 1 else "")
                + ', or take noise = "gaussian"'
            )

    def decoded(self, total: Tensor, state: State, scale: float, honest: float, bits: int | None) -> Tensor:
        """The sum of the vectors, from the sum of what was sent."""
        if bits is None:
            return total
        grid = self._grid(scale, honest, len(state.roster), bits, state.round)
        return decode(grid, total.cpu().numpy()).to(state.model)

    def of_nobody(self, state: State, scale: float, honest_share: float, streams: Streams, bits: int | None) -> Tensor:
        """What is known where nobody was drawn: noise, as large as a cohort's of which all answer."""
        own, none = streams.select([0]), torch.zeros(1, self.size)
        if bits is None:
            noise = self.deviation(scale) / math.sqrt(honest_share) * normals_for(own, none, self.action)[0]
            return noise.to(state.model)
        grid = self._grid(scale, honest_share, 1, bits, state.round)
        return decode(grid, encode(grid, none, words_of(own, self.action))[0]).to(state.model)

    @property
    def _lattice(self) -> NoiseName:
        return "skellam" if self.noise == "skellam" else "discrete-gaussian"

    def _grid(self, scale: float, honest: float, drawn: int, bits: int, rotation: int) -> Grid:
        """Integers as all agree on them. The noise of all who were drawn is that of the honest, and the surplus."""
        everybodys = self.deviation(scale) * math.sqrt(drawn / honest)
        return Grid(self.clip, self.clip / FINE, self.size, drawn, drawn, everybodys, bits, rotation, self._lattice)


@dataclass(frozen=True)
class SecureSums:
    """How the releases of a round are summed: what may go wrong without anything being lost."""

    scale: float  # of a round, which is public
    expected: float  # how many are drawn on average
    streams: Callable[[int], Streams]  # the server's own, of a round
    dropouts: float = 0.1  # the share of those drawn that may fail to answer
    colluders: float = 0.0  # the share of those drawn that may tell the server their noise

    def __post_init__(self) -> None:
        for name in ("dropouts", "colluders"):
            if not 0 <= getattr(self, name) < 1:
                raise InputError(f"{name} must be at least 0 and below 1, not {getattr(self, name)}")
        if not self.honest_share > 0:
            raise InputError("dropouts and colluders leave nobody to add noise; together they must be below 1")
        most = (1 - self.colluders) / 2
        if self.dropouts > most + 1e-9:
            raise InputError(
                f"dropouts must be at most (1 - colluders)/2, here {most:g}, not {self.dropouts:g}: a secure sum opens "
                "nothing if fewer than (1 + colluders)/2 of those drawn answer, so noise for more dropouts is in vain"
            )

    @property
    def honest_share(self) -> float:
        """Of those drawn, who answer and keep their noise to themselves."""
        return 1 - self.dropouts - self.colluders

    def conditions(self, rate: float) -> tuple[str, ...]:
        """What the promise hangs on, where clients are drawn with probability `rate`."""
        shown = (
            f"It holds as long as the server sees only sums over at least {_of_100(1 - self.dropouts)} clients drawn"
        )
        told = (
            f"at most {_of_100(self.colluders)} drawn tell others their noise"
            if self.colluders
            else "none tells its noise"
        )
        return (f"{shown}, and {told}.", *((SECRET_COHORT,) if rate < 1 else ()))

    @property
    def most(self) -> int:
        """Clients whose sum must fit: a number that is public, and hardly ever passed. If it is, more sums wrap."""
        return math.ceil(self.expected + _SPREAD * math.sqrt(self.expected))

    def check(self, *releases: Release) -> None:
        """Refuse noise that clients could not draw, before anybody has paid: for cohorts of all likely sizes."""
        fewest = max(1, math.floor(self.expected - _SPREAD * math.sqrt(self.expected)))
        for release in releases:
            for drawn in (fewest, self.most):
                release.check_drawable(self.scale, self.honest_share, drawn)

    def least(self, drawn: int) -> int:
        """How many of those drawn must answer for a sum to be opened: enough for the noise, and for the secure sum.

        Masks hold if a server cannot gather so many answers to each of two stories, with the colluders telling both.
        """
        for_masks = math.floor(drawn * (1 + self.colluders) / 2 + 1e-9) + 1
        return max(for_masks, math.ceil(drawn * (1 - self.dropouts) - 1e-9))

    def least_told(self, asked: Payload) -> int:
        """The same, for a client that was told by how many to divide its noise."""
        return self.least(round(float(asked[HONEST]) / self.honest_share))

    def opened(self, ask: Ask, task: Task, bits: int | None = None) -> Payload:
        """The sum of what some clients reply, with their parts of the noise; empty where too few answered."""
        told = replace(task, payload={**task.payload, **self.noise_of(len(task.to))})
        return ask.total(told, self.least(len(task.to)), bits).payload

    def takes(self, agents: int) -> Specs:
        """What clients of a federation of `agents` are told about parts of noise: bounded by what they agreed to."""
        return {HONEST: Spec((), "float64", self.honest_share * (1 - 1e-9), agents * self.honest_share * (1 + 1e-9))}

    def noise_of(self, drawn: int) -> Payload:
        """What clients must know to add their parts of the noise."""
        return {HONEST: torch.tensor(drawn * self.honest_share, dtype=torch.float64)}

    def of(self, state: State, ask: Ask, release: Release, asked: Payload) -> Tensor | None:
        """The noisy sum over the clients drawn; nothing where too few answered."""
        drawn = tuple(client.id for client in state.roster)
        bits = release.bits(self.scale, self.honest_share, self.most)
        if not drawn:
            if not self.scale:
                return None
            return release.of_nobody(state, self.scale, self.honest_share, self.streams(state.round), bits)
        honest = len(drawn) * self.honest_share
        task = Task(release.action, drawn, {**asked, **release.to_ask(state, bits)})
        found = self.opened(ask, task, bits).get(release.action)
        return None if found is None else release.decoded(found, state, self.scale, honest, bits)


def _of_100(share: float) -> str:
    return f"{100 * share:g} of 100"


def with_parts_of_noise(work: Work, values: Tensor, deviations: Tensor, release: str) -> Tensor:
    """Values (n, k), each with its part of noise whose sum over the honest has these deviations, (n, 1) or (n, k)."""
    parts = deviations.to(values) / math.sqrt(float(work.payload[HONEST]))
    return values + parts * normals_for(work.streams, values, release)


def starting(size: int, rate_decay: float) -> Specs:
    """What `start_of` sends for a model of `size` parameters."""
    return {"model": vector(size)} | ({RATE: LEARNING} if rate_decay != 1 else {})


def start_of(state: State, rate_decay: float) -> Payload:
    """What clients need to train in a round: the model, and the learning rate's factor where it falls."""
    asked = {"model": state.model}
    if rate_decay != 1:
        asked[RATE] = torch.tensor(rate_decay**state.round, dtype=torch.float64)
    return asked


def check_rates(server_rate: float, rate_decay: float) -> None:
    if not 0 < server_rate < math.inf:
        raise InputError(f"server_rate must be a finite number above 0, not {server_rate}")
    if not 0 < rate_decay <= 1:
        raise InputError(f"rate_decay must be above 0 and at most 1, not {rate_decay}")
