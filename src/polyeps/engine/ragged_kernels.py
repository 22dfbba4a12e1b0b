"""Products and sums of ragged batches on a device, by Triton: a client's rows are neighbours, however many it has.

`layout.spans` (n + 1,) on the device says where each client's rows begin, so nothing is padded and one captured step
serves every batch. Products take three passes of TF32 on tensor cores ("tf32x3"): they round about as float32 does.
A row's product has the same order of summation wherever the row lies and whatever lies beside it. Sums over rows skip
those whose factor is zero, whatever they hold, and add blocks of sixteen rows in float64.
"""

# Triton reads annotations as code, so its functions have none but those of constants, which are in capitals.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,attr-defined,misc"
# ruff: noqa: N803

from __future__ import annotations

from torch import Tensor

from polyeps.engine.triton_kernels import tl, triton

_FEWEST, _MOST, _INNER, _ROWS = 16, 64, 32, 16


def multiply_rows(rows: Tensor, weights: Tensor, bias: Tensor | None, owner: Tensor, spans: Tensor) -> Tensor:
    """Return rows (T, ..., in) times the weights (n, out, in) of their clients, plus the biases (n, out)."""
    fan_out, inputs = weights.shape[1], rows.flatten(1, -2) if rows.dim() > 2 else rows
    outputs = rows.new_empty(*rows.shape[:-1], fan_out)
    if rows.dim() > 2:
        _products(inputs, weights.transpose(1, 2), outputs, bias, owner)
        return outputs
    inner, block = rows.shape[1], _block(fan_out)
    grid = (len(spans) - 1, triton.cdiv(fan_out, block))
    shifts, step = (outputs, 0) if bias is None else (bias, bias.stride(0))
    _by_client[grid](inputs, weights, outputs, shifts, spans, inner, fan_out, inputs.stride(0), inputs.stride(1),
                     *weights.stride(), step, bias is not None, _ROWS, block, _INNER)  # fmt: skip
    return outputs


def multiply_pairs(left: Tensor, right: Tensor) -> Tensor:
    """Return the products (T, a, b) of matrices (T, a, k) and (T, k, b)."""
    found = left.new_empty(len(left), left.shape[1], right.shape[2])
    _products(left, right, found, None, None)
    return found


def add_outer_products(
    into: Tensor, gradients: Tensor, inputs: Tensor, factors: Tensor, spans: Tensor, bias: bool
) -> None:
    """Add Σ factor · g aᵀ over each client's rows g (T, out), a (T, in) to into (n, out * in); Σ factor · g follows."""
    fan_out, fan_in = gradients.shape[1], inputs.shape[1]
    tall, wide = _block(fan_out), _block(fan_in)
    grid = (len(spans) - 1, triton.cdiv(fan_out, tall) * triton.cdiv(fan_in, wide))
    _outer[grid](into, gradients, inputs, factors.float(), spans, fan_out, fan_in, into.stride(0), *gradients.stride(),
                 *inputs.stride(), _ROWS, tall, wide)  # fmt: skip
    if bias:
        add_weighted_rows(into[:, fan_out * fan_in :], gradients, factors, spans)


def add_weighted_rows(into: Tensor, rows: Tensor, factors: Tensor, spans: Tensor) -> None:
    """Add Σ factor · row over each client's rows (T, p) to into (n, p)."""
    size = rows.shape[1]
    block = min(1024, triton.next_power_of_2(max(size, _FEWEST)))
    grid = (len(spans) - 1, triton.cdiv(size, block))
    _weighted[grid](into, rows, factors.float(), spans, size, into.stride(0), *rows.stride(), _ROWS, block)


def _products(left: Tensor, right: Tensor, into: Tensor, bias: Tensor | None, owner: Tensor | None) -> None:
    """Write left (T, a, k) times right (T or n, k, b) to contiguous `into`; owner (T,) says which right one."""
    count, tall, inner = left.shape
    wide = right.shape[2]
    blocks = _block(tall), _block(wide)
    grid = (count, triton.cdiv(tall, blocks[0]) * triton.cdiv(wide, blocks[1]))
    shifts, step = (into, 0) if bias is None else (bias, bias.stride(0))
    _pairs[grid](left, right, into, shifts, into if owner is None else owner, tall, inner, wide, *left.stride(),
                 *right.stride(), step, bias is not None, owner is not None, *blocks, _INNER)  # fmt: skip


def _block(size: int) -> int:
    block: int = min(_MOST, max(_FEWEST, triton.next_power_of_2(size)))
    return block


