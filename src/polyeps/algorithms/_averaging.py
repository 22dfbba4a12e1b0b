"""Building blocks of several algorithms: local training as an action, groups of clients, and the server's step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from polyeps.accounting.certificate import Form
from polyeps.aggregation.client_groups import split_by_epsilon
from polyeps.aggregation.subspace import weighted_mean
from polyeps.core import Action, Algorithm, Ask, Field, Payload, Profile, Replies, Spec, State, Streams, Task, Work
from polyeps.engine.noise import SystemStreams
from polyeps.errors import InputError
from polyeps.mechanisms.clipping import check_clip
from polyeps.messages import update, vector
from polyeps.training import Training

ROWS_TOGETHER = 16  # rows a device trains at once are a multiple of this: few sizes, and little wasted
Split = Literal["mixture", "k-means", "top", "threshold"]


@dataclass(frozen=True)
class Course:
    """The public settings of algorithms whose clients send gradients."""

    learning_rate: float
    clip: float  # values are sent within ± this
    cohort: int  # clients asked in a round
    batches: int  # rounds of an epoch, in which every client is asked once
    epochs: int  # how often a client is asked in total
    form: Form = "sound"


@dataclass(frozen=True)
class Federation:
    """The public settings of algorithms that protect whole clients by noisy sums."""

    rate: float  # the probability of every client to be drawn for a round
    rounds: int
    sizes: Mapping[str, int]  # the number of clients of each privacy group
    # round price -> each group's noise multiplier, for all releases of a round together; 0: a group without guarantee
    noise_for: Callable[[Callable[[float], Any]], Mapping[str, float]]
    clip: float
    noise: Callable[[int], Streams]  # the server's own random numbers of a round, a row for each group
    training: Training  # local training, without noise of its own
    learning_rate: float
    delta: float = 1e-8  # the smallest δ of the clients' budgets: a little of it pays for cohorts too small for a sum

    def __post_init__(self) -> None:
        check_clip("training.clip", self.clip)

    @property
    def clients(self) -> int:
        """The number of enrolled clients."""
        return sum(self.sizes.values())

    @property
    def seeded(self) -> bool:
        """Whether the server's noise can be repeated: in simulation only."""
        return not isinstance(self.noise(0), SystemStreams)

    def seed(self, round: int) -> int:
        """Return a public seed of a round, from the server's own random numbers, which no data affect."""
        return int(self.noise(round).uniforms(1)[0, 0] * 2**53)


def with_padding(rows: int, device: torch.device) -> list[int]:
    """Return the rows to train: on a device the first is repeated, up to a multiple of ROWS_TOGETHER.

    Random cohorts have many sizes, and every size would have its steps captured anew.
    """
    return [*range(rows), *[0] * (-rows % ROWS_TOGETHER if device.type == "cuda" and rows else 0)]


RATE = "rate"  # in a task: the factor of the learning rate in this round
LEARNING = Spec((), "float64", math.ulp(0.0), 1.0)


def starting(size: int, rate_decay: float) -> dict[str, Spec]:
    """Return the specification of what `start_of` sends for a model of `size` parameters."""
    return {"model": vector(size)} | ({RATE: LEARNING} if rate_decay != 1 else {})


def start_of(state: State, rate_decay: float) -> Payload:
    """Return what clients need to train in a round: the model, and the learning rate's factor where it falls."""
    asked = {"model": state.model}
    if rate_decay != 1:
        asked[RATE] = torch.tensor(rate_decay**state.round, dtype=torch.float64)
    return asked


def check_learning_rates(server_rate: float, rate_decay: float) -> None:
    """Refuse bad learning rates before any client trains."""
    if not 0 < server_rate < math.inf:
        raise InputError(f"server_rate must be a finite number above 0, not {server_rate}")
    if not 0 < rate_decay <= 1:
        raise InputError(f"rate_decay must be above 0 and at most 1, not {rate_decay}")


def trained_in_cohort(training: Training, work: Work) -> Tensor:
    """Return the updates of local training, without noise of its own, from the model received, (n, d)."""
    places = with_padding(work.clients, work.data.features.device)
    updates = training.run(
        work.payload["model"],
        replace(work.data, offsets=work.data.spans[places]),
        work.streams.select(places),
        settings={name: values[places] for name, values in work.settings.items()},
        rate_factor=float(work.payload.get(RATE, 1.0)),
    )
    return updates[: work.clients]


