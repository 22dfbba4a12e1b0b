"""A layer's contributions to the gradient: per-example norms, and sums weighted by clipping factors.

Each class stores the results of one backward pass (a layer's inputs and output gradients). It computes the squared norm
of every row's gradient without a second pass, and adds the weighted sum of a client's rows to its gradient. Without
factors, sums are plain.

A norm bounds a record's influence only if it is the norm of the numbers that are added. So no rule computes a norm by
cancellation (as Σ of inner products), squares are float64, and factors too small for float32 count as zero.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from typing import Protocol

import torch
from torch import Tensor

from polyeps.engine.layout import Layout, RowGroup
from polyeps.engine.ragged_kernels import add_outer_products, add_weighted_rows, multiply_pairs
from polyeps.engine.row_norms import squared_row_norms
from polyeps.engine.stable_products import align_matrices, multiply_each, multiply_persons

# Clients with more rows than this sum in float64: float32 would round by more than the margin of the clip.
_WIDE = 32
# Factors below this leave too few digits in float32 for a norm.
SMALLEST = 2.0**-120
_HUGE = 2.0**252  # squared norms above which a row of a kernel is dropped
_COLUMNS = 1024  # of a product that is computed at a time
_JOINED = 4096  # longest gradients that are copied to be treated together


class Contribution(Protocol):
    """One layer's part of every row's gradient."""

    @property
    def formed(self) -> int:
        """Return how many numbers of a row's gradient are formed for its norm."""

    def squared_norms(self) -> Tensor:
        """Return (T,): the squared norm of each row's gradient of this layer's parameters."""

    def drop(self, rows: Tensor) -> None:
        """Set the gradients of some rows, a mask (T,), to zero whatever they hold; called after `squared_norms`."""

    def add_to(self, gradient: Tensor, factors: Tensor | None) -> None:
        """Add Σ factor · row gradient over each client's rows to gradient (n, p)."""

    def grouped(self, layout: Layout, times: int) -> Contribution:
        """Return the contribution of rows that are each the sum of `times` neighbouring ones; called before the others.

        `layout` is that of the sums.
        """

    def part(self, layout: Layout, rows: slice) -> Contribution:
        """Return the contribution of some rows, which have this layout; called before the norms."""


class OuterProducts:
    """Rows whose gradient is an outer product g aᵀ (a linear layer): ‖g aᵀ‖ = ‖g‖ ‖a‖, never formed."""

    def __init__(self, layout: Layout, inputs: Tensor, gradients: Tensor, bias: bool) -> None:
        self.layout, self.inputs, self.gradients, self.bias = layout, inputs, gradients, bias
        self._lengths: Tensor | None = None  # (T,) squared, of the output gradients

    @property
    def formed(self) -> int:
        return 0

    def squared_norms(self) -> Tensor:
        self._lengths, inputs = squared_row_norms(self.gradients), self.layout.squared_norms(self.inputs)
        if self.layout.spans is not None:  # its kernels round numbers to parts, and the largest of them to infinity
            inputs = inputs.masked_fill(torch.maximum(inputs, self._lengths) > _HUGE, torch.inf)
        return (inputs + float(self.bias)) * self._lengths

    def drop(self, rows: Tensor) -> None:
        if self.layout.spans is not None:
            return  # its kernels skip rows whose factor is zero
        self.inputs, self.gradients = _without(self.inputs, rows), _without(self.gradients, rows)

    def add_to(self, gradient: Tensor, factors: Tensor | None) -> None:
        if self.layout.spans is not None and factors is not None:
            kept = self._large(factors)
            add_outer_products(gradient, self.gradients, self.inputs, kept, self.layout.spans, self.bias)
            return
        add_products(self.layout, gradient, self.scaled(factors), self.inputs, self.bias, factors is not None)

    def grouped(self, layout: Layout, times: int) -> Contribution:
        if times == 1:
            return self
        return PositionProducts(layout, self.inputs[:, None], self.gradients[:, None], self.bias).grouped(layout, times)

    def part(self, layout: Layout, rows: slice) -> Contribution:
        return OuterProducts(layout, self.inputs[rows], self.gradients[rows], self.bias)

    def scaled(self, factors: Tensor | None) -> Tensor:
        """Return the output gradients (T, out) times the rows' factors."""
        if factors is None:
            return self.gradients
        return self.gradients * self._large(factors).to(self.gradients.dtype)[:, None]

    def _large(self, factors: Tensor) -> Tensor:
        """Return factors, zero where products with them would underflow; huge inputs may compensate for that."""
        return (
            factors if self._lengths is None else factors.masked_fill(self._lengths * factors.square() < SMALLEST**2, 0)
        )


