"""Norms of convolutions from inner products of positions, against gradients that are formed."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from polyeps.engine.contributions import Contribution, RowGradients
from polyeps.engine.convolution_rules import ConvolutionProducts, ConvolutionUse, Kind
from polyeps.engine.gram_norms import Taps, position_sums
from polyeps.engine.layout import lay_out

KINDS = {
    "plain": ((3, 3), (1, 1), (1, 1), (1, 1), (6, 5)),
    "stride": ((3, 3), (2, 2), (1, 1), (1, 1), (8, 8)),
    "uneven": ((2, 3), (2, 1), (1, 2), (1, 0), (7, 9)),
    "dilated": ((3, 3), (1, 1), (2, 2), (2, 2), (6, 6)),
    "single": ((1, 1), (2, 2), (1, 1), (0, 0), (9, 9)),
    "patches": ((4, 4), (4, 4), (1, 1), (0, 0), (16, 16)),  # many pixels for few positions
}


def use_of(name: str, several: int = 1, rows: int = 6) -> tuple[ConvolutionUse, Taps]:
    kernel, stride, dilation, padding, size = KINDS[name]
    generator = torch.Generator().manual_seed(5)
    kind = Kind(stride, padding, dilation, False, (0, 0), 1)
    weights = torch.randn(2, 7, 3, *kernel, generator=generator)
    images = torch.randn(rows, several, 3, *size, generator=generator)
    outputs = kind.outputs(images.flatten(0, 1), weights[0], None)
    gradients = torch.randn(rows, several, *outputs.shape[1:], generator=generator)
    use = ConvolutionUse((0, weights[0].numel()), kind, images, gradients, weights)
    return use, Taps(kernel, stride, dilation, padding)


@pytest.mark.parametrize("several", [1, 2])
@pytest.mark.parametrize("name", KINDS)
def test_norms_are_those_of_formed_gradients(name: str, several: int) -> None:
    use, taps = use_of(name, several)
    sums = position_sums(use.images, use.gradients, taps)
    torch.testing.assert_close(sums.squares, use.formed().double().square().sum(1), rtol=1e-6, atol=0.0)
    torch.testing.assert_close(sums.lengths, use.gradients.double().square().flatten(1).sum(1))
    assert bool((sums.terms >= sums.squares.sqrt() * (1 - 1e-9)).all())


@pytest.mark.parametrize("cancelling", [[], [1], [0, 3, 5]])
def test_rows_whose_positions_cancel_are_formed_alone(cancelling: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    use, _ = use_of("single")
    images, gradients = use.images.clone(), use.gradients.clone()
    for row in cancelling:  # all patches alike, gradients that add up to little
        images[row] = 1.0
        gradients[row] += 0.03 - gradients[row].mean((-1, -2), keepdim=True)
    use = ConvolutionUse(use.range, use.kind, images, gradients, use.weights)
    monkeypatch.setattr(ConvolutionProducts, "formed", 0)
    layout = lay_out(2, [0, 2], np.array([3]), torch.device("cpu"))
    found, wanted = ConvolutionProducts(layout, use), RowGradients(layout, use.formed())
    both: tuple[Contribution, Contribution] = found, wanted
    torch.testing.assert_close(found.squared_norms(), wanted.squared_norms(), rtol=1e-5, atol=0.0)
    assert found._alone == cancelling
    factors = torch.rand(6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    broken = torch.tensor([False, False, True, False, False, False])
    sums = [torch.zeros(2, use.range[1]) for _ in range(2)]
    for contribution, into in zip(both, sums, strict=True):
        contribution.drop(broken)
        contribution.add_to(into, factors)
    torch.testing.assert_close(sums[0], sums[1], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("clip", [1.0, 1e-3, 1e-4, 1e-6])
@pytest.mark.parametrize("small", [1e-18, 1.0, 100.0])
def test_no_row_exceeds_its_clip_where_scaled_gradients_underflow(
    clip: float, small: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Huge pixels make up for output gradients that lose their digits when they are scaled."""
    use, _ = use_of("single")
    images, gradients = torch.zeros_like(use.images), torch.zeros_like(use.gradients)
    images[:, :, 0, 0, 0], images[:, :, 0, 2, 2] = 3e38, 1e-10
    gradients[:, :, :5, 0, 0] = small * torch.linspace(1, 2, 6)[:, None, None]
    gradients[:, :, 1, 1, 1] = 1e10
    use = ConvolutionUse(use.range, use.kind, images, gradients, use.weights)
    monkeypatch.setattr(ConvolutionProducts, "formed", 0)
    found = ConvolutionProducts(lay_out(6, [0, 6], np.array([1]), torch.device("cpu")), use)
    factors = (clip * (1 - 2**-18) / found.squared_norms().sqrt()).clamp(max=1)
    into = torch.zeros(6, use.range[1])
    found.add_to(into, factors)
    lengths = torch.linalg.vector_norm(into, dim=1, dtype=torch.float64)
    assert bool((lengths <= clip).all())
    if small < 100:  # beyond that a row may be left out
        assert bool((lengths > 0.9999 * clip).all())
