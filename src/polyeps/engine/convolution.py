"""Two-dimensional convolution batched over clients: a strided copy of patches and batched matrix products.

Images are (T, channels, height, width) by shape and channels-last in memory: patches are then copied in long
runs, and pooling is fast (on the CPU torch pools channels-last images nine times faster).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from polyeps.engine.layers import times
from polyeps.engine.layout import Layout
from polyeps.engine.sums import Contribution, Positions

Pair = tuple[int, int]


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

    def forward(self, weights: Tensor, rows: Tensor, layout: Layout) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        patches, padded = self._patches(rows)
        count = len(rows)
        kernels, bias = self._kernels(weights)
        outputs = times(layout, kernels, bias, patches.view(count, -1, patches.shape[-1]))
        images = outputs.view(*patches.shape[:3], self.channels_out).permute(0, 3, 1, 2)
        return images, (patches.view(count, -1, patches.shape[-1]), padded)

    def backward(
        self, weights: Tensor, saved: tuple[Tensor, Tensor], gradients: Tensor, layout: Layout, inputs: bool
    ) -> tuple[Tensor | None, Contribution]:
        patches, padded = saved
        flat = gradients.permute(0, 2, 3, 1).reshape(len(gradients), -1, self.channels_out)  # (T, positions, out)
        contribution = _Reordered(self, Positions(layout, patches, flat, self.bias))
        if not inputs:
            return None, contribution
        back = times(layout, self._kernels(weights)[0].transpose(1, 2), None, flat)
        return self._unpatch(back.view(*gradients.shape[:1], *gradients.shape[2:], -1), padded), contribution

    def _kernels(self, weights: Tensor) -> tuple[Tensor, Tensor | None]:
        """Weights (n, out, kh * kw * in), in the order of the patches, and biases (n, out)."""
        taps = weights[:, : -self.channels_out] if self.bias else weights
        shaped = torch.unflatten(taps, 1, (self.channels_out, self.channels_in, *self.kernel))
        kernels = shaped.permute(0, 1, 3, 4, 2).flatten(2)
        return kernels, weights[:, -self.channels_out :] if self.bias else None

    def _patches(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The patches (T, H', W', kh * kw * in), copied from the padded images (T, H, W, in)."""
        images = rows.permute(0, 2, 3, 1)
        padded = functional.pad(images, (0, 0, *self.padding)) if any(self.padding) else images
        padded = padded.contiguous()
        count, height, width, channels = padded.shape
        (kh, kw), (sh, sw) = self.kernel, self.stride
        out = ((height - kh) // sh + 1, (width - kw) // sw + 1)
        s0, s1, s2, _ = padded.stride()
        windows = padded.as_strided((count, *out, kh, kw * channels), (s0, s1 * sh, s2 * sw, s1, 1))
        return windows.reshape(count, *out, kh * kw * channels), padded

    def _unpatch(self, patches: Tensor, padded: Tensor) -> Tensor:
        """The sum of patches (T, H', W', kh * kw * in) back at their places, as images."""
        images = torch.zeros_like(padded)
        (kh, kw), (sh, sw) = self.kernel, self.stride
        _, high, wide, _ = patches.shape
        taps = torch.unflatten(patches, 3, (kh, kw, self.channels_in))
        for i in range(kh):
            for j in range(kw):
                place = images[:, i : i + sh * (high - 1) + 1 : sh, j : j + sw * (wide - 1) + 1 : sw]
                place += taps[:, :, :, i, j]
        left, right, top, bottom = self.padding
        inner = images[:, top : images.shape[1] - bottom, left : images.shape[2] - right]
        return inner.permute(0, 3, 1, 2)


class _Reordered:
    """A contribution in the order of the patches, added in the order of the parameters."""

    def __init__(self, layer: Convolution, patches: Positions) -> None:
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
