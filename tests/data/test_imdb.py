from __future__ import annotations

import io
import tarfile

from polyeps.data.imdb import (
    frequent_words,
    number_words,
    parse_reviews_archive,
    parse_reviews_csv,
    tokenise,
)


def test_words_of_a_text() -> None:
    assert tokenise("Don't <br />miss É-toile: 9/10".encode()) == [
        b"don't",
        b"miss",
        "É".encode(),
        b"toile",
        b"9",
        b"10",
    ]
    assert tokenise(b" ... ") == []


def test_the_most_frequent_words_come_first_and_ties_are_alphabetical() -> None:
    assert frequent_words([[b"b", b"a", b"c"], [b"c", b"d"]], 3) == [b"c", b"a", b"b"]


def test_rows_are_cut_at_the_end_and_padded_in_front() -> None:
    texts = [[b"a", b"x"], [b"b", b"a", b"a", b"b"], []]
    assert number_words(texts, [b"a", b"b"], 3).tolist() == [[0, 2, 1], [3, 2, 2], [0, 0, 0]]


def test_both_forms_give_the_same_reviews() -> None:
    from_csv = parse_reviews_csv('label,text\n0,"Bad, ""very"" bad"\n1,Good\n1,Café\n'.encode())
    stream = io.BytesIO()
    members = {
        "aclImdb/train/pos/1_9.txt": "Café",
        "aclImdb/train/pos/0_8.txt": "Good",
        "aclImdb/train/neg/0_1.txt": 'Bad, "very" bad',
        "aclImdb/train/unsup/0_0.txt": "no label",
        "aclImdb/test/neg/0_1.txt": "of the other split",
        "aclImdb/README": "about",
    }
    with tarfile.open(fileobj=stream, mode="w:gz") as archive:
        for name, text in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(text.encode())
            archive.addfile(member, io.BytesIO(text.encode()))
    from_archive = parse_reviews_archive(stream.getvalue(), "train")
    assert from_archive[0] == from_csv[0]
    assert from_archive[1].tolist() == from_csv[1].tolist() == [0, 1, 1]
