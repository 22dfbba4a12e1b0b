"""Matrix products whose rounding of a row does not depend on the other rows.

The BLAS behind torch picks another kernel, and so another order of summation, for few rows, for few columns and for
unaligned rows. A record that comes or goes would then change the last digits of other records' gradients and, under
malicious weights whose terms cancel, all of their digits. Products here use only shapes and alignments for which
rounding was measured to be independent of the number of rows and of a row's place.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.nn import functional

from polyeps.engine.openblas import multiply_records, suits_openblas

LINE = 16  # numbers per cache line
_FEWEST_ROWS = 4  # threads, too, leave rows beyond a multiple of it to another kernel
_FEWEST_PRODUCTS = 400  # torch itself multiplies smaller matrices
_FEWEST_POSITIONS = 8
_BLOCK = 128  # positions of a person that are added at once
_LARGE = 1 << 19  # products of a record from which on a call per client is worth it


def multiply(rows: Tensor, weights: Tensor, bias: Tensor | None, into: Tensor, positions: int = 1) -> None:
    """Write rows (c, w, in) times weights (c, in, out), plus bias (c, 1, out), to `into` (c, w, out).

    A record has so many neighbouring rows. The kernel is chosen by a record's size, not by the number of records.
    """
    count, width, fan_in = rows.shape
    fan_out = weights.shape[2]
    if rows.is_cuda or not rows.numel():
        _multiply(rows, weights, bias, into)
        return
    if suits_onednn(positions * fan_in * fan_out):
        for client in range(count):
            into[client] = by_onednn(rows[client], weights[client].T, None if bias is None else bias[client, 0])
        return
    wanted = max(width, _FEWEST_ROWS, -(-_FEWEST_PRODUCTS // (fan_in * fan_out)))
    few = fan_out < LINE
    if few:
        wanted = _rounded_up(wanted, LINE)
    elif count == 1 and width > _FEWEST_ROWS and width % _FEWEST_ROWS:  # one product, which threads may divide
        whole = width - width % _FEWEST_ROWS
        for some in (slice(whole), slice(whole, width)):
            multiply(rows[:, some], weights, bias, into[:, some], positions)
        return
    if not few and wanted == width:
        _multiply(rows, weights, bias, into)
        return
    if wanted > width or fan_in % LINE:
        padded = rows.new_zeros(count, wanted, _rounded_up(fan_in, LINE))[:, :, :fan_in]
        padded[:, :width] = rows
        rows = padded
    if few:  # twice as fast as with the outputs as columns
        products = _narrow(weights.transpose(1, 2), rows.transpose(1, 2)).transpose(1, 2)[:, :width]
        torch.add(products, 0.0 if bias is None else bias, out=into)
        return
    room = rows.new_empty(count, wanted, _rounded_up(fan_out, LINE))[:, :, :fan_out]
    _multiply(rows, weights, bias, room)
    into.copy_(room[:, :width])


def _narrow(weights: Tensor, columns: Tensor) -> Tensor:
    """Return weights (c, out, in) of few outputs times columns (c, in, w)."""
    count, fan_out, fan_in = weights.shape
    if 1 < fan_out < _FEWEST_ROWS:  # their kernels depend on the alignment, and so on a client's place
        padded = weights.new_zeros(count, _FEWEST_ROWS, fan_in)
        padded[:, :fan_out] = weights
        return _narrow(padded, columns)[:, :fan_out]
    if count == 1:  # threads would divide a single product
        return torch.bmm(weights.expand(2, -1, -1), columns.expand(2, -1, -1))[:1]
    return torch.bmm(weights, columns)


def suits_onednn(products: int) -> bool:
    """Return whether records of so many products are computed by oneDNN, a call per client (on the CPU)."""
    return products >= _LARGE and _has_onednn()


def by_onednn(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return rows (w, in) times weight (out, in), plus bias (out,), by oneDNN.

    From two rows on, its rounding of a row depends neither on the number of rows nor on the place. It uses AVX-512 on
    all processors that have it; MKL only on Intel's.
    """
    if len(rows) == 1:
        return by_onednn(rows.expand(2, -1).contiguous(), weight, bias)[:1]
    product: Tensor = torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")
    return product


