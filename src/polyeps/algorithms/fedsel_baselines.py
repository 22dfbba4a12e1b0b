"""The baselines of FedSel: flat, compressed and non-private reports.

Paper: Liu et al., "FedSel: Federated SGD under Local Differential Privacy with Top-k Dimension Selection", DASFAA 2020,
https://arxiv.org/abs/2003.10637

    flat        c random coordinates, each at ε′/c, enlarged by d/c (Wang et al. 2019; Duchi et al. 2018)
    compressed  one random coordinate of the gradient times a public random matrix Φ (d × q), enlarged by q
    exact       no privacy: all of the gradient (NP), a random coordinate enlarged by d (NP-RS), the largest (NP-K),
                or one chosen privately but sent as it is (figures 2(a) to 2(d))

Departures: c is an option, the same for all (the usual rule, ⌊ε′/2.5⌋, would disclose ε by the length of a reply). The
compressed gradient is clipped after projecting; clipping only before, as in the text, bounds nothing.
The control "random coordinate, not enlarged", which the paper lacks, is `fedsel` with select = "uniform".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from polyeps.accounting.events import PureDpEvent
from polyeps.algorithms._averaging import Course
from polyeps.algorithms._ldp_reports import gradients_of, reporting, sparse, sparse_mean
from polyeps.core import Algorithm, Payload, Replies, State, Streams, Work
from polyeps.errors import InputError
from polyeps.mechanisms.selection import SelectName, pick, whole_numbers
from polyeps.mechanisms.values import ValueMechanism, check_epsilon_value, perturb
from polyeps.messages import update
from polyeps.training import Training


def flat(training: Training, course: Course, *, value: ValueMechanism = "grid-pm", coordinates: int = 1) -> Algorithm:
    """Return federated SGD with random coordinates of the gradient, unbiased and of large variance."""
    size = training.model.size
    if not 1 <= coordinates <= size:
        raise InputError(f"coordinates must be between 1 and the {size} of the model, not {coordinates}")

    def draw(work: Work, _: Tensor | None) -> tuple[Payload, Tensor | None]:
        return _random_parts(gradients_of(training, work), work, course, value, coordinates), None

    def direction(_: State, replies: Replies) -> Tensor:
        return sparse_mean(replies, size) * (size / coordinates)

    return reporting(
        course, draw, _price(coordinates), direction, gives=sparse(coordinates, size), size=size, value=value
    )


def compressed(
    training: Training, course: Course, *, value: ValueMechanism = "grid-pm", ratio: float = 0.1, matrix: int = 0
) -> Algorithm:
    """Return federated SGD with a random coordinate of the projected gradient; `matrix` is the projection's seed."""
    size = training.model.size
    if not 0 < ratio <= 1:
        raise InputError(f"ratio must be above 0 and at most 1, not {ratio}")
    kept = max(1, round(ratio * size))
    projection = torch.randn(size, kept, generator=torch.Generator().manual_seed(matrix)) / kept**0.5  # Φ
    recovery = torch.linalg.pinv(projection.T)  # (d, q)

    def draw(work: Work, _: Tensor | None) -> tuple[Payload, Tensor | None]:
        gradients = gradients_of(training, work)
        return _random_parts(gradients @ projection.to(gradients.device), work, course, value, 1), None

    def direction(_: State, replies: Replies) -> Tensor:
        mean = sparse_mean(replies, kept) * kept
        return torch.mv(recovery.to(mean.device), mean)

    return reporting(course, draw, _price(1), direction, gives=sparse(1, kept), size=size, value=value)


def exact(
    training: Training,
    course: Course,
    *,
    send: Literal["all", "random", "largest", "exp", "pe", "ps"] = "all",
    epsilon_select: float = 4.0,
    top: int | None = None,
) -> Algorithm:
    """Return federated SGD on gradients without noise, or on a coordinate of them: there is no guarantee."""
    size = training.model.size
    choices: dict[str, SelectName] = {"random": "uniform", "exp": "exp", "pe": "pe", "ps": "ps"}

    def draw(work: Work, before: Tensor | None) -> tuple[Payload, Tensor | None]:
        held = gradients_of(training, work)
        if send == "all":
            return {"value": held}, None
        if before is not None and send != "random":
            held += before
        if send == "largest":
            place = held.abs().argmax(1, keepdim=True)
        else:
            epsilon = np.full(len(held), epsilon_select)
            index = pick(choices[send], held, top or max(1, size // 10), epsilon, work.streams, course.form)
            place = torch.from_numpy(index).to(held.device)[:, None]
        at = place.clamp(min=0)
        found = held.gather(1, at)
        reply = {"index": place, "value": torch.where(place < 0, 0.0, found)}
        return reply, held.scatter_(1, at, torch.where(place < 0, found, 0.0))

    def direction(_: State, replies: Replies) -> Tensor:
        if send == "all":
            return replies.payload["value"].mean(0)
        return sparse_mean(replies, size) * (size if send == "random" else 1)

    keeps = size if course.epochs > 1 and send not in ("all", "random") else None
    given = {"value": update(size)} if send == "all" else sparse(1, size)
    return reporting(course, draw, None, direction, gives=given, size=size, residual=keeps)


def _random_parts(rows: Tensor, work: Work, course: Course, value: ValueMechanism, count: int) -> Payload:
    """Return some random coordinates of each row (n, q), each value clipped and perturbed at its part of ε′."""
    index = torch.from_numpy(_random_places(work.streams, rows.shape[1], count)).to(rows.device)
    chosen = rows.gather(1, index).double().cpu().numpy() / course.clip
    epsilon = 1 / (work.noise_multiplier * count)
    sent = np.stack([perturb(value, chosen[:, place], epsilon, work.streams) for place in range(count)], axis=1)
    return {"index": index, "value": torch.from_numpy(sent * course.clip).to(rows)}


def _random_places(streams: Streams, size: int, count: int) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    """Return `count` different coordinates for every client."""
    if count == 1:
        return pick("uniform", torch.empty(streams.clients, size), 1, np.zeros(streams.clients), streams)[:, None]
    return np.argsort(whole_numbers(streams, size), axis=1)[:, :count]


def _price(count: int) -> Callable[[float, Mapping[str, float]], PureDpEvent]:
    """Return the price of `count` values, whose ε add up to ε′; coordinates chosen at random cost nothing."""

    def price(noise_multiplier: float, _: Mapping[str, float]) -> PureDpEvent:
        check_epsilon_value(1 / noise_multiplier / count)
        return PureDpEvent(1 / noise_multiplier)

    return price
