"""Two-dimensional convolution batched over clients: a strided copy of patches and batched matrix products.

Images are (T, channels, height, width) by shape and channels-last in memory: patches are then copied in long
runs, and pooling is fast (on the CPU torch pools channels-last images nine times faster).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from polyeps.engine.contributions import Contribution, PositionProducts
from polyeps.engine.layers import times
from polyeps.engine.layout import Layout
from polyeps.engine.patches import Pair, added_up, patches_of


@dataclass(frozen=True)
class Convolution:
    """A convolution without groups or dilation, padded with zeros."""

    channels_in: int
    channels_out: int
    kernel: Pair
    stride: Pair
    padding: tuple[int, int, int, int]  # left, right, top, bottom
    bias: bool

    @property
    def size(self) -> int:
        return self.channels_out * (self.channels_in * self.kernel[0] * self.kernel[1] + self.bias)

    def forward(self, weights: Tensor, rows: Tensor, layout: Layout) -> tuple[Tensor, tuple[Tensor, Pair]]:
        patches, size = self._patches(rows)
        count = len(rows)
        kernels, bias = self._kernels(weights)
        outputs = times(layout, kernels, bias, patches.view(count, -1, patches.shape[-1]))
        images = outputs.view(*patches.shape[:3], self.channels_out).permute(0, 3, 1, 2)
        return images, (patches.view(count, -1, patches.shape[-1]), size)

    def backward(
        self, weights: Tensor, saved: tuple[Tensor, Pair], gradients: Tensor, layout: Layout, inputs: bool
    ) -> tuple[Tensor | None, Contribution]:
        patches, size = saved
        flat = gradients.permute(0, 2, 3, 1).reshape(len(gradients), -1, self.channels_out)  # (T, positions, out)
        contribution = _Reordered(self, PositionProducts(layout, patches, flat, self.bias))
        if not inputs:
            return None, contribution
        back = times(layout, self._kernels(weights)[0].transpose(1, 2), None, flat)
        return self._unpatch(back.view(*gradients.shape[:1], *gradients.shape[2:], -1), size), contribution

    def _kernels(self, weights: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return weights (n, out, kh * kw * in) in the order of the patches, and biases (n, out)."""
        taps = weights[:, : -self.channels_out] if self.bias else weights
        shaped = torch.unflatten(taps, 1, (self.channels_out, self.channels_in, *self.kernel))
        kernels = shaped.permute(0, 1, 3, 4, 2).flatten(2)
        return kernels, weights[:, -self.channels_out :] if self.bias else None

    def _patches(self, rows: Tensor) -> tuple[Tensor, Pair]:
        """Return the patches (T, H', W', kh * kw * in) of the padded images, and the images' height and width."""
        images = rows.permute(0, 2, 3, 1)
        padded = (functional.pad(images, (0, 0, *self.padding)) if any(self.padding) else images).contiguous()
        return patches_of(padded, self.kernel, self.stride), (padded.shape[1], padded.shape[2])

    def _unpatch(self, patches: Tensor, size: Pair) -> Tensor:
        """Add patches (T, H', W', kh * kw * in) at their places; return images without padding."""
        images = added_up(patches, size, self.kernel, self.stride)
        left, right, top, bottom = self.padding
        inner = images[:, top : size[0] - bottom, left : size[1] - right]
        return inner.permute(0, 3, 1, 2)


class _Reordered:
    """A contribution in the order of the patches, added in the order of the parameters."""

    def __init__(self, layer: Convolution, patches: PositionProducts) -> None:
        self.layer, self.patches = layer, patches

    def squared_norms(self) -> Tensor:
        return self.patches.squared_norms()

    def drop(self, rows: Tensor) -> None:
        self.patches.drop(rows)

    def add_to(self, gradient: Tensor, factors: Tensor | None) -> None:
        layer = self.layer
        summed = torch.zeros_like(gradient)
        self.patches.add_to(summed, factors)
        taps = gradient.shape[1] - layer.channels_out * layer.bias
        shape = (layer.channels_out, *layer.kernel, layer.channels_in)
        ordered = torch.unflatten(summed[:, :taps], 1, shape).permute(0, 1, 4, 2, 3)
        torch.unflatten(gradient[:, :taps], 1, ordered.shape[1:]).add_(ordered)
        gradient[:, taps:] += summed[:, taps:]
