"""Patches and their sums, against torch's own; on a device the kernels against the torch operations."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from polyeps.engine.convolution import Pair, added_up, patches_of

SHAPES = [((5, 5), (1, 1), 3), ((3, 2), (1, 2), 1), ((2, 4), (3, 1), 4), ((1, 1), (1, 1), 2), ((4, 4), (2, 3), 32)]
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("kernel", "stride", "channels"), SHAPES)
def test_as_torch_unfolds_and_folds(device: str, kernel: Pair, stride: Pair, channels: int) -> None:
    torch.manual_seed(1)
    images = torch.randn(3, channels, 11, 9)
    columns = functional.unfold(images, kernel, stride=stride)  # (T, in * kh * kw, positions)
    patches = patches_of(images.permute(0, 2, 3, 1).contiguous().to(device), kernel, stride)
    shaped = columns.view(3, channels, kernel[0] * kernel[1], *patches.shape[1:3]).permute(0, 3, 4, 2, 1).flatten(3)
    assert torch.equal(patches.cpu(), shaped)
    weights = torch.randn_like(columns)
    back = weights.view(3, channels, kernel[0] * kernel[1], *patches.shape[1:3]).permute(0, 3, 4, 2, 1).flatten(3)
    wanted = functional.fold(weights, (11, 9), kernel, stride=stride).permute(0, 2, 3, 1)
    torch.testing.assert_close(added_up(back.contiguous().to(device), (11, 9), kernel, stride).cpu(), wanted)
