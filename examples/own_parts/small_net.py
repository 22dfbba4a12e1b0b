"""An own model: any torch module that treats the records of a batch one by one."""

from math import prod

from torch import nn


def small_net(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Two dense layers with a normalisation between them."""
    layers = [nn.Flatten(), nn.Linear(prod(shape), 16), nn.LayerNorm(16), nn.Tanh(), nn.Linear(16, classes)]
    return nn.Sequential(*layers)
