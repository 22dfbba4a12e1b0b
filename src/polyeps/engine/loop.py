"""The training loop of a cohort: every client has its own model, batches, noise, rates and number of steps.

All clients of a cohort take a step together. A client draws from its own streams only, and clients' arithmetic does not
mix, so chunks and grouping change nothing but float rounding.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from polyeps.core import Records, Streams
from polyeps.engine.contributions import Contribution
from polyeps.engine.deferred import Deferral, defer
from polyeps.engine.layers import Linear
from polyeps.engine.layout import (
    Plan,
    TrainingStep,
    padding_is_cheaper,
    plan_exact,
    plan_padded,
    plan_sorted,
    steps_of,
    usual_width,
)
from polyeps.engine.losses import Loss
from polyeps.engine.network import ROUNDING, Network, add_gradients, add_rows, row_gradients
from polyeps.engine.per_client import Floats, Whole
from polyeps.engine.row_draws import RowDraws, client_keys
from polyeps.engine.sampling import Batches, fixed_batches, poisson_batches, split_batches
from polyeps.engine.stable_products import LINE
from polyeps.engine.units import examples_of, records_held, split_by_length
from polyeps.models import Model

# From this many parameters on, one client's matrix products are large enough for a call of their own, and copying
# models into frame order would cost more than calls.
LARGE = 200_000
_GROUPS = 4
_KEPT = 1 << 30  # bytes of freed memory
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
NOISE_BLOCK = 1 << 20  # normals drawn at once: enough to hide the cost of calls, few enough for the cache


@dataclass(frozen=True)
class Settings:
    """The training settings of each client: one entry per client."""

    rate: Floats  # sampling rate of a record
    steps: Whole
    learning_rate: Floats
    divisor: Floats | None  # of gradient sums; None: the realised batch size
    clip: Floats | None  # None: do not clip
    deviation: Floats | None  # of the noise on the sum; None: add none
    momentum: Floats | None
    decay: Floats | None
    pull: Floats | None  # towards the anchor
    batch: Whole | None = None  # exact size of every batch; None: Poisson batches
    at_once: int | None = None  # most rows of a client's batch in one pass, for all clients; None: all of them

    def select(self, rows: slice | Whole) -> Settings:
        """Return the settings of some of the clients."""
        held = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "at_once"}
        return replace(self, **{name: values[rows] for name, values in held.items() if values is not None})


@dataclass(frozen=True)
class Pace:
    """The settings of a run as tensors: columns (n, 1), and per step (S, n, 1)."""

    rate: Tensor  # (S, n, 1): 0 once a client has taken all its steps
    divisor: Tensor  # (S, n, 1)
    clip: Tensor | None  # (n,)
    deviation: Tensor | None
    momentum: Tensor | None
    decay: Tensor | None
    pull: Tensor | None

    @property
    def plain(self) -> bool:
        """Return whether row gradients can be added to models or velocities directly, without forming their sum."""
        pulled = self.momentum is not None and self.pull is not None
        return self.clip is None and self.deviation is None and self.decay is None and not pulled


def pace(settings: Settings, sizes: Whole | None, device: torch.device) -> Pace:
    """Return the settings as tensors for the steps of a run; batch sizes (S, n) are needed if they are the divisor."""

    def column(values: Floats | None) -> Tensor | None:
        return None if values is None else torch.from_numpy(values).float().to(device)[:, None]

    def per_step(values: Floats) -> Tensor:
        return torch.from_numpy(values).float().to(device)[:, :, None]

    active = settings.steps > np.arange(settings.steps.max(initial=0))[:, None]  # (S, n)
    if settings.divisor is not None:
        divisor = np.broadcast_to(settings.divisor, active.shape)
    else:
        assert sizes is not None
        divisor = np.maximum(sizes, 1).astype(float)
    clip = column(clip_of(settings))
    return Pace(
        rate=per_step(np.where(active, settings.learning_rate, 0.0)),
        divisor=per_step(np.array(divisor)),
        clip=None if clip is None else clip[:, 0],
        **{name: column(getattr(settings, name)) for name in ("deviation", "momentum", "decay", "pull")},
    )


def clip_of(settings: Settings) -> Floats | None:
    """Return the clips that rows' gradients get, lower by what the rounding of sums may add.

    By how many rows a sum usually has, which is public: what a record moves must not depend on the others drawn.
    """
    if settings.clip is None or settings.divisor is None:
        return settings.clip
    aimed: Floats = settings.clip * (1 - np.minimum(ROUNDING * settings.divisor, 0.5))
    return aimed


class Learning(NamedTuple):
    """The tensors that steps change, with the network and loss."""

    network: Network
    loss: Loss
    models: Tensor  # (n, d)
    velocity: Tensor | None
    anchor: Tensor  # (n, d)
    keys: Tensor | None = None  # (n,) of each client's draws inside the model; None: it is not random
    starts: Tensor | None = None  # (n,) first record of each client, with keys


def train_on_cpu(
    model: Model,
    starts: Tensor,
    anchor: Tensor,
    records: Records,
    streams: Streams,
    settings: Settings,
    drift: Tensor | None = None,
) -> Tensor:
    """Return the models (n, d) after local training from starts (n, d), for all clients of `records` at once."""
    keep_freed_memory()
    keys = client_keys(streams) if model.network.random else None
    batches = draw_batches(streams, records.spans.numpy(), settings)
    whole = split_by_length(batches, records, model.floats_per_row)
    parts = whole
    if settings.at_once is not None:
        parts = [
            (part, longest)
            for each, longest in whole
            for part in split_batches(each, max(1, settings.at_once // longest))
        ]
    plans = [plan for part, longest in parts for plan in choose_plans(model, part, longest, settings.clip is not None)]
    fixed = pace(settings, batches.sizes, starts.device)
    width, ordered = max(int(p.widths.max(initial=0)) for p in plans), any(p.order is not None for p in plans)
    ordered = ordered or len(plans) > len(whole)  # sums of several passes need a place of their own
    deferral = deferral_of(model, starts, fixed, width, ordered or drift is not None)
    deferral.begin(starts, fixed.rate, fixed.momentum)
    models = deferral.kept(starts)
    velocity = None if fixed.momentum is None else torch.zeros_like(models)
    first = records.spans[:, 0]
    learning = Learning(deferral.network, model.loss, models, velocity, anchor, keys, first)
    steps = zip(*(steps_of(plan, first.numpy()) for plan in plans), strict=True)
    for number, (parts_of_step, drawn) in enumerate(zip(steps, draw_noise(streams, settings, model.size), strict=True)):
        passes = [drawing(learning, records, step, number) for step in parts_of_step]
        rate, divisor = fixed.rate[number], fixed.divisor[number]
        if fixed.plain and not ordered:
            deferral.enter(torch.tensor([number]), number)
            step_directly(learning, records, passes, fixed, rate, divisor)
        else:
            gradient = torch.zeros_like(models) if drawn is None else drawn
            advance(learning, records, passes, fixed, rate, divisor, gradient)
        add_drift(models, drift, rate)
    return deferral.joined(models)


def drift_per_step(drift: Tensor, settings: Settings) -> Tensor:
    """Return what is added to models in each of a client's steps, (n, d)."""
    return torch.div(drift, torch.from_numpy(np.maximum(settings.steps, 1)).to(drift)[:, None])


