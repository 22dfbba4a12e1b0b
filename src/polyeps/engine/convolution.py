"""Two-dimensional convolution batched over clients: a strided copy of patches and batched matrix products.

Images are (T, channels, height, width) by shape and channels-last in memory: patches are then copied in long
runs, and pooling is fast (on the CPU torch pools channels-last images nine times faster). On a device with Triton,
patches are made and added up by one kernel each: there, a strided copy and twenty-five additions are far below memory
bandwidth.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from polyeps.engine.contributions import Contribution, PositionProducts
from polyeps.engine.convolution_rules import Kind, clients_rows
from polyeps.engine.layers import times
from polyeps.engine.layout import Layout
from polyeps.engine.openblas import suits_openblas
from polyeps.engine.stable_products import LINE, suits_onednn
from polyeps.engine.triton_kernels import add_patches, copy_patches, has_kernel

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

    def forward(self, weights: Tensor, rows: Tensor, layout: Layout) -> tuple[Tensor, tuple[Tensor, Pair]]:
        images = rows.permute(0, 2, 3, 1)
        padded = (functional.pad(images, (0, 0, *self.padding)) if any(self.padding) else images).contiguous()
        patches = patches_of(padded, self.kernel, self.stride)
        flat = patches.view(len(rows), -1, patches.shape[-1])
        kernels, shifts = self._kernels(weights, self._of_many(flat))
        outputs = times(layout, kernels, shifts, flat).view(*patches.shape[:3], self.channels_out)
        return outputs.permute(0, 3, 1, 2), (flat, (padded.shape[1], padded.shape[2]))

    def backward(
        self, weights: Tensor, saved: tuple[Tensor, Pair], gradients: Tensor, layout: Layout, inputs: bool
    ) -> tuple[Tensor | None, Contribution]:
        patches, size = saved
        flat = gradients.permute(0, 2, 3, 1).reshape(len(gradients), -1, self.channels_out)  # (T, positions, out)
        contribution = _Reordered(self, PositionProducts(layout, patches, flat, self.bias))
        if not inputs:
            return None, contribution
        left, right, top, bottom = self.padding
        if self._by_client(flat.shape[1]) and not flat.is_cuda:
            shape = (self.channels_in, size[0] - top - bottom, size[1] - left - right)
            return self._input_gradients(weights, gradients, shape, layout), contribution
        back = times(layout, self._kernels(weights)[0].transpose(1, 2), None, flat)
        images = added_up(back.view(len(gradients), *gradients.shape[2:], -1), size, self.kernel, self.stride)
        return images[:, top : size[0] - bottom, left : size[1] - right].permute(0, 3, 1, 2), contribution

    def _by_client(self, positions: int) -> bool:
        """Return whether torch's kernel computes the inputs' gradients faster, and each record's alike in any company.

        The latter was measured: it holds for these kernels and channels, not for others with strides or few channels.
        """
        left, right, top, bottom = self.padding
        measured = self.stride == (1, 1) and min(self.kernel) > 1 and left == right and top == bottom
        blocks = self.channels_in % LINE == 0 and self.channels_out % LINE == 0
        products = positions * self.channels_out * self.channels_in * self.kernel[0] * self.kernel[1]
        return measured and blocks and suits_onednn(products)

    def _input_gradients(self, weights: Tensor, gradients: Tensor, shape: tuple[int, ...], layout: Layout) -> Tensor:
        """Return the gradients of images of a shape (channels, height, width) by torch's kernel, a call per client."""
        left, _, top, _ = self.padding
        kind = Kind(self.stride, (top, left), (1, 1), False, (0, 0), 1)
        taps = weights[:, : -self.channels_out] if self.bias else weights
        kernels = torch.unflatten(taps, 1, (self.channels_out, self.channels_in, *self.kernel))
        found = []
        for client, mine in clients_rows(layout, gradients):
            images = torch.empty(len(mine), *shape, memory_format=torch.channels_last)  # only its shape is read
            found.append(kind.of_images(mine, images, kernels[client]))
        return torch.cat(found)

    def _of_many(self, patches: Tensor) -> bool:
        """Return whether OpenBLAS multiplies each record's patches (T, positions, kh * kw * in)."""
        return not patches.is_cuda and suits_openblas(patches.shape[1], patches.shape[2], self.channels_out)

    def _kernels(self, weights: Tensor, turned: bool = False) -> tuple[Tensor, Tensor | None]:
        """Return weights (n, out, kh * kw * in) in the order of the patches, and biases (n, out).

        Turned, neighbouring numbers in memory are those of neighbouring outputs, which OpenBLAS reads faster.
        """
        taps = weights[:, : -self.channels_out] if self.bias else weights
        shaped = torch.unflatten(taps, 1, (self.channels_out, self.channels_in, *self.kernel))
        if turned:
            kernels = shaped.permute(0, 3, 4, 2, 1).flatten(1, 3).transpose(1, 2)
        else:
            kernels = shaped.permute(0, 1, 3, 4, 2).flatten(2)
        return kernels, weights[:, -self.channels_out :] if self.bias else None


