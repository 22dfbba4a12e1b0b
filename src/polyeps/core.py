"""The nouns every other module speaks in; imports nothing of ours but the errors."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from polyeps.errors import InputError

if TYPE_CHECKING:  # torch takes seconds to import; the command line must start without it
    from torch import Tensor

# add-remove: neighbouring data sets differ by one unit present or absent.
# replace-one: they differ by the value of one unit; their number is public.
Adjacency = Literal["add-remove", "replace-one"]
# What one guarantee protects: a record inside a client, or everything a client holds.
Unit = Literal["record", "client"]
# Whom the protected must trust with un-noised values.
Trust = Literal["nobody", "secure-sum", "server"]


@dataclass(frozen=True, order=True)
class Budget:
    """The most privacy a client is willing to lose, all told.

    >>> Budget(1.0, 1e-5)
    Budget(epsilon=1.0, delta=1e-05)
    """

    epsilon: float
    delta: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.epsilon) and self.epsilon > 0):
            raise InputError(f"epsilon must be a finite number above 0, not {self.epsilon}")
        check_delta(self.delta)


def check_delta(delta: float) -> None:
    """Refuse a δ that is not a probability below one."""
    if not 0 <= delta < 1:  # NaN fails every comparison
        raise InputError(f"delta must be at least 0 and below 1, not {delta}")


@dataclass(frozen=True)
class Records:
    """The records of n clients in one block: client i owns rows offsets[i] up to offsets[i + 1]."""

    features: Tensor  # (R, ...)
    labels: Tensor  # (R,)
    offsets: Tensor  # (n + 1,) int64

    @property
    def clients(self) -> int:
        return len(self.offsets) - 1
