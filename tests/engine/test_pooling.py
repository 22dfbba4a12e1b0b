"""A ReLU and a pooling as one layer, against the two modules; on a device the kernels against torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from polyeps.engine.layers import Parameterless
from polyeps.engine.layout import Layout
from polyeps.engine.network import lower
from polyeps.engine.pooling import ReluPool, relu_pool

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def images_of(shape: tuple[int, ...]) -> Tensor:
    """Whole numbers around zero, so that many are equal."""
    generator = torch.Generator().manual_seed(3)
    return torch.randint(-3, 3, shape, generator=generator).float()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(5, 3, 8, 6), (2, 32, 7, 9), (1, 1, 2, 2)])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("last", [True, False], ids=["channels-last", "channels-first"])
def test_as_one_layer_what_the_two_modules_do(device: str, shape: tuple[int, ...], stride: int, last: bool) -> None:
    rows = images_of(shape)
    leaf = rows.clone().requires_grad_()
    wanted = nn.functional.max_pool2d(leaf.relu(), 2, stride)
    onwards = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(4))
    (back,) = torch.autograd.grad(wanted, leaf, onwards)
    layer = relu_pool(nn.ReLU(inplace=True), nn.MaxPool2d(2, stride))
    assert layer is not None
    layout = Layout(1, (), torch.zeros(0))
    form = torch.channels_last if last else torch.contiguous_format
    given = rows.to(device).contiguous(memory_format=form)
    found, saved = layer.forward(given[:, :0], given, layout)
    assert torch.equal(found.cpu(), wanted.detach())
    gradients, nothing = layer.backward(given[:, :0], saved, onwards.to(device), layout, True)
    assert nothing is None
    assert gradients is not None
    torch.testing.assert_close(gradients.cpu(), back, rtol=1e-6, atol=1e-6)  # up to four are added
    assert torch.equal(given.cpu(), rows)  # not worked on in place


@pytest.mark.parametrize("device", DEVICES)
def test_rows_may_be_images_without_channels(device: str) -> None:
    rows = images_of((5, 8, 6))
    layer = relu_pool(nn.ReLU(), nn.MaxPool2d(2))
    assert layer is not None
    layout = Layout(1, (), torch.zeros(0))
    found, saved = layer.forward(rows[:, :0], rows.to(device), layout)
    assert torch.equal(found.cpu(), nn.functional.max_pool2d(rows.relu(), 2))
    gradients, _ = layer.backward(rows[:, :0], saved, torch.ones_like(found), layout, True)
    assert gradients is not None
    assert gradients.shape == rows.shape


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("at", [0, 1, 2, 3])
def test_what_is_no_number_is_not_hidden(device: str, at: int) -> None:
    rows = torch.ones(1, 1, 2, 2)
    rows.view(-1)[at] = float("nan")
    layer = relu_pool(nn.ReLU(), nn.MaxPool2d(2))
    assert layer is not None
    found, _ = layer.forward(rows[:, :0], rows.to(device), Layout(1, (), torch.zeros(0)))
    assert found.isnan().all()


@pytest.mark.parametrize(
    "pair",
    [
        (nn.Tanh(), nn.MaxPool2d(2)),
        (nn.ReLU(), nn.AvgPool2d(2)),
        (nn.ReLU(), nn.MaxPool2d(3)),
        (nn.ReLU(), nn.MaxPool2d(2, stride=3)),
        (nn.ReLU(), nn.MaxPool2d(2, stride=(1, 2))),
        (nn.ReLU(), nn.MaxPool2d(2, padding=1)),
        (nn.ReLU(), nn.MaxPool2d(2, dilation=2)),
        (nn.ReLU(), nn.MaxPool2d(2, ceil_mode=True)),
        (nn.ReLU(), nn.MaxPool2d(2, return_indices=True)),
    ],
    ids=str,
)
def test_other_pairs_stay_two(pair: tuple[nn.Module, nn.Module]) -> None:
    assert relu_pool(*pair) is None


def test_only_neighbours_are_merged() -> None:
    apart = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(2), nn.Unflatten(2, (6, 6)), nn.MaxPool2d(2))
    together = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Sequential(nn.ReLU(), nn.MaxPool2d((2, 2))), nn.Flatten())
    assert not any(isinstance(layer, ReluPool) for layer in lower(apart).layers)
    kinds = [type(layer) for layer in lower(together).layers]
    assert kinds[1:] == [ReluPool, Parameterless]
