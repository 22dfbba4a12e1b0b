"""Secret sharing: enough shares give the secret, too few say nothing."""

import itertools
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.secure_rounds import seeded

from polyeps.secagg.shamir import PRIME, SHARE_BYTES, evaluate, join, split, weights


def test_the_field_is_one() -> None:
    assert PRIME > 2**256
    assert all(pow(base, PRIME - 1, PRIME) == 1 for base in range(2, 40))  # Fermat


@given(st.binary(min_size=32, max_size=32), st.data())
def test_any_threshold_of_shares_gives_the_secret(secret: bytes, data: st.DataObject) -> None:
    holders = data.draw(st.integers(1, 12))
    threshold = data.draw(st.integers(1, holders))
    points = data.draw(st.lists(st.integers(1, 200), min_size=holders, max_size=holders, unique=True))
    shares = dict(zip(points, split(secret, points, threshold, seeded(1)), strict=True))
    assert {len(share) for share in shares.values()} == {SHARE_BYTES}
    chosen = data.draw(st.permutations(points))[:threshold]
    assert join(shares, weights(chosen)) == secret
    if threshold > 1:
        assert join(shares, weights(chosen[1:])) != secret


@pytest.mark.parametrize("secret", [bytes(32), b"\xff" * 32])
def test_the_extreme_secrets_are_shared_too(secret: bytes) -> None:
    shares = split(secret, [1, 2, 3], 2, seeded(2))
    assert join({2: shares[1], 3: shares[2]}, weights([2, 3])) == secret


def test_shares_of_no_secret_are_noticed() -> None:
    too_large = (2**256).to_bytes(SHARE_BYTES, "big")
    assert join({1: too_large}, weights([1])) is None


@pytest.mark.parametrize(("prime", "threshold"), [(5, 2), (7, 3)])
def test_fewer_shares_say_nothing(prime: int, threshold: int) -> None:
    """Every secret shows the same shares equally often, for every choice of too few holders: by enumeration."""
    points = range(1, threshold + 2)
    for holders in itertools.combinations(points, threshold - 1):
        seen = []
        for secret in range(prime):
            tails = itertools.product(range(prime), repeat=threshold - 1)
            seen.append(Counter(tuple(evaluate([secret, *tail], holders, prime)) for tail in tails))
        assert all(counts == seen[0] for counts in seen)
        assert len(seen[0]) == prime ** (threshold - 1)


@pytest.mark.parametrize("prime", [5, 11])
def test_weights_read_off_the_constant(prime: int) -> None:
    for coefficients in itertools.product(range(prime), repeat=3):
        values = dict(zip([1, 2, 4], evaluate(coefficients, [1, 2, 4], prime), strict=True))
        found = weights([1, 2, 4], prime)
        assert sum(found[point] * value for point, value in values.items()) % prime == coefficients[0]
