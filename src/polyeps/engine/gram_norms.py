"""Norms of a convolution's row gradients from inner products of positions, without forming the gradients.

The gradient is Σ over positions of g aᵀ, so its squared norm is Σ over pairs of positions of (g · g') (a · a'), in
float64. The inner products of patches are sums of inner products of pixels, one for each tap of the kernel: that takes
as many times fewer multiplications as the kernel has taps.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from polyeps.engine.openblas import multiply_records, suits_openblas


class Taps(NamedTuple):
    """A kernel's size, stride, dilation and padding, each for rows and columns of pixels."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    padding: tuple[int, ...]


class PositionSums(NamedTuple):
    """Sums over the positions of each row, (t,) float64."""

    squares: Tensor  # squared norm of the sum of the positions' gradients
    terms: Tensor  # sum of their norms
    lengths: Tensor  # squared norm of the output gradients


def position_sums(images: Tensor, gradients: Tensor, taps: Taps) -> PositionSums:
    """Return the sums of rows' images (t, images a row, in, h, w) and output gradients (t, images a row, out, ...)."""
    by_gradients = _inner_products(gradients.double().transpose(1, 2).flatten(2))
    by_images = _of_patches(images.double(), gradients.shape[3:], taps)
    each, of_each = (matrix.diagonal(dim1=1, dim2=2) for matrix in (by_gradients, by_images))
    terms = (each * of_each).sqrt_().sum(1)
    return PositionSums((by_gradients * by_images).sum((1, 2)), terms, each.sum(1))


def _inner_products(vectors: Tensor) -> Tensor:
    """Return the inner products (t, positions, positions) of vectors (t, size, positions)."""
    count, size, positions = vectors.shape
    if vectors.is_cuda or not suits_openblas(positions, size, positions):
        return torch.bmm(vectors.transpose(1, 2), vectors)
    found = vectors.new_empty(count, positions, positions)
    multiply_records(vectors.transpose(1, 2), vectors, found, add=False)
    return found


def _of_patches(images: Tensor, shape: torch.Size, taps: Taps) -> Tensor:
    """Return the inner products of all patches of each row, (t, positions, positions)."""
    count, several, channels, high, wide = images.shape
    positions, pixels = several * shape.numel(), high * wide
    if several > 1 or pixels**2 > positions**2 * torch.Size(taps.kernel).numel():
        patches = functional.unfold(images.flatten(0, 1), taps.kernel, taps.dilation, taps.padding, taps.stride)
        return _inner_products(torch.unflatten(patches, 0, (count, several)).transpose(1, 2).flatten(2))
    products = _inner_products(images.reshape(count, channels, pixels)).view(count, high, wide, high, wide)
    top, left = taps.padding
    products = functional.pad(products, (left, left, top, top) * 2)
    found = products.new_zeros(count, *shape, *shape)
    for row in range(taps.kernel[0]):
        for column in range(taps.kernel[1]):
            rows, columns = (
                slice(tap * dilation, tap * dilation + stride * (size - 1) + 1, stride)
                for tap, dilation, stride, size in zip((row, column), taps.dilation, taps.stride, shape, strict=True)
            )
            found += products[:, rows, columns, rows, columns]
    return found.view(count, positions, positions)
