"""Gradients of rows that look vectors up in a table, such as an embedding's: a few places of a large one."""

from __future__ import annotations

import torch
from torch import Tensor

from polyeps.engine.contributions import MANY_ROWS, Contribution, by_sum, times_factors, without
from polyeps.engine.layout import Layout
from polyeps.engine.row_norms import squared_row_norms


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
        self.gradients = without(self.gradients, rows)

    def add_to(self, gradient: Tensor, factors: Tensor | None) -> None:
        rows = self.gradients if factors is None else times_factors(self.gradients, factors)
        into = gradient
        if factors is not None and any(group.width > MANY_ROWS for group in self.layout.groups):
            into, rows = torch.zeros_like(gradient, dtype=torch.float64), rows.double()
        table = torch.unflatten(into, 1, (-1, self.width))  # (n, vocabulary, width)
        clients = self.layout.owner[:, None].expand_as(self.tokens)
        table.index_put_((clients, self.tokens), rows, accumulate=True)
        if into is not gradient:
            gradient += into

    def grouped(self, layout: Layout, times: int) -> Contribution:
        tokens, gradients = (by_sum(each, times).flatten(1, 2) for each in (self.tokens, self.gradients))
        return LookupGradients(layout, tokens, gradients, self.width)

    def part(self, layout: Layout, rows: slice) -> Contribution:
        return LookupGradients(layout, self.tokens[rows], self.gradients[rows], self.width)


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