def add_drift(models: Tensor, drift: Tensor | None, rate: Tensor) -> None:
    """Add a step's drift to the models of clients that take the step, in place; rate (n, 1) is 0 for the others."""
    if drift is not None:
        models.addcmul_(drift, (rate > 0).to(models))


@functools.cache
def keep_freed_memory() -> bool:
    """Ask the C library, once per process, to keep freed memory; return whether it agreed.

    A step frees all it allocated, and the next one allocates the same again. glibc returns large blocks to the system
    at once, so every step would pay for fresh pages: a quarter to a half of a step's time for large models, measured.
    """
    change = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform.startswith("linux") else None  # glibc's alone
    return change is not None and bool(change(_MMAP_THRESHOLD, _KEPT)) and bool(change(_TRIM_THRESHOLD, _KEPT))


def deferral_of(model: Model, starts: Tensor, fixed: Pace, width: int, ordered: bool) -> Deferral:
    """Return the layers that a run defers: none unless it is plain, without pull and in the clients' own order."""
    if not fixed.plain or fixed.pull is not None or ordered:
        return Deferral(model.network)
    return defer(model.network, model.one_vector_a_row, starts, len(fixed.rate), width)


def draw_batches(streams: Streams, spans: Whole, settings: Settings) -> Batches:
    """Draw all batches of a run, by the settings' way of sampling."""
    if settings.batch is None:
        return poisson_batches(streams, spans, settings.rate, settings.steps)
    return fixed_batches(streams, spans, settings.batch, settings.steps)


def choose_plans(model: Model, batches: Batches, records: int = 1, clipped: bool = True) -> list[Plan]:
    """Return the plans that should move the fewest floats for this model and these batches of so many records a row.

    Several plans are the passes of a step: where batches are padded, what exceeds their usual width follows.
    """
    sizes = batches.sizes
    clients = sizes.shape[1]
    if model.size >= LARGE or clients == 1:
        return [plan_exact(batches)]
    padding = float((clients * sizes.max(1, initial=0) - sizes.sum(1)).sum())
    if not padding_is_cheaper(padding, len(sizes), clients, model.size, records * model.floats_per_row):
        return [plan_sorted(batches, _GROUPS)]
    if not clipped:
        return [plan_padded(batches)]
    usual, largest = usual_width(sizes, LINE), int(sizes.max(initial=0))
    first, *others = split_batches(batches, usual) if largest <= 2 * usual else [batches]
    # Products with few outputs are of whole lines of rows; padding here spares a copy.
    main = max(model.network.layers, key=lambda layer: layer.size)
    narrow = isinstance(main, Linear) and main.fan_out < LINE < 2 * largest
    return [plan_padded(first, LINE if narrow else 1), *(plan_exact(each, 2) for each in others)]


