"""Loads the public data sets by name, from published files in IDX, CIFAR-10 or table form."""

from __future__ import annotations

import gzip
import importlib.util
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyeps.data import uci_tables
from polyeps.data.dataset import Dataset, without_test
from polyeps.data.imdb import load_imdb
from polyeps.data.public_catalogue import PUBLIC_DATASETS, PublicDataset
from polyeps.data.public_files import Download, obtain, places, read_files
from polyeps.data.public_files import download as download_file
from polyeps.errors import DataError, InputError, suggest

_WRITER_COLUMN = 2  # of QMNIST's extended labels: the NIST writer
_IDX_TYPES: dict[int, np.dtype[Any]] = {8: np.dtype(np.uint8), 12: np.dtype(">i4")}
CIFAR_RECORD = 1 + 3 * 32 * 32


def load_dataset(name: str, *, data_dir: Path | None = None, download: Download | None = download_file) -> Dataset:
    """Load a public data set from the first place that has its files; `download=None` stays off the network."""
    if name == "digits":
        return _digits()
    if name == "imdb":
        return load_imdb(data_dir=data_dir, download=download)
    if name.startswith("syn-"):
        raise InputError(f"{name} is not loaded but made from a seed: call polyeps.data.synthetic.synthetic")
    if name not in _LOADERS:
        raise InputError(f"there is no data set {name!r} to load: {suggest(name, ['digits', 'imdb', *_LOADERS])}")
    published = PUBLIC_DATASETS[name]
    return _LOADERS[name](published, read_files(obtain(published, places(data_dir), download)))


def _digits() -> Dataset:
    found = importlib.util.find_spec("sklearn")  # whose import takes a second: the file alone is read
    if found is None or found.origin is None:
        raise DataError("digits are a file of scikit-learn, which is not installed: pip install scikit-learn")
    with gzip.open(Path(found.origin).parent / "datasets" / "data" / "digits.csv.gz", "rt", encoding="ascii") as file:
        numbers = np.loadtxt(file, np.int64, delimiter=",")
    images = (numbers[:, :-1].reshape(-1, 1, 8, 8) / 16).astype(np.float32)
    labels = numbers[:, -1].copy()
    published = PUBLIC_DATASETS["digits"]
    n = published.records
    return Dataset("digits", images[:n], labels[:n], images[n:], labels[n:], published.classes)


def parse_idx(content: bytes, name: str) -> NDArray[Any]:
    """Parse an IDX file: two zero bytes, a type, a rank, a size per dimension, then the values, all big-endian."""
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
        raise DataError(f"{name} has {len(content)} bytes where its header announces {expected}: {remedy}")
    return np.frombuffer(content, kind, offset=start).reshape(shape)


def _idx_images(published: PublicDataset, contents: list[bytes]) -> Dataset:
    arrays = [parse_idx(content, file.path) for content, file in zip(contents, published.files, strict=False)]
    images = [pixels[:, None].astype(np.float32) / np.float32(255) for pixels in arrays[::2]]
    labels = [numbers.astype(np.int64) for numbers in arrays[1::2]]
    return Dataset(published.name, images[0], labels[0], images[1], labels[1], published.classes)


def _mnist_writers(published: PublicDataset, contents: list[bytes]) -> Dataset:
    images = _idx_images(published, contents[:4])
    extended = parse_idx(contents[4], published.files[4].path)
    writers, groups = np.unique(extended[:, _WRITER_COLUMN], return_inverse=True)
    names = tuple(f"writer-{writer}" for writer in writers)
    return replace(images, groups=groups.astype(np.int64), group_names=names)


def parse_cifar(content: bytes, name: str) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Parse a binary CIFAR-10 batch: per image one label byte, then its red, green and blue planes."""
    if not content or len(content) % CIFAR_RECORD:
        raise DataError(f"{name} has {len(content)} bytes, not a multiple of {CIFAR_RECORD}: fetch it again")
    records = np.frombuffer(content, np.uint8).reshape(-1, CIFAR_RECORD)
    return records[:, 1:].reshape(-1, 3, 32, 32), records[:, 0]


def _cifar10(published: PublicDataset, contents: list[bytes]) -> Dataset:
    batches = [parse_cifar(content, file.path) for content, file in zip(contents, published.files, strict=True)]
    features = [images.astype(np.float32) / np.float32(255) for images, _ in batches]
    labels = [numbers.astype(np.int64) for _, numbers in batches]
    training = np.concatenate(features[:-1]), np.concatenate(labels[:-1])
    return Dataset(published.name, *training, features[-1], labels[-1], published.classes)


def _adult(published: PublicDataset, contents: list[bytes]) -> Dataset:
    train, test = (content.strip().split(b"\n") for content in contents)
    # The test file begins with a comment.
    cells = uci_tables.parse_table(train + test[1:], uci_tables.ADULT_COLUMNS, b", ")
    n = len(train)
    rows, columns = uci_tables.encode_adult(cells, n)
    labels = np.char.startswith(cells["income"], b">50K").astype(np.int64)
    return Dataset(published.name, rows[:n], labels[:n], rows[n:], labels[n:], published.classes, columns=columns)


def _bank(published: PublicDataset, contents: list[bytes]) -> Dataset:
    lines = contents[0].replace(b'"', b"").split()[1:]
    cells = uci_tables.parse_table(lines, uci_tables.BANK_COLUMNS, b";")
    features, columns = uci_tables.encode_bank(cells)
    labels = (cells["y"] == b"yes").astype(np.int64)
    return without_test(published.name, features, labels, published.classes, columns=columns)


def _kddcup99(published: PublicDataset, contents: list[bytes]) -> Dataset:
    lines = contents[0].split()
    # Seven rows in ten are repeats: parse each distinct line once.
    distinct: dict[bytes, int] = {}
    which = np.fromiter((distinct.setdefault(line, len(distinct)) for line in lines), np.int64, len(lines))
    cells = uci_tables.parse_table(list(distinct), uci_tables.KDD_COLUMNS, b",")
    features, columns = uci_tables.encode_kdd(cells, np.bincount(which))
    attack = (cells["attack"] != b"normal.").astype(np.int64)
    return without_test(published.name, features[which], attack[which], published.classes, columns=columns)


_LOADERS: dict[str, Callable[[PublicDataset, list[bytes]], Dataset]] = {
    "mnist": _idx_images,
    "fashion-mnist": _idx_images,
    "cifar10": _cifar10,
    "adult": _adult,
    "bank": _bank,
    "kddcup99": _kddcup99,
    "mnist-writers": _mnist_writers,
}