# fmt: off
if triton is not None:
    @triton.jit
    def _pairs(left, right, into, bias, owner, tall, inner, wide, l0, l1, l2, r0, r1, r2, b0, BIAS: tl.constexpr,
               OWNED: tl.constexpr, TALL: tl.constexpr, WIDE: tl.constexpr, INNER: tl.constexpr):
        pair = tl.program_id(0).to(tl.int64)
        across = tl.cdiv(wide, WIDE)
        row = (tl.program_id(1) // across) * TALL + tl.arange(0, TALL)
        column = (tl.program_id(1) % across) * WIDE + tl.arange(0, WIDE)
        mine = pair
        if OWNED:
            mine = tl.load(owner + pair)
        lines, columns = left + pair * l0 + row[:, None] * l1, right + mine * r0 + column[None, :] * r2
        total = tl.zeros([TALL, WIDE], dtype=tl.float32)
        for first in range(0, inner, INNER):
            place = first + tl.arange(0, INNER)
            a = tl.load(lines + place[None, :] * l2, mask=(row < tall)[:, None] & (place < inner)[None, :], other=0.0)
            b = tl.load(columns + place[:, None] * r1, mask=(place < inner)[:, None] & (column < wide)[None, :],
                        other=0.0)
            total = tl.dot(a, b, total, input_precision="tf32x3")
        if BIAS:
            total += tl.load(bias + mine * b0 + column, mask=column < wide, other=0.0)[None, :]
        there = (row < tall)[:, None] & (column < wide)[None, :]
        tl.store(into + (pair * tall + row[:, None]) * wide + column[None, :], total, mask=there)

    @triton.jit
    def _by_client(rows, weights, outputs, bias, spans, inner, wide, l0, l1, w0, w1, w2, b0, BIAS: tl.constexpr,
                   ROWS: tl.constexpr, WIDE: tl.constexpr, INNER: tl.constexpr):
        client = tl.program_id(0).to(tl.int64)
        column = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
        columns = weights + client * w0 + column[None, :] * w1
        last = tl.load(spans + client + 1)
        for first in range(tl.load(spans + client), last, ROWS):
            row = first + tl.arange(0, ROWS)
            total = tl.zeros([ROWS, WIDE], dtype=tl.float32)
            for start in range(0, inner, INNER):
                place = start + tl.arange(0, INNER)
                a = tl.load(rows + row[:, None] * l0 + place[None, :] * l1,
                            mask=(row < last)[:, None] & (place < inner)[None, :], other=0.0)
                b = tl.load(columns + place[:, None] * w2, mask=(place < inner)[:, None] & (column < wide)[None, :],
                            other=0.0)
                total = tl.dot(a, b, total, input_precision="tf32x3")
            if BIAS:
                total += tl.load(bias + client * b0 + column, mask=column < wide, other=0.0)[None, :]
            there = (row < last)[:, None] & (column < wide)[None, :]
            tl.store(outputs + row[:, None] * wide + column[None, :], total, mask=there)

    @triton.jit
    def _outer(into, gradients, inputs, factors, spans, tall, wide, i0, g0, g1, a0, a1, ROWS: tl.constexpr,
               TALL: tl.constexpr, WIDE: tl.constexpr):
        client = tl.program_id(0).to(tl.int64)
        across = tl.cdiv(wide, WIDE)
        output = (tl.program_id(1) // across) * TALL + tl.arange(0, TALL)
        feature = (tl.program_id(1) % across) * WIDE + tl.arange(0, WIDE)
        last = tl.load(spans + client + 1)
        total = tl.zeros([TALL, WIDE], dtype=tl.float64)
        for first in range(tl.load(spans + client), last, ROWS):
            row = first + tl.arange(0, ROWS)
            factor = tl.load(factors + row, mask=row < last, other=0.0)
            kept = factor != 0.0
            a = tl.load(gradients + row[None, :] * g0 + output[:, None] * g1,
                        mask=kept[None, :] & (output < tall)[:, None], other=0.0) * factor[None, :]
            b = tl.load(inputs + row[:, None] * a0 + feature[None, :] * a1,
                        mask=kept[:, None] & (feature < wide)[None, :], other=0.0)
            total += tl.dot(a, b, input_precision="tf32x3").to(tl.float64)
        there = (output < tall)[:, None] & (feature < wide)[None, :]
        place = into + client * i0 + output[:, None] * wide + feature[None, :]
        tl.store(place, (tl.load(place, mask=there, other=0.0) + total.to(tl.float32)), mask=there)

    @triton.jit
    def _weighted(into, rows, factors, spans, size, i0, r0, r1, ROWS: tl.constexpr, BLOCK: tl.constexpr):
        client = tl.program_id(0).to(tl.int64)
        place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        last = tl.load(spans + client + 1)
        total = tl.zeros([BLOCK], dtype=tl.float64)
        for first in range(tl.load(spans + client), last, ROWS):
            block = tl.zeros([BLOCK], dtype=tl.float32)
            for row in range(first, tl.minimum(first + ROWS, last)):
                factor = tl.load(factors + row)
                value = tl.load(rows + row * r0 + place * r1, mask=place < size, other=0.0)
                block += tl.where(factor == 0.0, 0.0, value * factor)
            total += block.to(tl.float64)
        here = into + client * i0 + place
        tl.store(here, tl.load(here, mask=place < size, other=0.0) + total.to(tl.float32), mask=place < size)
# fmt: on
