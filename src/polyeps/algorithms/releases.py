"""Releases of a round that are summed unseen: what each client clips and adds, and what the server then knows.

A release of share s costs s of a round's privacy: its noise multiplier is scale/√s, so that releases whose shares add
up to one cost, together, one Gaussian of multiplier `scale`, the client's own. Who has no scale is promised nothing,
and sends values as they are.

How many were drawn is known to them, n. Each adds its part of noise that the honest among those who stay make up: n
times 1 - dropouts - colluders, and not rounded. So when all answer, the noise of a sum is the same whoever and however
many were drawn: in a vector of thousands of coordinates the size of the noise could be read off, and with it whether
one more was there. If fewer stay than promised, nothing is opened. If nobody was drawn, the server puts noise in the
place of a sum: a round that changes nothing would tell that nobody was.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from polyeps.core import PROGRESS, Ask, Payload, State, Streams, Task, Work
from polyeps.engine.noise import normals_for
from polyeps.errors import InputError
from polyeps.mechanisms.clipping import clip_to_norm
from polyeps.training import Training

HONEST = "honest"  # in a task: how many clients' noise makes up all of it, not always a whole number
RATE = "rate"  # in a task: what the learning rate is multiplied by in this round
_TOGETHER = 32  # clients a device trains at once are a multiple of this, so that few graphs serve cohorts of any size


@dataclass(frozen=True)
class Release:
    """One vector of every client, clipped as a whole, summed with noise."""

    action: str  # in which it is made; the tensor has the same name
    size: int
    clip: float
    share: float = 1.0  # of the round's privacy

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise InputError(f"the share of a round's privacy must be above 0 and at most 1, not {self.share}")

    def multiplier(self, scale: float) -> float:
        """Its noise over its clip norm, where the round's is `scale`."""
        return scale / math.sqrt(self.share)

    def from_clients(self, work: Work, values: Tensor) -> Payload:
        """What clients send of values (n, size): clipped, with their part of the noise."""
        if not work.scale.any():
            return {self.action: values}
        part = self.multiplier(1.0) * self.clip / math.sqrt(float(work.payload[HONEST]))
        deviations = torch.from_numpy(work.scale * part).to(values)[:, None]
        return {
            self.action: clip_to_norm(values, self.clip) + deviations * normals_for(work.streams, values, self.action)
        }

    def of_nobody(self, scale: float, streams: Streams, like: Tensor) -> Tensor:
        """What is known where nobody was drawn: noise."""
        none = torch.zeros(1, self.size)
        noise = normals_for(streams.select([0]), none, self.action)[0] * self.multiplier(scale) * self.clip
        return noise.to(like)


@dataclass(frozen=True)
class SecureSums:
    """How the releases of a round are summed: what may go wrong without anything being lost."""

    scale: float  # of a round, which is public
    streams: Callable[[int], Streams]  # the server's own, of a round
    dropouts: float = 0.1  # the share of those drawn that may fail to answer
    colluders: float = 0.0  # the share of those drawn that may tell the server their noise

    def __post_init__(self) -> None:
        for name in ("dropouts", "colluders"):
            if not 0 <= getattr(self, name) < 1:
                raise InputError(f"{name} must be at least 0 and below 1, not {getattr(self, name)}")
        if not self.dropouts + self.colluders < 1:
            raise InputError("dropouts and colluders leave nobody to add noise; together they must be below 1")

    def least(self, drawn: int) -> int:
        """How many of those drawn must answer for a sum to be opened."""
        return max(1, math.ceil(drawn * (1 - self.dropouts) - 1e-9))

    def honest(self, drawn: int) -> float:
        """How many of those keep their noise to themselves."""
        return drawn * (1 - self.dropouts - self.colluders)

    def of(self, state: State, ask: Ask, release: Release, asked: Payload) -> Tensor | None:
        """The noisy sum over the clients drawn; nothing where too few answered."""
        drawn = tuple(client.id for client in state.roster)
        if not drawn and not self.scale:
            return None
        if not drawn:
            return release.of_nobody(self.scale, self.streams(state.round), state.model)
        task = Task(
            release.action, drawn, {**asked, HONEST: torch.tensor(self.honest(len(drawn)), dtype=torch.float64)}
        )
        return ask.total(task, least=self.least(len(drawn))).payload.get(release.action)


class Held:
    """Updates that clients keep from one release of a round to the next, and no longer.

    In a client's memory they would be written down with every round: of thousands of clients who are simulated, tens of
    gigabytes, though only a cohort has any. So they are held here, by whoever is drawn, until they are used or the
    next round begins. A client that has lost its update fails, which counts as dropping out.
    """

    def __init__(self) -> None:
        self._round = 0
        self._places: dict[int, tuple[Tensor, int]] = {}

    def keep(self, work: Work, updates: Tensor) -> None:
        number = int(work.memory[PROGRESS][0, 0])
        if number != self._round:
            self._round, self._places = number, {}
        self._places |= {int(row): (updates, place) for place, row in enumerate(work.rows)}

    def take(self, work: Work) -> Tensor:
        """The updates (n, d), which are then forgotten."""
        try:
            found = [self._places.pop(int(row)) for row in work.rows]
        except KeyError:
            raise InputError("a client no longer has the update it began the round with; leave it out") from None
        together = found[0][0]
        if len(found) == len(together) and all(
            held is together and place == i for i, (held, place) in enumerate(found)
        ):
            return together
        return torch.stack([held[place] for held, place in found])


def trained(training: Training, work: Work) -> Tensor:
    """What local training makes of the model received, (n, d), at this round's learning rate."""
    clients = len(work.rows)
    places = [*range(clients)]
    if work.data.features.is_cuda:
        places += [0] * (-clients % _TOGETHER)
    updates = training.run(
        work.payload["model"],
        replace(work.data, offsets=work.data.spans[places]),
        work.streams.select(places),
        rows=work.rows[places].tolist(),
        rate_factor=float(work.payload.get(RATE, 1.0)),
    )
    return updates[:clients]


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