class PositionProducts:
    """Rows whose gradient is Σ over positions of g aᵀ (convolutions, sequences): formed once, for the norm."""

    def __init__(self, layout: Layout, inputs: Tensor, gradients: Tensor, bias: bool, *, persons: bool = False) -> None:
        self.layout, self.bias, self.persons = layout, bias, persons
        self.inputs, self.gradients = inputs, gradients  # (T, L, in), (T, L, out)
        self._formed: ContributionParts | None = None  # of the weights and, if any, the biases

    @property
    def formed(self) -> int:
        return self.gradients.shape[-1] * self.inputs.shape[-1]

    def squared_norms(self) -> Tensor:
        if self.persons:
            weights = multiply_persons(self.gradients, self.inputs)
        elif self.layout.spans is not None:
            weights = multiply_pairs(self.gradients.transpose(1, 2), self.inputs).flatten(1)
        else:
            weights = multiply_each(align_matrices(self.gradients).transpose(1, 2), align_matrices(self.inputs))
        formed = [weights, *([_summed(self.gradients)] if self.bias else [])]  # (T, out * in), (T, out)
        self._formed = ContributionParts([(each.shape[1], RowGradients(self.layout, each)) for each in formed])
        return self._formed.squared_norms()

    def drop(self, rows: Tensor) -> None:
        if self._formed is not None:
            self._formed.drop(rows)

    def add_to(self, gradient: Tensor, factors: Tensor | None) -> None:
        if self._formed is not None:
            self._formed.add_to(gradient, factors)
        else:  # without norms, a sum of products needs no row's own gradient
            scaled = self.gradients if factors is None else _times_factors(self.gradients, factors)
            add_products(self.layout, gradient, scaled, self.inputs, self.bias, factors is not None)

    def grouped(self, layout: Layout, times: int) -> PositionProducts:
        inputs, gradients = (_by_sum(each, times).flatten(1, 2) for each in (self.inputs, self.gradients))
        return PositionProducts(layout, inputs, gradients, self.bias, persons=not inputs.is_cuda)

    def part(self, layout: Layout, rows: slice) -> PositionProducts:
        return PositionProducts(layout, self.inputs[rows], self.gradients[rows], self.bias, persons=self.persons)


class RowGradients:
    """Rows whose gradients (T, p) are all formed."""

    def __init__(self, layout: Layout, gradients: Tensor) -> None:
        self.layout, self.gradients = layout, gradients

    @property
    def formed(self) -> int:
        return 0  # they are already

    def squared_norms(self) -> Tensor:
        return squared_row_norms(self.gradients)

    def drop(self, rows: Tensor) -> None:
        if self.layout.spans is None:  # its kernel skips rows whose factor is zero
            self.gradients = _without(self.gradients, rows)

    def add_to(self, gradient: Tensor, factors: Tensor | None) -> None:
        if self.layout.spans is not None and factors is not None:
            add_weighted_rows(gradient, self.gradients, factors, self.layout.spans)
            return
        for group in self.layout.groups:
            rows = group.rows(self.gradients)  # (c, w, p)
            if factors is None:
                gradient[group.first : group.last] += rows.sum(1)
            else:
                exact = _exact(group, rows)
                weighted = torch.bmm(group.rows(factors)[:, None, :].to(exact.dtype), exact)  # (c, 1, p)
                gradient[group.first : group.last] += weighted[:, 0]

    def grouped(self, layout: Layout, times: int) -> Contribution:
        return RowGradients(layout, _summed(_by_sum(self.gradients, times)))

    def part(self, layout: Layout, rows: slice) -> Contribution:
        return RowGradients(layout, self.gradients[rows])


