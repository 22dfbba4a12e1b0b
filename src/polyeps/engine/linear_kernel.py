"""Multinomial logistic regression on a device: all steps of all clients in one Triton kernel, a program per client.

A captured step (`cuda_graphs`) passes over models, batches and gradients some twenty times, and for few clients mostly
launches kernels. Here a client's program reads its rows twice and its model twice, takes a step, and goes on with the
next one. What a step computes is what `loop.advance` does, with the same batches and the same noise.
"""

# Triton reads annotations as code, so its functions have none but those of constants, which are in capitals.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,attr-defined,misc"
# ruff: noqa: N803, N806, PIE808

from __future__ import annotations

import torch
from torch import Tensor

from polyeps.core import Records
from polyeps.engine.contributions import SMALLEST
from polyeps.engine.device_batches import PlacedBatches
from polyeps.engine.layers import Linear
from polyeps.engine.loop import Settings, clip_of
from polyeps.engine.losses import CrossEntropy
from polyeps.engine.network import AIM_ON_DEVICE
from polyeps.engine.triton_kernels import gaussian_pair, has_kernel, tl, triton
from polyeps.models import Model

WIDEST = 64  # rows expected in a batch; above, products of matrices are faster
_LONG = 32  # rows of a batch above which sums are float64, as in `contributions`
_FEW = 256  # clients: each then gets more threads
_SHAPE_OF_FEW, _SHAPE_OF_MANY = (1024, 8), (256, 4)  # parameters at once, and warps
_ROWS, _FEATURES = 16, 128  # of a product


def suits_linear_kernel(model: Model, starts: Tensor, records: Records, settings: Settings) -> bool:
    """Return whether the kernel can train these clients, and is faster: by what is expected, never by what was drawn.

    Drawing again where a batch turned out long would no longer be Poisson sampling.
    """
    layers = model.network.layers
    plain = settings.momentum is None and settings.decay is None and settings.pull is None
    linear = len(layers) == 1 and isinstance(layers[0], Linear) and type(model.loss) is CrossEntropy
    if not (has_kernel(starts) and plain and linear and records.units is None and records.labels.dim() == 1):
        return False
    usual = settings.rate * records.counts if settings.batch is None else settings.batch
    if float(usual.max(initial=0)) > WIDEST:
        return False
    return records.features.dim() == 2 and records.features.dtype == starts.dtype == torch.float32


def train_linear(
    model: Model, starts: Tensor, records: Records, placed: PlacedBatches, keys: Tensor | None, settings: Settings
) -> Tensor:
    """Return the models (n, d) after all steps on batches in the clients' own order; keys (n,) draw the noise."""
    (layer,) = model.network.layers
    assert isinstance(layer, Linear)
    assert placed.order is None
    device, (clients, width) = starts.device, (len(starts), placed.shape.widths[0])
    models = starts.clone(memory_format=torch.contiguous_format)
    padded = max(_ROWS, triton.next_power_of_2(layer.fan_out))

    def column(values: object) -> Tensor:
        return torch.as_tensor(values).float().to(device)

    none = models  # in place of what is not used
    clip, shape = clip_of(settings), _SHAPE_OF_FEW if clients <= _FEW else _SHAPE_OF_MANY
    _train[(clients,)](
        models,
        records.features.contiguous(),
        records.labels.long(),
        placed.records,
        placed.sizes,
        torch.empty(clients, max(width, 1), padded, device=device),
        none if keys is None else keys,
        torch.from_numpy(settings.steps).to(device),
        column(settings.learning_rate),
        none if settings.divisor is None else column(settings.divisor),
        none if clip is None else column(clip) * AIM_ON_DEVICE,
        none if settings.deviation is None else column(settings.deviation),
        width,
        layer.fan_in,
        layer.fan_out,
        layer.bias,
        padded,
        settings.divisor is None,
        clip is not None,
        settings.deviation is not None,
        width > _LONG,
        SMALLEST,
        _ROWS,
        _FEATURES,
        shape[0],
        num_warps=shape[1],
        num_stages=1,
    )
    return models


