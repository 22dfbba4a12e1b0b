"""IMDb's film reviews as rows of word numbers (A. Maas et al., ACL 2011).

Tokeniser: `<br />` marks dropped, ASCII letters lowered; every run of letters, digits, apostrophes or non-ASCII
characters is a word. Vocabulary: the most frequent words of the training split, ties in alphabetical order. A row holds
the first `length` words of a review, with padding in front so that a recurrent model ends on a word.
"""

from __future__ import annotations

import contextlib
import csv
import io
import os
import tarfile
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyeps.data.dataset import Dataset
from polyeps.data.public_catalogue import PUBLIC_DATASETS
from polyeps.data.public_files import Download, obtain, places, read_files, user_cache
from polyeps.data.public_files import download as download_file
from polyeps.errors import InputError

PADDING, UNKNOWN = 0, 1
FIRST_WORD = 2  # the number of the most frequent word
TOKENISER = 1  # raise when a change here gives the same texts other rows

_WORD_BYTES = bytes(range(ord("a"), ord("z") + 1)) + b"0123456789'" + bytes(range(128, 256))
_TO_WORDS = bytes(byte if byte in _WORD_BYTES else ord(" ") for byte in bytes(range(256)).lower())
Reviews = tuple[list[bytes], NDArray[np.int64]]  # texts as UTF-8 bytes, and 1 for each positive one


def load_imdb(
    *,
    data_dir: Path | None = None,
    download: Download | None = download_file,
    vocabulary: int = 10_000,
    length: int = 256,
) -> Dataset:
    """Load IMDb with the `vocabulary` most frequent words and `length` words a review; the rows are cached."""
    if vocabulary < 1 or length < 1:
        raise InputError(f"vocabulary and length must be at least 1, not {vocabulary} and {length}")
    cached = user_cache() / "prepared" / f"imdb-{TOKENISER}-{vocabulary}-{length}.npz"
    # A copy that is absent or damaged is made again.
    damage = (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile)
    with contextlib.suppress(*damage), cached.open("rb") as stream, np.load(stream) as arrays:
        return _dataset(dict(arrays))
    found = obtain(PUBLIC_DATASETS["imdb"], places(data_dir), download)
    made = _number_reviews(read_files(found), vocabulary, length)
    with contextlib.suppress(OSError):  # a cache that cannot be written costs time, nothing else
        _write_cache(cached, made)
    return _dataset(made)


def _number_reviews(contents: list[bytes], vocabulary: int, length: int) -> dict[str, NDArray[Any]]:
    if len(contents) == 1:
        splits = [parse_reviews_archive(contents[0], split) for split in ("train", "test")]
    else:
        splits = [parse_reviews_csv(content) for content in contents]
    train, test = ([tokenise(text) for text in texts] for texts, _ in splits)
    words = frequent_words(train, vocabulary)
    return {
        "features": number_words(train, words, length).astype(np.int32),
        "labels": splits[0][1],
        "test_features": number_words(test, words, length).astype(np.int32),
        "test_labels": splits[1][1],
        "words": np.array(words),
    }


def _dataset(arrays: dict[str, NDArray[Any]]) -> Dataset:
    return Dataset(
        "imdb",
        arrays["features"].astype(np.int64),
        arrays["labels"],
        arrays["test_features"].astype(np.int64),
        arrays["test_labels"],
        PUBLIC_DATASETS["imdb"].classes,
        words=tuple(word.decode() for word in arrays["words"].tolist()),
    )


def _write_cache(path: Path, arrays: dict[str, NDArray[Any]]) -> None:
    """Write a .npz file atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with partial.open("wb") as stream:
            np.savez(stream, allow_pickle=False, **arrays)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def parse_reviews_csv(content: bytes) -> Reviews:
    """Parse a CSV file with the columns label and text."""
    rows = csv.reader(io.StringIO(content.decode(), newline=""))
    next(rows)
    labels, texts = zip(*rows, strict=True)
    return [text.encode() for text in texts], np.array(labels, dtype=np.int64)


def parse_reviews_archive(content: bytes, split: str) -> Reviews:
    """Parse a split, `train` or `test`, of the official archive: negative reviews then positive, by file name."""
    texts: dict[str, bytes] = {}
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        for member in archive:
            parts = member.name.split("/")
            if parts[1:2] == [split] and parts[2:3] in (["neg"], ["pos"]) and member.isfile():
                stream = archive.extractfile(member)
                texts[member.name] = stream.read() if stream else b""
    names = sorted(texts)
    labels = np.array([name.split("/")[2] == "pos" for name in names], dtype=np.int64)
    return [texts[name] for name in names], labels


def tokenise(text: bytes) -> list[bytes]:
    """Return the words of a text.

    >>> tokenise(b"It's GREAT...<br /><br />10/10!")
    [b"it's", b'great', b'10', b'10']
    """
    return text.replace(b"<br />", b" ").translate(_TO_WORDS).split()


def frequent_words(texts: list[list[bytes]], size: int) -> list[bytes]:
    """Return the `size` most frequent words, the most frequent first."""
    counts: Counter[bytes] = Counter()
    for words in texts:
        counts.update(words)
    return sorted(counts, key=lambda word: (-counts[word], word))[:size]


def number_words(texts: list[list[bytes]], vocabulary: list[bytes], length: int) -> NDArray[np.int64]:
    """Return one row of `length` word numbers per text."""
    number = {word: FIRST_WORD + i for i, word in enumerate(vocabulary)}
    rows = np.full((len(texts), length), PADDING, dtype=np.int64)
    for row, words in zip(rows, texts, strict=True):
        kept = words[:length]
        if kept:
            row[length - len(kept) :] = [number.get(word, UNKNOWN) for word in kept]
    return rows
