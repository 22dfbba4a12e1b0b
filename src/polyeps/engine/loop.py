"""Local training of a cohort: every client its own model, batches, noise, rate, step size and step count.

All of a cohort's clients take a step together. Whatever a client draws comes from its own streams, and a
client's arithmetic does not mix with another's, so chunks and grouping change nothing but float rounding.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from polyeps.core import Records
from polyeps.engine.layout import Step, exact_steps, sorted_steps
from polyeps.engine.network import add_gradients
from polyeps.engine.noise import Streams
from polyeps.engine.sampling import Batches, poisson_batches
from polyeps.models import Model

# From this many parameters on, one client's matrix products are work enough for a call of their own, and
# copying models into frame order would cost more than calls.
LARGE = 200_000
GROUPS = 4
NOISE_BLOCK = 1 << 20  # normals drawn at once: enough to hide the calls, small enough for the cache


@dataclass(frozen=True)
class Settings:
    """How each client trains: one entry per client."""

    rate: NDArray[np.float64]  # sampling rate of a record
    steps: NDArray[np.int64]
    learning_rate: NDArray[np.float64]
    divisor: NDArray[np.float64]  # what gradient sums are divided by; NaN for the realised batch size
    clip: NDArray[np.float64] | None  # None: do not clip
    deviation: NDArray[np.float64] | None  # of the noise on the sum; None: add none
    momentum: NDArray[np.float64]
    decay: NDArray[np.float64]
    pull: NDArray[np.float64]  # towards the anchor

    def select(self, rows: NDArray[np.int64]) -> Settings:
        changed = {f.name: getattr(self, f.name) for f in fields(self)}
        return replace(self, **{name: v[rows] for name, v in changed.items() if v is not None})


def train(
    model: Model, starts: Tensor, anchor: Tensor, records: Records, streams: Streams, settings: Settings
) -> Tensor:
    """The models (n, d) after local training from starts (n, d), the clients of `records` all at once."""
    offsets = records.offsets.cpu().numpy()
    batches = poisson_batches(streams, offsets, settings.rate, settings.steps)
    large = model.size >= LARGE or starts.shape[0] == 1
    steps = exact_steps(batches) if large else sorted_steps(batches, GROUPS)
    models = starts.clone()
    momentum = torch.zeros_like(models) if settings.momentum.any() else None
    clip = None if settings.clip is None else torch.from_numpy(settings.clip).float()
    for step, drawn in enumerate(_noise(streams, settings, model.size)):
        gradient = drawn if drawn is not None else torch.zeros_like(models)
        _add_step_gradients(model, models, records, steps[step], clip, gradient)
        _descend(models, gradient, momentum, anchor, settings, batches, step)
    return models


def _add_step_gradients(
    model: Model, models: Tensor, records: Records, step: Step, clip: Tensor | None, gradient: Tensor
) -> None:
    """Add each client's clipped gradient sum of one step to its row of gradient (n, d)."""
    rows = records.features[step.records]
    labels = records.labels[step.records]
    if step.order is None:
        add_gradients(
            model.network, model.loss, models, rows, labels, step.layout, step.valid, clip, gradient
        )
        return
    framed = torch.zeros_like(models)
    ordered = None if clip is None else clip[step.order]
    add_gradients(
        model.network,
        model.loss,
        models[step.order],
        rows,
        labels,
        step.layout,
        step.valid,
        ordered,
        framed,
    )
    gradient.index_add_(0, step.order, framed)


def _descend(
    models: Tensor,
    gradient: Tensor,
    momentum: Tensor | None,
    anchor: Tensor,
    settings: Settings,
    batches: Batches,
    step: int,
) -> None:
    """Move the models of all clients that still have steps to take."""
    active = settings.steps > step
    realised = np.maximum(batches.sizes[step], 1)
    divisor = np.where(np.isnan(settings.divisor), realised, settings.divisor)
    rate = _column(np.where(active, settings.learning_rate, 0.0))
    if momentum is None and not settings.decay.any() and not settings.pull.any():
        models.addcmul_(gradient, rate / _column(divisor), value=-1)
        return
    gradient.div_(_column(divisor))
    if settings.decay.any():
        gradient.addcmul_(models, _column(settings.decay))
    if settings.pull.any():
        gradient.addcmul_(models - anchor, _column(settings.pull))
    if momentum is not None:
        gradient = momentum.mul_(_column(settings.momentum)).add_(gradient)
    models.addcmul_(gradient, rate, value=-1)


def _noise(streams: Streams, settings: Settings, size: int):
    """Per step: the noise on every client's gradient sum, (n, d), or None; drawn several steps at once."""
    total = int(settings.steps.max(initial=0))
    if settings.deviation is None:
        yield from (None for _ in range(total))
        return
    deviation = _column(settings.deviation)
    clients = len(settings.steps)
    block = max(1, min(total, NOISE_BLOCK // (clients * size)))
    normals = torch.zeros(clients, block, size)
    for step in range(0, total, block):
        streams.normals(normals, np.flatnonzero(settings.steps > step).tolist())
        for ahead in range(min(block, total - step)):
            yield normals[:, ahead].mul_(deviation)


def _column(values: NDArray[np.float64]) -> Tensor:
    return torch.from_numpy(values).float()[:, None]
