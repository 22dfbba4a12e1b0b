"""Matrix products whose rounding of a row does not depend on the other rows.

The BLAS behind torch picks another kernel, and so another order of summation, for few rows, for few columns and for
unaligned rows. A record that comes or goes would then change the last digits of other records' gradients and, under
malicious weights whose terms cancel, all of their digits. Products here use only shapes and alignments for which
rounding was measured to be independent of the number of rows and of a row's place.
"""

from __future__ import annotations

import torch
from torch import Tensor

_LINE = 16  # numbers per cache line
_FEWEST_ROWS = 4
_FEWEST_PRODUCTS = 400  # torch itself multiplies smaller matrices


def multiply(rows: Tensor, weights: Tensor, bias: Tensor | None, into: Tensor) -> None:
    """Write rows (c, w, in) times weights (c, in, out), plus bias (c, 1, out), to `into` (c, w, out)."""
    count, width, fan_in = rows.shape
    fan_out = weights.shape[2]
    if rows.is_cuda or not rows.numel():
        _multiply(rows, weights, bias, into)
        return
    wanted = max(width, _FEWEST_ROWS, -(-_FEWEST_PRODUCTS // (fan_in * fan_out)))
    if width == 1:  # single records: only their alignment matters
        wanted = 1
    by_columns = weights.stride(1) == 1 and fan_in % _LINE == 0  # as a linear layer's weights are stored
    if wanted == width and ((by_columns and (fan_out > 1 or width == 1)) or (fan_out >= _LINE and width > 1)):
        _multiply(rows, weights, bias, into)
        return
    if fan_out < _LINE and width > 1:
        wanted = _rounded_up(wanted, _FEWEST_ROWS)
    if wanted > width or fan_in % _LINE:
        padded = rows.new_zeros(count, wanted, _rounded_up(fan_in, _LINE))[:, :, :fan_in]
        padded[:, :width] = rows
        rows = padded
    room = rows.new_empty(count, wanted, _rounded_up(fan_out, _LINE))[:, :, :fan_out]
    _multiply(rows, weights, bias, room)
    into.copy_(room[:, :width])


def align_matrices(items: Tensor) -> Tensor:
    """Return matrices (T, rows, columns), copied if needed so that all have the same alignment."""
    columns = items.shape[2]
    if items.is_cuda or items.stride(0) % _LINE == 0:
        return items
    room = items.new_zeros(*items.shape[:2], _rounded_up(columns, _LINE))[:, :, :columns]
    return room.copy_(items)


def _multiply(rows: Tensor, weights: Tensor, bias: Tensor | None, into: Tensor) -> None:
    if bias is None:
        torch.bmm(rows, weights, out=into)
    else:
        torch.baddbmm(bias, rows, weights, out=into)


def _rounded_up(number: int, step: int) -> int:
    return -(-number // step) * step
