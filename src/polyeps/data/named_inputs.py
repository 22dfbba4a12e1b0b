"""Records with several named inputs, packed into one block of numbers and described so that they can be cut out again.

The engine, partitions and ledgers know one block of features (R, W). A dictionary of arrays becomes such a block, and
`engine.adapters` cuts it into the module's arguments. Whole numbers survive exactly: the block holds whole numbers if
all inputs are, and else float32, which is exact up to 2^24.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyeps.errors import DataError, InputError

_EXACT = 1 << 24  # float32 holds all whole numbers up to it
_WHOLE = ("int64", "int32", "int16", "int8", "uint8", "bool")
_KINDS = ("float32", *_WHOLE)


@dataclass(frozen=True)
class NamedInput:
    """One input of a record: the name of the module's argument, or its place as text; its shape and its type."""

    name: str
    shape: tuple[int, ...]
    kind: str = "float32"

    def __post_init__(self) -> None:
        if not (self.name.isidentifier() or self.name.isdecimal()):
            raise InputError(f"the input {self.name!r} cannot be the name of an argument; rename it")
        if min(self.shape, default=1) < 1:
            raise InputError(f"the input {self.name!r} has shape {self.shape}, which holds nothing; leave it out")
        if self.kind not in _KINDS:
            raise InputError(
                f"the input {self.name!r} is {self.kind}; a model takes float32 or whole numbers: convert it, for "
                "instance with .float() or .astype('float32')"
            )


@dataclass(frozen=True)
class Inputs:
    """The inputs of a record, in the order in which they are packed."""

    parts: tuple[NamedInput, ...]

    def __post_init__(self) -> None:
        names = [part.name for part in self.parts]
        if not names or len(set(names)) < len(names):
            raise InputError("a record needs at least one input, and each a name of its own")
        if len({name.isdecimal() for name in names}) > 1 or (names[0].isdecimal() and names != _places(len(names))):
            raise InputError("give all inputs by name, in a dictionary, or all by place, in a tuple")

    @property
    def sizes(self) -> list[int]:
        """How many numbers each input has."""
        return [prod(part.shape) for part in self.parts]

    @property
    def kind(self) -> str:
        """The type of the block."""
        return "float32" if any(part.kind == "float32" for part in self.parts) else "int64"

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each input by name."""
        return {part.name: part.shape for part in self.parts}

    def pack(self, arrays: Mapping[str, Any], where: str = "the inputs") -> NDArray[Any]:
        """Return the block (R, W) of arrays (R, ...) that have these names, shapes and types."""
        if odd := sorted(set(self.shapes) ^ set(arrays)):
            said = "missing" if odd[0] in self.shapes else "unknown"
            raise DataError(f"{where}: the input {odd[0]!r} is {said}; give exactly {', '.join(self.shapes)}")
        found = {name: _plain(name, array) for name, array in arrays.items()}
        count = len(found[self.parts[0].name])
        columns = []
        for part in self.parts:
            array = found[part.name]
            if array.shape != (count, *part.shape):
                raise DataError(
                    f"{where}: {part.name} has shape {array.shape}, and {(count, *part.shape)} is needed; reshape it"
                )
            if part.kind != "float32":
                _check_whole(array, part, self.kind, where)
            columns.append(array.reshape(count, prod(part.shape)).astype(self.kind))
        return np.concatenate(columns, axis=1)


def inputs_of(arrays: Mapping[str, Any] | Sequence[Any]) -> Inputs:
    """Return the description of arrays (R, ...) by name, or by place; other floats than float32 become float32."""
    parts = []
    for name, array in by_name(arrays).items():
        found = _plain(name, array)
        if not found.ndim:
            raise DataError(f"the input {name!r} is a single number; give an array with one row per record")
        parts.append(NamedInput(name, found.shape[1:], "float32" if found.dtype.kind == "f" else found.dtype.name))
    return Inputs(tuple(parts))


def by_name(arrays: Mapping[str, Any] | Sequence[Any]) -> dict[str, Any]:
    """Return arrays by name; those of a tuple are called after their places.

    >>> by_name((3, 4))
    {'0': 3, '1': 4}
    """
    if isinstance(arrays, Mapping):
        return {str(name): array for name, array in arrays.items()}
    return dict(zip(_places(len(arrays)), arrays, strict=True))


def _places(count: int) -> list[str]:
    return [str(place) for place in range(count)]


def _plain(name: str, array: Any) -> NDArray[Any]:
    found = np.asarray(array.detach().cpu() if hasattr(array, "detach") else array)
    if found.dtype.kind not in "fiub":
        raise DataError(f"the input {name!r} is {found.dtype}, not numbers; convert it")
    with np.errstate(over="ignore"):  # what is too large becomes infinite, which is refused by its place
        return found.astype(np.float32) if found.dtype.kind == "f" else found


def _check_whole(array: NDArray[Any], part: NamedInput, kind: str, where: str) -> None:
    if array.dtype.kind == "f" and not np.array_equal(array, np.floor(array)):
        raise DataError(f"{where}: {part.name} must be whole numbers; convert it")
    if not array.size:
        return
    low, high = int(array.min()), int(array.max())
    bounds = (0, 1) if part.kind == "bool" else (np.iinfo(part.kind).min, np.iinfo(part.kind).max)
    if low < bounds[0] or high > bounds[1]:
        raise DataError(f"{where}: {part.name} holds {low} to {high}, and {part.kind} ends at {bounds[1]}; correct it")
    if kind == "float32" and max(-low, high) > _EXACT:
        raise DataError(
            f"{where}: {part.name} holds {low} to {high}; beside inputs of floats, whole numbers may not exceed 2^24, "
            "since they would be rounded: number them anew, or make all inputs whole numbers"
        )
