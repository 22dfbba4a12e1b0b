"""Secure sums are exact, or there is none; and what the server sees of one client is noise."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import stats
from support.secure_rounds import Walk, exchange, plain_sum, seat, secure_sum, seeded

from polyeps.errors import InputError, SumAborted
from polyeps.secagg import masks
from polyeps.secagg.messages import Step, SumSetup, lowest_threshold

LENGTH = 20_000


def random_rows(clients: int, length: int, bits: int) -> NDArray[np.uint64]:
    return np.random.default_rng(3).integers(0, 2**bits - 1, (clients, length), np.uint64, endpoint=True)


@pytest.mark.parametrize(
    ("clients", "length", "bits"), [(2, 1, 1), (2, 10, 64), (3, 1_000_000, 20), (5, 1000, 33), (40, 100, 32)]
)
def test_the_sum_is_exact(clients: int, length: int, bits: int) -> None:
    rows = random_rows(clients, length, bits)
    total, survivors = secure_sum(rows, bits, lowest_threshold(clients), "run", 0)
    assert np.array_equal(total, plain_sum(rows, bits))
    assert set(survivors) == {str(place) for place in range(clients)}


def test_many_clients_of_whom_some_drop_out() -> None:
    rows = random_rows(130, 4, 24)
    names = [f"client {place:03}" for place in range(130)]
    gone = {Step.SHARE: set(names[:6]), Step.MASK: set(names[6:26]), Step.UNMASK: set(names[26:39])}
    total, survivors = secure_sum(rows, 24, 72, "run", 0, gone, names, honest=78, colluders=10)
    assert survivors == tuple(names[26:])
    assert np.array_equal(total, plain_sum(rows[26:], 24))


@st.composite
def cases(draw: st.DrawFn) -> tuple[NDArray[np.uint64], int, int, dict[Step, set[str]]]:
    clients, bits = draw(st.integers(2, 7)), draw(st.integers(1, 64))
    rows = random_rows(clients, draw(st.integers(1, 9)), bits)
    threshold = draw(st.integers(lowest_threshold(clients), clients))
    gone: dict[Step, set[str]] = {}
    for place in draw(st.lists(st.integers(0, clients - 1), max_size=4)):
        gone.setdefault(draw(st.sampled_from(Step)), set()).add(str(place))
    return rows, bits, threshold, gone


@given(cases())
@settings(max_examples=60, deadline=None)
def test_the_sum_is_that_of_the_survivors_or_none(
    case: tuple[NDArray[np.uint64], int, int, Mapping[Step, set[str]]],
) -> None:
    rows, bits, threshold, gone = case
    left = [{str(place) for place in range(len(rows))}]
    for step in Step:
        left.append(left[-1] - gone.get(step, set()))
    if len(left[-1]) < threshold:
        with pytest.raises(SumAborted, match="there is no sum"):
            secure_sum(rows, bits, threshold, "run", 0, gone)
        return
    total, survivors = secure_sum(rows, bits, threshold, "run", 0, gone)
    assert set(survivors) == left[Step.MASK + 1]
    assert np.array_equal(total, plain_sum(rows[[int(name) for name in survivors]], bits))


def test_noise_needs_more_survivors_than_shares_do() -> None:
    rows = random_rows(6, 2, 8)
    gone = {Step.MASK: {"0"}}
    assert len(secure_sum(rows, 8, 4, "run", 0, gone, honest=5).survivors) == 5
    with pytest.raises(SumAborted, match="5 clients are left of at least 6"):
        secure_sum(rows, 8, 4, "run", 0, gone, honest=5, colluders=1)
    # Who sends its vector and then falls silent is in the sum, noise and all.
    assert len(secure_sum(rows, 8, 4, "run", 0, {Step.CONFIRM: {"0"}}, honest=6).survivors) == 6


def test_an_aborted_sum_leaves_nothing_behind() -> None:
    walk = Walk(Step.UNMASK)
    walk.server.receive("a", walk.answer("a", Step.UNMASK))
    with pytest.raises(SumAborted, match="1 clients are left of at least 3"):
        walk.server.finish()
    assert not any(walk.server._total)
    with pytest.raises(SumAborted):
        walk.server.finish()


def uniform(words: masks.Words, bits: int) -> float:
    """How likely words as uneven as these are if they are uniform: the least p over a few views of them."""
    views = [words & np.uint64(15), words >> np.uint64(bits - 4)]
    chances = [stats.chisquare(np.bincount(view.astype(np.int64), minlength=16)).pvalue for view in views]
    chances.append(stats.kstest((words.astype(np.float64) + 0.5) / 2.0**bits, "uniform").pvalue)
    return float(min(chances))


CONSTANTS = [(8, 0), (16, 77), (32, 2**32 - 1), (40, 0), (64, 12345)]


@pytest.mark.parametrize(("bits", "constant"), CONSTANTS)
def test_a_masked_vector_looks_uniform_whatever_it_hides(bits: int, constant: int) -> None:
    vector = np.full(LENGTH, constant, np.uint64)
    walk = Walk(Step.CONFIRM, vector=vector, bits=bits, names="abc", threshold=2)
    for name in walk.clients:
        assert uniform(walk.masked(name), bits) > 1e-3
    # And of two clients nothing is alike, though their masks are the same but for the sign.
    one, other = (walk.masked(name).astype(np.float64) for name in "ab")
    assert abs(np.corrcoef(one, other)[0, 1]) < 4 / np.sqrt(LENGTH)


def test_either_kind_of_secret_alone_shows_nothing() -> None:
    walk = Walk(Step.CONFIRM, vector=np.zeros(LENGTH, np.uint64), bits=32, names="abc", threshold=2)
    first = {name: past[0] for name, past in walk.past.items()}
    # What is left of a's vector without its own mask: what the server has of a client in the sum.
    without_own = masks.Masking(walk.masked("a").copy())
    without_own.put(masks.self_mask_key(walk.setup, "a", first["a"].seed), plus=False)
    assert uniform(without_own.words, 32) > 1e-3
    # And without the masks it shares: what the server has of a client whose vector comes too late.
    without_pairs = masks.Masking(walk.masked("a").copy())
    private = masks.private_key(first["a"].mask_key)
    for other in "bc":
        secret = masks.agree(private, masks.public_key(first[other].mask_key))
        key = masks.pair_mask_key(walk.setup, "a", other, secret)
        without_pairs.put(key, plus=False)
        without_own.put(key, plus=False)
    assert uniform(without_pairs.words, 32) > 1e-3
    assert not without_own.words.any()  # with both, all is bare


@pytest.mark.parametrize("other", [{"round": 2}, {"run": "another"}, {"seed": 1}])
def test_masks_never_repeat(other: dict[str, int | str]) -> None:
    """Not even where all keys are the same by mistake, as here with one seed for two rounds."""
    vector = np.zeros(LENGTH, np.uint64)
    one = Walk(Step.CONFIRM, vector=vector, bits=32, names="abc", threshold=2)
    two = Walk(Step.CONFIRM, vector=vector, bits=32, names="abc", threshold=2, **other)  # type: ignore[arg-type]
    for name in "abc":
        assert (one.past[name][0].mask_key == two.past[name][0].mask_key) == ("seed" not in other)
        assert uniform(one.masked(name) - two.masked(name), 32) > 1e-3


def test_fresh_keys_in_every_round() -> None:
    walk = Walk(Step.ADVERTISE)
    keys = {walk.clients["a"].advertise()[0].mask_key for _ in range(3)}
    assert len(keys) == 3


@pytest.mark.parametrize("bits", [1, 8, 20, 32, 33, 64])
def test_a_masked_vector_is_little_more_than_its_numbers(bits: int) -> None:
    sizes = {}

    def weigh(step: Step, name: str, sent: bytes) -> bytes:
        sizes[step] = len(sent)
        return sent

    rows = random_rows(3, 500, bits)
    setup, clients = seat(["x", "y", "z"], seeded(0), "run", 0, bits, 500, 2)
    exchange(setup, clients, dict(zip("xyz", rows, strict=True)), weigh)
    numbers = 500 * -(-bits // 8)
    assert numbers < sizes[Step.MASK] <= numbers + 200
    assert sum(sizes.values()) <= numbers + 1500


WRONG_TERMS: dict[str, dict[str, Any]] = {
    "needs clients": {"identities": {}},
    "one identity": {"identities": {"a": bytes(32), "b": bytes(32)}},
    "each with a name": {"identities": {"": bytes(32), "a": bytes(32)}},
    "32 bytes": {"identities": {"a": bytes(31), "b": bytes(32)}},
    "bits must be": {"bits": 65},
    "coordinates": {"length": 0},
    "rounds count": {"round": -1},
    "honest must be": {"honest": 0},
    "must be 3 to 4, not 2": {"threshold": 2},
    "must be 4 to 4, not 3": {"colluders": 2},
    "more than the 4": {"honest": 4, "colluders": 1},
}


@pytest.mark.parametrize("problem", WRONG_TERMS)
def test_terms_that_protect_nobody_are_refused(problem: str) -> None:
    right: dict[str, Any] = {
        "run": "r",
        "round": 0,
        "identities": {name: name.encode() * 32 for name in "abcd"},
        "bits": 8,
        "length": 1,
    }
    SumSetup(**right, threshold=3)
    with pytest.raises(InputError, match=problem):
        SumSetup(**{**right, "threshold": 3, **WRONG_TERMS[problem]})


def test_rows_and_names_must_match() -> None:
    with pytest.raises(InputError, match="give one a row"):
        secure_sum(random_rows(3, 2, 8), 8, 2, "run", 0, ids=["a", "a", "b"])


@pytest.mark.parametrize(
    "row", [np.array([256], np.uint64), np.array([1, 2], np.uint64), np.array([1.0]), np.array([-1])]
)
def test_a_client_gives_numbers_that_fit(row: NDArray[np.uint64]) -> None:
    walk = Walk(Step.MASK, vector=np.zeros(1, np.uint64), bits=8)
    with pytest.raises(InputError, match="client 'a' must give 1 uint64 numbers below 2\\^8"):
        walk.clients["a"].mask(walk.past["a"][-1], walk.asked["a"], row)
