"""Triton and the kernels of the engine's layers; every kernel has an equivalent in torch operations."""

# Triton reads annotations as code, so its functions have none but those of constants, which are in capitals. Sizes are
# constants: dividing by them is cheap.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,attr-defined,misc"
# ruff: noqa: N803

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

try:
    import triton  # type: ignore[import-not-found,unused-ignore]
    import triton.language as tl  # type: ignore[import-not-found,unused-ignore]
except ImportError:  # CPU builds of torch come without it
    triton = tl = gaussian_pair = None

KERNEL_BLOCK = 1024  # numbers per program of a kernel
NO_WINNER = 4  # place of the largest of four if none is above zero


def has_kernel(values: Tensor) -> bool:
    """Return whether Triton kernels can work on values."""
    return values.is_cuda and triton is not None


def row_squares(rows: Tensor) -> Tensor:
    """Return the squared norm of each row (T, p), (T,) float64, reading every number once."""
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    count, size = rows.shape
    squares = torch.empty(count, dtype=torch.float64, device=rows.device)
    if count:
        block = min(KERNEL_BLOCK, triton.next_power_of_2(max(size, 16)))
        _squares[(count,)](rows, squares, size, rows.stride(0), block)
    return squares


def copy_patches(images: Tensor, patches: Tensor, kernel: tuple[int, int], stride: tuple[int, int]) -> None:
    """Write every patch (T, height', width', kh * kw * channels) of contiguous images (T, height, width, channels)."""
    s0, s1, s2, _ = images.stride()
    # A run of a patch within one row of the image has the same length in both.
    run = patches.shape[3] // kernel[0]
    steps = (stride[0] * s1, stride[1] * s2, s1, s0)
    _launch(_copy, patches, images, *patches.shape[1:3], kernel[0], run, *steps)


def add_patches(patches: Tensor, images: Tensor, kernel: tuple[int, int], stride: tuple[int, int]) -> None:
    """Write images (T, height, width, channels) in which every patch is added at its place."""
    _launch(_add, images, patches, *images.shape[1:], *patches.shape[1:3], *kernel, *stride)


def pool_largest(images: Tensor, pooled: Tensor, winners: Tensor, stride: int) -> None:
    """Write the largest of each two by two pixels of images (T, height, width, channels), at least 0, and its place."""
    _launch(_largest, pooled, images, winners, *images.shape[1:], *pooled.shape[1:3], stride, NO_WINNER)


def spread_pooled(gradients: Tensor, winners: Tensor, images: Tensor, stride: int) -> None:
    """Write images (T, height, width, channels) with every pooled gradient added at the pixel that was largest."""
    _launch(_spread, images, gradients, winners, *images.shape[1:], *gradients.shape[1:3], stride)


