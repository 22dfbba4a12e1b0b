"""Random features: fixed functions of a record whose weights are drawn from a public seed.

    random Fourier      cos(Wx), sin(Wx), W ~ N(0, 1/s²): Rahimi and Recht, "Random features for large-scale kernel
                        machines", 2007; inner products approximate the Gaussian kernel of bandwidth s
    random convolutions pooled responses to random filters: Coates, Lee and Ng, "An analysis of single-layer networks
                        in unsupervised feature learning", 2011, with filters that are not learnt
    random projection   Px, P ~ N(0, 1/features): keeps inner products, per feature, on average

The weights follow from the seed and from the shape of a record. No mean, variance or bandwidth is estimated from
records, and the features of a record depend on that record alone. So no budget is charged for them. Features have a
mean square of about one: then the model's bias, whose input is one, takes little of the clip of a gradient.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from polyeps.encoders.scattering import image_size
from polyeps.errors import InputError

_SEED = 2021  # public: who knows it knows the encoder, and nothing about any record
_WIDTH = 5  # pixels of a random filter
_CELLS = 4  # the responses are averaged over 4 x 4 parts of an image
_MOST_WEIGHTS = 1 << 29  # 2 GiB
_LEAST = 1e-5  # added to a variance before dividing by its root
# The bandwidth for records of d features between 0 and 1, in units of √d.
_BANDWIDTH = 0.25


class RandomFourier(nn.Module):
    """Encode records of numbers as `size` cosines and sines: rows of norm √size.

    >>> RandomFourier((30,), 200)(torch.rand(3, 30)).shape
    torch.Size([3, 200])
    """

    weights: Tensor  # (features of a record, pairs)

    def __init__(self, shape: tuple[int, ...], size: int, bandwidth: float | None = None) -> None:
        super().__init__()
        features = math.prod(shape)
        scale = bandwidth or _BANDWIDTH * math.sqrt(features)
        self.size = size
        self.register_buffer("weights", _normal(features, (size + 1) // 2) / scale, persistent=False)

    def forward(self, records: Tensor) -> Tensor:
        waves = records.flatten(1).float() @ self.weights
        return torch.cat([waves.cos(), waves.sin()], 1)[:, : self.size] * math.sqrt(2)


class RandomConvolutions(nn.Module):
    """Encode images as the rectified responses to random filters, averaged over 4 x 4 parts: norm √size or less.

    >>> RandomConvolutions((28, 28), 320)(torch.rand(3, 28, 28)).shape
    torch.Size([3, 320])
    """

    filters: Tensor  # (filters, channels, width, width)

    def __init__(self, shape: tuple[int, ...], size: int) -> None:
        super().__init__()
        if size % _CELLS**2:
            raise InputError(
                f"model.encoder_size = {size}: random-convolutions has {_CELLS**2} features for each filter; choose a "
                "multiple"
            )
        self.height, self.width = image_size(shape, "random-convolutions")
        self.channels = 1 if len(shape) == 2 else shape[0]
        drawn = _normal(size // _CELLS**2, self.channels * _WIDTH**2)
        drawn = drawn - drawn.mean(1, keepdim=True)
        drawn = drawn / drawn.norm(dim=1, keepdim=True)
        self.register_buffer("filters", drawn.reshape(-1, self.channels, _WIDTH, _WIDTH), persistent=False)
        self.size = size

    def forward(self, images: Tensor) -> Tensor:
        planes = images.reshape(-1, self.channels, self.height, self.width).float()
        found = nn.functional.conv2d(planes, self.filters, padding=_WIDTH // 2).relu()
        rows = nn.functional.adaptive_avg_pool2d(found, _CELLS).flatten(1)
        rows = rows - rows.mean(1, keepdim=True)
        return rows / (rows.square().mean(1, keepdim=True) + _LEAST).sqrt()


class RandomProjection(nn.Module):
    """Encode rows of features as `size` random combinations of them.

    >>> RandomProjection(3969, 300)(torch.rand(3, 3969)).shape
    torch.Size([3, 300])
    """

    weights: Tensor  # (features, size)

    def __init__(self, features: int, size: int) -> None:
        super().__init__()
        if size > features:
            raise InputError(
                f"model.encoder_size = {size}, but scattering has {features} features of such a record; choose fewer, "
                "or leave it out"
            )
        self.register_buffer("weights", _normal(features, size) / math.sqrt(features), persistent=False)

    def forward(self, rows: Tensor) -> Tensor:
        return rows @ self.weights


def _normal(*shape: int) -> Tensor:
    """Return normal numbers from the public seed, the same on every machine."""
    if math.prod(shape) > _MOST_WEIGHTS:
        raise InputError(f"the encoder would have {' x '.join(map(str, shape))} weights; lower model.encoder_size")
    return torch.randn(shape, generator=torch.Generator().manual_seed(_SEED))
