"""A ReLU and a 2 x 2 max pooling as one layer: the largest of four numbers, and its place.

By torch operations, and on a device with Triton by one kernel each way: separately, they pass over the largest
activations of a network six times.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from polyeps.engine.layers import Parameterless
from polyeps.engine.layout import Layout
from polyeps.engine.triton_kernels import KERNEL_BLOCK, has_kernel, programs, tl, triton

_NONE = 4  # place if none of the four is above zero


@dataclass(frozen=True)
class ReluPool(Parameterless):
    """A ReLU, then a 2 x 2 max pooling, on images (T, channels, height, width)."""

    def forward(self, weights: Tensor, rows: Tensor, layout: Layout) -> tuple[Tensor, Any]:
        if not _by_kernel(rows):
            return super().forward(weights, rows, layout)
        images = rows.permute(0, 2, 3, 1).contiguous()
        pooled, winners = _largest_of_four(images)
        return pooled.permute(0, 3, 1, 2), (winners, images.shape)

    def backward(
        self, weights: Tensor, saved: Any, gradients: Tensor, layout: Layout, inputs: bool
    ) -> tuple[Tensor | None, None]:
        if not _by_kernel(gradients):
            return super().backward(weights, saved, gradients, layout, inputs)
        winners, shape = saved
        if not inputs:
            return None, None
        return _to_the_winner(gradients.permute(0, 2, 3, 1).contiguous(), winners, shape).permute(0, 3, 1, 2), None


def relu_pool(first: nn.Module, second: nn.Module) -> ReluPool | None:
    """Return two neighbouring modules as one layer, if they are such a pair; else None."""
    if type(first) is not nn.ReLU or not isinstance(second, nn.MaxPool2d) or type(second) is not nn.MaxPool2d:
        return None
    by_two = second.kernel_size in (2, (2, 2)) and second.stride in (2, (2, 2))
    plain = second.padding in (0, (0, 0)) and second.dilation in (1, (1, 1))
    if not by_two or not plain or second.ceil_mode or second.return_indices:
        return None
    return ReluPool(nn.Sequential(nn.ReLU(), second))  # a new ReLU: the given one may work in place


def _by_kernel(rows: Tensor) -> bool:
    """Return whether a kernel can pool rows: not rows of one channel (T, height, width), which torch also accepts."""
    return has_kernel(rows) and rows.dim() == 4


def _largest_of_four(images: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest of each two by two pixels, at least 0, and its place; images (T, height, width, channels)."""
    count, height, width, channels = images.shape
    pooled = images.new_empty(count, height // 2, width // 2, channels)
    winners = torch.empty_like(pooled, dtype=torch.int8)
    _largest[programs(pooled)](images, pooled, winners, pooled.numel(), height, width, channels, _NONE, KERNEL_BLOCK)
    return pooled, winners


def _to_the_winner(gradients: Tensor, winners: Tensor, shape: torch.Size) -> Tensor:
    """Return images (T, height, width, channels) with every pooled gradient at the pixel that was largest."""
    images = gradients.new_empty(shape)
    _spread[programs(images)](gradients, winners, images, images.numel(), *shape[1:], KERNEL_BLOCK)
    return images


if triton is not None:
    # Triton reads annotations as code, so its functions have none. Sizes are constants: dividing by them is cheap.
    @triton.jit  # type: ignore[untyped-decorator,unused-ignore]
    def _largest(  # type: ignore[no-untyped-def,unused-ignore]
        images,
        pooled,
        winners,
        total,
        HEIGHT: tl.constexpr,  # noqa: N803
        WIDTH: tl.constexpr,  # noqa: N803
        CHANNELS: tl.constexpr,  # noqa: N803
        NONE: tl.constexpr,  # noqa: N803
        BLOCK: tl.constexpr,  # noqa: N803
    ):
        place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = place < total
        channel, pixel = place % CHANNELS, place // CHANNELS
        x, line = pixel % (WIDTH // 2), pixel // (WIDTH // 2)
        y, image = line % (HEIGHT // 2), line // (HEIGHT // 2)
        corner = ((image * HEIGHT + 2 * y) * WIDTH + 2 * x) * CHANNELS + channel
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

    @triton.jit  # type: ignore[untyped-decorator,unused-ignore]
    def _spread(  # type: ignore[no-untyped-def,unused-ignore]
        gradients,
        winners,
        images,
        total,
        HEIGHT: tl.constexpr,  # noqa: N803
        WIDTH: tl.constexpr,  # noqa: N803
        CHANNELS: tl.constexpr,  # noqa: N803
        BLOCK: tl.constexpr,  # noqa: N803
    ):
        place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = place < total
        channel, pixel = place % CHANNELS, place // CHANNELS
        x, line = pixel % WIDTH, pixel // WIDTH
        y, image = line % HEIGHT, line // HEIGHT
        pooled = inside & (x // 2 < WIDTH // 2) & (y // 2 < HEIGHT // 2)  # an odd edge is in no square
        source = ((image * (HEIGHT // 2) + y // 2) * (WIDTH // 2) + x // 2) * CHANNELS + channel
        winner = tl.load(winners + source, mask=pooled, other=4)
        found = tl.load(gradients + source, mask=pooled, other=0.0)
        tl.store(images + place, tl.where(winner == (y % 2) * 2 + x % 2, found, 0.0), mask=inside)
