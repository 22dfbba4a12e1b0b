"""Local optimisation as values: `sgd`, `dp_sgd` and `proximal`, a model per row in, an update per row out.

Numbers that may differ between clients (`PerClient`) are given as one number for all or as one per row, and a run
may train only some of the rows. Batches are Poisson, or of a fixed size as `published` forms take them. A cohort
is trained in chunks that fit into memory; the answer does not depend on the chunks beyond float rounding.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from polyeps.core import Adjacency, Arithmetic, Records, Streams
from polyeps.engine.batching import Batching, Sampler
from polyeps.engine.cuda_graphs import CudaGraphs, train_on_device
from polyeps.engine.deployed_training import train_deployed
from polyeps.engine.loop import Settings, train_on_cpu
from polyeps.engine.per_client import (
    PerClient,
    Rows,
    above_zero,
    check_lengths,
    cohort_of,
    each,
    of_row,
    unless_zero,
    whole,
)
from polyeps.errors import InputError
from polyeps.mechanisms.clipping import check_clip
from polyeps.models import Model

# On the CPU a chunk larger than this gains nothing more: 1 GiB holds a thousand small models' step.
CPU_MEMORY = 1 << 30


class Run(Protocol):
    """Train a cohort; the update of a client is its model after training less its model before."""

    def __call__(
        self,
        starts: Tensor,  # (n, d), or (d,) for all alike
        records: Records,
        streams: Streams,
        scale: PerClient | None = None,  # noise multipliers; None where no noise is added
        anchor: Tensor | None = None,  # (n, d) or (d,): where `proximal` pulls to; None for the starts
        *,
        # Whose records these are, as rows of the settings the training was built with; None: all, in order.
        rows: Sequence[int] | None = None,
        rate_factor: float = 1.0,  # of all learning rates: for those that fall from round to round
    ) -> Tensor: ...  # (n, d)


@dataclass(frozen=True)
class Training:
    """A way to train, and what one run of it costs a client's records in privacy."""

    model: Model
    run: Run
    # price(scale, row) -> DpEvent of one run, for one record of a client; None: no guarantee is given.
    price: Callable[..., Any] | None
    adjacency: Adjacency = "zero-out"  # of the price
    arithmetic: Arithmetic = "ideal"


def dp_sgd(
    model: Model,
    *,
    rate: PerClient | None = None,
    steps: PerClient,
    clip: PerClient,
    learning_rate: PerClient,
    batch: PerClient | None = None,
    momentum: PerClient = 0.0,
    decay: PerClient = 0.0,
    memory: int | None = None,
    sampler: Sampler = "poisson",
    records_held: PerClient | None = None,
    hide_records: bool = False,
) -> Training:
    """DP-SGD with true Poisson batches, whose sums are divided by the public batch size, never the realised one.

    Guarantee: record, zero-out. Each step releases the sum of gradients clipped to `clip`, with Gaussian
    noise of standard deviation scale · clip in every coordinate. Momentum and decay only process what was
    released. The number of records is public, so `rate` and `batch` may depend on it; without `batch` the divisor
    is rate · records.

    With `hide_records` the guarantee is add-remove: the caller states that `rate` and `batch`, which must be given,
    were chosen without looking at how many records there are.

    With sampler "fixed" there is no `rate`: a batch is exactly `batch` records, and so is the divisor. Guarantee:
    record, replace-one. Its price needs the public number of records of every client, `records_held`.
    """
    batching = Batching(sampler, rate, batch, records_held)
    for bound in np.ravel(clip):
        if not np.isinf(bound):
            check_clip("clip", float(bound))
    if hide_records and (batching.fixed or batch is None):
        raise InputError("hide_records needs Poisson batches, and a batch to divide by that is chosen for all clients")
    check_lengths(
        rate=rate,
        steps=steps,
        clip=clip,
        learning_rate=learning_rate,
        batch=batch,
        momentum=momentum,
        decay=decay,
        records_held=records_held,
    )

    def settings_for(cohort: Rows, scale: PerClient | None) -> Settings:
        if scale is None:
            raise InputError("dp_sgd needs a noise scale for every client; give 0 to train without noise")
        bound, scales = each("clip", clip, cohort), each("scale", scale, Rows(cohort.counts))
        if np.any(np.isinf(bound) & (scales > 0)):
            raise InputError("noise needs a finite clip: without one the scale has nothing to multiply")
        rates = batching.rates(cohort)
        return Settings(
            rate=rates,
            steps=whole("steps", steps, cohort),
            learning_rate=each("learning_rate", learning_rate, cohort),
            divisor=rates * cohort.counts if batch is None else above_zero("batch", batch, cohort),
            clip=None if np.isinf(bound).all() else bound,
            deviation=scales * np.where(np.isinf(bound), 0, bound) if scales.any() else None,
            momentum=unless_zero("momentum", momentum, cohort),
            decay=unless_zero("decay", decay, cohort),
            pull=None,
            batch=batching.sizes(cohort),
        )

    def price(scale: float, row: int | None = None) -> Any:
        import dp_accounting

        sampled = batching.event(dp_accounting.GaussianDpEvent(scale), row)
        return dp_accounting.SelfComposedDpEvent(sampled, int(of_row("steps", steps, row)))

    adjacency: Adjacency = "replace-one" if batching.fixed else "add-remove" if hide_records else "zero-out"
    arithmetic: Arithmetic = "ideal" if batching.fixed else "exact-when-deployed"
    # A client that hides how many records it has must not stand out by having none.
    return Training(model, _runner(model, memory, settings_for, empty=hide_records), price, adjacency, arithmetic)


