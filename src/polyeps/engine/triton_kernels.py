"""Triton and what its kernels share; every kernel of the engine has an equivalent in torch operations."""

from __future__ import annotations

import torch
from torch import Tensor

try:
    import triton  # type: ignore[import-not-found,unused-ignore]
    import triton.language as tl  # type: ignore[import-not-found,unused-ignore]
except ImportError:  # CPU builds of torch come without it
    triton = tl = None

__all__ = ["KERNEL_BLOCK", "has_kernel", "programs", "row_squares", "tl", "triton"]

KERNEL_BLOCK = 1024  # numbers per program of a kernel


def has_kernel(values: Tensor) -> bool:
    """Return whether Triton kernels can work on values."""
    return values.is_cuda and triton is not None


def programs(values: Tensor) -> tuple[int]:
    """Return the number of programs of a kernel that writes values."""
    return (-(-values.numel() // KERNEL_BLOCK),)


def row_squares(rows: Tensor) -> Tensor:
    """Return the squared norm of each row (T, p), (T,) float64, reading every number once."""
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    count, size = rows.shape
    squares = torch.empty(count, dtype=torch.float64, device=rows.device)
    if count:
        _squares[(count,)](
            rows, squares, size, rows.stride(0), min(KERNEL_BLOCK, triton.next_power_of_2(max(size, 16)))
        )
    return squares


if triton is not None:
    # Triton reads annotations as code, so its functions have none.
    @triton.jit  # type: ignore[untyped-decorator,unused-ignore]
    def _squares(rows, squares, size, stride, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def,unused-ignore]  # noqa: N803
        row = tl.program_id(0).to(tl.int64)
        place = tl.arange(0, BLOCK)
        total = tl.zeros([BLOCK], dtype=tl.float64)
        for first in range(0, size, BLOCK):
            value = tl.load(rows + row * stride + first + place, mask=first + place < size, other=0.0).to(tl.float64)
            total += value * value
        tl.store(squares + row, tl.sum(total, axis=0))
