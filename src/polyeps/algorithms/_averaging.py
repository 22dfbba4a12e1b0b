"""What several algorithms are made of: local training as an action, groups of clients, and the server's step."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from polyeps.accounting.certificate import Form
from polyeps.aggregation.client_groups import split_by_epsilon
from polyeps.aggregation.subspace import weighted_mean
from polyeps.core import Action, Algorithm, Ask, Field, Payload, Profile, Replies, Spec, State, Streams, Task, Work
from polyeps.engine.noise import SystemStreams
from polyeps.mechanisms.clipping import check_clip
from polyeps.messages import update, vector
from polyeps.training import Training

Floats = NDArray[np.float64]
ROWS_TOGETHER = 16  # rows a device trains at once are a multiple of this: few sizes, and little wasted
Split = Literal["mixture", "k-means", "top", "threshold"]


@dataclass(frozen=True)
class Course:
    """What is settled for all clients before the first round, for algorithms whose clients send gradients."""

    learning_rate: float
    clip: float  # values are sent within ± this
    cohort: int  # clients asked in a round
    batches: int  # rounds in which every client is asked once: an epoch
    epochs: int  # how often a client is asked, all told
    form: Form = "sound"


@dataclass(frozen=True)
class Federation:
    """What is public and settled before the first round, for algorithms that protect whole clients by noisy sums."""

    rate: float  # of every client to be drawn for a round
    rounds: int
    groups: tuple[str, ...]  # the privacy group of every client, by row
    # Each group's noise multiplier, of all that a round releases together; 0: a group that is promised nothing.
    scales: Mapping[str, float]
    clip: float
    learning_rate: float
    noise: Callable[[int], Streams]  # the server's own random numbers of a round, a row for each group
    # (learning_rate, pull) -> SGD, with one number for all or one for each row it will train
    training: Callable[[Floats | float, Floats | float], Training]

    delta: float = 1e-8  # the smallest δ of the clients' budgets: a little of it pays for cohorts too small for a sum

    def __post_init__(self) -> None:
        check_clip("training.clip", self.clip)

    @property
    def sizes(self) -> dict[str, int]:
        """How many clients each group has; nobody's joining or leaving a round changes it."""
        counts = Counter(self.groups)
        return {name: counts[name] for name in self.scales}

    @property
    def seeded(self) -> bool:
        """Whether the server's noise can be repeated: in simulation only."""
        return not isinstance(self.noise(0), SystemStreams)

    def seed(self, round: int) -> int:
        """A public seed of a round, of the server's own random numbers, which know nobody's data."""
        return int(self.noise(round).uniforms(1)[0, 0] * 2**53)


def with_padding(rows: int, device: torch.device) -> list[int]:
    """Places of rows to train; on a device the first again and again, up to one of few numbers.

    Cohorts drawn by chance are of many sizes, and each size would have its steps captured anew.
    """
    return [*range(rows), *[0] * (-rows % ROWS_TOGETHER if device.type == "cuda" and rows else 0)]


RATE = "rate"  # in a task: what the learning rate is multiplied by in this round
LEARNING = Spec((), "float64", math.ulp(0.0), 1.0)  # what it may be


def trained_in_cohort(training: Training, work: Work) -> Tensor:
    """What local training, without noise of its own, makes of the model received, (n, d)."""
    places = with_padding(len(work.rows), work.data.features.device)
    updates = training.run(
        work.payload["model"],
        replace(work.data, offsets=work.data.spans[places]),
        work.streams.select(places),
        rows=work.rows[places].tolist(),
        rate_factor=float(work.payload.get(RATE, 1.0)),
    )
    return updates[: len(work.rows)]


def train_locally(training: Training) -> Action:
    """Train from the model received; reply with the update, at the price of the training."""

    def run(work: Work) -> tuple[Payload, Payload]:
        return {"update": updates_of(training, work)}, {}

    size = training.model.size
    return Action(run, training.price, takes={"model": vector(size)}, gives=lambda _: {"update": update(size)})


def with_noise_of_their_own(
    training: Training,
    round: Callable[[State, Ask], State],
    needs: tuple[Field, ...] = (),
    actions: Mapping[str, Action] | None = None,
) -> Algorithm:
    """Return an algorithm whose clients train, by default, and whose guarantee is that of their training."""
    return Algorithm(
        {"train": train_locally(training)} if actions is None else actions,
        round,
        needs=needs,
        adjacency=training.adjacency,
        arithmetic=training.arithmetic,
        claimed=training.claimed,
    )


def updates_of(training: Training, work: Work) -> Tensor:
    """What local training makes of the model received, (n, d)."""
    scale = work.scale if training.price is not None else None
    return training.run(work.payload["model"], work.data, work.streams, scale, rows=work.rows.tolist())


def ask_updates(state: State, ask: Ask, clients: Iterable[Profile]) -> Replies:
    """The updates of some of the round's clients, trained from the present model."""
    return ask(Task("train", tuple(client.id for client in clients), {"model": state.model}))


def mean(rows: Tensor, weights: Sequence[float] | None = None) -> Tensor:
    """The mean of updates (n, d), plain unless weights are given."""
    return weighted_mean(rows, torch.ones(len(rows)) if weights is None else torch.tensor(weights, dtype=torch.float64))


def step(state: State, update: Tensor, **kept: Tensor) -> State:
    """The next state: the model moved by an update; what is not kept anew stays as it was."""
    return replace(state, model=state.model + update, kept={**state.kept, **kept})


def epsilons(state: State, ids: Iterable[str]) -> list[float]:
    """The budgets some clients disclosed."""
    known = {client.id: client.epsilon for client in state.enrolled if client.epsilon is not None}
    return [known[client] for client in ids]


def public_clients(enrolled: Sequence[Profile], rule: Split, at: float | None = None) -> frozenset[str]:
    """The clients with the liberal budgets, among all who are enrolled; where all budgets are equal, everybody.

    `at` is the share of the rule "top", or the ε of "threshold".
    """
    liberal = _liberal(tuple(client.epsilon for client in enrolled), rule, at)
    return frozenset(client.id for client, yes in zip(enrolled, liberal, strict=True) if yes)


@lru_cache(maxsize=4)  # a mixture is fitted once, not every round
def _liberal(epsilons: tuple[float | None, ...], rule: Split, at: float | None) -> tuple[bool, ...]:
    parameter = {} if at is None else {_PARAMETER.get(rule, "at"): at}
    return tuple(split_by_epsilon(np.array(epsilons, dtype=np.float64), rule, **parameter).tolist())


_PARAMETER = {"top": "share", "threshold": "threshold"}


def check_split(rule: Split, at: float | None) -> None:
    """Refuse a rule or a parameter of it before anybody trains."""
    _liberal((1.0, 2.0), rule, at)
