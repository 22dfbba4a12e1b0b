"""Losses of numbers, of several labels at once and of soft labels, and all losses by name."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor
from torch.nn import functional

from polyeps.engine.losses import BinaryHinge, BinaryLogistic, Loss, cross_entropy, hinge
from polyeps.engine.stable_functions import steady
from polyeps.errors import InputError


class _EachNumber:
    """The mean over a row's numbers of a function of output and target."""

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.values(*_paired(self, outputs, targets)).mean(1)

    def gradients(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return each row's gradient by its outputs (T, ...)."""
        slopes = self.slopes(*_paired(self, outputs, targets))
        return (slopes / slopes.shape[1]).reshape(outputs.shape)

    def example_labels(self, outputs: Tensor, generator: torch.Generator) -> Tensor:
        """Return targets to check a module with."""
        return torch.randn(outputs.shape, generator=generator).to(outputs.device)

    def values(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of every number, (T, k)."""
        raise NotImplementedError

    def slopes(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the derivatives of `values` by the outputs, (T, k)."""
        raise NotImplementedError


class Squared(_EachNumber):
    """(z − y)², for regression."""

    def values(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - targets).square()

    def slopes(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return 2 * (outputs - targets)


class Absolute(_EachNumber):
    """|z − y|, for regression with outliers."""

    def values(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - targets).abs()

    def slopes(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - targets).sign()


class Huber(_EachNumber):
    """(z − y)²/2 up to a distance of 1 and |z − y| − 1/2 beyond, for regression with outliers."""

    def values(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return functional.huber_loss(outputs, targets, reduction="none")

    def slopes(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - targets).clamp(-1, 1)


class MultiLabel(_EachNumber):
    """Binary cross-entropy of every label, 0 or 1, with the logistic function of its output."""

    def values(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return functional.binary_cross_entropy_with_logits(outputs, targets, reduction="none")

    def slopes(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return steady(torch.sigmoid, outputs) - targets

    def example_labels(self, outputs: Tensor, generator: torch.Generator) -> Tensor:
        return (torch.rand(outputs.shape, generator=generator) < 0.5).float().to(outputs.device)


class SoftCrossEntropy:
    """Cross-entropy of outputs (T, classes) with a probability for every class, (T, classes)."""

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        scores, chances = _paired(self, outputs, targets)
        return -(chances * torch.log_softmax(scores, dim=1)).sum(1)

    def gradients(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return each row's gradient by its outputs: softmax, times the sum of the targets, minus the targets."""
        scores, chances = _paired(self, outputs, targets)
        return (torch.softmax(scores, dim=1) * chances.sum(1, keepdim=True) - chances).reshape(outputs.shape)

    def example_labels(self, outputs: Tensor, generator: torch.Generator) -> Tensor:
        """Return targets to check a module with."""
        return torch.randn(outputs.shape, generator=generator).softmax(-1).to(outputs.device)


OUR_LOSSES = (Squared, Absolute, Huber, MultiLabel, SoftCrossEntropy)


def _paired(loss: object, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return outputs and targets as two matrices (T, k); refuse numbers that do not belong together."""
    mine, theirs = (each[:, None] if each.dim() == 1 else each.flatten(1) for each in (outputs, targets))
    if mine.shape != theirs.shape:
        named = next((name for name, known in LOSSES.items() if type(known) is type(loss)), type(loss).__name__)
        raise InputError(
            f'the loss "{named}" compares every output with a number of its own, but a row has outputs of shape '
            f"{tuple(outputs.shape[1:])} and targets of shape {tuple(targets.shape[1:])}; make them alike"
        )
    return mine, theirs.to(mine.dtype)


LOSSES: Mapping[str, Loss] = MappingProxyType(
    {
        "cross-entropy": cross_entropy,
        "soft-cross-entropy": SoftCrossEntropy(),
        "hinge": hinge,
        "binary-logistic": BinaryLogistic(),
        "binary-hinge": BinaryHinge(),
        "squared": Squared(),
        "absolute": Absolute(),
        "huber": Huber(),
        "multi-label": MultiLabel(),
    }
)


def loss_named(loss: Loss | str) -> Loss:
    """Return a loss, or the one of a name."""
    if not isinstance(loss, str):
        return loss
    if loss not in LOSSES:
        raise InputError(f"there is no loss {loss!r}; known are {', '.join(LOSSES)}, or give a function")
    return LOSSES[loss]