class LookupGradients:
    """Rows that look vectors up in a table (an embedding); gradients of a token that recurs in a row add up.

    They are added before the norm is computed: two that nearly cancel have inner products that do not.
    """

    def __init__(self, layout: Layout, tokens: Tensor, gradients: Tensor, width: int) -> None:
        self.layout, self.tokens, self.width = layout, tokens, width  # tokens (T, L)
        self.gradients = gradients  # (T, L, width)

    @property
    def formed(self) -> int:
        return 0

    def squared_norms(self) -> Tensor:
        self.tokens, self.gradients = _once_a_row(self.tokens, self.gradients)
        return squared_row_norms(self.gradients.flatten(1))

    def drop(self, rows: Tensor) -> None:
        self.gradients = _without(self.gradients, rows)

    def add_to(self, gradient: Tensor, factors: Tensor | None) -> None:
        rows = self.gradients if factors is None else _times_factors(self.gradients, factors)
        into = gradient
        if factors is not None and any(group.width > _WIDE for group in self.layout.groups):
            into, rows = torch.zeros_like(gradient, dtype=torch.float64), rows.double()
        table = torch.unflatten(into, 1, (-1, self.width))  # (n, vocabulary, width)
        clients = self.layout.owner[:, None].expand_as(self.tokens)
        table.index_put_((clients, self.tokens), rows, accumulate=True)
        if into is not gradient:
            gradient += into

    def grouped(self, layout: Layout, times: int) -> Contribution:
        tokens, gradients = (_by_sum(each, times).flatten(1, 2) for each in (self.tokens, self.gradients))
        return LookupGradients(layout, tokens, gradients, self.width)

    def part(self, layout: Layout, rows: slice) -> Contribution:
        return LookupGradients(layout, self.tokens[rows], self.gradients[rows], self.width)


class ContributionParts:
    """Contributions to consecutive slices of one layer's parameters.

    With `join`, short formed gradients, such as those of many biases, are copied side by side: norm and sum then take a
    few operations for all.
    """

    def __init__(self, parts: list[tuple[int, Contribution]], join: bool = False) -> None:
        short = [part for size, part in parts if join and isinstance(part, RowGradients) and size <= _JOINED]
        self.parts, self.join = parts, join  # (number of parameters, contribution)
        self._short = set(map(id, short)) if len(short) > 1 else set()
        self._joined: RowGradients | None = None  # of the short ones

    @property
    def formed(self) -> int:
        return sum(part.formed for _, part in self.parts)

    def squared_norms(self) -> Tensor:
        joined = [part for _, part in self.parts if id(part) in self._short and isinstance(part, RowGradients)]
        others: list[Contribution] = [part for _, part in self.parts if id(part) not in self._short]
        if joined:
            self._joined = RowGradients(joined[0].layout, torch.cat([part.gradients for part in joined], dim=1))
            others.append(self._joined)
        return reduce(torch.add, (part.squared_norms() for part in others))

    def drop(self, rows: Tensor) -> None:
        if self._joined is not None:
            self._joined.drop(rows)
        for _, part in self.parts:
            if self._joined is None or id(part) not in self._short:
                part.drop(rows)

    def add_to(self, gradient: Tensor, factors: Tensor | None) -> None:
        slices = torch.split(gradient, [size for size, _ in self.parts], dim=1)
        sums: Iterator[Tensor] = iter(())
        if self._joined is not None:
            summed = gradient.new_zeros(len(gradient), self._joined.gradients.shape[1])
            self._joined.add_to(summed, factors)
            sums = iter(torch.split(summed, [size for size, part in self.parts if id(part) in self._short], dim=1))
        for (_, part), columns in zip(self.parts, slices, strict=True):
            if self._joined is not None and id(part) in self._short:
                columns += next(sums)
            else:
                part.add_to(columns, factors)

    def grouped(self, layout: Layout, times: int) -> Contribution:
        return ContributionParts([(size, part.grouped(layout, times)) for size, part in self.parts], self.join)

    def part(self, layout: Layout, rows: slice) -> Contribution:
        return ContributionParts([(size, part.part(layout, rows)) for size, part in self.parts], self.join)