def train_locally(training: Training) -> Action:
    """Return the action that trains from the model received and replies with the update, at the training's price."""

    def run(work: Work) -> tuple[Payload, Payload]:
        return {"update": updates_of(training, work)}, {}

    size = training.model.size
    return Action(run, training.price, takes={"model": vector(size)}, gives=lambda _: {"update": update(size)})


def with_local_noise(
    training: Training,
    round: Callable[[State, Ask], State],
    needs: tuple[Field, ...] = (),
    actions: Mapping[str, Action] = MappingProxyType({}),
) -> Algorithm:
    """Return an algorithm whose clients add their own noise: its guarantee is that of their training.

    Clients can train; further `actions` have other replies.
    """
    return Algorithm(
        {"train": train_locally(training), **actions},
        round,
        needs=needs,
        unit=training.unit,
        person=training.model.person,
        adjacency=training.adjacency,
        arithmetic=training.arithmetic,
        claimed=training.claimed,
    )


def updates_of(training: Training, work: Work) -> Tensor:
    """Return the updates of local training from the model received, (n, d)."""
    noise = work.noise_multiplier if training.price is not None else None
    return training.run(work.payload["model"], work.data, work.streams, noise, settings=work.settings)


def ask_updates(state: State, ask: Ask, clients: Iterable[Profile]) -> Replies:
    """Ask some of the round's clients for updates, trained from the present model."""
    return ask(Task("train", tuple(client.id for client in clients), {"model": state.model}))


def mean(rows: Tensor, weights: Sequence[float] | None = None) -> Tensor:
    """Return the mean of updates (n, d), plain unless weights are given."""
    return weighted_mean(rows, torch.ones(len(rows)) if weights is None else torch.tensor(weights, dtype=torch.float64))


def step(state: State, update: Tensor, **kept: Tensor) -> State:
    """Return the next state: the model plus an update; of `kept`, only what is given changes."""
    return replace(state, model=state.model + update, kept={**state.kept, **kept})


def epsilons(state: State, ids: Iterable[str]) -> list[float]:
    """Return the disclosed budgets of some clients."""
    wanted = list(ids)
    some = state.roster if {client.id for client in state.roster}.issuperset(wanted) else state.enrolled
    known = {client.id: client.epsilon for client in some if client.epsilon is not None}
    return [known[client] for client in wanted]


def disclosed_weights(state: State, weights: str, ids: Sequence[str]) -> list[float]:
    """Return weights by the disclosed budgets of some clients where `weights` says "epsilon", else equal ones."""
    return epsilons(state, ids) if weights == "epsilon" else [1.0] * len(ids)


def public_clients(enrolled: Sequence[Profile], rule: Split, at: float | None = None) -> frozenset[str]:
    """Return the high-ε clients among all that are enrolled; all of them where budgets are equal.

    `at` is the share of the rule "top", or the ε of "threshold".
    """
    high = _are_high(tuple(client.epsilon for client in enrolled), rule, at)
    return frozenset(client.id for client, yes in zip(enrolled, high, strict=True) if yes)


@lru_cache(maxsize=4)  # a mixture is fitted once, not every round
def _are_high(epsilons: tuple[float | None, ...], rule: Split, at: float | None) -> tuple[bool, ...]:
    return tuple(split_by_epsilon(np.array(epsilons, dtype=np.float64), rule, at).tolist())


def check_split(rule: Split, at: float | None) -> None:
    """Refuse a bad rule or parameter before any client trains."""
    _are_high((1.0, 2.0), rule, at)


def of_everybody(state: State, kept: Payload, name: str) -> Tensor:
    """Return a number of every enrolled client, 0 for clients that joined since."""
    held = torch.zeros(len(state.enrolled), dtype=torch.float64)
    if name in kept:
        held[: len(kept[name])] = kept[name].cpu()
    return held


def places_of(state: State, ids: Iterable[str]) -> list[int]:
    """Return the places of some clients among all that are enrolled."""
    where = {client.id: place for place, client in enumerate(state.enrolled)}
    return [where[client] for client in ids]
