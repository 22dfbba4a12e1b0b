"""Squared norms of rows, accurate whatever they hold: a norm that is too small would not bound a record's influence."""

from __future__ import annotations

import torch
from torch import Tensor

from polyeps.engine.triton_kernels import has_kernel, row_squares

_BLOCK = 1024  # squares added in float32
_SHORT = 64  # rows for which float64 costs nothing
_TINY, _SHIFT = 2.0**-100, 2.0**100
_LOST = 2.0**-126  # largest part of a square that underflows in float32


def squared_row_norms(rows: Tensor) -> Tensor:
    """Return the squared norm of each row (T, p) in float64, accurate to about 10⁻⁶ whatever the rows hold.

    Float32 sums up to 1024 squares at a time, which is fast. Squares that underflow are replaced by a bound or, in
    short rows, like those that overflow, computed again after scaling by a power of two. A device sums in float64.
    """
    if has_kernel(rows):
        return row_squares(rows)
    size = rows.shape[1]
    short = size <= 4 * _BLOCK
    if size <= _SHORT or rows.is_cuda:
        return _square_of_norm(rows.double())
    squares = _by_block(rows)
    large, small = squares == torch.inf, squares < size * _TINY  # asked of each row: another one may be NaN
    if bool(large.any()):
        squares[large] = _by_block(rows[large] / _SHIFT) * _SHIFT**2
    if short and bool(small.any()):
        squares[small] = _by_block(rows[small] * _SHIFT) / _SHIFT**2
    return squares if short else squares.add_(size * _LOST)


def _by_block(rows: Tensor) -> Tensor:
    """Return the squared norm of each row, summed in float32 within blocks and in float64 across them."""
    whole = rows.shape[1] // _BLOCK * _BLOCK
    if not whole:
        return _square_of_norm(rows)
    blocks = _square_of_norm(torch.unflatten(rows[:, :whole], 1, (-1, _BLOCK))).sum(1)
    return blocks + _square_of_norm(rows[:, whole:])


def _square_of_norm(rows: Tensor) -> Tensor:
    squares: Tensor = torch.linalg.vector_norm(rows, dim=-1).double().square_()
    return squares