# fmt: off
if triton is not None:
    AT_ONCE = tl.constexpr(4)  # rows whose numbers are loaded together

    @triton.jit
    def _train(models, features, labels, records, sizes, scaled, keys, steps, rates, divisors, clips, deviations,
               width, IN: tl.constexpr, OUT: tl.constexpr, BIAS: tl.constexpr, PADDED: tl.constexpr,
               BY_SIZE: tl.constexpr, CLIPPED: tl.constexpr, NOISY: tl.constexpr, EXACT: tl.constexpr,
               SMALLEST: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr):
        SIZE: tl.constexpr = OUT * IN + (OUT if BIAS else 0)
        QUADS: tl.constexpr = (SIZE + 3) // 4
        client = tl.program_id(0).to(tl.int64)
        model, own = models + client * SIZE, scaled + client * width * PADDED
        rate = tl.load(rates + client)
        for step in range(0, tl.load(steps + client).to(tl.int32)):
            batch = step * tl.num_programs(0).to(tl.int64) + client
            drawn, size = records + batch * width, tl.load(sizes + batch).to(tl.int32)
            for first in range(0, size, ROWS):
                _scale_rows(model, features, labels, drawn, own, clips + client, first, size, IN, OUT, BIAS, PADDED,
                            CLIPPED, SMALLEST, ROWS, WIDE)
            tl.debug_barrier()  # what one thread wrote, others read
            divisor = tl.maximum(size, 1).to(tl.float32) if BY_SIZE else tl.load(divisors + client)
            for start in range(0, QUADS, BLOCK):
                element = start + tl.arange(0, BLOCK)
                n0 = tl.zeros([BLOCK], dtype=tl.float32)
                n1, n2, n3 = n0, n0, n0
                if NOISY:  # as in `philox_normals`
                    zero = element * 0
                    r0, r1, r2, r3 = tl.philox(tl.load(keys + client), element, zero + step, zero, zero)
                    deviation = tl.load(deviations + client)
                    n0, n1 = gaussian_pair(r0, r1)
                    n2, n3 = gaussian_pair(r2, r3)
                    n0, n1, n2, n3 = n0 * deviation, n1 * deviation, n2 * deviation, n3 * deviation
                inside, by = element < QUADS, rate / divisor
                # all sums before the first change, so that their loads need not wait for one another
                n0 += _sums(features, drawn, own, element, inside, size, IN, OUT, PADDED, CLIPPED, EXACT)
                n1 += _sums(features, drawn, own, QUADS + element, inside, size, IN, OUT, PADDED, CLIPPED, EXACT)
                n2 += _sums(features, drawn, own, 2 * QUADS + element, inside, size, IN, OUT, PADDED, CLIPPED, EXACT)
                inside3 = inside & (3 * QUADS + element < SIZE)
                n3 += _sums(features, drawn, own, 3 * QUADS + element, inside3, size, IN, OUT, PADDED, CLIPPED, EXACT)
                _move(model, element, n0 * by, inside & (element < SIZE))
                _move(model, QUADS + element, n1 * by, inside & (QUADS + element < SIZE))
                _move(model, 2 * QUADS + element, n2 * by, inside & (2 * QUADS + element < SIZE))
                _move(model, 3 * QUADS + element, n3 * by, inside3)
            tl.debug_barrier()

    @triton.jit
    def _scale_rows(model, features, labels, drawn, own, clip, first, size, IN: tl.constexpr, OUT: tl.constexpr,
                    BIAS: tl.constexpr, PADDED: tl.constexpr, CLIPPED: tl.constexpr, SMALLEST: tl.constexpr,
                    ROWS: tl.constexpr, WIDE: tl.constexpr):
        # write the gradients of some rows by their outputs, each times its clipping factor
        row, output = first + tl.arange(0, ROWS), tl.arange(0, PADDED)
        inside, real = row < size, output < OUT
        record = tl.load(drawn + row, mask=inside, other=0)
        outputs = tl.zeros([ROWS, PADDED], dtype=tl.float32)
        squares = tl.zeros([ROWS], dtype=tl.float64)
        for start in range(0, IN, WIDE):
            feature = start + tl.arange(0, WIDE)
            there = feature < IN
            values = tl.load(features + record[:, None] * IN + feature[None, :], mask=inside[:, None] & there[None, :],
                             other=0.0)
            weights = tl.load(model + output[None, :] * IN + feature[:, None], mask=real[None, :] & there[:, None],
                              other=0.0)
            outputs = tl.dot(values, weights, outputs, input_precision="tf32x3")
            if CLIPPED:
                exact = values.to(tl.float64)
                squares += tl.sum(exact * exact, axis=1)
        if BIAS:
            outputs += tl.load(model + OUT * IN + output, mask=real, other=0.0)[None, :]
            squares += 1.0
        outputs = tl.where(real[None, :], outputs, float("-inf"))
        powers = tl.exp(outputs - tl.max(outputs, axis=1)[:, None])
        chances = powers / tl.sum(powers, axis=1)[:, None]
        label = tl.load(labels + record, mask=inside, other=0)
        gradients = tl.where(output[None, :] == label[:, None], chances - 1.0, chances)
        if CLIPPED:  # as `network.clip_rows` and `OuterProducts.scaled`
            exact = gradients.to(tl.float64)
            lengths = tl.sum(exact * exact, axis=1)
            ratio = tl.load(clip).to(tl.float64) / tl.sqrt(squares * lengths)
            factors = tl.where(ratio < 1.0, ratio, 1.0).to(tl.float32)
            kept = (ratio >= SMALLEST) & (lengths * (factors * factors).to(tl.float64) >= SMALLEST * SMALLEST)
            gradients = tl.where(kept[:, None], gradients * factors[:, None], 0.0)
        tl.store(own + row[:, None] * PADDED + output[None, :], gradients, mask=inside[:, None])

    @triton.jit
    def _sums(features, drawn, own, place, inside, size, IN: tl.constexpr, OUT: tl.constexpr, PADDED: tl.constexpr,
              CLIPPED: tl.constexpr, EXACT: tl.constexpr):
        # return some parameters' sums over rows: of weights, then of biases
        weight = place < OUT * IN
        inside = inside & (place < OUT * IN + OUT)
        output = tl.where(weight, place // IN, place - OUT * IN)
        total = tl.zeros_like(place).to(tl.float64 if EXACT else tl.float32)
        for first in range(0, size, AT_ONCE):
            for i in tl.static_range(AT_ONCE):
                row = first + i
                there = inside & (row < size)
                record = tl.load(drawn + row, mask=row < size, other=0)
                gradient = tl.load(own + row * PADDED + output, mask=there, other=0.0)
                part = gradient * tl.load(features + record * IN + place % IN, mask=there & weight, other=1.0)
                if CLIPPED:
                    part = tl.where(gradient == 0.0, 0.0, part)  # a row that was dropped may hold anything
                total += part.to(tl.float64) if EXACT else part
        return total.to(tl.float32)

    @triton.jit
    def _move(model, place, by, inside):
        tl.store(model + place, tl.load(model + place, mask=inside, other=0.0) - by, mask=inside)
# fmt: on
