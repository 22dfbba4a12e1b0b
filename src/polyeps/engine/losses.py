"""Row-wise losses: outputs (T, ...) and targets (T, ...) in, (T,) out; gradients in closed form where that is faster.

The loss of a row is the mean over its own positions or numbers, so it depends on no other row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import grad, vmap
from torch.nn import functional

from polyeps.data.targets import IGNORED
from polyeps.engine.stable_functions import steady, whole_rows
from polyeps.errors import InputError

# The loss of each row, (T,), from outputs (T, ...) and targets (T, ...). A loss with a method `gradients` of the same
# arguments is not differentiated by autograd; one with `example_labels` says which targets it is checked with.
Loss = Callable[[Tensor, Tensor], Tensor]


class CrossEntropy:
    """Cross-entropy of each row, with the gradient in closed form: a fraction of what autograd costs.

    Outputs (T, classes) have one label a row, (T,). Outputs (T, ..., classes) have a label for each position, (T, ...),
    of which `IGNORED` ones do not count: the loss is the mean over the row's others, and 0 where there are none.
    """

    def __call__(self, outputs: Tensor, labels: Tensor) -> Tensor:
        if labels.dim() == 1 and outputs.dim() == 2:
            return functional.cross_entropy(outputs, labels.long(), reduction="none")
        self._check(outputs, labels)
        flat = outputs.reshape(-1, outputs.shape[-1])
        each = functional.cross_entropy(flat, labels.reshape(-1).long(), reduction="none", ignore_index=IGNORED)
        return (each.view(labels.shape) * self._shares(labels)).flatten(1).sum(1)

    def gradients(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Return each row's gradient by its outputs: softmax minus one at the label."""
        if labels.dim() > 1 or outputs.dim() != 2:
            self._check(outputs, labels)
            shares = self._shares(labels)[..., None]
            chances = torch.softmax(outputs, dim=-1)
            minus = chances.new_full((1,), -1.0).expand(*labels.shape, 1)
            chances.scatter_add_(-1, labels.long().masked_fill(labels == IGNORED, 0)[..., None], minus)
            return torch.where(shares > 0, chances * shares, 0.0)  # whatever the outputs are where nothing counts
        chances = torch.softmax(outputs, dim=1)
        return chances.scatter_add_(1, labels.long()[:, None], chances.new_full((1, 1), -1.0).expand(len(labels), 1))

    def example_labels(self, outputs: Tensor, generator: torch.Generator) -> Tensor:
        """Return labels to check a module with; of positions, some are ignored, and all those of the last row."""
        shape = outputs.shape[:1] if outputs.dim() < 3 else outputs.shape[:-1]
        classes = outputs.shape[-1] if outputs.dim() > 1 and outputs.shape[-1] > 1 else 2
        labels = torch.randint(0, classes, shape, generator=generator)
        if outputs.dim() > 2:
            labels[torch.rand(shape, generator=generator) < 0.3] = IGNORED
            labels[-1] = IGNORED
        return labels.to(outputs.device)

    @staticmethod
    def _check(outputs: Tensor, labels: Tensor) -> None:
        if outputs.shape[:-1] != labels.shape or labels.is_floating_point():
            raise InputError(
                f"cross-entropy compares outputs (rows, positions, classes) with whole labels (rows, positions), but "
                f"these are {_shown(outputs)} and {_shown(labels)}; move the classes to the end, or choose another loss"
            )

    @staticmethod
    def _shares(labels: Tensor) -> Tensor:
        """Return one over the number of the row's positions that count, for each of them; 0 for ignored ones."""
        counts = (labels != IGNORED).float()
        return counts / counts.flatten(1).sum(1).clamp(min=1).reshape(-1, *(1,) * (labels.dim() - 1))


cross_entropy = CrossEntropy()


class BinaryLogistic:
    """ln(1 + e^(−yz)) of one output z and y = ±1 for the labels 1 and 0, with its gradient in closed form."""

    def __call__(self, outputs: Tensor, labels: Tensor) -> Tensor:
        _check_one_output(outputs)
        return functional.softplus(outputs[:, 0] * (1 - 2 * labels))

    def gradients(self, outputs: Tensor, labels: Tensor) -> Tensor:
        _check_one_output(outputs)
        return steady(torch.sigmoid, outputs) - labels[:, None]


