"""Data sets as arrays: the value every population starts from, and the loaders of the public ones."""

from __future__ import annotations

import contextlib
import os
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyeps.data import reviews
from polyeps.data.catalogue import CATALOGUE, Entry
from polyeps.data.downloads import download as download_file
from polyeps.data.encoders import (
    ADULT_COLUMNS,
    BANK_COLUMNS,
    KDD_COLUMNS,
    encode_adult,
    encode_bank,
    encode_kdd,
)
from polyeps.data.formats import parse_cifar, parse_idx, parse_table
from polyeps.data.sources import Download, obtain, places, read, user_cache
from polyeps.errors import DataError, InputError

Labels = NDArray[np.int64]
WRITER_COLUMN = 2  # of QMNIST's extended labels: the NIST writer


@dataclass(frozen=True, eq=False)
class Dataset:
    """Records to be divided among clients, and the test records kept apart from all of them."""

    name: str
    features: NDArray[Any]  # (R, ...) float32, or int64 word numbers
    labels: Labels  # (R,) label i means classes[i]
    test_features: NDArray[Any]  # (T, ...)
    test_labels: Labels  # (T,)
    classes: tuple[str, ...]
    groups: Labels | None = None  # (R,) the writer or client each record belongs to: group_names[groups[i]]
    group_names: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()  # names of the features, when they have any
    words: tuple[str, ...] = ()  # of a text: word number reviews.FIRST_WORD + i is words[i]

    def __post_init__(self) -> None:
        for part, features, labels in (
            ("training", self.features, self.labels),
            ("test", self.test_features, self.test_labels),
        ):
            _check_records(f"{self.name}, {part} records", features, labels, self.classes, self.columns)
        if self.groups is not None and len(self.groups) != len(self.labels):
            raise DataError(f"{self.name} has {len(self.labels)} records but {len(self.groups)} group numbers")


def _check_records(
    where: str, features: NDArray[Any], labels: Labels, classes: tuple[str, ...], columns: tuple[str, ...]
) -> None:
    if len(features) != len(labels):
        raise DataError(f"{where}: {len(features)} rows of features but {len(labels)} labels, make them equal")
    if features.dtype.kind == "f" and not np.isfinite(features.sum(dtype=np.float64)):
        bad = np.argwhere(~np.isfinite(features))
        if len(bad):  # else the sum overflowed, and every value is fine
            at = tuple(int(i) for i in bad[0])
            feature = columns[at[1]] if columns else at[1:]
            raise DataError(
                f"{where}: feature {feature} of record {at[0]} is {features[at]}: fill it in or remove the record"
            )
    if len(labels) and not (labels.min() >= 0 and labels.max() < len(classes)):
        record = int(np.argmax((labels < 0) | (labels >= len(classes))))
        raise DataError(
            f"{where}: label {labels[record]} of record {record} is outside 0 to {len(classes) - 1}: "
            "correct it or remove the record"
        )


def without_test(
    name: str,
    features: NDArray[Any],
    labels: Labels,
    classes: tuple[str, ...],
    *,
    columns: tuple[str, ...] = (),
) -> Dataset:
    """A data set nobody published a test split for; `hold_out` or `folds` makes one."""
    return Dataset(name, features, labels, features[:0], labels[:0], classes, columns=columns)


def load(name: str, *, data_dir: Path | None = None, download: Download | None = download_file) -> Dataset:
    """A public data set by name, from the first place that has it; `download=None` keeps off the network."""
    if name == "digits":
        return _digits()
    if name == "imdb":
        return load_imdb(data_dir=data_dir, download=download)
    if name.startswith("syn-"):
        raise InputError(f"{name} is not loaded but made from a seed: call polyeps.data.synthetic.synthetic")
    if name not in _LOADERS:
        known = ", ".join(["digits", "imdb", *_LOADERS])
        raise InputError(f"there is no data set {name!r} to load: choose one of {known}")
    entry = CATALOGUE[name]
    found = obtain(entry, places(data_dir), download)
    return _LOADERS[name](entry, read(found))


def load_imdb(
    *,
    data_dir: Path | None = None,
    download: Download | None = download_file,
    vocabulary: int = 10_000,
    length: int = 256,
) -> Dataset:
    """IMDb with the `vocabulary` most frequent words and `length` words a review, kept in the cache."""
    if vocabulary < 1 or length < 1:
        raise InputError(f"vocabulary and length must be at least 1, not {vocabulary} and {length}")
    prepared = user_cache() / "prepared" / f"imdb-{reviews.TOKENISER}-{vocabulary}-{length}.npz"
    # A copy that is absent or damaged is made again.
    damage = (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile)
    with contextlib.suppress(*damage), prepared.open("rb") as stream, np.load(stream) as arrays:
        return _numbered_reviews(dict(arrays))
    found = obtain(CATALOGUE["imdb"], places(data_dir), download)
    made = _number_reviews(read(found), vocabulary, length)
    with contextlib.suppress(OSError):  # a cache that cannot be written costs time, nothing else
        _keep(prepared, made)
    return _numbered_reviews(made)


