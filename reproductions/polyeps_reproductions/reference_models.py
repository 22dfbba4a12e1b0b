"""Models as the papers' code has them, where that differs from the text; named in studies as built-in ones are."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import torch
from torch import Tensor, nn
from torch.nn import functional

from polyeps.models import Model

SOFTMAX_TWICE = "logistic-softmax-twice"
# IMDb as PFA's LSTM takes it: so many words that the model has the 160 306 parameters that the paper states; the length
# of a review is our assumption.
WORDS, LENGTH = 4225, 50


class SoftmaxTwice:
    """Cross-entropy of each row with softmax applied to the outputs and again to the result, as in PFA's code.

    Chances in place of outputs make gradients at the start ten times smaller, for ten classes.
    """

    def __call__(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(torch.softmax(outputs, dim=1), labels.long(), reduction="none")

    def gradients(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Return each row's gradient by its outputs (T, classes), in closed form."""
        chances = torch.softmax(outputs, dim=1)
        upper = torch.softmax(chances, dim=1) - functional.one_hot(labels.long(), outputs.shape[1])
        return chances * (upper - (chances * upper).sum(1, keepdim=True))


def softmax_twice(shape: tuple[int, ...], classes: int) -> Model:
    """Return logistic regression trained by `SoftmaxTwice`, started at zero."""
    features = prod(shape)
    return Model(nn.Sequential(nn.Linear(features, classes)), SoftmaxTwice(), (features,), start_at_zero=True)


MODELS_OF_CODE: dict[str, Callable[[tuple[int, ...], int], Model]] = {SOFTMAX_TWICE: softmax_twice}
