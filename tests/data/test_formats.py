from __future__ import annotations

import struct

import numpy as np
import pytest

from polyeps.data.formats import CIFAR_RECORD, parse_cifar, parse_idx, parse_table
from polyeps.errors import DataError


def idx(kind: int, shape: tuple[int, ...], body: bytes) -> bytes:
    return bytes([0, 0, kind, len(shape)]) + struct.pack(f">{len(shape)}I", *shape) + body


def test_idx_of_bytes_and_of_integers() -> None:
    np.testing.assert_array_equal(parse_idx(idx(8, (2, 3), bytes(range(6))), "f"), [[0, 1, 2], [3, 4, 5]])
    np.testing.assert_array_equal(parse_idx(idx(12, (2,), struct.pack(">2i", -1, 70_000)), "f"), [-1, 70_000])


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"", "is not an IDX file"),
        (b"\x1f\x8b\x08\x00", "is not an IDX file"),
        (idx(13, (1,), b"0000"), "is not an IDX file"),
        (bytes([0, 0, 8, 2, 0]), "ends inside its header"),
        (idx(8, (2, 3), bytes(5)), "has 17 bytes where its header promises 18"),
        (idx(8, (2, 3), bytes(7)), "has 19 bytes where its header promises 18"),
    ],
)
def test_a_damaged_idx_file_is_refused_by_name(content: bytes, what: str) -> None:
    with pytest.raises(DataError, match=rf"some-file {what}.*fetch it again"):
        parse_idx(content, "some-file")


def test_a_cifar_record_is_a_label_and_three_planes() -> None:
    planes = np.arange(3072, dtype=np.uint8)
    images, labels = parse_cifar(bytes([7]) + planes.tobytes() + bytes([1]) + bytes(3072), "f")
    assert labels.tolist() == [7, 1]
    np.testing.assert_array_equal(images[0], planes.reshape(3, 32, 32))


@pytest.mark.parametrize("length", [0, CIFAR_RECORD - 1, CIFAR_RECORD + 1])
def test_a_damaged_cifar_batch_is_refused_by_name(length: int) -> None:
    with pytest.raises(DataError, match=rf"batch has {length} bytes, not a multiple"):
        parse_cifar(bytes(length), "batch")


def test_a_table_by_column() -> None:
    table = parse_table([b"1;a", b"2;bb"], ("number", "word"), b";")
    assert table["number"].astype(int).tolist() == [1, 2]
    assert table["word"].tolist() == [b"a", b"bb"]
