"""Shared by FedSel and its baselines: clients that send a little of their gradient once per epoch, and the step.

The price of a report is one pure ε for all records of a client (unit client, replace-one); no server is trusted. The
server sends the epoch; a client answers only if it has not answered in that epoch or a later one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polyeps.algorithms._averaging import Course, step
from polyeps.core import Action, Algorithm, Ask, Payload, Profile, Replies, Spec, Specs, State, Task, Work
from polyeps.engine.per_client import Floats
from polyeps.mechanisms.values import IDEAL_ONLY
from polyeps.messages import MOST_ROUNDS, update, vector, whole_number
from polyeps.training import Training

# (work, residual kept before (n, d)) -> the reply, and the residual to keep
Draw = Callable[[Work, Tensor | None], tuple[Payload, Tensor | None]]


def reporting(
    course: Course,
    draw: Draw,
    price: Callable[[float, Mapping[str, float]], Any] | None,
    direction: Callable[[State, Replies], Tensor],
    *,
    gives: Specs,
    size: int,
    learning_rate: float | None = None,
    residual: int | None = None,
    value: str = "exact",
) -> Algorithm:
    """Return an algorithm with one report per client and epoch; the server steps against their direction (d,)."""
    rate = course.learning_rate if learning_rate is None else learning_rate

    def run(work: Work) -> tuple[Payload, Payload]:
        payload, held = draw(work, work.memory.get("residual"))
        return payload, {} if held is None or residual is None else {"residual": held}

    def round(state: State, ask: Ask) -> State:
        asked = tuple(client.id for client in state.roster)
        epoch = torch.tensor(state.round // course.batches + 1)
        replies = ask(Task("report", asked, {"model": state.model, "epoch": epoch}))
        return step(state, -rate * direction(state, replies)) if replies.ids else state

    takes = {"model": vector(size), "epoch": whole_number(1, MOST_ROUNDS)}
    return Algorithm(
        {"report": Action(run, price, takes=takes, gives=lambda _: gives)},
        round,
        once_per="epoch",
        unit="client",
        adjacency="replace-one",
        arithmetic="ideal" if value in IDEAL_ONLY else "exact",
        claimed=None if price is None else lambda noise, rounds, *_: rounds / noise,  # ε′ for each report
        memory={} if residual is None else {"residual": (residual,)},
    )


def gradients_of(training: Training, work: Work) -> Tensor:
    """Return the gradient of every client's mean loss at the model received, (n, d): minus a full step of size one.

    NaN becomes 0: a server that sends a model under which a record overflows must not spoil what the client keeps.
    """
    steps = training.run(work.payload["model"], work.data, work.streams, settings=work.settings)
    return steps.neg_().nan_to_num_(nan=0.0)


def sparse(count: int, size: int) -> Specs:
    """Return the specification of a report of a few coordinates; index -1 stands for none."""
    return {"index": Spec((count,), "int64", -1, size - 1), "value": update(count)}


def sparse_mean(replies: Replies, size: int, weights: Tensor | None = None) -> Tensor:
    """Return the mean over all replies of vectors with a few entries each; indices outside the vector are ignored."""
    index, value = replies.payload["index"].long(), replies.payload["value"].double()
    if weights is not None:
        value = value * weights[:, None].to(value.device)
    real = (index >= 0) & (index < size)
    total = torch.zeros(size, dtype=torch.float64, device=value.device)
    total.index_add_(0, index[real], value[real])
    return (total / len(replies.ids)).to(torch.float32)


def disclosed(roster: tuple[Profile, ...], ids: tuple[str, ...]) -> Floats | None:
    """Return the budgets of some of a round's clients; None if one of them is undisclosed, or if all are equal."""
    known = {client.id: client.epsilon for client in roster}
    found = [known[client] for client in ids]
    if any(epsilon is None for epsilon in found) or len(set(found)) == 1:
        return None
    return np.array(found, dtype=np.float64)
