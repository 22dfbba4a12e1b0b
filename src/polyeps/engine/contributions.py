"""What a layer contributes to the gradient: per-example norms, and sums weighted by clipping factors.

Each kind keeps what one backward pass leaves (a layer's inputs and output gradients) and knows how to give
the squared norm of every row's gradient without a second pass, and how to add the weighted sum of a client's
rows to its gradient. No factors means plain sums.

A norm bounds what a record can do only if it is the norm of the very numbers that are added, so no rule takes one by
cancellation (as Σ of inner products), squares are float64, and factors too small for float32 count as zero.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from polyeps.engine.layout import Layout, RowGroup
from polyeps.engine.stable_products import align_matrices
from polyeps.engine.triton_kernels import has_kernel, row_squares

# Rows of a client from which on clipped sums are float64: float32 would round by more than the margin of the clip.
WIDE = 32
# Scales below this times float32's smallest numbers leave too few digits to keep a norm by.
SMALLEST = 2.0**-120
_BLOCK = 1024  # squares added in float32
_SHORT = 64  # rows for which float64 costs nothing
_TINY, _SHIFT = 2.0**-100, 2.0**100
_LOST = 2.0**-126  # at most this of a square is lost to float32's smallest numbers


class Contribution(Protocol):
    """One layer's part of every row's gradient."""

    def squared_norms(self) -> Tensor:
        """(T,): the squared norm of each row's gradient of this layer's parameters."""

    def drop(self, rows: Tensor) -> None:
        """Make the gradients of some rows, a mask (T,), zero whatever they are; asked for after the norms."""

    def add_to(self, gradient: Tensor, factors: Tensor | None) -> None:
        """Add Σ factor · row gradient over each client's rows to gradient (n, p)."""


class OuterProducts:
    """Rows whose gradient is an outer product g aᵀ (a linear layer): ‖g aᵀ‖ = ‖g‖ ‖a‖, never formed."""

    def __init__(self, layout: Layout, inputs: Tensor, gradients: Tensor, bias: bool) -> None:
        self.layout, self.inputs, self.gradients, self.bias = layout, inputs, gradients, bias
        self._lengths: Tensor | None = None  # (T,) squared, of the output gradients

    def squared_norms(self) -> Tensor:
        self._lengths = squared_row_norms(self.gradients)
        return (squared_row_norms(self.inputs) + float(self.bias)) * self._lengths

    def drop(self, rows: Tensor) -> None:
        self.inputs, self.gradients = _without(self.inputs, rows), _without(self.gradients, rows)

    def add_to(self, gradient: Tensor, factors: Tensor | None) -> None:
        add_products(self.layout, gradient, self.scaled(factors), self.inputs, self.bias, factors is not None)

    def scaled(self, factors: Tensor | None) -> Tensor:
        """The output gradients (T, out) times the rows' factors."""
        if factors is None:
            return self.gradients
        if self._lengths is not None:  # huge inputs may make up for what float32 would round to nothing here
            factors = factors.masked_fill(self._lengths * factors.square() < SMALLEST**2, 0.0)
        return self.gradients * factors.to(self.gradients.dtype)[:, None]


class PositionProducts:
    """Rows whose gradient is Σ over positions of g aᵀ (convolutions, sequences): formed once for the norm."""

    def __init__(self, layout: Layout, inputs: Tensor, gradients: Tensor, bias: bool) -> None:
        self.layout, self.bias = layout, bias
        self.inputs, self.gradients = inputs, gradients  # (T, L, in), (T, L, out)
        self._each: list[RowGradients] = []  # of the weights and, if any, the biases

    def squared_norms(self) -> Tensor:
        weights = torch.bmm(align_matrices(self.gradients).transpose(1, 2), align_matrices(self.inputs)).flatten(
            1
        )  # (T, out * in)
        self._each = [RowGradients(self.layout, weights)]
        if self.bias:
            self._each.append(RowGradients(self.layout, self.gradients.sum(1)))
        norms = self._each[0].squared_norms()
        return norms + self._each[1].squared_norms() if self.bias else norms

    def drop(self, rows: Tensor) -> None:
        for each in self._each:
            each.drop(rows)

    def add_to(self, gradient: Tensor, factors: Tensor | None) -> None:
        if not self._each:  # no norms were asked for: the sum of products needs no row's own gradient
            scaled = self.gradients if factors is None else times_factors(self.gradients, factors)
            add_products(self.layout, gradient, scaled, self.inputs, self.bias, factors is not None)
            return
        sizes = [each.gradients.shape[1] for each in self._each]
        for each, columns in zip(self._each, torch.split(gradient, sizes, dim=1), strict=True):
            each.add_to(columns, factors)