class BinaryHinge:
    """max(0, 1 − yz) of one output z, with its gradient (at the hinge: the left one) in closed form."""

    def __call__(self, outputs: Tensor, labels: Tensor) -> Tensor:
        _check_one_output(outputs)
        return (1 - outputs[:, 0] * (2 * labels - 1)).clamp(min=0)

    def gradients(self, outputs: Tensor, labels: Tensor) -> Tensor:
        _check_one_output(outputs)
        signs = (2 * labels - 1).to(outputs.dtype)[:, None]
        return torch.where(outputs * signs < 1, -signs, 0.0)


def _check_one_output(outputs: Tensor) -> None:
    if outputs.dim() != 2 or outputs.shape[1] != 1:
        raise InputError(
            f"a binary loss takes one output a row, not {tuple(outputs.shape[1:])}; choose cross-entropy or hinge"
        )


def hinge(outputs: Tensor, labels: Tensor) -> Tensor:
    """Return Crammer and Singer's multi-class hinge: max over the wrong classes of 1 + score - right score, or 0."""
    right = outputs.gather(1, labels.long()[:, None])
    margins = (1 + outputs - right).scatter(1, labels.long()[:, None], 0.0)
    return margins.clamp(min=0).amax(1)


def is_row_wise_loss(loss: Loss) -> bool:
    """Return whether a loss is one of ours, which are row-wise and run on all rows at once."""
    from polyeps.engine.target_losses import OUR_LOSSES
    from polyeps.engine.units import UnitLoss

    if isinstance(loss, UnitLoss):
        loss = loss.loss
    ours = (CrossEntropy, BinaryLogistic, BinaryHinge, RowWiseLoss, *OUR_LOSSES)
    return type(loss) in ours or loss is hinge


def _shown(values: Tensor) -> str:
    return f"{str(values.dtype).removeprefix('torch.')} {tuple(values.shape)}"


def per_row_error(losses: object, count: int) -> str:
    """Return the error message for a loss that does not return one number per row."""
    what = f"shape {tuple(losses.shape)}" if isinstance(losses, Tensor) else f"a {type(losses).__name__}"
    return (
        f"the loss returns {what} for {count} rows; it must return one number per row, shape ({count},),"
        ' because every row is clipped on its own: pass reduction="none" to a loss of torch, and average over each'
        " row's own positions"
    )


@dataclass(frozen=True)
class RowWiseLoss:
    """Any loss, run one row at a time, so that no row's loss or gradient can depend on another row.

    By `vmap`, or by a loop where `vmap` cannot run it, for instance because a branch depends on the data.
    """

    loss: Loss
    looped: bool = False

    def __call__(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return self._each(self._one, outputs, labels)

    def gradients(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Return each row's gradient by its outputs (T, ...), by the loss's own `gradients` if it has that method."""
        closed_form = getattr(self.loss, "gradients", None)
        if closed_form is not None:
            return self._each(lambda output, label: closed_form(output[None], label[None])[0], outputs, labels)
        return self._each(self._autograd if self.looped else grad(self._one), outputs, labels)

    def _each(self, one: Callable[[Tensor, Tensor], Tensor], outputs: Tensor, labels: Tensor) -> Tensor:
        if not self.looped:
            mapped: Tensor = vmap(one)(whole_rows(outputs), whole_rows(labels))
            return mapped[: len(outputs)]
        return torch.stack([one(output, label) for output, label in zip(outputs, labels, strict=True)])

    def _one(self, output: Tensor, label: Tensor) -> Tensor:
        return self.loss(output[None], label[None])[0]

    def _autograd(self, output: Tensor, label: Tensor) -> Tensor:
        with torch.enable_grad():
            leaf = output.detach().clone().requires_grad_()
            value = self._one(leaf, label)
        (found,) = torch.autograd.grad(value, leaf)
        return found