@functools.cache
def _has_onednn() -> bool:
    """Return whether this torch has the operation that `by_onednn` calls, which is not public."""
    return torch._C._has_mkldnn and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def multiply_each(left: Tensor, right: Tensor) -> Tensor:
    """Return the products of matrices (T, a, b) and (T, b, c), flattened to (T, a * c)."""
    if left.is_cuda or not left.numel():
        return torch.bmm(left, right).flatten(1)
    if suits_openblas(left.shape[1], left.shape[2], right.shape[2]):
        found = left.new_empty(len(left), left.shape[1], right.shape[2])
        multiply_records(left, right, found, add=False)
        return found.flatten(1)
    return _by_torch(left, right)


def adds_by_openblas(left: Tensor, right: Tensor) -> bool:
    """Return whether OpenBLAS adds up products of matrices left (c, a, b) and right (c, b, d), each for itself."""
    plain = not left.is_cuda and left.dtype == torch.float32
    return plain and suits_openblas(left.shape[1], left.shape[2], right.shape[2], alone=True)


def add_product(into: Tensor, left: Tensor, right: Tensor) -> None:
    """Add left (a, b) times right (b, d) to `into` (a, d)."""
    if adds_by_openblas(left[None], right[None]):
        multiply_records(left[None], right[None], into[None], add=True)
    else:
        into.addmm_(left, right)


def _by_torch(left: Tensor, right: Tensor) -> Tensor:
    """Return the products of `multiply_each` by torch."""
    if len(left) == 1:  # threads would divide a single product
        return _by_torch(left.expand(2, -1, -1), right.expand(2, -1, -1))[:1]
    size = left.shape[1] * right.shape[2]
    room = left.new_empty(len(left), _rounded_up(size, LINE))[:, :size]  # each product begins a cache line
    torch.bmm(left, right, out=torch.unflatten(room, 1, (left.shape[1], right.shape[2])))
    return room


def multiply_persons(gradients: Tensor, inputs: Tensor) -> Tensor:
    """Return the sums over positions, (T, out * in), of products of gradients (T, L, out) and inputs (T, L, in).

    Of persons, L is that of the longest in the batch: gradients that are zero after a person's last position must leave
    its sum as it is. MKL adds up to 192 positions one after the other, in another way for few; so it gets no more.
    OpenBLAS would add other numbers of positions in other orders.
    """
    length, size = gradients.shape[1], gradients.shape[2] * inputs.shape[2]
    fewest = max(_FEWEST_POSITIONS, -(-_FEWEST_PRODUCTS // size))
    wanted = _rounded_up(length, _BLOCK) if length > _BLOCK else max(length, fewest if fewest <= _BLOCK else 0)
    left, right = (functional.pad(each, (0, 0, 0, wanted - length)) for each in (gradients, inputs))
    parts = (
        _by_torch(align_matrices(a).transpose(1, 2), align_matrices(b))
        for a, b in zip(torch.split(left, _BLOCK, 1), torch.split(right, _BLOCK, 1), strict=True)
    )
    return functools.reduce(torch.add, parts)


def align_matrices(items: Tensor) -> Tensor:
    """Return matrices (T, rows, columns), copied if needed so that all have the same alignment."""
    columns = items.shape[2]
    if items.is_cuda or items.stride(0) % LINE == 0:
        return items
    room = items.new_zeros(*items.shape[:2], _rounded_up(columns, LINE))[:, :, :columns]
    return room.copy_(items)


def _multiply(rows: Tensor, weights: Tensor, bias: Tensor | None, into: Tensor) -> None:
    if bias is None:
        torch.bmm(rows, weights, out=into)
    else:
        torch.baddbmm(bias, rows, weights, out=into)


def _rounded_up(number: int, step: int) -> int:
    return -(-number // step) * step