class RowGradients:
    """Rows whose gradients are all there, (T, p)."""

    def __init__(self, layout: Layout, gradients: Tensor) -> None:
        self.layout, self.gradients = layout, gradients

    def squared_norms(self) -> Tensor:
        return squared_row_norms(self.gradients)

    def drop(self, rows: Tensor) -> None:
        self.gradients = _without(self.gradients, rows)

    def add_to(self, gradient: Tensor, factors: Tensor | None) -> None:
        for group in self.layout.groups:
            rows = group.rows(self.gradients)  # (c, w, p)
            if factors is None:
                gradient[group.first : group.last] += rows.sum(1)
            else:
                exact = _exact(group, rows)
                weighted = torch.bmm(group.rows(factors)[:, None, :].to(exact.dtype), exact)  # (c, 1, p)
                gradient[group.first : group.last] += weighted[:, 0]


class LookupGradients:
    """Rows that look vectors up in a table (an embedding): a token that recurs in a row adds up.

    Its gradients are added before the norm is taken: two that nearly cancel have inner products which do not.
    """

    def __init__(self, layout: Layout, tokens: Tensor, gradients: Tensor, width: int) -> None:
        self.layout, self.tokens, self.width = layout, tokens, width  # tokens (T, L)
        self.gradients = gradients  # (T, L, width)

    def squared_norms(self) -> Tensor:
        self.tokens, self.gradients = _once_a_row(self.tokens, self.gradients)
        return squared_row_norms(self.gradients.flatten(1))

    def drop(self, rows: Tensor) -> None:
        self.gradients = _without(self.gradients, rows)

    def add_to(self, gradient: Tensor, factors: Tensor | None) -> None:
        rows = self.gradients if factors is None else times_factors(self.gradients, factors)
        into = gradient
        if factors is not None and any(group.width > WIDE for group in self.layout.groups):
            into, rows = torch.zeros_like(gradient, dtype=torch.float64), rows.double()
        table = torch.unflatten(into, 1, (-1, self.width))  # (n, vocabulary, width)
        clients = self.layout.owner[:, None].expand_as(self.tokens)
        table.index_put_((clients, self.tokens), rows, accumulate=True)
        if into is not gradient:
            gradient += into


class ContributionParts:
    """Several contributions to neighbouring slices of one layer's parameters."""

    def __init__(self, parts: list[tuple[int, Contribution]]) -> None:
        self.parts = parts  # (number of parameters, contribution)

    def squared_norms(self) -> Tensor:
        norms = self.parts[0][1].squared_norms()
        for _, part in self.parts[1:]:
            norms = norms + part.squared_norms()
        return norms

    def drop(self, rows: Tensor) -> None:
        for _, part in self.parts:
            part.drop(rows)

    def add_to(self, gradient: Tensor, factors: Tensor | None) -> None:
        for (_, part), columns in zip(
            self.parts, torch.split(gradient, [size for size, _ in self.parts], dim=1), strict=True
        ):
            part.add_to(columns, factors)


