"""The built-in encoders by name."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from polyeps.encoders import EncoderChoice
from polyeps.encoders.random_features import RandomConvolutions, RandomFourier, RandomProjection
from polyeps.encoders.scattering import Scattering

_USUAL_SIZE = 1024  # features


def _scattering(shape: tuple[int, ...], wanted: EncoderChoice) -> nn.Module:
    found = Scattering(shape)
    return found if wanted.size is None else nn.Sequential(found, RandomProjection(found.size, wanted.size))


def _random_fourier(shape: tuple[int, ...], wanted: EncoderChoice) -> nn.Module:
    return RandomFourier(shape, wanted.size or _USUAL_SIZE, wanted.bandwidth)


def _random_convolutions(shape: tuple[int, ...], wanted: EncoderChoice) -> nn.Module:
    return RandomConvolutions(shape, wanted.size or _USUAL_SIZE)


# A name and the function that makes the encoder for records of a shape.
ENCODERS: dict[str, Callable[[tuple[int, ...], EncoderChoice], nn.Module]] = {
    "scattering": _scattering,
    "random-fourier": _random_fourier,
    "random-convolutions": _random_convolutions,
}
