import numpy as np
import pytest

from polyeps.engine.noise import SeededStreams, SystemStreams
from polyeps.mechanisms.random_words import SeededWords, SystemWords, WordStreams, words_of


def drawn(words: WordStreams, rows: list[int], count: int) -> np.ndarray[tuple[int, ...], np.dtype[np.uint64]]:
    out = np.empty((len(rows), count), np.uint64)
    words.fill(out, rows)
    return out


def test_a_clients_words_depend_on_itself_alone() -> None:
    both = drawn(SeededWords(SeededStreams(7, ["a", "b"], 3), "update"), [0, 1], 50)
    alone = SeededWords(SeededStreams(7, ["b"], 3), "update")
    assert np.array_equal(np.append(drawn(alone, [0], 20), drawn(alone, [0], 30)), both[1])
    assert not np.isin(both[0], both[1]).any()


@pytest.mark.parametrize(("seed", "round", "release"), [(8, 3, "update"), (7, 4, "update"), (7, 3, "again")])
def test_seed_round_and_release_each_change_the_words(seed: int, round: int, release: str) -> None:
    first = drawn(SeededWords(SeededStreams(7, ["a"], 3), "update"), [0], 50)
    assert not np.isin(drawn(SeededWords(SeededStreams(seed, ["a"], round), release), [0], 50), first).any()


def test_deployed_words_never_repeat_and_are_even() -> None:
    one, two = SystemWords(2), SystemWords(2)
    words = np.concatenate([drawn(source, [0, 1], 5_000) for source in (one, one, two)])
    assert len(np.unique(words)) == words.size
    ones = np.unpackbits(words.reshape(-1, 1).view(np.uint8), axis=1).sum(0)
    assert np.abs(ones - words.size / 2).max() < 6 * np.sqrt(words.size) / 2  # of 64 bits, six deviations


def test_words_are_as_secret_as_the_streams() -> None:
    assert isinstance(words_of(SeededStreams(1, ["a"], 0), "x"), SeededWords)
    deployed = words_of(SystemStreams(3), "x")
    assert isinstance(deployed, SystemWords)
    assert deployed.clients == 3
