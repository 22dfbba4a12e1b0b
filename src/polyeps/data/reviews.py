"""IMDb's film reviews as rows of word numbers.

Tokeniser: `<br />` marks dropped, ASCII letters lowered, and every run of letters, digits, apostrophes or
non-ASCII characters is a word. Vocabulary: the most frequent words of the training split, ties in
alphabetical order. A row holds the first `length` words of a review, with padding in front so that a
recurrent model ends on a word.
"""

from __future__ import annotations

import csv
import io
import tarfile
from collections import Counter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

PADDING, UNKNOWN = 0, 1
FIRST_WORD = 2  # the number of the most frequent word
TOKENISER = 1  # raise when a change here makes other rows of the same texts

_WORD_BYTES = bytes(range(ord("a"), ord("z") + 1)) + b"0123456789'" + bytes(range(128, 256))
_TO_WORDS = bytes(byte if byte in _WORD_BYTES else ord(" ") for byte in bytes(range(256)).lower())


class Reviews(NamedTuple):
    """Texts as UTF-8 bytes, and 1 for each positive one."""

    texts: list[bytes]
    labels: NDArray[np.int64]


def parse_reviews_csv(content: bytes) -> Reviews:
    """A CSV file with the columns label and text."""
    rows = csv.reader(io.StringIO(content.decode(), newline=""))
    next(rows)
    labels, texts = zip(*rows, strict=True)
    return Reviews([text.encode() for text in texts], np.array(labels, dtype=np.int64))


def parse_reviews_archive(content: bytes, split: str) -> Reviews:
    """A split, `train` or `test`, of the official archive: negative reviews then positive, by file name."""
    wanted: dict[str, bytes] = {}
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        for member in archive:
            parts = member.name.split("/")
            if parts[1:2] == [split] and parts[2:3] in (["neg"], ["pos"]) and member.isfile():
                stream = archive.extractfile(member)
                wanted[member.name] = stream.read() if stream else b""
    names = sorted(wanted)
    labels = np.array([name.split("/")[2] == "pos" for name in names], dtype=np.int64)
    return Reviews([wanted[name] for name in names], labels)


def tokenise(text: bytes) -> list[bytes]:
    """The words of a text.

    >>> tokenise(b"It's GREAT...<br /><br />10/10!")
    [b"it's", b'great', b'10', b'10']
    """
    return text.replace(b"<br />", b" ").translate(_TO_WORDS).split()


def frequent_words(texts: list[list[bytes]], size: int) -> list[bytes]:
    """The `size` most frequent words, the most frequent first."""
    counts: Counter[bytes] = Counter()
    for words in texts:
        counts.update(words)
    return sorted(counts, key=lambda word: (-counts[word], word))[:size]


def number_words(texts: list[list[bytes]], vocabulary: list[bytes], length: int) -> NDArray[np.int64]:
    """One row of `length` word numbers per text."""
    number = {word: FIRST_WORD + i for i, word in enumerate(vocabulary)}
    rows = np.full((len(texts), length), PADDING, dtype=np.int64)
    for row, words in zip(rows, texts, strict=True):
        kept = words[:length]
        if kept:
            row[length - len(kept) :] = [number.get(word, UNKNOWN) for word in kept]
    return rows
