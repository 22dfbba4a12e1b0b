"""Encoders: fixed functions of one record, applied before training.

An encoder is part of the model, and public. A built-in one is made from the shape of a record, its parameters and a
constant seed, never from records, and its features of a record depend on that record alone. So one record changes the
features of no other, the clip of its gradient bounds its influence, and nothing is charged for encoding.
"""

from __future__ import annotations

from dataclasses import dataclass

from polyeps.errors import InputError

ENCODER_NAMES = ("scattering", "random-fourier", "random-convolutions")


@dataclass(frozen=True)
class EncoderChoice:
    """An encoder by its name, and its parameters."""

    name: str
    size: int | None = None  # number of features
    bandwidth: float | None = None  # of random-fourier

    def __post_init__(self) -> None:
        if self.bandwidth is not None and self.name != "random-fourier":
            raise InputError(
                f"model.encoder_bandwidth has no effect on {self.name}, only on random-fourier; leave it out"
            )
        if self.size is not None and self.name not in ENCODER_NAMES:
            raise InputError(f"model.encoder_size has no effect on {self.name}; fix the size in your encoder")
