"""What several algorithms are made of: local training as an action, groups of clients, and the server's step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from polyeps.aggregation import weighted_mean
from polyeps.certificate import Form
from polyeps.core import Action, Ask, Payload, Profile, Replies, State, Task, Work
from polyeps.grouping import split_by_epsilon
from polyeps.training import Training


@dataclass(frozen=True)
class Course:
    """What is settled for all clients before the first round, for algorithms whose clients send gradients."""

    learning_rate: float
    clip: float  # values are sent within ± this
    cohort: int  # clients asked in a round
    batches: int  # rounds in which every client is asked once: an epoch
    epochs: int  # how often a client is asked, all told
    form: Form = "sound"


def train_locally(training: Training) -> Action:
    """Train from the model received; reply with the update, at the price of the training."""

    def run(work: Work) -> tuple[Payload, Payload]:
        return {"update": updates_of(training, work)}, {}

    return Action(run, training.price)


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
    known = _disclosed(state.enrolled)
    return [known[client] for client in ids]


@lru_cache(maxsize=32)
def _disclosed(enrolled: tuple[Profile, ...]) -> dict[str, float]:
    return {client.id: client.epsilon for client in enrolled if client.epsilon is not None}


@lru_cache(maxsize=32)
def public_clients(enrolled: tuple[Profile, ...], rule: str) -> frozenset[str]:
    """The clients with the liberal budgets; decided once, over all who are enrolled."""
    liberal = split_by_epsilon(np.array([client.epsilon for client in enrolled]), rule)
    return frozenset(client.id for client, yes in zip(enrolled, liberal, strict=True) if yes)
