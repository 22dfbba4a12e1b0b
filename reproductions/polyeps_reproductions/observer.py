"""What an observer can still infer where budgets are not transmitted: each client's noise, and from it its ε.

Whoever sees updates and knows how everybody trains knows the noise: DP-SGD leaves σ·clip·rate/batch·√steps in every
coordinate (rate: learning rate; without momentum). Where no gradient reaches, as at pixels that are always black,
that is all there is. The accountant, inverted, makes ε of σ. So "hidden" means "not transmitted", and no more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from scipy.interpolate import PchipInterpolator
from torch import Tensor

from polyeps.accounting import epsilon
from polyeps.aggregation.noise_estimation import estimate_noise_variances
from polyeps.core import check_delta
from polyeps.errors import InputError
from polyeps.methods import Method, dp_sgd
from polyeps.models import Model

Floats = NDArray[np.float64]
# Above as many different scales ε is computed on a ladder and interpolated: the curve is smooth, scales are guesses.
EXACT = 16


@dataclass(frozen=True)
class Facts:
    """What is public about local training; `records` is one number for all clients, or one for each."""

    steps: int
    learning_rate: float
    clip: float
    batch: int
    records: int | Sequence[int]
    rounds: int  # a client takes part in, all told
    delta: float
    sampler: Literal["poisson", "fixed"] = "poisson"

    def __post_init__(self) -> None:
        check_delta(self.delta)
        positive = min(self.steps, self.learning_rate, self.clip, self.batch, self.rounds)
        if not (positive > 0 and math.isfinite(self.learning_rate * self.clip)):
            raise InputError("steps, learning_rate, clip, batch and rounds must be finite numbers above 0")

    @property
    def deviation(self) -> float:
        """The noise in each coordinate of an update at scale 1."""
        return self.learning_rate * self.clip / self.batch * math.sqrt(self.steps)


@dataclass(frozen=True)
class Inferred:
    """An observer's estimates, a row per client; NaN for one that was never heard."""

    scale: Floats
    epsilon: Floats


@dataclass(frozen=True)
class Verdict:
    """How well estimates meet the truth, over the clients that were heard."""

    r_squared: float  # of log ε: 1 is exact, 0 no better than everybody's mean; NaN where all are equal
    relative_error: float  # of ε, the median


def infer(updates: Sequence[Tensor], facts: Facts, silent: Tensor | None = None) -> Inferred:
    """Scales and budgets from the updates (n, d) of rounds; a row that is not finite was not heard in that round.

    `silent` names coordinates that no gradient reaches, as a mask (d,) or as indices. Without any, the signal of an
    update is in the way: coordinates of the middle have less of it, what stays over rounds or is shared with other
    clients cancels, and whatever is left makes a client look stricter than it is.
    """
    if not updates or any(rows.ndim != 2 or rows.shape != updates[0].shape for rows in updates):
        raise InputError("updates must be one matrix per round, a row per client, all of one shape")
    rows = torch.stack(list(updates), 1).double().cpu()  # (n, rounds, d)
    if silent is not None and rows[0][:, silent].shape[1]:
        heard = torch.isfinite(rows).all(2)
        squares = rows[:, :, silent].square().mean(2)
        variances = squares.where(heard, 0).sum(1) / heard.sum(1)  # NaN for one never heard
    else:
        variances = estimate_noise_variances(rows)
    scale = variances.sqrt().numpy() / facts.deviation
    return Inferred(scale, _epsilons(scale, facts))


def judge(inferred: Inferred, epsilons: ArrayLike) -> Verdict:
    """Estimates against the true budgets."""
    truth = np.asarray(epsilons, dtype=np.float64)
    if truth.shape != inferred.epsilon.shape:
        raise InputError(f"epsilons must be one for each of {len(inferred.epsilon)} clients, not {truth.shape}")
    heard = np.isfinite(inferred.epsilon) & (inferred.epsilon > 0)
    if not heard.any():
        return Verdict(math.nan, math.nan)
    found, true = inferred.epsilon[heard], truth[heard]
    spread = float(np.square(np.log(true) - np.log(true).mean()).sum())
    missed = float(np.square(np.log(found) - np.log(true)).sum())
    return Verdict(1 - missed / spread if spread > 0 else math.nan, float(np.median(abs(found / true - 1))))


def silent_coordinates(model: Model, features: Tensor) -> Tensor:
    """A mask (d,) of the weights of a first dense layer whose input is zero in all of these public records."""
    first = next(iter(model.slices.values()))
    flat = features.reshape(len(features), -1)
    if len(first.shape) != 2 or first.shape[1] != flat.shape[1]:
        raise InputError(
            "the model's first layer is not a dense one on these features; name silent coordinates yourself"
        )
    dark = (flat == 0).all(0).cpu()
    mask = torch.zeros(model.size, dtype=torch.bool)
    mask[first.start : first.stop] = dark.expand(first.shape).flatten()
    return mask


def _epsilons(scale: Floats, facts: Facts) -> Floats:
    """The ε that every scale costs after all rounds."""
    found = np.full(len(scale), np.nan)
    held = np.broadcast_to(np.asarray(facts.records), len(scale))
    for records in np.unique(held).tolist():
        rows = np.flatnonzero((held == records) & np.isfinite(scale) & (scale > 0))
        if not len(rows):
            continue
        method = dp_sgd(records=records, batch=facts.batch, steps=facts.steps * facts.rounds, sampler=facts.sampler)
        logs = np.log(scale[rows])
        if len(rows) <= EXACT:
            found[rows] = _cost(method, logs, facts.delta)
            continue
        ladder = np.linspace(logs.min(), logs.max() + 1e-9, EXACT)
        costs = np.clip(_cost(method, ladder, facts.delta), 1e-12, 1e12)
        found[rows] = np.exp(PchipInterpolator(ladder, np.log(costs))(logs))
    return found


def _cost(method: Method, log_scales: Floats, delta: float) -> Floats:
    judged = [epsilon(method.event(at), delta, adjacency=method.adjacency) for at in np.exp(log_scales).tolist()]
    return np.array(judged)
