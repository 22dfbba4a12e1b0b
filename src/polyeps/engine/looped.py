"""The last resort: modules run on one row after the other, where `vmap` cannot."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from polyeps.engine.layout import Layout
from polyeps.engine.mapped import Mapped
from polyeps.engine.sums import Contribution, Each


@dataclass(frozen=True)
class Looped(Mapped):
    """A module that `vmap` does not take, for instance one whose branches depend on the data."""

    def forward(self, weights: Tensor, rows: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
        owners = layout.owner.tolist()
        with torch.no_grad():
            outputs = [self._one(weights[owner], row) for owner, row in zip(owners, rows, strict=True)]
        return torch.stack(outputs), rows

    def backward(
        self, weights: Tensor, saved: Tensor, gradients: Tensor, layout: Layout, inputs: bool
    ) -> tuple[Tensor | None, Contribution | None]:
        wanted = inputs and saved.is_floating_point()
        found = [
            self._gradients(weights[owner], row, gradient, wanted)
            for owner, row, gradient in zip(layout.owner.tolist(), saved, gradients, strict=True)
        ]
        onwards = torch.stack([of_row for _, of_row in found]) if wanted else None
        return onwards, Each(layout, torch.stack([of for of, _ in found])) if self.size else None

    def _gradients(self, weights: Tensor, row: Tensor, gradient: Tensor, wanted: bool) -> tuple[Tensor, Tensor]:
        """The gradients of the weights and, where wanted, of the row."""
        with torch.enable_grad():
            leaf, start = weights.detach().clone().requires_grad_(), row.detach()
            if wanted:
                start = start.clone().requires_grad_()
            output = self._one(leaf, start)
        leaves = (leaf, start) if wanted else (leaf,)
        if not output.requires_grad:
            return torch.zeros_like(leaf), torch.zeros_like(start)
        found = torch.autograd.grad(output, leaves, gradient, allow_unused=True)
        filled = [torch.zeros_like(of) if by is None else by for of, by in zip(leaves, found, strict=True)]
        return filled[0], filled[-1]
