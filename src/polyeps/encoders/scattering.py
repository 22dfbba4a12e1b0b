"""Scattering features of images: local averages of the absolute values of wavelet coefficients.

Two layers of Morlet wavelets, as in Bruna and Mallat, "Invariant scattering convolution networks", 2013, normalised in
groups of channels as in Tramèr and Boneh, "Differentially private learning needs better features", 2021.

    J  octaves     psi[j, l]  wavelet of octave j and angle πl/L     phi  low-pass filter
    S0 = x*phi     S1 = |x*psi1|*phi     S2 = ||x*psi1|*psi2|*phi, octave 2 above octave 1; all taken every 2^J pixels

The filters follow from formulas and the size of the images. Nothing is learnt, and the features of an image depend on
that image alone: mean and variance are taken over the features of one image, never over images. So the features tell
nothing about a record but to its own client, and no budget is charged for them.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from polyeps.errors import InputError

_SIDES = (8, 256)  # pixels: margins mirror up to 7, and the filters of large images fill the memory
_ANGLES = 8
_SPREAD = 0.8  # width of the filters of the finest octave, in pixels
_FREQUENCY = 3 * math.pi / 4  # centre of the wavelets of the finest octave
_WRAPS = 2  # copies of a filter on each side that a periodic one sums
_WIDE = 64  # pixels of a plane on which a filter's second copy has fallen below 1e-30
_LEAST = 1e-5  # added to a variance before dividing by its root
_AT_ONCE = {"cpu": 1 << 22, "cuda": 1 << 30}  # bytes of wavelet coefficients held at a time; a CPU keeps them in caches


class Scattering(nn.Module):
    """Encode images (n, height, width) or (n, channels, height, width) as rows of mean square one or less.

    >>> Scattering((28, 28))(torch.rand(3, 28, 28)).shape
    torch.Size([3, 3969])
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.height, self.width = image_size(shape, "scattering")
        self.channels = 1 if len(shape) == 2 else shape[0]
        # Two octaves up to 63 pixels; a larger image has 8 to 15 cells on its shorter side.
        self.octaves: int = max(2, int(math.log2(min(self.height, self.width) / _SIDES[0])))
        self.stride = 2**self.octaves
        self.cells = (-(-self.height // self.stride), -(-self.width // self.stride))
        for octave in range(self.octaves):
            self._add_wavelets(octave)
            for axis in (0, 1):
                self._keep(f"averages{axis}_{octave}", self._averages(self.padded[axis], self.cells[axis], octave))

    @property
    def paths(self) -> int:
        """The number of channels that an image channel becomes."""
        pairs: int = self.octaves * (self.octaves - 1) // 2
        return 1 + self.octaves * _ANGLES + pairs * _ANGLES**2

    @property
    def size(self) -> int:
        """The number of features of an image."""
        return math.prod((self.channels, self.paths, *self.cells))

    @property
    def padded(self) -> tuple[int, int]:
        """The size of images with margins, so that opposite borders do not meet: a multiple of the stride."""
        return self.stride * (self.cells[0] + 2), self.stride * (self.cells[1] + 2)

    def forward(self, images: Tensor) -> Tensor:
        if not len(images):
            return images.new_zeros(0, self.size)
        planes = images.reshape(-1, self.height, self.width)
        each = _ANGLES**2 * self.padded[0] * self.padded[1] * 8 // 4  # bytes, of the second layer
        some = max(1, _AT_ONCE.get(planes.device.type, _AT_ONCE["cpu"]) // each)
        found = torch.cat([self.transform(part) for part in planes.split(some)])  # type: ignore[no-untyped-call]
        return self._normalised(found.reshape(len(images), self.channels * self.paths, -1))

    def transform(self, planes: Tensor) -> Tensor:
        """Return the scattering coefficients (n, paths, cells down, cells across) of images (n, height, width)."""
        down, right = self.padded[0] - self.height - self.stride, self.padded[1] - self.width - self.stride
        margins = (self.stride, right, self.stride, down)
        padded = nn.functional.pad(planes.float()[:, None], margins, mode="reflect")
        spectrum = torch.fft.fft2(padded)  # (n, 1, padded size)
        zeroth, first, second = [self._averaged(padded, 0)], [], []
        for octave in range(self.octaves):
            once = self._modulus(spectrum, 0, octave)
            first.append(self._averaged(once, octave))
            if octave + 1 < self.octaves:
                again = torch.fft.fft2(once)[:, :, None]
                second += [
                    self._averaged(self._modulus(again, octave, coarser), coarser).flatten(1, 2)
                    for coarser in range(octave + 1, self.octaves)
                ]
        return torch.cat(zeroth + first + second, dim=1)

    def _modulus(self, spectrum: Tensor, k: int, octave: int) -> Tensor:
        """Return absolute wavelet coefficients of all angles, every 2^octave pixels, of images every 2^k pixels."""
        filters, step = getattr(self, f"wavelets{octave}_{k}"), 2 ** (octave - k)  # (blocks, angles, numbers)
        *rows, high, wide = spectrum.shape
        parts = torch.view_as_real(spectrum.reshape(*rows, step, high // step, step, wide // step))
        found: Tensor | None = None
        # The spectrum of every step-th pixel is a sum over blocks; as flat rows they are multiplied fastest.
        for (row, column), block in zip(np.ndindex(step, step), filters, strict=True):
            part = parts[..., row, :, column, :, :].flatten(-3)
            found = part * block if found is None else found.addcmul_(part, block)
        assert found is not None
        waves = torch.view_as_complex(found.reshape(*rows[:-1], _ANGLES, high // step, wide // step, 2))
        moduli: Tensor = torch.fft.ifft2(waves).abs()
        return moduli

    def _averaged(self, planes: Tensor, k: int) -> Tensor:
        """Return local averages every 2^octaves pixels, without the margins, of images every 2^k pixels."""
        across = planes @ getattr(self, f"averages1_{k}").T
        found: Tensor = (across.transpose(-1, -2) @ getattr(self, f"averages0_{k}").T).transpose(-1, -2)
        return found

    def _normalised(self, features: Tensor) -> Tensor:
        """Return rows of zero mean and variance one, unless constant, in every group of an image's channels."""
        together = next(count for count in range(3, self.paths + 1) if self.paths % count == 0)
        parts = features.reshape(len(features), -1, together * features.shape[2])
        parts = parts - parts.mean(2, keepdim=True)
        parts = parts / (parts.square().mean(2, keepdim=True) + _LEAST).sqrt()
        return parts.flatten(1)

    def _add_wavelets(self, octave: int) -> None:
        found = []
        for angle in range(_ANGLES):
            turn = math.pi * (_ANGLES // 2 - 1 - angle) / _ANGLES
            waves = _waves(self.padded, _SPREAD * 2**octave, turn, _FREQUENCY / 2**octave)
            hull = _waves(self.padded, _SPREAD * 2**octave, turn, 0.0)
            found.append(np.fft.fft2(waves - waves.sum() / hull.sum() * hull).real)  # which is zero at frequency zero
        for k in range(octave + 1):
            spectra, step = _folded(_folded(np.stack(found), 1, k), 2, k), 2 ** (octave - k)
            high, wide = spectra.shape[1:]
            blocks = spectra.reshape(-1, step, high // step, step, wide // step).transpose(1, 3, 0, 2, 4) / step**2
            both = np.repeat(blocks.reshape(step**2, _ANGLES, -1), 2, axis=2)  # for real and imaginary parts
            self._keep(f"wavelets{octave}_{k}", both)

    def _averages(self, side: int, cells: int, k: int) -> NDArray[np.float64]:
        """Return the low-pass filter along one axis as a matrix, (cells, pixels taken every 2^k)."""
        spread = _SPREAD * 2 ** (self.octaves - 1)
        places = np.arange(-_WRAPS * side, (_WRAPS + 1) * side)
        hull = np.exp(-(places**2) / (2 * spread**2)) / (math.sqrt(2 * math.pi) * spread)
        spectrum = np.fft.fft(hull.reshape(-1, side).sum(0)).real
        weights = np.fft.ifft(_folded(spectrum, 0, k)).real
        step = 2 ** (self.octaves - k)
        return np.stack([weights[(step * cell - np.arange(side >> k)) % (side >> k)] for cell in range(1, cells + 1)])

    def _keep(self, name: str, values: NDArray[np.float64]) -> None:
        self.register_buffer(name, torch.from_numpy(values).float(), persistent=False)


def image_size(shape: tuple[int, ...], encoder: str) -> tuple[int, int]:
    """Return the height and width of records that are images, (height, width) or (channels, height, width)."""
    sides, channels = shape[-2:], shape[:-2]
    if len(sides) < 2 or channels not in ((), (1,), (3,)) or min(sides) < _SIDES[0] or max(sides) > _SIDES[1]:
        raise InputError(
            f'model.encoder = "{encoder}" reads images with 1 or 3 channels, (height, width) or (channels, height, '
            f"width), with sides of {_SIDES[0]} to {_SIDES[1]} pixels, not records of shape {shape}; choose "
            '"random-fourier", which takes any numbers'
        )
    return shape[-2], shape[-1]


def _waves(size: tuple[int, int], spread: float, turn: float, frequency: float) -> NDArray[np.complex128]:
    """Return a wave under a Gaussian hull around pixel (0, 0), on a plane whose borders meet."""
    cosine, sine, slant = math.cos(turn), math.sin(turn), 4 / _ANGLES
    turned = np.array([[cosine, -sine], [sine, cosine]])
    curve = turned @ np.diag([1, slant**2]) @ turned.T / (2 * spread**2)
    wraps = _WRAPS if min(size) < _WIDE else 1
    high, wide = (np.arange(-wraps * side, (wraps + 1) * side) for side in size)
    y, x = np.meshgrid(high, wide, indexing="ij")
    hull = np.exp(-(curve[0, 0] * y**2 + 2 * curve[0, 1] * y * x + curve[1, 1] * x**2))
    waves = hull * np.exp(1j * frequency * (y * cosine + x * sine)) / (2 * math.pi * spread**2 / slant)
    copies = 2 * wraps + 1
    return np.asarray(waves.reshape(copies, size[0], copies, size[1]).sum((0, 2)))


def _folded(spectrum: NDArray[np.float64], axis: int, k: int) -> NDArray[np.float64]:
    """Return a filter's spectrum along an axis, for images that are taken every 2^k pixels."""
    if not k:
        return spectrum
    side = spectrum.shape[axis]
    found = np.moveaxis(spectrum, axis, -1).copy()
    found[..., side >> (k + 1) : (side >> (k + 1)) + side - (side >> k)] = 0  # which such images cannot hold
    return np.moveaxis(found.reshape(*found.shape[:-1], 2**k, -1).sum(-2), -1, axis)
