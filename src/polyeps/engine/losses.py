"""Losses of the rows of a batch, (T, outputs) and labels (T,) in, (T,) out; gradients in closed form where it pays."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


class CrossEntropy:
    """Cross-entropy of each row, with the gradient in closed form: a fraction of what autograd costs."""

    def __call__(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(outputs, labels.long(), reduction="none")

    def gradients(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Each row's gradient by its outputs (T, classes): softmax less one at the label."""
        chances = torch.softmax(outputs, dim=1)
        return chances.scatter_add_(1, labels.long()[:, None], chances.new_full((1, 1), -1.0).expand(len(labels), 1))


cross_entropy = CrossEntropy()


class BinaryLogistic:
    """ln(1 + e^(−yz)) of one output z and y = ±1 for the labels 1 and 0, with its gradient in closed form."""

    def __call__(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return functional.softplus(outputs[:, 0] * (1 - 2 * labels))

    def gradients(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return torch.sigmoid(outputs) - labels[:, None]


class BinaryHinge:
    """max(0, 1 − yz) of one output z, with its gradient (at the hinge: that of its left side) in closed form."""

    def __call__(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return (1 - outputs[:, 0] * (2 * labels - 1)).clamp(min=0)

    def gradients(self, outputs: Tensor, labels: Tensor) -> Tensor:
        signs = (2 * labels - 1).to(outputs.dtype)[:, None]
        return torch.where(outputs * signs < 1, -signs, 0.0)


def hinge(outputs: Tensor, labels: Tensor) -> Tensor:
    """Crammer and Singer's multi-class hinge: max over the wrong classes of 1 + score - right score, or 0."""
    right = outputs.gather(1, labels.long()[:, None])
    margins = (1 + outputs - right).scatter(1, labels.long()[:, None], 0.0)
    return margins.clamp(min=0).amax(1)