def sgd(
    model: Model,
    *,
    rate: PerClient | None = None,
    steps: PerClient,
    learning_rate: PerClient,
    batch: PerClient | None = None,
    momentum: PerClient = 0.0,
    decay: PerClient = 0.0,
    memory: int | None = None,
    sampler: Sampler = "poisson",
) -> Training:
    """Plain SGD on the mean loss of batches, stepping as torch.optim.SGD; rate 1 is full batch.

    Batches are Poisson at `rate`, or, with sampler "fixed", exactly `batch` records.
    """
    return proximal(
        model,
        rate=rate,
        steps=steps,
        learning_rate=learning_rate,
        pull=0.0,
        batch=batch,
        momentum=momentum,
        decay=decay,
        memory=memory,
        sampler=sampler,
    )


def proximal(
    model: Model,
    *,
    rate: PerClient | None = None,
    steps: PerClient,
    learning_rate: PerClient,
    pull: PerClient,
    batch: PerClient | None = None,
    momentum: PerClient = 0.0,
    decay: PerClient = 0.0,
    memory: int | None = None,
    sampler: Sampler = "poisson",
) -> Training:
    """SGD on the loss plus pull/2 · ‖model - anchor‖²: Ditto's personal step.

    Ditto starts at the client's personal model, with the received one as anchor. FedProx starts at the
    received model, which is then the anchor too (the default). Batches as in `sgd`.
    """
    batching = Batching(sampler, rate, batch)
    if not batching.fixed and batch is not None:
        raise InputError('batch is the exact size of batches with sampler="fixed"; give Poisson batches a rate alone')
    check_lengths(
        rate=rate, steps=steps, learning_rate=learning_rate, pull=pull, batch=batch, momentum=momentum, decay=decay
    )

    def settings_for(cohort: Rows, scale: PerClient | None) -> Settings:
        if scale is not None:
            raise InputError("this training adds no noise, so it takes no scale; use dp_sgd for a guarantee")
        return Settings(
            rate=batching.rates(cohort),
            steps=whole("steps", steps, cohort),
            learning_rate=each("learning_rate", learning_rate, cohort),
            divisor=None if batch is None else above_zero("batch", batch, cohort),
            clip=None,
            deviation=None,
            momentum=unless_zero("momentum", momentum, cohort),
            decay=unless_zero("decay", decay, cohort),
            pull=unless_zero("pull", pull, cohort),
            batch=batching.sizes(cohort),
        )

    return Training(model, _runner(model, memory, settings_for), price=None)


