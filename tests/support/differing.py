"""Trainings whose numbers differ between clients, for tests."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from polyeps.core import Adjacency
from polyeps.models import Model
from polyeps.training import Training


@dataclass(frozen=True)
class Differing:
    """A training with the settings of its clients."""

    run: Callable[..., Tensor]  # as `Training.run`, for all clients or for some `rows` of them
    price: Callable[[float, int], Any] | None  # (noise multiplier, row)
    adjacency: Adjacency


def of_each(build: Callable[..., Training], model: Model, **numbers: Any) -> Differing:
    """Return a training; numbers given as a list are the settings of its clients, `rows` of which a run may train.

    A number that is the clients' own is given to the builder as one that nobody could train with.
    """
    own = {name: np.asarray(values) for name, values in numbers.items() if np.ndim(values)}
    for_all = {name: value for name, value in numbers.items() if name not in own}
    for_all |= {name: math.nan for name in own if name not in ("rate", "batch", "clip", "records")}
    training = build(model, **({"clip": math.inf} if "clip" in own else {}), **for_all)

    def run(*arguments: Any, rows: Sequence[int] | None = None, **others: Any) -> Tensor:
        chosen = {name: values if rows is None else values[list(rows)] for name, values in own.items()}
        return training.run(*arguments, settings=chosen, **others)

    def price(noise_multiplier: float, row: int) -> Any:
        assert training.price is not None
        return training.price(noise_multiplier, {name: float(values[row]) for name, values in own.items()})

    return Differing(run, None if training.price is None else price, training.adjacency)
