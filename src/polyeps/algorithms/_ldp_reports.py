"""What FedSel and its baselines share: clients that send a little of their gradient once an epoch, and the step.

The price of a report is one pure ε for everything a client holds (unit client, any two states of it); nobody is
trusted. Which epoch it is, the server says; a client answers only if it has not answered in that or a later one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from polyeps.algorithms._averaging import Course, step
from polyeps.core import Action, Algorithm, Ask, Payload, Profile, Replies, Spec, Specs, State, Task, Work
from polyeps.mechanisms.values import IDEAL_ONLY
from polyeps.messages import MOST_ROUNDS, update, vector, whole_number
from polyeps.training import Training

Floats = NDArray[np.float64]
# What a client makes of a task and of what it kept (n, d) before: the reply, and what it keeps from now on.
Draw = Callable[[Work, Tensor | None], tuple[Payload, Tensor | None]]


def reporting(
    course: Course,
    draw: Draw,
    price: Callable[[float, int], Any] | None,
    direction: Callable[[State, Replies], Tensor],
    *,
    gives: Specs,
    size: int,
    learning_rate: float | None = None,
    residual: int | None = None,
    value: str = "exact",
) -> Algorithm:
    """One report per client and epoch; the server steps against the direction (d,) it reads from a round's reports."""
    rate = course.learning_rate if learning_rate is None else learning_rate

    def run(work: Work) -> tuple[Payload, Payload]:
        payload, held = draw(work, work.memory.get("residual"))
        kept = {"epoch": work.payload["epoch"].to(work.memory["epoch"]).expand(len(work.rows))}
        return payload, kept if held is None or residual is None else {**kept, "residual": held}

    def allows(payload: Payload, memory: Payload) -> Tensor:
        return payload["epoch"].to(memory["epoch"]) > memory["epoch"]

    def round(state: State, ask: Ask) -> State:
        asked = tuple(client.id for client in state.roster)
        epoch = torch.tensor(state.round // course.batches + 1)
        replies = ask(Task("report", asked, {"model": state.model, "epoch": epoch}))
        return step(state, -rate * direction(state, replies)) if replies.ids else state

    takes = {"model": vector(size), "epoch": whole_number(1, MOST_ROUNDS)}
    return Algorithm(
        {"report": Action(run, price, allows, pure=price is not None, takes=takes, gives=lambda _: gives)},
        round,
        unit="client",
        adjacency="replace-one",
        arithmetic="ideal" if value in IDEAL_ONLY else "exact",
        claimed=None if price is None else lambda scale, rounds, *_: rounds / scale,  # ε′ for each report
        memory={"epoch": ()} | ({} if residual is None else {"residual": (residual,)}),
    )


def gradients_of(training: Training, work: Work) -> Tensor:
    """The gradient of every client's mean loss at the model received, (n, d): a full step of size one, turned round.

    A server that sends a model under which a record overflows must not spoil what the client keeps: NaN becomes 0.
    """
    steps = training.run(work.payload["model"], work.data, work.streams, None, rows=work.rows.tolist())
    return steps.neg_().nan_to_num_(nan=0.0)


def sparse(count: int, size: int) -> Specs:
    """Return what a report of a few coordinates holds; index -1 stands for none."""
    return {"index": Spec((count,), "int64", -1, size - 1), "value": update(count)}


def sparse_mean(replies: Replies, size: int, weights: Tensor | None = None) -> Tensor:
    """The mean over all who answered of vectors with a few entries each; an index outside the vector is none."""
    index, value = replies.payload["index"].long(), replies.payload["value"].double()
    if weights is not None:
        value = value * weights[:, None].to(value.device)
    real = (index >= 0) & (index < size)
    total = torch.zeros(size, dtype=torch.float64, device=value.device)
    total.index_add_(0, index[real], value[real])
    return (total / len(replies.ids)).to(torch.float32)


def disclosed(roster: tuple[Profile, ...], ids: tuple[str, ...]) -> Floats | None:
    """The budgets of some of a round's clients; None when one of them does not say, or when all are equal."""
    known = {client.id: client.epsilon for client in roster}
    told = [known[client] for client in ids]
    if any(epsilon is None for epsilon in told) or len(set(told)) == 1:
        return None
    return np.array(told, dtype=np.float64)
