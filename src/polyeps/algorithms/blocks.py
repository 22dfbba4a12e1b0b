"""What several algorithms are made of."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import numpy as np
from torch import Tensor

from polyeps.core import Action, Ask, Payload, Profile, Replies, State, Task, Work
from polyeps.grouping import split_by_epsilon
from polyeps.training import Training


def train_locally(training: Training) -> Action:
    """Train from the model received; reply with the update, at the price of the training."""

    def run(work: Work) -> tuple[Payload, Payload]:
        scale = work.scale if training.price is not None else None
        update = training.run(work.payload["model"], work.data, work.streams, scale, rows=work.rows.tolist())
        return {"update": update}, {}

    return Action(run, training.price)


def ask_updates(state: State, ask: Ask, clients: tuple[Profile, ...]) -> Replies:
    """The updates of some of the round's clients, trained from the present model."""
    return ask(Task("train", names(clients), {"model": state.model}))


def split_roster(state: State, rule: str) -> tuple[tuple[Profile, ...], tuple[Profile, ...]]:
    """This round's clients as (public, private); who is public is decided once, over all who are enrolled."""
    public = public_clients(state.enrolled, rule)
    return (
        tuple(client for client in state.roster if client.id in public),
        tuple(client for client in state.roster if client.id not in public),
    )


@lru_cache(maxsize=32)
def public_clients(enrolled: tuple[Profile, ...], rule: str) -> frozenset[str]:
    """The clients with the liberal budgets."""
    liberal = split_by_epsilon(np.array([client.epsilon for client in enrolled]), rule)
    return frozenset(client.id for client, yes in zip(enrolled, liberal, strict=True) if yes)


def names(clients: tuple[Profile, ...]) -> tuple[str, ...]:
    return tuple(client.id for client in clients)


def step(state: State, update: Tensor, **kept: Tensor) -> State:
    """The next state: the model moved by an update."""
    return replace(state, model=state.model + update.to(state.model.device), kept=kept)
