"""A multilayer perceptron with layer normalisation and a residual connection, written as a class."""

from math import prod

import torch
from torch import Tensor, nn


class LayerNormMLP(nn.Module):
    """Two dense layers, the second around a residual connection, and a classifier."""

    def __init__(self, features: int, width: int, classes: int) -> None:
        super().__init__()
        self.first = nn.Linear(features, width)
        self.norm = nn.LayerNorm(width)
        self.second = nn.Linear(width, width)
        self.classifier = nn.Linear(width, classes)

    def forward(self, records: Tensor) -> Tensor:
        hidden = torch.relu(self.first(records.flatten(1)))
        hidden = hidden + torch.relu(self.second(self.norm(hidden)))
        found: Tensor = self.classifier(hidden)
        return found


def layernorm_mlp(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Return the module for records of a shape."""
    return LayerNormMLP(prod(shape), 32, classes)
