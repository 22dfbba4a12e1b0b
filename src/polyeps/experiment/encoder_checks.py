"""Checks of an encoder: its features of a record must not depend on other records, their number or their order.

A record is encoded with the others, with a few, with other ones, in another order, alone, twice, and by the same
encoder made anew; made-up records are encoded before and after all others. What comes out must be equal, up to
rounding.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from polyeps.errors import InputError

Apply = Callable[[NDArray[Any]], NDArray[np.float32]]
_COMPARED = 16  # records
_ALONE = 3  # of these, encoded one at a time
_ROUNDING = 1e-3  # of a feature, and of the largest one a tenth of that: batches of other sizes round otherwise
_SAME_ROUNDING = 1e-5  # where only the values of other records differ, in batches of one size


@dataclass(frozen=True, eq=False)
class Sample:
    """Some records of a data set, and others of the same kind that are nobody's."""

    places: NDArray[np.int64]
    records: NDArray[Any]
    made_up: NDArray[Any]
    far: NDArray[Any]  # from the records, to show when an encoder mixes them

    @classmethod
    def of(cls, records: NDArray[Any]) -> Self:
        """Choose records from all parts of a data set."""
        places = np.linspace(0, len(records) - 1, _COMPARED).astype(np.int64)
        some = records[places]
        if not np.issubdtype(records.dtype, np.floating):  # words, say: others might not exist
            return cls(places, some, np.zeros_like(some), some[::-1])
        made_up = np.random.default_rng(0).random(some.shape).astype(some.dtype)
        return cls(places, some, made_up, 2 * some + 1)


def check_one_by_one(name: str, apply: Apply, again: Apply, sample: Sample) -> NDArray[np.float32]:
    """Return the features of a sample; refuse an encoder whose features of a record depend on others beside it.

    `again` applies the same encoder, made anew.
    """
    some, size = sample.records, len(sample.records)
    found = apply(some)
    near, far = (apply(np.concatenate([other, some]))[size:] for other in (sample.made_up, sample.far))
    turned = apply(some[::-1])[::-1]
    twice = apply(np.concatenate([some, some]))
    others = (near, far, turned, twice[:size], twice[size:])
    if not (alike(near, far, _SAME_ROUNDING) and all(alike(rows, found) for rows in others)):
        raise differs(name)
    alone = [apply(some[row : row + 1]) for row in range(_ALONE)]
    if not all(alike(row, found[place : place + 1]) for place, row in enumerate(alone)):
        raise differs(name)
    if not alike(again(some), found):
        raise InputError(
            f"model.encoder = {name} encodes a record differently when it is made anew: it is fitted to the records it "
            "sees first, or draws its parameters without a fixed seed; fix them"
        )
    return found


def check_whole_batch(
    name: str, apply: Apply, sample: Sample, records: NDArray[Any], found: NDArray[np.float32], batch: int
) -> None:
    """Refuse an encoder whose features of some records change in a full batch of other ones.

    It may mix few records only, such as the largest of a batch, or large batches only.
    """
    others = sample.far if len(records) <= batch else sample.far[:0]
    places = np.linspace(0, len(records) - 1, min(len(records), batch - len(others))).astype(np.int64)
    again = apply(np.concatenate([others, records[places[::-1]]]))[len(others) :][::-1]
    if not alike(again, found[places]):
        raise differs(name)


def alike(first: NDArray[np.float32], second: NDArray[np.float32], rounding: float = _ROUNDING) -> bool:
    """Return whether features are equal, up to rounding."""
    if first.shape != second.shape:
        return False
    largest = float(np.abs(second).max(initial=0.0))
    return np.allclose(first, second, rtol=rounding, atol=0.1 * rounding * largest)


def differs(name: str) -> InputError:
    """Return the refusal of an encoder that mixes records."""
    return InputError(
        f"model.encoder = {name} encodes a record differently with other records beside it, so one record would "
        "change the features of others; compute each row from its own record, in 32 bits, with fixed or seeded "
        "parameters"
    )


def check_unchanged(name: str, before: NDArray[np.float32], after: NDArray[np.float32]) -> None:
    """Refuse an encoder that encodes made-up records differently after it has seen a data set."""
    if not alike(before, after, _SAME_ROUNDING):
        raise InputError(
            f"model.encoder = {name} has changed with the records it encoded, so its features depend on all of them; "
            "keep no state between calls"
        )


def state_of(encoder: Any) -> str:
    """Return a digest of the parameters and buffers of a module; "" for a function."""
    if not isinstance(encoder, nn.Module):
        return ""
    found = hashlib.sha256()
    for name, tensor in encoder.state_dict().items():
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        found.update(bytes(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()))
    return found.hexdigest()