def add_products(
    layout: Layout, gradient: Tensor, left: Tensor, right: Tensor, bias: bool, clipped: bool = False
) -> None:
    """Add leftᵀ right, summed over a client's rows and positions, to its weights, and left to its biases."""
    out, size = left.shape[-1], left.shape[-1] * right.shape[-1]
    weights = torch.unflatten(gradient[:, :size], 1, (out, -1))
    for group in layout.groups:
        a = group.rows(left).flatten(1, -2)  # (c, w * L, out)
        b = group.rows(right).flatten(1, -2)
        if clipped:
            a, b = _exact(group, a), _exact(group, b)
        if a.dtype != gradient.dtype:
            weights[group.first : group.last] += torch.bmm(a.transpose(1, 2), b)
        elif group.clients == 1:
            weights[group.first].addmm_(a[0].T, b[0])
        elif gradient.is_cuda:
            weights[group.first : group.last].baddbmm_(a.transpose(1, 2), b)
        else:  # not baddbmm_: on columns of a wider matrix it falls back to a product per client on the CPU
            weights[group.first : group.last] += torch.bmm(a.transpose(1, 2), b)
        if bias:
            gradient[group.first : group.last, size:] += a.sum(1)


def times_factors(gradients: Tensor, factors: Tensor) -> Tensor:
    """Every row of gradients (T, ...) times its factor (T,)."""
    return gradients * factors.to(gradients.dtype).reshape(-1, *(1,) * (gradients.dim() - 1))


def squared_row_norms(rows: Tensor) -> Tensor:
    """The squared norm of each row (T, p) in float64, right to about a millionth whatever the rows hold.

    As fast as in float32: that adds up to 1024 squares at a time. Squares too small for it are replaced by a bound, or
    in short rows, like those too large, found again by scaling with a power of two. A device adds in float64.
    """
    if has_kernel(rows):
        return row_squares(rows)
    size = rows.shape[1]
    short = size <= 4 * _BLOCK
    if size <= _SHORT or rows.is_cuda:
        return _square_of_norm(rows.double())
    squares = _by_block(rows)
    least, most = (float(extreme) for extreme in squares.aminmax())
    if most == torch.inf:
        large = squares == torch.inf
        squares[large] = _by_block(rows[large] / _SHIFT) * _SHIFT**2
    if short and least < size * _TINY:
        small = squares < size * _TINY
        squares[small] = _by_block(rows[small] * _SHIFT) / _SHIFT**2
    return squares if short else squares.add_(size * _LOST)


def _by_block(rows: Tensor) -> Tensor:
    """The squared norm of each row, added in float32 within blocks and in float64 across them."""
    whole = rows.shape[1] // _BLOCK * _BLOCK
    if not whole:
        return _square_of_norm(rows)
    blocks = _square_of_norm(torch.unflatten(rows[:, :whole], 1, (-1, _BLOCK))).sum(1)
    return blocks + _square_of_norm(rows[:, whole:])


def _square_of_norm(rows: Tensor) -> Tensor:
    squares: Tensor = torch.linalg.vector_norm(rows, dim=-1).double().square_()
    return squares


def _once_a_row(tokens: Tensor, gradients: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens (T, L) and their gradients (T, L, width), each token's added at one of its places and zero elsewhere."""
    count, length = tokens.shape
    if length < 2:
        return tokens, gradients
    ordered, places = tokens.sort(dim=1)
    new = torch.ones_like(ordered)
    new[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    group = new.cumsum(1) - 1 + torch.arange(0, count * length, length, device=tokens.device)[:, None]  # (T, L)
    summed = gradients.new_zeros(count * length, gradients.shape[2])
    within = gradients.gather(1, places[:, :, None].expand_as(gradients))
    summed.index_add_(0, group.flatten(), within.flatten(0, 1))
    named = torch.zeros_like(tokens).flatten()
    named[group.flatten()] = ordered.flatten()
    return named.view_as(tokens), summed.view_as(gradients)


def _exact(group: RowGroup, rows: Tensor) -> Tensor:
    """Rows of a group, in float64 where a client has many."""
    return rows.double() if group.width > WIDE else rows


def _without(values: Tensor, rows: Tensor) -> Tensor:
    """The values (T, ...) with some rows zero; multiplying by zero would keep what is not a number."""
    return values.masked_fill(rows.reshape(-1, *(1,) * (values.dim() - 1)), 0.0)