def drawing(learning: Learning, records: Records, step: TrainingStep, number: int | Tensor) -> TrainingStep:
    """Return a step, with the rows' random numbers if the model needs any; number (1,) on a device."""
    if learning.keys is None or learning.starts is None:
        return step
    client = step.layout.owner if step.order is None else step.order.index_select(0, step.layout.owner)
    now = number if isinstance(number, Tensor) else torch.tensor([number])
    held = records_held(records, step.records)
    draws = RowDraws(learning.keys[client], step.records - learning.starts[client], now, held)
    return step._replace(layout=replace(step.layout, draws=draws))


def advance(
    learning: Learning,
    records: Records,
    passes: Sequence[TrainingStep],
    fixed: Pace,
    rate: Tensor,
    divisor: Tensor,
    gradient: Tensor,
) -> None:
    """Take one step of all clients, in place; gradient (n, d) holds the noise and is overwritten.

    The rows of a step may be computed in several passes.
    """
    network, loss, models = learning[:3]
    for step in passes:
        rows, labels = examples_of(records, step.records, step.valid)
        if step.order is None:
            framed, framed_models, clip = gradient, models, fixed.clip
        else:
            framed, framed_models = torch.zeros_like(models), models.index_select(0, step.order)
            clip = None if fixed.clip is None else fixed.clip.index_select(0, step.order)
        add_gradients(network, loss, framed_models, rows, labels, step.layout, step.valid, clip, framed)
        if step.order is not None:
            gradient.index_add_(0, step.order, framed)
    move(learning, fixed, rate, divisor, gradient)


def move(learning: Learning, fixed: Pace, rate: Tensor, divisor: Tensor, gradient: Tensor) -> None:
    """Move the models of all clients by a step, in place, given their gradient sums (n, d), which are overwritten."""
    _, _, models, velocity, anchor = learning[:5]
    if velocity is None and fixed.decay is None:
        if fixed.pull is not None:
            models.lerp_(anchor, rate * fixed.pull)  # one pass over the models instead of three
        models.addcmul_(gradient, rate / divisor, value=-1)
        return
    gradient.div_(divisor)
    if fixed.decay is not None:
        gradient.addcmul_(models, fixed.decay)
    if fixed.pull is not None:
        gradient.addcmul_(models - anchor, fixed.pull)
    if velocity is not None and fixed.momentum is not None:
        gradient = velocity.mul_(fixed.momentum).add_(gradient)
    models.addcmul_(gradient, rate, value=-1)


def step_directly(
    learning: Learning, records: Records, passes: Sequence[TrainingStep], fixed: Pace, rate: Tensor, divisor: Tensor
) -> None:
    """Take one step of all clients, in place, adding row gradients to velocities or models directly.

    A model too large for the cache is then read and written only half as often.
    """
    network, loss, models, velocity, anchor = learning[:5]
    by = -rate / divisor if velocity is None else 1 / divisor
    found: list[list[Contribution | None]] = []
    for step in passes:
        if not step.layout.rows:
            continue
        rows, labels = examples_of(records, step.records, step.valid)
        # Scaling the few outputs here scales everything computed from them.
        weights = by[:, 0].index_select(0, step.layout.owner)
        if step.valid is not None:
            weights = weights * step.valid
        found.append(row_gradients(network, loss, models, rows, labels, step.layout, weights))
    if fixed.pull is not None:
        models.lerp_(anchor, rate * fixed.pull)
    if velocity is not None and fixed.momentum is not None:
        velocity.mul_(fixed.momentum)
    for each in found:
        add_rows(network, each, None, models if velocity is None else velocity)
    if velocity is not None:
        models.addcmul_(velocity, rate, value=-1)


def draw_noise(streams: Streams, settings: Settings, size: int) -> Iterator[Tensor | None]:
    """Yield the noise on every client's gradient sum for each step, (n, d), or None; drawn several steps at once."""
    total = int(settings.steps.max(initial=0))
    if settings.deviation is None:
        yield from (None for _ in range(total))
        return
    deviation = torch.from_numpy(settings.deviation).float()[:, None]
    clients = len(settings.steps)
    block = max(1, min(total, NOISE_BLOCK // (clients * size)))
    normals = torch.zeros(block, clients, size)
    for step in range(0, total, block):
        active = np.flatnonzero(settings.steps > step).tolist()
        if len(active) < clients:  # what is left of clients that have finished would be scaled again and again
            normals.zero_()
        streams.normals(normals.transpose(0, 1), active)
        for ahead in range(min(block, total - step)):
            yield normals[ahead].mul_(deviation)
