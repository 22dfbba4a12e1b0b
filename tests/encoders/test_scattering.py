"""Scattering features against their definition, summed up in space without Fourier transforms, and against kymatio."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from polyeps.encoders.scattering import Scattering
from polyeps.errors import InputError

Plane = NDArray[Any]
MARGIN = 4  # pixels around an image, with two octaves

# Of kymatio 0.3 (J = 2, L = 8) for the image below, by path and cell. It divides by 3.1415 for π in every filter.
KYMATIO = {
    (0, 2, 4): 0.5574253,
    (0, 5, 1): 0.0030360,
    (1, 2, 4): 0.0288474,
    (3, 2, 4): 0.0645493,
    (6, 5, 1): 0.0005536,
    (8, 2, 4): 0.0147685,
    (9, 5, 1): 0.0018583,
    (12, 2, 4): 0.0753322,
    (16, 2, 4): 0.0268631,
    (17, 2, 4): 0.0009871,
    (20, 2, 4): 0.0039806,
    (30, 5, 1): 0.0002062,
    (44, 2, 4): 0.0016810,
    (58, 2, 4): 0.0027150,
    (71, 5, 1): 0.0002058,
    (80, 2, 4): 0.0014981,
}


def test_kymatios_numbers() -> None:
    y, x = np.meshgrid(np.arange(28), np.arange(28), indexing="ij")
    image = np.exp(-((y - 11) ** 2 + 2 * (x - 16) ** 2) / 60) * (0.6 + 0.4 * np.cos(0.9 * y + 0.35 * x))
    found = Scattering((28, 28)).transform(torch.from_numpy(image)[None])[0]
    assert found.shape == (81, 7, 7)
    for (path, row, column), value in KYMATIO.items():
        filters = 1 if path == 0 else 2 if path < 17 else 3
        assert float(found[path, row, column]) == pytest.approx(
            value * (3.1415 / math.pi) ** filters, rel=1e-6, abs=1e-7
        )


def wavelet(size: tuple[int, int], octave: int, angle: int) -> Plane:
    """A Morlet wavelet on a torus, from its formula: a wave under a slanted Gaussian, less what makes its sum zero."""
    spread, frequency = 0.8 * 2**octave, 3 * math.pi / 4 / 2**octave
    turn = math.pi * (3 - angle) / 8
    wave, hull = np.zeros(size, complex), np.zeros(size)
    for y in range(-2 * size[0], 3 * size[0]):
        for x in range(-2 * size[1], 3 * size[1]):
            along = y * math.cos(turn) + x * math.sin(turn)
            across = -y * math.sin(turn) + x * math.cos(turn)
            height = math.exp(-(along**2 + across**2 / 4) / (2 * spread**2)) / (4 * math.pi * spread**2)
            hull[y % size[0], x % size[1]] += height
            wave[y % size[0], x % size[1]] += height * np.exp(1j * frequency * along)
    return np.asarray(wave - wave.sum() / hull.sum() * hull)


def low_pass(side: int, step: int) -> Plane:
    """The low-pass filter of one axis of an image that is taken every `step` pixels, free of what it cannot hold."""
    places = np.arange(side)
    hull = sum(np.exp(-((places + turn * side) ** 2) / (2 * 1.6**2)) for turn in range(-2, 3)) / math.sqrt(2 * math.pi)
    found = np.zeros(side // step)
    kept = range(-side // (2 * step), side // (2 * step)) if step > 1 else range(side)
    for frequency in kept:
        weight = float((hull / 1.6 * np.cos(2 * math.pi * frequency * places / side)).sum())
        found += weight * np.cos(2 * math.pi * frequency * np.arange(side // step) * step / side) * step / side
    return found


def convolved(plane: Plane, kernel: Plane) -> Plane:
    """The convolution on a torus, one shift at a time."""
    found = np.zeros(plane.shape, complex)
    for y, x in np.ndindex(*plane.shape):
        found += kernel[y, x] * np.roll(plane, (y, x), (0, 1))
    return found


def averaged(plane: Plane, step: int, cells: tuple[int, int]) -> Plane:
    high, wide = (low_pass(side * step, step) for side in plane.shape)
    found = convolved(plane, np.outer(high, wide)).real
    every = 4 // step
    return found[every : every * (1 + cells[0]) : every, every : every * (1 + cells[1]) : every]


def slowly(image: Plane) -> Plane:
    """The coefficients of two octaves by their definition."""
    cells = (-(-image.shape[0] // 4), -(-image.shape[1] // 4))
    size = (4 * cells[0] + 8, 4 * cells[1] + 8)
    far = tuple((MARGIN, whole - side - MARGIN) for whole, side in zip(size, image.shape, strict=True))
    padded = np.pad(image, far, mode="reflect")
    fine, coarse = ([wavelet(size, octave, angle) for angle in range(8)] for octave in (0, 1))
    first = [np.abs(convolved(padded, one)) for one in fine]
    found = [averaged(padded, 1, cells)] + [averaged(one, 1, cells) for one in first]
    found += [averaged(np.abs(convolved(padded, one))[::2, ::2], 2, cells) for one in coarse]
    for once in first:
        found += [averaged(np.abs(convolved(once, one))[::2, ::2], 2, cells) for one in coarse]
    return np.stack(found)


def test_coefficients_by_their_definition() -> None:
    image = np.random.default_rng(3).random((9, 8))
    found = Scattering((9, 8)).transform(torch.from_numpy(image)[None])[0].numpy()
    np.testing.assert_allclose(found, slowly(image), atol=2e-6)


def test_normalised_by_groups_of_three_channels_of_one_image() -> None:
    encoder = Scattering((28, 28))
    image = torch.rand(2, 28, 28, generator=torch.Generator().manual_seed(1))
    raw, found = encoder.transform(image).numpy(), encoder(image).numpy()
    for row in range(2):
        expected = []
        for group in range(27):
            part = raw[row, 3 * group : 3 * group + 3].astype(float).ravel()
            expected.append((part - part.mean()) / math.sqrt(part.var() + 1e-5))
        np.testing.assert_allclose(found[row], np.concatenate(expected), atol=1e-4)
        assert 0.25 < np.square(found[row]).mean() <= 1


def test_colours_are_channels_of_their_own() -> None:
    image = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(2))
    found, alone = Scattering((3, 32, 32))(image), Scattering((32, 32))
    assert found.shape == (2, 3 * 81 * 64)
    apart = torch.cat([alone(image[:, channel]) for channel in range(3)], 1)
    assert torch.allclose(found, apart, atol=1e-4)


def test_larger_images_have_more_octaves() -> None:
    found = Scattering((64, 70))
    assert (found.octaves, found.cells, found.paths) == (3, (8, 9), 217)
    image = torch.rand(2, 64, 70, generator=torch.Generator().manual_seed(4))
    assert found(image).shape == (2, 217 * 72)
    assert torch.allclose(found(image[:1]), found(image)[:1], atol=1e-6)
    # The averages of an even image are even; wavelets see nothing in it.
    assert torch.allclose(found.transform(torch.ones(1, 64, 70))[0, 0], torch.ones(8, 9), atol=1e-5)
    assert float(found.transform(torch.ones(1, 64, 70))[0, 1:].abs().max()) < 1e-5


@pytest.mark.parametrize("shape", [(64,), (7, 28), (28, 600), (2, 28, 28), (4, 1, 28, 28), (28, 28, 3), ()])
def test_other_records_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(
        InputError, match=r'"scattering" reads images .* not records of shape .*; choose "random-fourier"'
    ):
        Scattering(shape)


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 40), st.integers(0, 2**31), st.sampled_from([1e-6, 1.0, 1e6]))
def test_the_features_of_an_image_do_not_depend_on_others(others: int, seed: int, scale: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    image, beside = torch.rand(1, 10, 12, generator=generator), scale * torch.rand(others, 10, 12, generator=generator)
    encoder = Scattering((10, 12))
    assert torch.allclose(encoder(torch.cat([beside, image]))[-1], encoder(image)[0], atol=1e-6)


def test_empty_and_constant_images() -> None:
    encoder = Scattering((28, 28))
    assert encoder(torch.zeros(0, 28, 28)).shape == (0, 3969)
    assert torch.isfinite(encoder(torch.zeros(2, 28, 28))).all()
    assert not list(encoder.parameters())
    assert not encoder.state_dict()  # filters follow from formulas, and are in no file
