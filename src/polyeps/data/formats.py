"""Reads the published file formats: IDX images and labels, CIFAR-10 batches, delimited tables."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyeps.errors import DataError

Cells = dict[str, NDArray[np.bytes_]]  # a table by column, its cells as they stand in the file

_IDX_TYPES: dict[int, np.dtype[Any]] = {8: np.dtype(np.uint8), 12: np.dtype(">i4")}
CIFAR_RECORD = 1 + 3 * 32 * 32


def parse_idx(content: bytes, name: str) -> NDArray[Any]:
    """An IDX file: two zero bytes, a type, a rank, a size per dimension, then the values, all big-endian."""
    remedy = "delete it and fetch it again"
    if len(content) < 4 or content[:2] != b"\0\0" or content[2] not in _IDX_TYPES:
        raise DataError(f"{name} is not an IDX file of bytes or 32-bit integers: {remedy}")
    kind, rank = _IDX_TYPES[content[2]], content[3]
    start = 4 + 4 * rank
    if len(content) < start:
        raise DataError(f"{name} ends inside its header: {remedy}")
    shape = tuple(int(size) for size in np.frombuffer(content, ">u4", count=rank, offset=4))
    expected = start + math.prod(shape) * kind.itemsize
    if len(content) != expected:
        raise DataError(f"{name} has {len(content)} bytes where its header promises {expected}: {remedy}")
    return np.frombuffer(content, kind, offset=start).reshape(shape)


def parse_cifar(content: bytes, name: str) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """A binary CIFAR-10 batch: per image one label byte, then its red, green and blue planes."""
    if not content or len(content) % CIFAR_RECORD:
        raise DataError(
            f"{name} has {len(content)} bytes, not a multiple of {CIFAR_RECORD}: delete it and fetch it again"
        )
    records = np.frombuffer(content, np.uint8).reshape(-1, CIFAR_RECORD)
    return records[:, 1:].reshape(-1, 3, 32, 32), records[:, 0]


def parse_table(lines: list[bytes], names: tuple[str, ...], delimiter: bytes) -> Cells:
    """Equally long delimited lines as columns of cells; for published files only, as no quoting is read."""
    cells = np.array(delimiter.join(lines).split(delimiter))
    table = cells.reshape(len(lines), len(names))
    return {name: table[:, i] for i, name in enumerate(names)}