def add_products(
    layout: Layout, gradient: Tensor, left: Tensor, right: Tensor, bias: bool, clipped: bool = False
) -> None:
    """Add leftᵀ right, summed over a client's rows and positions, to its weights, and left to its biases."""
    out, size = left.shape[-1], left.shape[-1] * right.shape[-1]
    weights = torch.unflatten(gradient[:, :size], 1, (out, -1))
    for group in layout.groups:
        a = group.rows(left).flatten(1, -2)  # (c, w * L, out)
        b = group.rows(right).flatten(1, -2)
        if clipped and layout.settled and group.width > _WIDE:
            summed = _by_blocks(a, b)
            weights[group.first : group.last] += summed
            if bias:
                gradient[group.first : group.last, size:] += a.sum(1, dtype=torch.float64)
            continue
        if clipped:
            a, b = _exact(group, a), _exact(group, b)
        same = a.dtype == gradient.dtype
        if same and group.clients == 1:
            weights[group.first].addmm_(a[0].T, b[0])
        elif same and gradient.is_cuda:
            weights[group.first : group.last].baddbmm_(a.transpose(1, 2), b)
        else:  # not baddbmm_: on columns of a wider matrix it falls back to a product per client on the CPU
            weights[group.first : group.last] += torch.bmm(a.transpose(1, 2), b)
        if bias:
            gradient[group.first : group.last, size:] += a.sum(1)


def _by_blocks(left: Tensor, right: Tensor) -> Tensor:
    """Return leftᵀ right of each client, (c, out, in) float64, for left (c, w, out) and right (c, w, in).

    Blocks of rows are multiplied in float32, as for clients with few rows, and added in float64: several times as fast
    as float64 throughout.
    """
    clients, width, out = left.shape
    total = left.new_zeros(clients, out, right.shape[2], dtype=torch.float64)
    whole = 0
    if clients == 1:  # all blocks at once, a few columns at a time, so that they stay in the cache
        whole = width // _WIDE * _WIDE
        blocks = torch.unflatten(left[0, :whole], 0, (-1, _WIDE)).transpose(1, 2)
        for first in range(0, right.shape[2], _COLUMNS):
            some = slice(first, first + _COLUMNS)
            each = torch.bmm(blocks, torch.unflatten(right[0, :whole, some], 0, (-1, _WIDE)))
            total[0, :, some] = each.sum(0, dtype=torch.float64)
    for first in range(whole, width, _WIDE):
        some = slice(first, first + _WIDE)
        total += torch.bmm(left[:, some].transpose(1, 2), right[:, some])
    return total


def _summed(rows: Tensor) -> Tensor:
    """Return the sums (T, p) of rows (T, L, p), one after the other: torch adds a single column in another order."""
    return rows.sum(1) if rows.shape[2] > 1 else rows.expand(-1, -1, 2).contiguous().sum(1)[:, :1]


def _by_sum(rows: Tensor, times: int) -> Tensor:
    """Return rows (T · times, ...) as (T, times, ...)."""
    return torch.unflatten(rows, 0, (len(rows) // times, times))


def _times_factors(gradients: Tensor, factors: Tensor) -> Tensor:
    """Return every row of gradients (T, ...) times its factor (T,)."""
    return gradients * factors.to(gradients.dtype).reshape(-1, *(1,) * (gradients.dim() - 1))


def _once_a_row(tokens: Tensor, gradients: Tensor) -> tuple[Tensor, Tensor]:
    """Add each token's gradients at one of its places, zero elsewhere; tokens (T, L) and gradients (T, L, width)."""
    count, length = tokens.shape
    if length < 2:
        return tokens, gradients
    ordered, places = tokens.sort(dim=1, stable=True)  # what follows, such as a person's padding, changes no order
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
    """Return rows of a group, in float64 if clients have many."""
    return rows.double() if group.width > _WIDE else rows


def _without(values: Tensor, rows: Tensor) -> Tensor:
    """Return values (T, ...) with some rows zero; multiplying by zero would keep NaN."""
    return values.masked_fill(rows.reshape(-1, *(1,) * (values.dim() - 1)), 0.0)
