"""Estimates of undisclosed budgets: an observer of updates infers each client's noise, and from it its ε.

An observer that sees updates and knows the training settings can measure the noise: DP-SGD leaves
σ·clip·rate/batch·√steps in every coordinate (rate: learning rate; without momentum). Where no gradient reaches, as at
pixels that are always black, there is nothing else. The accountant, inverted, turns σ into ε. So a hidden budget is
a budget that is not transmitted, and no more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import dp_accounting as dp
import numpy as np
import torch
from dp_accounting.dp_event import DpEvent
from numpy.typing import ArrayLike, NDArray
from scipy.interpolate import PchipInterpolator
from torch import Tensor

from polyeps.accounting import epsilon
from polyeps.accounting.events import FixedSize, Gaussian, Poisson
from polyeps.aggregation.noise_estimation import estimate_noise_variances
from polyeps.core import Adjacency, check_delta
from polyeps.errors import InputError
from polyeps.models import Model

Floats = NDArray[np.float64]
# Above as many different noise multipliers ε is computed on a ladder and interpolated: the curve is smooth.
EXACT = 16


@dataclass(frozen=True)
class Facts:
    """The public settings of local training; `records` is one number for all clients, or one for each."""

    steps: int
    learning_rate: float
    clip: float
    batch: int
    records: int | Sequence[int]
    rounds: int  # a client takes part in, in all
    delta: float
    sampler: Literal["poisson", "fixed"] = "poisson"

    def __post_init__(self) -> None:
        check_delta(self.delta)
        positive = min(self.steps, self.learning_rate, self.clip, self.batch, self.rounds)
        if not (positive > 0 and math.isfinite(self.learning_rate * self.clip)):
            raise InputError("steps, learning_rate, clip, batch and rounds must be finite numbers above 0")

    @property
    def deviation(self) -> float:
        """The noise in each coordinate of an update at noise multiplier 1."""
        return self.learning_rate * self.clip / self.batch * math.sqrt(self.steps)

    @property
    def adjacency(self) -> Adjacency:
        return "zero-out" if self.sampler == "poisson" else "replace-one"

    def step(self, records: int) -> Callable[[float], DpEvent]:
        """Return the price of one step of a client with so many records, by its noise multiplier."""
        if self.sampler == "fixed":
            return lambda sigma: FixedSize(records, self.batch, Gaussian(sigma))
        return lambda sigma: Poisson(self.batch / records, Gaussian(sigma))


@dataclass(frozen=True)
class Inferred:
    """An observer's estimates, a row per client; NaN for a client that never replied."""

    noise_multiplier: Floats
    epsilon: Floats


@dataclass(frozen=True)
class Fit:
    """How well estimates fit the truth, over the clients that replied."""

    r_squared: float  # of log ε: 1 is exact, 0 no better than the mean of all clients; NaN where all are equal
    relative_error: float  # of ε, the median


def infer(updates: Sequence[Tensor], facts: Facts, silent: Tensor | None = None) -> Inferred:
    """Infer noise multipliers and budgets from the updates (n, d) of rounds; a row that is not finite is no reply.

    `silent` names coordinates that no gradient reaches, as a mask (d,) or as indices. Without any, the signal of an
    update is in the way: coordinates of the middle have less of it, the part that stays over rounds or is shared with
    other clients cancels, and the rest makes a client's ε look smaller than it is.
    """
    if not updates or any(rows.ndim != 2 or rows.shape != updates[0].shape for rows in updates):
        raise InputError("updates must be one matrix per round, a row per client, all of one shape")
    rows = torch.stack(list(updates), 1).double().cpu()  # (n, rounds, d)
    if silent is not None and rows[0][:, silent].shape[1]:
        replied = torch.isfinite(rows).all(2)
        squares = rows[:, :, silent].square().mean(2)
        variances = squares.where(replied, 0).sum(1) / replied.sum(1)  # NaN for a client that never replied
    else:
        variances = estimate_noise_variances(rows)
    sigma = variances.sqrt().numpy() / facts.deviation
    return Inferred(sigma, _epsilons(sigma, facts))


def fit_of(inferred: Inferred, epsilons: ArrayLike) -> Fit:
    """Compare estimates with the true budgets."""
    truth = np.asarray(epsilons, dtype=np.float64)
    if truth.shape != inferred.epsilon.shape:
        raise InputError(f"epsilons must be one for each of {len(inferred.epsilon)} clients, not {truth.shape}")
    replied = np.isfinite(inferred.epsilon) & (inferred.epsilon > 0)
    if not replied.any():
        return Fit(math.nan, math.nan)
    found, true = inferred.epsilon[replied], truth[replied]
    spread = float(np.square(np.log(true) - np.log(true).mean()).sum())
    missed = float(np.square(np.log(found) - np.log(true)).sum())
    return Fit(1 - missed / spread if spread > 0 else math.nan, float(np.median(abs(found / true - 1))))


def silent_coordinates(model: Model, features: Tensor) -> Tensor:
    """Return a mask (d,) of the weights of a first dense layer whose input is zero in all of these public records."""
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


def _epsilons(sigma: Floats, facts: Facts) -> Floats:
    """Return the ε that every noise multiplier costs after all rounds."""
    found = np.full(len(sigma), np.nan)
    held = np.broadcast_to(np.asarray(facts.records), len(sigma))
    for records in np.unique(held).tolist():
        rows = np.flatnonzero((held == records) & np.isfinite(sigma) & (sigma > 0))
        if not len(rows):
            continue
        logs = np.log(sigma[rows])
        if len(rows) <= EXACT:
            found[rows] = _cost(facts, records, logs)
            continue
        ladder = np.linspace(logs.min(), logs.max() + 1e-9, EXACT)
        costs = np.clip(_cost(facts, records, ladder), 1e-12, 1e12)
        found[rows] = np.exp(PchipInterpolator(ladder, np.log(costs))(logs))
    return found


def _cost(facts: Facts, records: int, logs: Floats) -> Floats:
    step, steps = facts.step(records), facts.steps * facts.rounds
    events = [dp.SelfComposedDpEvent(step(sigma), steps) for sigma in np.exp(logs).tolist()]
    return np.array([epsilon(event, facts.delta, adjacency=facts.adjacency) for event in events])
