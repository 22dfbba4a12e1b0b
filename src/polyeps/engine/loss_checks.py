"""Checks of a loss before training: one number per row, of that row's outputs and target alone."""

from __future__ import annotations

import torch
from torch import Tensor

from polyeps.engine.example_rows import MAGNITUDES
from polyeps.engine.gradient_checks import name_of
from polyeps.engine.losses import Loss, RowWiseLoss, is_row_wise_loss, per_row_error
from polyeps.engine.slow_modules import warn_slow
from polyeps.errors import InputError


def checked_loss(
    loss: Loss, outputs: Tensor, generator: torch.Generator, targets: Tensor | None
) -> tuple[Loss, Tensor]:
    """Return a row-wise loss, and labels it accepts; refuse a loss in which a row depends on another row."""
    spread = torch.randn(outputs.shape, generator=generator).to(outputs)
    magnitudes = torch.tensor(MAGNITUDES).to(outputs).reshape(-1, *(1,) * (outputs.dim() - 1))
    own = outputs.nan_to_num(0.0, 0.0, 0.0).clamp(-100, 100)
    outputs = own + spread * magnitudes
    try:
        labels = _labels(loss, outputs, generator, targets)
    except InputError:  # a loss of probabilities takes the module's own outputs alone
        outputs = own
        labels = _labels(loss, outputs, generator, targets)
    if is_row_wise_loss(loss):
        return loss, labels
    leaf = outputs.clone().requires_grad_()
    with torch.enable_grad():
        together = loss(leaf, labels)
    if not isinstance(together, Tensor) or together.shape != labels.shape[:1]:
        raise InputError(per_row_error(together, len(labels)))
    if not together.requires_grad:
        raise InputError(
            "autograd cannot differentiate the loss by the outputs; compute it from them with torch operations"
        )
    (gradients,) = torch.autograd.grad(together.sum(), leaf)
    looped = RowWiseLoss(loss, looped=True)
    alone = [looped._autograd(output, label) for output, label in zip(outputs, labels, strict=True)]
    if not nearly(together.detach(), looped(outputs, labels)) or not nearly(gradients, torch.stack(alone)):
        raise InputError(
            "a row's loss depends on the other rows of the batch, so no row can be clipped on its own;"
            " return one number per row from that row's outputs and label alone"
        )
    if not nearly(looped._autograd(outputs[0], labels[0]), alone[0]):
        raise InputError("a row's loss depends on the rows that were seen before; keep nothing of them in the loss")
    apart: Loss = looped
    try:
        apart = RowWiseLoss(loss)
        found = apart.gradients(outputs, labels)
    except InputError:
        raise
    except Exception as error:  # any error of user code under vmap
        warn_slow(f"the loss {name_of(loss)}", error)
        apart = looped
        found = looped.gradients(outputs, labels)
    if found.shape != gradients.shape or not nearly(found, gradients):
        raise InputError(f"`gradients` of {name_of(loss)} does not return what autograd does; correct it or remove it")
    return apart, labels


def _labels(loss: Loss, outputs: Tensor, generator: torch.Generator, targets: Tensor | None) -> Tensor:
    """Return targets that a loss accepts: those that are stated, its own examples, classes or numbers."""
    example = getattr(loss, "example_labels", None)
    if targets is None and example is not None:
        found: Tensor = example(outputs, generator)
        return found
    classes = outputs.shape[1] if outputs.dim() > 1 and outputs.shape[1] > 1 else 2
    as_classes = torch.randint(0, classes, (len(outputs),), generator=generator).to(outputs.device)
    as_numbers = torch.randn(len(outputs), generator=generator).to(outputs.device)
    tried = [as_classes, as_numbers]
    if targets is not None:
        if not len(targets):
            raise InputError("the example targets are empty; give at least one, like those of the records")
        tried = [targets[torch.arange(len(outputs)) % len(targets)].to(outputs.device)]
    failed: Exception | None = None
    for labels in tried:
        try:
            loss(outputs, labels)
        except InputError:
            raise
        except Exception as error:
            failed = failed or error
        else:
            return labels
    shape, remedy = f"({len(outputs)},), classes or numbers", "; state others by giving example targets"
    if targets is not None:
        shape, remedy = str((len(outputs), *targets.shape[1:])), ""
    raise InputError(
        f"the loss cannot be called with outputs of shape {tuple(outputs.shape)} and targets of shape"
        f" {shape}: {failed}{remedy}"
    )


def nearly(first: Tensor, second: Tensor) -> bool:
    """Return whether numbers are equal but for rounding."""
    return torch.allclose(first, second, rtol=1e-3, atol=1e-5, equal_nan=True)
