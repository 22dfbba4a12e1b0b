"""What a layer contributes to the gradient: per-example norms, and sums weighted by clipping factors.

Each kind keeps what one backward pass leaves (a layer's inputs and output gradients) and knows how to give
the squared norm of every row's gradient without a second pass, and how to add the weighted sum of a client's
rows to its gradient. No factors means plain sums.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from polyeps.engine.layout import Layout


class Contribution(Protocol):
    """One layer's part of every row's gradient."""

    def squared_norms(self) -> Tensor:
        """(T,): the squared norm of each row's gradient of this layer's parameters."""

    def drop(self, rows: Tensor) -> None:
        """Make the gradients of some rows, a mask (T,), zero whatever they are; asked for after the norms."""

    def add_to(self, gradient: Tensor, factors: Tensor | None) -> None:
        """Add Σ factor · row gradient over each client's rows to gradient (n, p)."""


class Outer:
    """Rows whose gradient is an outer product g aᵀ (a linear layer): ‖g aᵀ‖ = ‖g‖ ‖a‖, never formed."""

    def __init__(self, layout: Layout, inputs: Tensor, gradients: Tensor, bias: bool) -> None:
        self.layout, self.inputs, self.gradients, self.bias = layout, inputs, gradients, bias

    def squared_norms(self) -> Tensor:
        of_inputs = _squares(self.inputs)
        return (of_inputs + float(self.bias)) * _squares(self.gradients)

    def drop(self, rows: Tensor) -> None:
        self.inputs, self.gradients = _without(self.inputs, rows), _without(self.gradients, rows)

    def add_to(self, gradient: Tensor, factors: Tensor | None) -> None:
        scaled = self.gradients if factors is None else self.gradients * factors[:, None]  # (T, out)
        add_products(self.layout, gradient, scaled, self.inputs, self.bias)


class Positions:
    """Rows whose gradient is Σ over positions of g aᵀ (convolutions, sequences): formed once for the norm."""

    def __init__(self, layout: Layout, inputs: Tensor, gradients: Tensor, bias: bool) -> None:
        self.layout, self.bias = layout, bias
        self.inputs, self.gradients = inputs, gradients  # (T, L, in), (T, L, out)
        self._each: list[Each] = []  # of the weights and, if any, the biases

    def squared_norms(self) -> Tensor:
        weights = torch.bmm(self.gradients.transpose(1, 2), self.inputs).flatten(1)  # (T, out * in)
        self._each = [Each(self.layout, weights)]
        if self.bias:
            self._each.append(Each(self.layout, self.gradients.sum(1)))
        norms = self._each[0].squared_norms()
        return norms + self._each[1].squared_norms() if self.bias else norms

    def drop(self, rows: Tensor) -> None:
        for each in self._each:
            each.drop(rows)

    def add_to(self, gradient: Tensor, factors: Tensor | None) -> None:
        if not self._each:  # no norms were asked for: the sum of products needs no row's own gradient
            scaled = self.gradients if factors is None else self.gradients * factors[:, None, None]
            add_products(self.layout, gradient, scaled, self.inputs, self.bias)
            return
        sizes = [each.gradients.shape[1] for each in self._each]
        for each, columns in zip(self._each, torch.split(gradient, sizes, dim=1), strict=True):
            each.add_to(columns, factors)


class Each:
    """Rows whose gradients are all there, (T, p)."""

    def __init__(self, layout: Layout, gradients: Tensor) -> None:
        self.layout, self.gradients = layout, gradients

    def squared_norms(self) -> Tensor:
        return _squares(self.gradients)

    def drop(self, rows: Tensor) -> None:
        self.gradients = _without(self.gradients, rows)

    def add_to(self, gradient: Tensor, factors: Tensor | None) -> None:
        for group in self.layout.groups:
            rows = group.rows(self.gradients)  # (c, w, p)
            if factors is None:
                gradient[group.first : group.last] += rows.sum(1)
            else:
                weighted = torch.bmm(group.rows(factors)[:, None, :], rows)  # (c, 1, p)
                gradient[group.first : group.last] += weighted[:, 0]


class Looked:
    """Rows that look vectors up in a table (an embedding): a token that recurs in a row adds up."""

    def __init__(self, layout: Layout, tokens: Tensor, gradients: Tensor, width: int) -> None:
        self.layout, self.tokens, self.width = layout, tokens, width
        self.gradients = gradients  # (T, L, width)

    def squared_norms(self) -> Tensor:
        same = self.tokens[:, :, None] == self.tokens[:, None, :]  # (T, L, L)
        products = torch.bmm(self.gradients, self.gradients.transpose(1, 2))
        return (products * same).sum((1, 2))

    def drop(self, rows: Tensor) -> None:
        self.gradients = _without(self.gradients, rows)

    def add_to(self, gradient: Tensor, factors: Tensor | None) -> None:
        rows = self.gradients if factors is None else self.gradients * factors[:, None, None]
        table = torch.unflatten(gradient, 1, (-1, self.width))  # (n, vocabulary, width)
        clients = self.layout.owner[:, None].expand_as(self.tokens)
        table.index_put_((clients, self.tokens), rows, accumulate=True)


class Parts:
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


def add_products(layout: Layout, gradient: Tensor, left: Tensor, right: Tensor, bias: bool) -> None:
    """Add leftᵀ right, summed over a client's rows and positions, to its weights, and left to its biases."""
    out, size = left.shape[-1], left.shape[-1] * right.shape[-1]
    weights = torch.unflatten(gradient[:, :size], 1, (out, -1))
    for group in layout.groups:
        a = group.rows(left).flatten(1, -2)  # (c, w * L, out)
        b = group.rows(right).flatten(1, -2)
        if group.clients == 1:
            weights[group.first].addmm_(a[0].T, b[0])
        elif gradient.is_cuda:
            weights[group.first : group.last].baddbmm_(a.transpose(1, 2), b)
        else:  # not baddbmm_: on columns of a wider matrix it falls back to a product per client on the CPU
            weights[group.first : group.last] += torch.bmm(a.transpose(1, 2), b)
        if bias:
            gradient[group.first : group.last, size:] += a.sum(1)


def _without(values: Tensor, rows: Tensor) -> Tensor:
    """The values (T, ...) with some rows zero; multiplying by zero would keep what is not a number."""
    return values.masked_fill(rows.reshape(-1, *(1,) * (values.dim() - 1)), 0.0)


def _squares(rows: Tensor) -> Tensor:
    """The squared norm of each row."""
    norms: Tensor = torch.linalg.vector_norm(rows, dim=1)
    return norms.square_()
