"""Triton, where there is a device and the build of torch brings it; everything it does here also goes without."""

from __future__ import annotations

from torch import Tensor

try:
    import triton  # type: ignore[import-not-found,unused-ignore]
    import triton.language as tl  # type: ignore[import-not-found,unused-ignore]
except ImportError:  # CPU builds of torch come without it
    triton = tl = None

__all__ = ["BLOCK", "by_kernel", "programs", "tl", "triton"]

BLOCK = 1024  # numbers that one program of a kernel works on


def by_kernel(values: Tensor) -> bool:
    """Whether a kernel can work on values."""
    return values.is_cuda and triton is not None


def programs(values: Tensor) -> tuple[int]:
    """How many programs of a kernel it takes to write values."""
    return (-(-values.numel() // BLOCK),)