def _runner(
    model: Model,
    memory: int | None,
    settings_for: Callable[[Rows, PerClient | None], Settings],
    *,
    empty: bool = False,
) -> Run:
    """Train in the way `settings_for` describes; device graphs live as long as the training."""
    graphs = CudaGraphs()

    def run(
        starts: Tensor,
        records: Records,
        streams: Streams,
        scale: PerClient | None = None,
        anchor: Tensor | None = None,
        *,
        rows: Sequence[int] | None = None,
        rate_factor: float = 1.0,
    ) -> Tensor:
        counts = records.counts
        settings = settings_for(cohort_of(counts, rows, empty=empty), scale)
        settings = replace(
            settings, learning_rate=settings.learning_rate * above_zero("rate_factor", rate_factor, Rows(counts))
        )
        try:
            return _train(model, starts, anchor, records, streams, settings, memory, graphs)
        except Exception:
            if not streams.exact or settings.deviation is not None:
                raise
            # Noise is added to what a deployed client learnt here; failing for some data alone would tell of them.
            logging.getLogger(__name__).warning("local training failed under the model received; the update is zero")
            return torch.zeros(records.clients, model.size, device=records.features.device)

    return run


@torch.no_grad()  # type: ignore[untyped-decorator,unused-ignore]
def _train(
    model: Model,
    starts: Tensor,
    anchor: Tensor | None,
    records: Records,
    streams: Streams,
    settings: Settings,
    memory: int | None,
    graphs: CudaGraphs,
) -> Tensor:
    clients, device = records.clients, records.features.device
    _check(model, starts, records, streams)
    features = records.features.reshape(-1, *model.input_shape)  # a linear model takes an image as one row
    starts = starts.to(device).expand(clients, model.size)
    pulled_to = starts if anchor is None else anchor.to(device).expand(clients, model.size)
    updates = torch.empty(clients, model.size, device=device)
    for rows in _chunks(model, records, settings, memory):
        mine = Records(features, records.labels, records.spans[rows])
        some = streams.select(range(rows.start, rows.stop))
        before, fixed = starts[rows], pulled_to[rows]
        if some.exact and settings.deviation is not None:
            after = train_deployed(model, before, mine, some, settings.select(rows))
        elif device.type == "cpu":
            after = train_on_cpu(model, before, fixed, mine, some, settings.select(rows))
        else:
            after = train_on_device(model, before, fixed, mine, some, settings.select(rows), graphs)
        torch.sub(after, before, out=updates[rows])
    return updates


def _chunks(model: Model, records: Records, settings: Settings, memory: int | None) -> list[slice]:
    """Slices of clients whose step fits into memory (bytes), all about equally large."""
    counts = records.counts
    rows = float(np.max(settings.rate * counts, initial=0.0))
    # models, gradient, their framed copies and room for noise
    per_client = 4 * (6 * model.size + math.ceil(rows * model.floats_per_row * 1.2))
    if memory is None:
        on_device = records.features.is_cuda
        # Of all the device's memory, not of what is free: chunks must stay the same from round to round.
        memory = torch.cuda.mem_get_info()[1] // 3 if on_device else CPU_MEMORY
    most = max(1, memory // per_client)
    pieces = max(1, math.ceil(records.clients / most))
    edges = np.linspace(0, records.clients, pieces + 1).round().astype(int).tolist()
    return [slice(a, b) for a, b in pairwise(edges) if b > a]


def _check(model: Model, starts: Tensor, records: Records, streams: Streams) -> None:
    if starts.shape not in ((model.size,), (records.clients, model.size)):
        raise InputError(
            f"starts must be ({model.size},) or ({records.clients}, {model.size}), not {tuple(starts.shape)}"
        )
    if math.prod(records.features.shape[1:]) != math.prod(model.input_shape):
        raise InputError(
            f"the model takes records of shape {model.input_shape}, but these are {tuple(records.features.shape[1:])}"
        )
    if streams.clients != records.clients:
        raise InputError(f"{records.clients} clients have records, but {streams.clients} have a random stream")
