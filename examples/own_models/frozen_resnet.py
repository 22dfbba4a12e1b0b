"""A ResNet-18 with GroupNorm whose layers are frozen; only the classifier on top is trained."""

from itertools import pairwise

import torch
from torch import Tensor, nn


class Residual(nn.Module):
    """Two convolutions with a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.first_norm = nn.GroupNorm(4, outputs)
        self.second = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.second_norm = nn.GroupNorm(4, outputs)
        same = stride == 1 and inputs == outputs
        self.shortcut = nn.Identity() if same else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, images: Tensor) -> Tensor:
        found = torch.relu(self.first_norm(self.first(images)))
        return torch.relu(self.second_norm(self.second(found)) + self.shortcut(images))


class ResNet18(nn.Module):
    """Eight residual blocks of two convolutions each, narrow, and with two halvings for small images."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(channels, width, 3, 1, 1, bias=False), nn.GroupNorm(4, width), nn.ReLU())
        widths = [width, width, 2 * width, 4 * width, 8 * width]
        blocks = []
        for stage, (before, after) in enumerate(pairwise(widths)):
            blocks += [Residual(before, after, 2 if stage > 1 else 1), Residual(after, after, 1)]
        self.blocks = nn.Sequential(*blocks)

    def forward(self, images: Tensor) -> Tensor:
        found: Tensor = self.blocks(self.stem(images)).flatten(1)
        return found


class FrozenResNet(nn.Module):
    """The frozen network and the trained classifier."""

    def __init__(self, channels: int, height: int, width: int, classes: int) -> None:
        super().__init__()
        self.encoder = ResNet18(channels, 8).requires_grad_(False)
        self.classifier = nn.Linear(64 * (height // 4) * (width // 4), classes)

    def forward(self, records: Tensor) -> Tensor:
        images = records.unsqueeze(1) if records.dim() == 3 else records  # a grey image has one channel
        found: Tensor = self.classifier(self.encoder(images))
        return found


def frozen_resnet(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Return the module for images; load public weights into its encoder here."""
    return FrozenResNet(shape[0] if len(shape) > 2 else 1, shape[-2], shape[-1], classes)


def resnet_features() -> nn.Module:
    """Return the frozen network as an encoder: features of a record are computed once and kept."""
    return ResNet18(1, 8).requires_grad_(False)
