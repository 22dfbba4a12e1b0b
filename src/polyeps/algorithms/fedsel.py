"""FedSel (algorithm 1): every report is one coordinate, chosen privately, and its private value; and its baselines.

Paper: Liu et al., "FedSel: Federated SGD under Local Differential Privacy with Top-k Dimension Selection", DASFAA 2020,
https://arxiv.org/abs/2003.10637

    ε′ = ε/E   1/noise multiplier         r     memory "residual"      j, s*_j   the reply: index, value
    ε1 = μ·ε′  share of it, for j         g     gradients_of           m, α, E   Course: cohort, learning rate, epochs
    ε2         the rest, for s*_j         η     discount               k         top (a tenth of d)

A client answers once per epoch and refuses a second request before it pays. With one epoch it keeps no residual, since
there is nothing to accumulate.

Departures. Algorithm 1 is missing from our copy of the paper; lines 11 and 15–18 are rebuilt from the text. η is
not given and line 17 is a guess: s_j = r_j + η·r_j of before this gradient, which needs no second buffer. The sum is
divided by the number of replies. PE is calibrated to keep its guarantee (`form = "published"` is the paper's), the
value is drawn on a grid. `share = "auto"` is the rule without hyper-parameters: ε2 is at least √(d·ln d/m) and
(1 − θ)·ε′. `weights = "variance"` is ours: reports under unequal disclosed budgets are weighted by the inverse of their
variance. `on_top = True` is the paper's control "-C": ε1 comes on top of ε′, and is charged.

An undisclosed budget hides only the number: the grid on which a client's values lie reveals its ε2.

The baselines are flat, compressed and non-private reports:

    flat        c random coordinates, each at ε′/c, enlarged by d/c (Wang et al. 2019; Duchi et al. 2018)
    compressed  one random coordinate of the gradient times a public random matrix Φ (d × q), enlarged by q
    exact       no privacy: all of the gradient (NP), a random coordinate enlarged by d (NP-RS), the largest (NP-K),
                or one chosen privately but sent as it is (figures 2(a) to 2(d))

Departures: c is an option, the same for all (the usual rule, ⌊ε′/2.5⌋, would disclose ε by the length of a reply). The
compressed gradient is clipped after projecting; clipping only before, as in the text, bounds nothing.
The control "random coordinate, not enlarged", which the paper lacks, is `fedsel` with select = "uniform".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from polyeps.accounting.events import PureDpEvent
from polyeps.algorithms._averaging import Course
from polyeps.algorithms._ldp_reports import disclosed, gradients_of, reporting, sparse, sparse_mean
from polyeps.core import Algorithm, Payload, Replies, State, Streams, Work
from polyeps.engine.per_client import Floats
from polyeps.errors import InputError
from polyeps.mechanisms import selection, values
from polyeps.mechanisms.selection import SelectName, pick, whole_numbers
from polyeps.mechanisms.values import ValueMechanism, check_epsilon_value, perturb
from polyeps.messages import update
from polyeps.training import Training


def fedsel(
    training: Training,
    course: Course,
    *,
    select: SelectName = "ps",
    value: ValueMechanism = "grid-pm",
    share: float | Literal["auto"] = 0.1,
    theta: float = 0.2,
    top: int | None = None,
    accumulate: Literal["gradient", "step"] = "gradient",
    discount: float = 0.1,
    weights: Literal["variance", "count"] = "variance",
    on_top: bool = False,
) -> Algorithm:
    """Return federated SGD under local differential privacy with private choice of coordinates."""
    size = training.model.size
    marked = max(1, size // 10) if top is None else top
    selection.check_selection(size, marked, 0.0)
    split = splitting(size, course.cohort, "uniform" if select == "uniform" else share, theta, on_top)
    # A step is α·g: the learning rate is inside what is sent, so the server must not apply it again.
    unit, rate = (1.0, course.learning_rate) if accumulate == "gradient" else (course.learning_rate, 1.0)

    def draw(work: Work, before: Tensor | None) -> tuple[Payload, Tensor | None]:
        first, second = split(1 / work.noise_multiplier)
        held = gradients_of(training, work).mul_(unit)
        if before is not None:
            held += before  # line 15
        index = pick(select, held, marked, first, work.streams, course.form)  # line 16
        place = torch.from_numpy(index).to(held.device)[:, None]
        at = place.clamp(min=0)
        found = held.gather(1, at)
        wanted = found if before is None else found + discount * before.gather(1, at)  # line 17
        answer = perturb(value, (wanted[:, 0].double() / course.clip).cpu().numpy(), second, work.streams)  # line 18
        sent = torch.from_numpy(np.where(index < 0, 0.0, answer * course.clip)).to(held)
        return {"index": place, "value": sent[:, None]}, held.scatter_(1, at, torch.where(place < 0, found, 0.0))

    def price(noise_multiplier: float, _: Mapping[str, float]) -> PureDpEvent:
        first, second = (float(part[0]) for part in split(np.array([1 / noise_multiplier])))
        check_epsilon_value(second)
        # One report is one adaptive composition of two pure steps, so its log-ratios add.
        return PureDpEvent(selection.selection_law(select, size, marked, first, course.form).epsilon + second)

    def direction(state: State, replies: Replies) -> Tensor:
        budgets = disclosed(state.roster, replies.ids) if weights == "variance" else None
        if budgets is None:
            return sparse_mean(replies, size)
        # A value lies within ±1, so no report has a variance below 1 as an estimate of the mean.
        weight = 1 / (1 + known_variance(value, split(budgets / course.epochs)[1]))
        return sparse_mean(replies, size, torch.from_numpy(weight / weight.mean()))

    keeps = size if course.epochs > 1 else None
    given = sparse(1, size)
    return reporting(
        course, draw, price, direction, gives=given, size=size, learning_rate=rate, residual=keeps, value=value
    )


def splitting(
    size: int, cohort: int, share: float | Literal["auto", "uniform"], theta: float, on_top: bool
) -> Callable[[Floats], tuple[Floats, Floats]]:
    """Return how a report's ε′ is divided into ε1, for the choice, and ε2, for the value, by public numbers alone."""
    if isinstance(share, float | int) and not 0 <= share < 1:
        raise InputError(f"share must be at least 0 and below 1, not {share}")
    if not 0 <= theta < 1:
        raise InputError(f"theta must be at least 0 and below 1, not {theta}")
    needed = math.sqrt(size * math.log(size) / cohort)

    def split(total: Floats) -> tuple[Floats, Floats]:
        if share == "uniform":
            return np.zeros_like(total), total
        if share == "auto":
            least = np.minimum(total, np.maximum((1 - theta) * total, needed))
        else:
            least = (1 - share) * total
        return total - least, total if on_top else least

    return split


def known_variance(value: ValueMechanism, epsilon: Floats) -> Floats:
    """Return the variance of answers to 0 under each ε; grid-PM's is PM's up to a thousandth."""
    amounts, group = np.unique(epsilon, return_inverse=True)
    return np.array([values.variance(value, float(amount), 0.0) for amount in amounts])[group]


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