def philox_normals(out: Tensor, keys: Tensor, step: Tensor) -> None:
    """Fill out (n, d) with a step's normals of the streams with the given keys (n,), as `philox.normals`."""
    size, block = out.shape[1], 256
    quads = -(-size // 4)
    _fill[(len(out), -(-quads // block))](out, keys, step, size, quads, block)


def philox_uniforms(out: Tensor, keys: Tensor, first: int) -> None:
    """Fill out (n, 2 b) with the pairs of uniforms of b blocks from number `first` on, as `philox.uniforms`."""
    pairs, block = out.shape[1] // 2, 256
    _fill_uniforms[(len(out), -(-pairs // block))](out, keys, first, pairs, block)


def _launch(kernel: Any, out: Tensor, *arguments: Any) -> None:
    """Run a kernel with a program for every block of what it writes."""
    kernel[(-(-out.numel() // KERNEL_BLOCK),)](out, out.numel(), *arguments, KERNEL_BLOCK)


# fmt: off
if triton is not None:
    @triton.jit
    def _squares(rows, squares, size, stride, BLOCK: tl.constexpr):
        row = tl.program_id(0).to(tl.int64)
        place = tl.arange(0, BLOCK)
        total = tl.zeros([BLOCK], dtype=tl.float64)
        for first in range(0, size, BLOCK):
            value = tl.load(rows + row * stride + first + place, mask=first + place < size, other=0.0).to(tl.float64)
            total += value * value
        tl.store(squares + row, tl.sum(total, axis=0))

    @triton.jit
    def _elements(total, BLOCK: tl.constexpr):
        place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        return place, place < total

    @triton.jit
    def _pixel(place, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, CHANNELS: tl.constexpr):
        channel, pixel = place % CHANNELS, place // CHANNELS
        x, line = pixel % WIDTH, pixel // WIDTH
        return channel, x, line % HEIGHT, line // HEIGHT

    @triton.jit
    def _copy(patches, total, images, HIGH: tl.constexpr, WIDE: tl.constexpr, KH: tl.constexpr, RUN: tl.constexpr,
              DOWN: tl.constexpr, RIGHT: tl.constexpr, ROW: tl.constexpr, IMAGE: tl.constexpr, BLOCK: tl.constexpr):
        place, inside = _elements(total, BLOCK)
        within, row = place % RUN, place // RUN
        i, position = row % KH, row // KH
        x, line = position % WIDE, position // WIDE
        source = (line // HIGH) * IMAGE + (line % HIGH) * DOWN + x * RIGHT + i * ROW + within
        tl.store(patches + place, tl.load(images + source, mask=inside), mask=inside)

    @triton.jit
    def _add(images, total, patches, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, CHANNELS: tl.constexpr,
             HIGH: tl.constexpr, WIDE: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr,
             SW: tl.constexpr, BLOCK: tl.constexpr):
        place, inside = _elements(total, BLOCK)
        channel, x, y, image = _pixel(place, HEIGHT, WIDTH, CHANNELS)
        found = tl.zeros([BLOCK], dtype=tl.float32)
        for i in tl.static_range(KH):
            for j in tl.static_range(KW):
                down, right = y - i, x - j
                hit = inside & (down >= 0) & (right >= 0) & (down % SH == 0) & (right % SW == 0)
                down, right = down // SH, right // SW
                hit = hit & (down < HIGH) & (right < WIDE)
                source = (((image * HIGH + down) * WIDE + right) * (KH * KW) + (i * KW + j)) * CHANNELS + channel
                found += tl.load(patches + source, mask=hit, other=0.0)
        tl.store(images + place, found, mask=inside)

    @triton.jit
    def _largest(pooled, total, images, winners, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, CHANNELS: tl.constexpr,
                 HIGH: tl.constexpr, WIDE: tl.constexpr, STRIDE: tl.constexpr, NONE: tl.constexpr, BLOCK: tl.constexpr):
        place, inside = _elements(total, BLOCK)
        channel, x, y, image = _pixel(place, HIGH, WIDE, CHANNELS)
        corner = ((image * HEIGHT + STRIDE * y) * WIDTH + STRIDE * x) * CHANNELS + channel
        best = tl.load(images + corner, mask=inside, other=0.0)
        winner = tl.zeros([BLOCK], dtype=tl.int8)
        for i in tl.static_range(1, 4):
            other = tl.load(images + corner + ((i // 2) * WIDTH + i % 2) * CHANNELS, mask=inside, other=0.0)
            better = (other > best) | (other != other)  # what is no number wins, as in torch
            best = tl.where(better, other, best)
            winner = tl.where(better, i, winner).to(tl.int8)
        dead = best <= 0
        tl.store(pooled + place, tl.where(dead, 0.0, best), mask=inside)
        tl.store(winners + place, tl.where(dead, NONE, winner).to(tl.int8), mask=inside)

    @triton.jit
    def _spread(images, total, gradients, winners, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, CHANNELS: tl.constexpr,
                HIGH: tl.constexpr, WIDE: tl.constexpr, STRIDE: tl.constexpr, BLOCK: tl.constexpr):
        place, inside = _elements(total, BLOCK)
        channel, x, y, image = _pixel(place, HEIGHT, WIDTH, CHANNELS)
        found = tl.zeros([BLOCK], dtype=tl.float32)
        for i in tl.static_range(2):
            for j in tl.static_range(2):  # the squares in which this pixel is at (i, j)
                down, right = y - i, x - j
                square = inside & (down >= 0) & (right >= 0) & (down % STRIDE == 0) & (right % STRIDE == 0)
                down, right = down // STRIDE, right // STRIDE
                square = square & (down < HIGH) & (right < WIDE)  # an odd edge may be in none
                source = ((image * HIGH + down) * WIDE + right) * CHANNELS + channel
                won = square & (tl.load(winners + source, mask=square, other=4) == i * 2 + j)
                found += tl.load(gradients + source, mask=won, other=0.0)
        tl.store(images + place, found, mask=inside)

    @triton.jit
    def gaussian_pair(radial, angular):
        radius = tl.abs(radial.to(tl.int32, bitcast=True).to(tl.float32)) + 0.5
        radius = tl.minimum(radius * 4.656612873077393e-10, 1.0)  # 2^-31
        radius = tl.sqrt(-2.0 * tl.log(radius))
        angle = angular.to(tl.int32, bitcast=True).to(tl.float32) * 1.4629180792671596e-09  # π 2^-31
        return radius * tl.cos(angle), radius * tl.sin(angle)

    @triton.jit
    def _fill(out, keys, step, size, quads, BLOCK: tl.constexpr):
        row = tl.program_id(0)
        element = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        zero = element * 0
        now = zero + tl.load(step).to(tl.int32)
        r0, r1, r2, r3 = tl.philox(tl.load(keys + row), element, now, zero, zero)
        n0, n1 = gaussian_pair(r0, r1)
        n2, n3 = gaussian_pair(r2, r3)
        here = out + row.to(tl.int64) * size
        inside = element < quads
        tl.store(here + element, n0, mask=inside & (element < size))
        tl.store(here + quads + element, n1, mask=inside & (quads + element < size))
        tl.store(here + 2 * quads + element, n2, mask=inside & (2 * quads + element < size))
        tl.store(here + 3 * quads + element, n3, mask=inside & (3 * quads + element < size))

    @triton.jit
    def _uniform(high, low):
        high, low = high.to(tl.uint32, bitcast=True).to(tl.int64), low.to(tl.uint32, bitcast=True).to(tl.int64)
        bits = (high << 21) | (low >> 11)
        return (bits + 1).to(tl.float64) * 1.1102230246251565e-16  # 2^-53

    @triton.jit
    def _fill_uniforms(out, keys, first, pairs, BLOCK: tl.constexpr):
        row = tl.program_id(0)
        pair = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        zero = pair * 0
        r0, r1, r2, r3 = tl.philox(tl.load(keys + row), zero + first + pair, zero, zero + 1, zero)
        here = out + 2 * (row.to(tl.int64) * pairs + pair)
        tl.store(here, _uniform(r0, r1), mask=pair < pairs)
        tl.store(here + 1, _uniform(r2, r3), mask=pair < pairs)
# fmt: on
