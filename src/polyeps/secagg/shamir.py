"""Shamir's secret sharing: any `threshold` shares give the secret, fewer reveal nothing about it.

A secret is the value at 0 of a random polynomial of degree threshold - 1 over a prime field; a share is its value at
the holder's point (1, 2, ...). Shares have a fixed size, so that their length reveals nothing about the secret.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from operator import mul

# The least prime above 2^256: any 32 bytes are one element of the field.
PRIME = 2**256 + 297
SECRET_BYTES = 32
SHARE_BYTES = 33
# Coefficients are drawn from this many bytes and reduced: off from uniform by less than 2^-127.
_DRAW_BYTES = 48

Entropy = Callable[[int], bytes]


def split(secret: bytes, points: Sequence[int], threshold: int, entropy: Entropy) -> list[bytes]:
    """Return one share of a 32-byte secret for each holder's point.

    >>> import os
    >>> shares = split(bytes(range(32)), [1, 2, 3], threshold=2, entropy=os.urandom)
    >>> join({1: shares[0], 3: shares[2]}, weights([1, 3])) == bytes(range(32))
    True
    """
    drawn = entropy(_DRAW_BYTES * (threshold - 1))
    tail = [int.from_bytes(drawn[i : i + _DRAW_BYTES], "big") % PRIME for i in range(0, len(drawn), _DRAW_BYTES)]
    values = evaluate([int.from_bytes(secret, "big"), *tail], points)
    return [value.to_bytes(SHARE_BYTES, "big") for value in values]


def join(shares: Mapping[int, bytes], weights: Mapping[int, int]) -> bytes | None:
    """Return the secret of shares at the points of `weights`; None where they stand for no 32 bytes."""
    value = sum(weight * int.from_bytes(shares[point], "big") for point, weight in weights.items()) % PRIME
    return value.to_bytes(SECRET_BYTES, "big") if value < 2 ** (8 * SECRET_BYTES) else None


def evaluate(coefficients: Sequence[int], points: Sequence[int], prime: int = PRIME) -> list[int]:
    """Return the values of a polynomial, constant first, at some points."""
    powers = _powers(tuple(points), len(coefficients), prime)
    return [sum(map(mul, coefficients, row)) % prime for row in powers]


def weights(points: Sequence[int], prime: int = PRIME) -> dict[int, int]:
    """Return Lagrange's weights: the value at 0 is the weighted sum of the values at these points.

    They depend only on the clients that are left, so one set of weights serves all secrets of a round.
    """
    found = {}
    for point in points:
        above = below = 1
        for other in points:
            if other != point:
                above = above * other % prime
                below = below * (other - point) % prime
        found[point] = above * pow(below, -1, prime) % prime
    return found


@lru_cache(maxsize=4)  # every client of a round shares among the same points
def _powers(points: tuple[int, ...], count: int, prime: int) -> list[list[int]]:
    return [[pow(point, power, prime) for power in range(count)] for point in points]
