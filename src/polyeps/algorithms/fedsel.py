"""FedSel (algorithm 1): every report is one coordinate, chosen privately, and its private value.

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
from polyeps.core import Algorithm, Payload, Replies, State, Work
from polyeps.engine.per_client import Floats
from polyeps.errors import InputError
from polyeps.mechanisms import selection, values
from polyeps.mechanisms.selection import SelectName, pick
from polyeps.mechanisms.values import ValueMechanism, perturb
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
        values.check_epsilon_value(second)
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
    one: Callable[[float], float] = (
        (lambda e: values.piecewise_variance(e, 0.0))
        if value == "grid-pm"
        else (lambda e: values.variance(value, e, 0.0))
    )
    return np.array([one(float(amount)) for amount in amounts])[group]
