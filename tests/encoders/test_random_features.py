"""Random features: kernels and inner products they approximate, slow loops, and where their numbers come from."""

import math

import numpy as np
import pytest
import torch

from polyeps.encoders import EncoderChoice
from polyeps.encoders.built_in import ENCODERS
from polyeps.encoders.random_features import RandomConvolutions, RandomFourier, RandomProjection
from polyeps.errors import InputError


def rows(*shape: int) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(5))


def test_random_fourier_features_approximate_the_gaussian_kernel() -> None:
    records = rows(6, 20)
    for bandwidth in (None, 0.8, 3.0):
        found = RandomFourier((20,), 20_000, bandwidth)(records).double()
        spread = bandwidth or 0.25 * math.sqrt(20)
        kernel = torch.exp(-(torch.cdist(records, records).double() ** 2) / (2 * spread**2))
        assert torch.allclose(found @ found.T / 20_000, kernel, atol=0.03)
        assert torch.allclose(found.square().mean(1), torch.ones(6).double(), atol=1e-6)
    assert RandomFourier((4, 5), 7)(rows(3, 4, 5)).shape == (3, 7)


def test_random_convolutions_by_a_slow_loop() -> None:
    encoder, images = RandomConvolutions((3, 9, 12), 32), rows(2, 3, 9, 12)
    found = encoder(images)
    for image, row in zip(images.double().numpy(), found.numpy(), strict=True):
        padded, expected = np.pad(image, ((0, 0), (2, 2), (2, 2))), []
        for kernel in encoder.filters.double().numpy():
            assert abs(kernel.sum()) < 1e-5
            answer = np.array(
                [[max(0, (padded[:, y : y + 5, x : x + 5] * kernel).sum()) for x in range(12)] for y in range(9)]
            )
            for y, x in np.ndindex(4, 4):  # 9 rows in four parts: 0-2, 2-4, 4-6, 6-8, as adaptive pooling has them
                expected.append(answer[9 * y // 4 : -(-9 * (y + 1) // 4), 3 * x : 3 * x + 3].mean())
        centred = np.array(expected) - np.mean(expected)
        np.testing.assert_allclose(row, centred / math.sqrt(centred.var() + 1e-5), atol=1e-4)


def test_a_random_projection_keeps_inner_products_per_feature() -> None:
    features = math.sqrt(12) * (rows(5, 4000) - 0.5)
    found = RandomProjection(4000, 2000)(features)
    assert torch.allclose(found @ found.T / 2000, features @ features.T / 4000, atol=0.1)


@pytest.mark.parametrize("name", list(ENCODERS))
def test_the_encoder_is_the_same_whatever_was_drawn_before(name: str) -> None:
    made, records = ENCODERS[name], rows(3, 28, 28)
    torch.manual_seed(1)
    first = made((28, 28), EncoderChoice(name, 320))(records)
    torch.manual_seed(2)
    torch.rand(5)
    before = torch.random.get_rng_state()
    assert torch.equal(made((28, 28), EncoderChoice(name, 320))(records), first)
    assert torch.equal(torch.random.get_rng_state(), before)  # and draws nothing from what others draw from
    assert first.shape == (3, 320)


def test_sizes_that_cannot_be_are_refused() -> None:
    with pytest.raises(InputError, match="16 features for each filter; choose a multiple"):
        RandomConvolutions((28, 28), 100)
    with pytest.raises(InputError, match="encoder_size = 4000, but scattering has 3969 features"):
        ENCODERS["scattering"]((28, 28), EncoderChoice("scattering", 4000))
    with pytest.raises(InputError, match="weights; lower model"):
        RandomFourier((1 << 20,), 1 << 20)
    with pytest.raises(InputError, match="encoder_bandwidth has no effect on scattering"):
        EncoderChoice("scattering", bandwidth=1.0)
    with pytest.raises(InputError, match="encoder_size has no effect on own:encoder; fix the size"):
        EncoderChoice("own:encoder", size=3)
