"""Training on a CUDA device: one step captured as a graph, replayed for every step of a run.

The step is `advance`, as on the CPU, on static buffers: the plan of all steps is on the device, a counter selects the
next one, and noise is drawn inside the graph. A graph is reused in later rounds while shapes and records are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from polyeps.core import Records, Streams
from polyeps.engine.convolution import Convolution
from polyeps.engine.deferred import Deferral
from polyeps.engine.device_batches import BatchShape, PlacedBatches, place_batches
from polyeps.engine.layers import Linear, Norm, Parameterless
from polyeps.engine.layout import Layout, TrainingStep, lay_out
from polyeps.engine.linear_kernel import suits_linear_kernel, train_linear
from polyeps.engine.loop import Learning, Pace, Settings, add_drift, advance, deferral_of, drawing, pace, step_directly
from polyeps.engine.noise import SeededStreams
from polyeps.engine.philox import fill_normals
from polyeps.engine.row_draws import client_keys
from polyeps.engine.triton_kernels import has_kernel
from polyeps.errors import InputError
from polyeps.models import Model

_RAGGED = (Linear, Convolution, Norm, Parameterless)  # layers that need no groups
_MOST_GRAPHS = 4  # each holds the memory of its buffers


class Buffers(NamedTuple):
    """Everything a step reads or writes, at fixed addresses."""

    models: Tensor  # (n, d)
    anchor: Tensor  # (n, d)
    velocity: Tensor | None
    gradient: Tensor | None  # (n, d); None where steps need not form it
    keys: Tensor  # (n,)
    inner: Tensor | None  # (n,) keys of the draws inside the model
    starts: Tensor | None  # (n,) first record of each client, with inner keys
    counter: Tensor  # (1,): the step to take next
    order: Tensor | None  # (S, n)
    records: Tensor  # (S, T)
    valid: Tensor  # (S, T)
    drift: Tensor | None  # (n, d) added in every step
    owner: Tensor | None  # (S, T), and
    spans: Tensor | None  # (S, n + 1) of ragged batches
    pace: Pace


class CapturedStep(NamedTuple):
    """A graph and all it works on: a replay reads the memory that was there at capture."""

    graph: torch.cuda.CUDAGraph
    buffers: Buffers
    layout: Layout
    shape: BatchShape
    deferral: Deferral


# Captured steps by shape: the only state that outlives a call, owned by the caller.
CudaGraphs = dict[tuple[object, ...], CapturedStep]


def train_on_device(
    model: Model,
    starts: Tensor,
    anchor: Tensor,
    records: Records,
    streams: Streams,
    settings: Settings,
    graphs: CudaGraphs,
    drift: Tensor | None = None,
) -> Tensor:
    """Train as `train_on_cpu` does, on the device that holds `records`, with noise drawn there."""
    if settings.deviation is not None and not isinstance(streams, SeededStreams):
        raise InputError("noise for deployment is drawn on the CPU; move the records there")
    if records.units is not None:
        raise InputError("on a device, persons' records are one padded block; move the records by to_records")
    inner = client_keys(streams).to(starts.device) if model.network.random else None
    device = starts.device
    layers = model.network.layers
    per_row = model.floats_per_row * (records.labels.shape[1] if records.padded else 1)
    steps = int(settings.steps.max(initial=0))
    if steps == 0:
        return starts.clone()
    if drift is None and suits_linear_kernel(model, starts, records, settings):
        # one group, in the clients' own order
        placed = place_batches(
            streams, records.spans, settings, model.size, 0, BatchShape(False, (0, len(starts)), (0,)), device
        )
        noise_keys = streams.keys_on(device) if isinstance(streams, SeededStreams) else None
        return train_linear(model, starts, records, placed, noise_keys, settings)
    optional = tuple(values is None for values in settings.__dict__.values())
    data = (records.features.data_ptr(), records.labels.data_ptr(), *records.features.shape)
    alike = starts.stride(0) == 0  # a deferred layer then has one start for all clients
    key = (model, data, steps, len(starts), alike, optional, drift is None)
    held = graphs.get(key)
    # At least as wide as last time, so that rounds soon share one shape.
    last = None if held is None else held.shape
    ragged = settings.clip is not None and has_kernel(starts) and all(isinstance(each, _RAGGED) for each in layers)
    placed = place_batches(streams, records.spans, settings, model.size, per_row, last, device, ragged)
    sizes = placed.sizes.cpu().numpy() if settings.divisor is None else None
    fixed = pace(settings, sizes, device)
    if held is not None and held.shape == placed.shape:
        deferral = held.deferral
    else:
        apart = placed.order is not None or drift is not None
        held, deferral = None, deferral_of(model, starts, fixed, max(placed.shape.widths), apart)
    deferral.begin(starts, fixed.rate, fixed.momentum)
    models = deferral.kept(starts)
    layout, buffers = _prepare(models, anchor, placed, fixed, streams)
    if drift is not None:
        buffers = buffers._replace(drift=drift.clone())
    if inner is not None:
        buffers = buffers._replace(inner=inner, starts=records.spans[:, 0].to(device))

    def step() -> None:
        with _coarse_products(settings.clip is None):
            _step(model, deferral, records, layout, buffers)

    if not starts.is_cuda:  # the same code without a graph, for tests without a device
        for _ in range(steps):
            step()
        return deferral.joined(buffers.models)
    if held is not None:
        _refill(held.buffers, buffers)
    else:
        while len(graphs) >= _MOST_GRAPHS:
            graphs.pop(next(iter(graphs)))
        graph = _capture(step, buffers, models)
        deferral.begin(starts, fixed.rate, fixed.momentum)
        held = graphs[key] = CapturedStep(graph, buffers, layout, placed.shape, deferral)
    for _ in range(steps):
        held.graph.replay()
    learned = deferral.joined(held.buffers.models)
    return learned.clone() if learned is held.buffers.models else learned


@contextmanager
def _coarse_products(allowed: bool) -> Iterator[None]:
    """Allow TF32 products, which are faster but rounded to ten bits; never where rows are clipped.

    There, a row's norm and its part of the sum must belong to the same gradient.
    """
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = allowed
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def _step(model: Model, deferral: Deferral, records: Records, layout: Layout, buffers: Buffers) -> None:
    now = buffers.counter
    fixed = buffers.pace
    learning = Learning(
        deferral.network,
        model.loss,
        buffers.models,
        buffers.velocity,
        buffers.anchor,
        buffers.inner,
        buffers.starts,
    )
    if buffers.owner is not None and buffers.spans is not None:
        owner, spans = (each.index_select(0, now)[0] for each in (buffers.owner, buffers.spans))
        layout = replace(layout, owner=owner, spans=spans)
    step = TrainingStep(
        layout,
        None if buffers.order is None else buffers.order.index_select(0, now)[0],
        buffers.records.index_select(0, now)[0],
        buffers.valid.index_select(0, now)[0],
    )
    step = drawing(learning, records, step, now)
    rate, divisor = fixed.rate.index_select(0, now)[0], fixed.divisor.index_select(0, now)[0]
    if buffers.gradient is None:
        deferral.enter(now, len(buffers.records))
        step_directly(learning, records, (step,), fixed, rate, divisor)
    else:
        if fixed.deviation is None:
            buffers.gradient.zero_()
        else:
            fill_normals(buffers.gradient, buffers.keys, now)
            buffers.gradient.mul_(fixed.deviation)
        advance(learning, records, (step,), fixed, rate, divisor, buffers.gradient)
    add_drift(buffers.models, buffers.drift, rate)
    now.add_(1)


def _prepare(
    starts: Tensor, anchor: Tensor, placed: PlacedBatches, fixed: Pace, streams: Streams
) -> tuple[Layout, Buffers]:
    """Allocate everything the steps work on, on the device."""
    device, clients = starts.device, len(starts)
    models = starts.clone()
    keys = torch.zeros(clients, dtype=torch.int64, device=device)
    if isinstance(streams, SeededStreams):
        keys = streams.keys_on(device)
    buffers = Buffers(
        models=models,
        anchor=anchor.clone() if fixed.pull is not None else models,
        velocity=None if fixed.momentum is None else torch.zeros_like(models),
        gradient=None if fixed.plain and placed.order is None else torch.zeros_like(models),
        keys=keys,
        inner=None,
        starts=None,
        counter=torch.zeros(1, dtype=torch.int64, device=device),
        order=placed.order,
        records=placed.records,
        valid=placed.valid,
        drift=None,
        owner=placed.owner,
        spans=placed.spans,
        pace=fixed,
    )
    if placed.shape.ragged:
        assert placed.owner is not None
        assert placed.spans is not None
        return Layout(clients, (), placed.owner[0], spans=placed.spans[0]), buffers
    return lay_out(clients, list(placed.shape.cuts), np.array(placed.shape.widths), device), buffers


def _capture(step: Callable[[], None], buffers: Buffers, starts: Tensor) -> torch.cuda.CUDAGraph:
    """Capture a step after a few trial runs on a side stream, as torch requires; then undo the trial runs."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call,unused-ignore]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            step()
            buffers.counter.zero_()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    buffers.models.copy_(starts)
    if buffers.velocity is not None:
        buffers.velocity.zero_()
    buffers.counter.zero_()
    return graph


def _refill(held: Buffers, fresh: Buffers) -> None:
    """Write a new run's values over an old run's, in place."""
    pairs = [*zip(held[:-1], fresh[:-1], strict=True)]
    pairs += [*zip(held.pace.__dict__.values(), fresh.pace.__dict__.values(), strict=True)]
    for old, new in pairs:
        if isinstance(old, Tensor) and isinstance(new, Tensor):
            old.copy_(new)
