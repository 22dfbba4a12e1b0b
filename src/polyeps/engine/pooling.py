"""A ReLU and a 2 x 2 max pooling of stride 1 or 2 as one layer: the largest of four numbers, and its place.

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
from polyeps.engine.triton_kernels import has_kernel, pool_largest, spread_pooled


@dataclass(frozen=True)
class ReluPool(Parameterless):
    """A ReLU, then a 2 x 2 max pooling, on images (T, channels, height, width)."""

    stride: int = 2

    def forward(self, weights: Tensor, rows: Tensor, layout: Layout) -> tuple[Tensor, Any]:
        if not _by_kernel(rows):
            return super().forward(weights, rows, layout)
        images = rows.permute(0, 2, 3, 1).contiguous()
        count, height, width, channels = images.shape
        pooled = images.new_empty(count, *((side - 2) // self.stride + 1 for side in (height, width)), channels)
        winners = torch.empty_like(pooled, dtype=torch.int8)
        pool_largest(images, pooled, winners, self.stride)
        return pooled.permute(0, 3, 1, 2), (winners, images.shape)

    def backward(
        self, weights: Tensor, saved: Any, gradients: Tensor, layout: Layout, inputs: bool
    ) -> tuple[Tensor | None, None]:
        if not _by_kernel(gradients):
            return super().backward(weights, saved, gradients, layout, inputs)
        winners, shape = saved
        if not inputs:
            return None, None
        images = gradients.new_empty(shape)
        spread_pooled(gradients.permute(0, 2, 3, 1).contiguous(), winners, images, self.stride)
        return images.permute(0, 3, 1, 2), None


def relu_pool(first: nn.Module, second: nn.Module) -> ReluPool | None:
    """Return two neighbouring modules as one layer, if they are such a pair; else None."""
    if type(first) is not nn.ReLU or not isinstance(second, nn.MaxPool2d) or type(second) is not nn.MaxPool2d:
        return None
    stride = next((step for step in (1, 2) if second.stride in (step, (step, step))), None)
    plain = second.padding in (0, (0, 0)) and second.dilation in (1, (1, 1))
    if (
        stride is None
        or second.kernel_size not in (2, (2, 2))
        or not plain
        or second.ceil_mode
        or second.return_indices
    ):
        return None
    return ReluPool(nn.Sequential(nn.ReLU(), second), stride)  # a new ReLU: the given one may work in place


def _by_kernel(rows: Tensor) -> bool:
    """Return whether a kernel can pool rows: not rows of one channel (T, height, width), which torch also accepts."""
    return has_kernel(rows) and rows.dim() == 4
