"""Losses of a user's own: one number per row, from that row alone, or refused before anybody trains."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from polyeps.engine.losses import RowWiseLoss
from polyeps.engine.network import lower, output_gradients
from polyeps.errors import InputError
from polyeps.models import Model, cross_entropy

Plain = Callable[[Tensor, Tensor], Tensor]


def each(outputs: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(outputs, labels, reduction="none")


class Wrong:
    """A loss whose closed form is not its gradient."""

    def __call__(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return each(outputs, labels)

    def gradients(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return torch.softmax(outputs, 1) - 0.5 * functional.one_hot(labels, outputs.shape[1])


class Right(Wrong):
    def gradients(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy.gradients(outputs, labels)


@pytest.mark.parametrize(
    "loss",
    [
        nn.CrossEntropyLoss(),
        nn.CrossEntropyLoss(reduction="sum"),
        nn.MultiMarginLoss(),
        lambda outputs, labels: each(outputs, labels)[:, None],
        lambda outputs, labels: (outputs - functional.one_hot(labels, 3)).square(),
        lambda outputs, labels: float(each(outputs, labels).detach().sum()),
    ],
    ids=["mean", "sum", "margin", "column", "matrix", "number"],
)
def test_a_loss_that_is_not_one_number_per_row_is_refused(loss: Plain) -> None:
    with pytest.raises(InputError, match=r"one number per row.*reduction=.none"):
        Model(nn.Linear(4, 3), loss, (4,))


@pytest.mark.parametrize(
    "loss",
    [
        lambda outputs, labels: each(outputs - outputs.mean(0), labels),
        lambda outputs, labels: each(outputs, labels).mean().expand(len(outputs)),
        lambda outputs, labels: each(outputs, labels) * labels.float().mean(),
        lambda outputs, labels: each(outputs, labels).sort().values,
        lambda outputs, labels: each(outputs / outputs.detach().abs().max(), labels),
        lambda outputs, labels: each(outputs, labels).flip(0),
    ],
    ids=["centred", "mean", "labels", "sorted", "scaled", "flipped"],
)
def test_a_loss_that_mixes_rows_is_refused(loss: Plain) -> None:
    with pytest.raises(InputError, match="depends on the other rows"):
        Model(nn.Linear(4, 3), loss, (4,))


def test_a_loss_that_remembers_rows_is_refused() -> None:
    mean = [1.0]

    def scaled(outputs: Tensor, labels: Tensor) -> Tensor:
        losses = each(outputs, labels)
        mean[0] = 0.9 * mean[0] + 0.1 * float(losses.detach().mean())
        return losses / mean[0]

    with pytest.raises(InputError, match=r"seen before|depends on the other rows"):
        Model(nn.Linear(4, 3), scaled, (4,))


def test_a_closed_form_that_is_not_the_gradient_is_refused() -> None:
    with pytest.raises(InputError, match="`gradients` of Wrong"):
        Model(nn.Linear(4, 3), Wrong(), (4,))
    assert isinstance(Model(nn.Linear(4, 3), Right(), (4,)).loss, RowWiseLoss)


def test_a_loss_that_autograd_cannot_follow_or_that_fails_is_refused() -> None:
    with pytest.raises(InputError, match="autograd cannot differentiate"):
        Model(nn.Linear(4, 3), lambda outputs, labels: each(outputs, labels).detach(), (4,))
    with pytest.raises(InputError, match="cannot be called with outputs"):
        Model(nn.Linear(4, 3), lambda outputs, labels: functional.bilinear(outputs, labels, outputs), (4,))


@pytest.mark.parametrize(
    "loss",
    [
        nn.CrossEntropyLoss(reduction="none", label_smoothing=0.1),
        Right(),
        lambda outputs, labels: (outputs[:, 0] - labels).square(),
        lambda outputs, labels: functional.binary_cross_entropy_with_logits(
            outputs[:, 0], labels.float(), reduction="none"
        ),
    ],
    ids=["smoothed", "closed form", "squares", "binary"],
)
def test_gradients_of_an_own_loss_are_autograds(loss: Plain) -> None:
    model = Model(nn.Linear(4, 3), loss, (4,))
    outputs = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([0, 1, 1, 0, 1, 0])
    leaf = outputs.clone().requires_grad_()
    (wanted,) = torch.autograd.grad(loss(leaf, labels).sum(), leaf)
    torch.testing.assert_close(output_gradients(model.loss, outputs, labels, None), wanted)
    weights = torch.arange(6.0)
    torch.testing.assert_close(output_gradients(model.loss, outputs, labels, weights), wanted * weights[:, None])


@pytest.mark.parametrize("threshold", [1e5, 1e9])
def test_a_branch_that_no_probe_takes_still_cannot_mix_rows(threshold: float) -> None:
    """Under large outputs of one row, this loss would change every row's: so it is run row by row."""

    def loss(outputs: Tensor, labels: Tensor) -> Tensor:
        return each(outputs, labels) * (2 if outputs.abs().max() > threshold else 1)

    with pytest.warns(UserWarning, match="one row after the other"):
        model = Model(nn.Linear(4, 3), loss, (4,))
    outputs, labels = torch.randn(3, 3), torch.tensor([0, 1, 2])
    calm = output_gradients(model.loss, outputs, labels, None)
    outputs[0] = 10 * threshold
    assert torch.equal(output_gradients(model.loss, outputs, labels, None)[1:], calm[1:])


def test_shapes_are_checked_even_where_no_model_was_made() -> None:
    outputs, labels = torch.randn(3, 3), torch.tensor([0, 1, 2])
    with pytest.raises(InputError, match="one number per row"):
        output_gradients(nn.CrossEntropyLoss(), outputs, labels, None)
    assert lower(nn.Linear(4, 3)).size == 15