def _number_reviews(contents: list[bytes], vocabulary: int, length: int) -> dict[str, NDArray[Any]]:
    if len(contents) == 1:
        splits = [reviews.parse_reviews_archive(contents[0], split) for split in ("train", "test")]
    else:
        splits = [reviews.parse_reviews_csv(content) for content in contents]
    train, test = ([reviews.tokenise(text) for text in split.texts] for split in splits)
    words = reviews.frequent_words(train, vocabulary)
    return {
        "features": reviews.number_words(train, words, length).astype(np.int32),
        "labels": splits[0].labels,
        "test_features": reviews.number_words(test, words, length).astype(np.int32),
        "test_labels": splits[1].labels,
        "words": np.array(words),
    }


def _numbered_reviews(arrays: dict[str, NDArray[Any]]) -> Dataset:
    return Dataset(
        "imdb",
        arrays["features"].astype(np.int64),
        arrays["labels"],
        arrays["test_features"].astype(np.int64),
        arrays["test_labels"],
        CATALOGUE["imdb"].classes,
        words=tuple(word.decode() for word in arrays["words"].tolist()),
    )


def _keep(path: Path, arrays: dict[str, NDArray[Any]]) -> None:
    """Write a .npz file that appears whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with partial.open("wb") as stream:
            np.savez(stream, allow_pickle=False, **arrays)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _digits() -> Dataset:
    from sklearn.datasets import load_digits  # takes a second to import

    pixels, target = load_digits(return_X_y=True)
    images = (pixels.reshape(-1, 1, 8, 8) / 16).astype(np.float32)
    labels = target.astype(np.int64)
    entry = CATALOGUE["digits"]
    n = entry.records
    return Dataset("digits", images[:n], labels[:n], images[n:], labels[n:], entry.classes)


def _grey_images(content: bytes, name: str) -> NDArray[np.float32]:
    return parse_idx(content, name)[:, None].astype(np.float32) / np.float32(255)


def _idx_images(entry: Entry, contents: list[bytes]) -> Dataset:
    names = [file.path for file in entry.files]
    return Dataset(
        entry.name,
        _grey_images(contents[0], names[0]),
        parse_idx(contents[1], names[1]).astype(np.int64),
        _grey_images(contents[2], names[2]),
        parse_idx(contents[3], names[3]).astype(np.int64),
        entry.classes,
    )


def _mnist_writers(entry: Entry, contents: list[bytes]) -> Dataset:
    images = _idx_images(entry, contents[:4])
    writers, groups = np.unique(parse_idx(contents[4], entry.files[4].path)[:, WRITER_COLUMN], return_inverse=True)
    names = tuple(f"writer-{writer}" for writer in writers)
    return replace(images, groups=groups.astype(np.int64), group_names=names)


def _cifar10(entry: Entry, contents: list[bytes]) -> Dataset:
    batches = [parse_cifar(c, file.path) for c, file in zip(contents, entry.files, strict=True)]
    images, labels = zip(*batches, strict=True)
    features = [image.astype(np.float32) / np.float32(255) for image in images]
    return Dataset(
        entry.name,
        np.concatenate(features[:-1]),
        np.concatenate(labels[:-1]).astype(np.int64),
        features[-1],
        labels[-1].astype(np.int64),
        entry.classes,
    )


def _adult(entry: Entry, contents: list[bytes]) -> Dataset:
    train, test = (content.strip().split(b"\n") for content in contents)
    cells = parse_table(train + test[1:], ADULT_COLUMNS, b", ")  # the test file begins with a comment
    n = len(train)
    features, columns = encode_adult(cells, n)
    labels = np.char.startswith(cells["income"], b">50K").astype(np.int64)
    return Dataset(entry.name, features[:n], labels[:n], features[n:], labels[n:], entry.classes, columns=columns)


def _bank(entry: Entry, contents: list[bytes]) -> Dataset:
    lines = contents[0].replace(b'"', b"").split()[1:]
    cells = parse_table(lines, BANK_COLUMNS, b";")
    features, columns = encode_bank(cells)
    return without_test(entry.name, features, (cells["y"] == b"yes").astype(np.int64), entry.classes, columns=columns)


def _kddcup99(entry: Entry, contents: list[bytes]) -> Dataset:
    lines = contents[0].split()
    # Seven rows in ten are repeats: parse each distinct line once.
    distinct: dict[bytes, int] = {}
    which = np.fromiter((distinct.setdefault(line, len(distinct)) for line in lines), np.int64, len(lines))
    cells = parse_table(list(distinct), KDD_COLUMNS, b",")
    features, columns = encode_kdd(cells, np.bincount(which))
    attack = (cells["attack"] != b"normal.").astype(np.int64)
    return without_test(entry.name, features[which], attack[which], entry.classes, columns=columns)


_LOADERS: dict[str, Callable[[Entry, list[bytes]], Dataset]] = {
    "mnist": _idx_images,
    "fashion-mnist": _idx_images,
    "cifar10": _cifar10,
    "adult": _adult,
    "bank": _bank,
    "kddcup99": _kddcup99,
    "mnist-writers": _mnist_writers,
}
