"""Uses of a parameter in one forward pass, and what they contribute to the gradient together.

A parameter may be used several times (weight tying, recurrence), in parts (the stacked projections of attention) and in
several ways (an embedding that is also the output layer). Uses of the same kind are joined; otherwise every row's
gradient is formed and added up.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

from polyeps.engine.contributions import (
    Contribution,
    ContributionParts,
    OuterProducts,
    PositionProducts,
    RowGradients,
)
from polyeps.engine.layout import Layout
from polyeps.engine.lookups import LookupGradients

Range = tuple[int, int]


class Use(Protocol):
    """One use of some of a parameter's numbers."""

    @property
    def range(self) -> Range:
        """Return the first of these numbers, and the one after the last."""

    def formed(self) -> Tensor:
        """Return every row's gradient, (T, p)."""

    def alone(self, layout: Layout) -> Contribution:
        """Return the contribution of this use, if it is the only one."""


@dataclass(frozen=True)
class RowUse:
    """A use of which every row's gradient is formed."""

    range: Range
    gradients: Tensor  # (T, p)

    def formed(self) -> Tensor:
        return self.gradients

    def alone(self, layout: Layout) -> Contribution:
        return RowGradients(layout, self.gradients)


@dataclass(frozen=True)
class ProductUse:
    """A matrix whose gradient is Σ over positions of g aᵀ."""

    range: Range
    inputs: Tensor  # (T, L, in)
    gradients: Tensor  # (T, L, out)

    def formed(self) -> Tensor:
        return torch.bmm(self.gradients.transpose(1, 2), self.inputs).flatten(1)

    def alone(self, layout: Layout) -> Contribution:
        if self.inputs.shape[1] == 1:
            return OuterProducts(layout, self.inputs[:, 0], self.gradients[:, 0], bias=False)
        return PositionProducts(layout, self.inputs, self.gradients, bias=False)


@dataclass(frozen=True)
class LookupUse:
    """A table in which rows look vectors up."""

    range: Range
    tokens: Tensor  # (T, L)
    gradients: Tensor  # (T, L, width)

    def formed(self) -> Tensor:
        count, _, width = self.gradients.shape
        table = self.gradients.new_zeros(count, (self.range[1] - self.range[0]) // width, width)
        rows = torch.arange(count, device=table.device)[:, None].expand_as(self.tokens)
        return table.index_put_((rows, self.tokens), self.gradients, accumulate=True).flatten(1)

    def alone(self, layout: Layout) -> Contribution:
        return LookupGradients(layout, self.tokens, self.gradients, self.gradients.shape[2])


class NoContribution:
    """Parameters without a gradient."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout

    @property
    def formed(self) -> int:
        return 0

    def squared_norms(self) -> Tensor:
        return torch.zeros(self.layout.rows, dtype=torch.float64, device=self.layout.owner.device)

    def drop(self, rows: Tensor) -> None:
        """Nothing to drop."""

    def add_to(self, gradient: Tensor, factors: Tensor | None) -> None:
        """Nothing to add."""

    def grouped(self, layout: Layout, times: int) -> Contribution:  # noqa: ARG002
        return NoContribution(layout)

    def part(self, layout: Layout, rows: slice) -> Contribution:  # noqa: ARG002
        return NoContribution(layout)


def contribution_of_uses(layout: Layout, sizes: list[int], uses: list[list[Use]]) -> Contribution:
    """Return the contribution of parameters of these sizes, in their order, from all uses of each."""
    parts: list[tuple[int, Contribution]] = []
    for size, of_parameter in zip(sizes, uses, strict=True):
        end = 0
        for (first, last), some in _by_range(of_parameter, size):
            if first > end:
                parts.append((first - end, NoContribution(layout)))
            parts.append((last - first, _joined(some).alone(layout)))
            end = last
        if end < size:
            parts.append((size - end, NoContribution(layout)))
    return ContributionParts(parts, join=True)


def _by_range(uses: list[Use], size: int) -> list[tuple[Range, list[Use]]]:
    """Group uses by the numbers they concern; if these overlap in part, as uses of all numbers."""
    grouped: dict[Range, list[Use]] = {}
    for use in uses:
        grouped.setdefault(use.range, []).append(use)
    ranges = sorted(grouped)
    if all(before[1] <= after[0] for before, after in pairwise(ranges)):
        return [(each, grouped[each]) for each in ranges]
    whole = [RowUse((0, size), _within(use, size)) for use in uses]
    return [((0, size), list(whole))]


def _within(use: Use, size: int) -> Tensor:
    part = use.formed()
    rows = part.new_zeros(len(part), size)
    rows[:, use.range[0] : use.range[1]] = part
    return rows


def _joined(uses: list[Use]) -> Use:
    first = uses[0]
    if len(uses) == 1:
        return first
    products = [use for use in uses if isinstance(use, ProductUse)]
    if len(products) == len(uses):
        inputs, gradients = ([getattr(use, part) for use in products] for part in ("inputs", "gradients"))
        return ProductUse(first.range, torch.cat(inputs, dim=1), torch.cat(gradients, dim=1))
    lookups = [use for use in uses if isinstance(use, LookupUse)]
    if len(lookups) == len(uses):
        tokens, gradients = ([getattr(use, part) for use in lookups] for part in ("tokens", "gradients"))
        return LookupUse(first.range, torch.cat(tokens, dim=1), torch.cat(gradients, dim=1))
    return RowUse(first.range, reduce(torch.add, (use.formed() for use in uses)))
