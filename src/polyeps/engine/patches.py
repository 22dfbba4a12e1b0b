"""Patches of images and back: they turn a convolution and its gradient into matrix products.

Images are (T, height, width, channels), patches (T, height', width', kh * kw * channels). By torch operations, and on a
device with Triton by one kernel each: there, a strided copy and twenty-five additions are far below memory bandwidth.
"""

from __future__ import annotations

import torch
from torch import Tensor

from polyeps.engine.triton_kernels import KERNEL_BLOCK, has_kernel, programs, tl, triton

Pair = tuple[int, int]


def patches_of(images: Tensor, kernel: Pair, stride: Pair) -> Tensor:
    """Return a copy of every patch of contiguous images."""
    count, height, width, channels = images.shape
    (kh, kw), (sh, sw) = kernel, stride
    out = ((height - kh) // sh + 1, (width - kw) // sw + 1)
    s0, s1, s2, _ = images.stride()
    if not has_kernel(images):
        windows = images.as_strided((count, *out, kh, kw * channels), (s0, s1 * sh, s2 * sw, s1, 1))
        return windows.reshape(count, *out, kh * kw * channels)
    patches = images.new_empty(count, *out, kh * kw * channels)
    # A run of a patch within one row of the image has the same length in both.
    _copy[programs(patches)](
        images, patches, patches.numel(), *out, kh, kw * channels, sh * s1, sw * s2, s1, s0, BLOCK=KERNEL_BLOCK
    )
    return patches


def added_up(patches: Tensor, size: Pair, kernel: Pair, stride: Pair) -> Tensor:
    """Return images of a size, (T, height, width, channels), in which every patch is added at its place."""
    count, high, wide, depth = patches.shape
    (kh, kw), (sh, sw) = kernel, stride
    channels = depth // (kh * kw)
    if has_kernel(patches):
        images = patches.new_empty(count, *size, channels)
        _add[programs(images)](
            patches, images, images.numel(), *size, channels, high, wide, kh, kw, sh, sw, BLOCK=KERNEL_BLOCK
        )
        return images
    images = patches.new_zeros(count, *size, channels)
    taps = torch.unflatten(patches, 3, (kh, kw, channels))
    for i in range(kh):
        for j in range(kw):
            images[:, i : i + sh * (high - 1) + 1 : sh, j : j + sw * (wide - 1) + 1 : sw] += taps[:, :, :, i, j]
    return images


if triton is not None:
    # Triton reads annotations as code, so its functions have none. Sizes are constants: dividing by them is cheap.
    @triton.jit  # type: ignore[untyped-decorator,unused-ignore]
    def _copy(  # type: ignore[no-untyped-def,unused-ignore]
        images,
        patches,
        total,
        HIGH: tl.constexpr,  # noqa: N803
        WIDE: tl.constexpr,  # noqa: N803
        KH: tl.constexpr,  # noqa: N803
        RUN: tl.constexpr,  # noqa: N803
        DOWN: tl.constexpr,  # noqa: N803
        RIGHT: tl.constexpr,  # noqa: N803
        ROW: tl.constexpr,  # noqa: N803
        IMAGE: tl.constexpr,  # noqa: N803
        BLOCK: tl.constexpr,  # noqa: N803
    ):
        place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = place < total
        within, row = place % RUN, place // RUN
        i, position = row % KH, row // KH
        x, line = position % WIDE, position // WIDE
        source = (line // HIGH) * IMAGE + (line % HIGH) * DOWN + x * RIGHT + i * ROW + within
        tl.store(patches + place, tl.load(images + source, mask=inside), mask=inside)

    @triton.jit  # type: ignore[untyped-decorator,unused-ignore]
    def _add(  # type: ignore[no-untyped-def,unused-ignore]
        patches,
        images,
        total,
        HEIGHT: tl.constexpr,  # noqa: N803
        WIDTH: tl.constexpr,  # noqa: N803
        CHANNELS: tl.constexpr,  # noqa: N803
        HIGH: tl.constexpr,  # noqa: N803
        WIDE: tl.constexpr,  # noqa: N803
        KH: tl.constexpr,  # noqa: N803
        KW: tl.constexpr,  # noqa: N803
        SH: tl.constexpr,  # noqa: N803
        SW: tl.constexpr,  # noqa: N803
        BLOCK: tl.constexpr,  # noqa: N803
    ):
        place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = place < total
        channel, pixel = place % CHANNELS, place // CHANNELS
        x, line = pixel % WIDTH, pixel // WIDTH
        y, image = line % HEIGHT, line // HEIGHT
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