class _Reordered:
    """A contribution in the order of the patches, added in the order of the parameters."""

    def __init__(self, layer: Convolution, patches: PositionProducts) -> None:
        self.layer, self.patches = layer, patches

    @property
    def formed(self) -> int:
        return self.patches.formed

    def squared_norms(self) -> Tensor:
        return self.patches.squared_norms()

    def drop(self, rows: Tensor) -> None:
        self.patches.drop(rows)

    def grouped(self, layout: Layout, times: int) -> Contribution:
        return _Reordered(self.layer, self.patches.grouped(layout, times))

    def part(self, layout: Layout, rows: slice) -> Contribution:
        return _Reordered(self.layer, self.patches.part(layout, rows))

    def add_to(self, gradient: Tensor, factors: Tensor | None) -> None:
        layer = self.layer
        summed = torch.zeros_like(gradient)
        self.patches.add_to(summed, factors)
        taps = gradient.shape[1] - layer.channels_out * layer.bias
        shape = (layer.channels_out, *layer.kernel, layer.channels_in)
        ordered = torch.unflatten(summed[:, :taps], 1, shape).permute(0, 1, 4, 2, 3)
        torch.unflatten(gradient[:, :taps], 1, ordered.shape[1:]).add_(ordered)
        gradient[:, taps:] += summed[:, taps:]


def patches_of(images: Tensor, kernel: Pair, stride: Pair) -> Tensor:
    """Return a copy of every patch of contiguous images (T, height, width, channels)."""
    count, height, width, channels = images.shape
    (kh, kw), (sh, sw) = kernel, stride
    out = ((height - kh) // sh + 1, (width - kw) // sw + 1)
    if not has_kernel(images):
        s0, s1, s2, _ = images.stride()
        windows = images.as_strided((count, *out, kh, kw * channels), (s0, s1 * sh, s2 * sw, s1, 1))
        return windows.reshape(count, *out, kh * kw * channels)
    patches = images.new_empty(count, *out, kh * kw * channels)
    copy_patches(images, patches, kernel, stride)
    return patches


def added_up(patches: Tensor, size: Pair, kernel: Pair, stride: Pair) -> Tensor:
    """Return images of a size, (T, height, width, channels), in which every patch is added at its place."""
    count, _, wide, depth = patches.shape
    (kh, kw), (sh, sw) = kernel, stride
    channels = depth // (kh * kw)
    if has_kernel(patches):
        images = patches.new_empty(count, *size, channels)
        add_patches(patches, images, kernel, stride)
        return images
    images = patches.new_zeros(count, *size, channels)
    rows = torch.unflatten(patches, 3, (kh, kw * channels))
    s0, s1, s2, _ = images.stride()
    apart = -(-kw // sw)  # patches so many places apart share no column, and are added by one operation
    for i in range(kh):
        for first in range(min(apart, wide)):
            some = rows[:, :, first::apart, i]
            windows = images.as_strided(some.shape, (s0, s1 * sh, s2 * sw * apart, 1), i * s1 + first * sw * s2)
            windows += some
    return images
