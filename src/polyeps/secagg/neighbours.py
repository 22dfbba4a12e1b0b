"""With whom a client works where pairs are too many: a few neighbours on a public graph (after Bell et al. 2020).

The n clients stand on a circle, in the order of their names, and each works with the k that are nearest to it. To cut
the circle in two, at least k clients must be taken away. Bell et al. draw a graph and bound the probability that it is
bad; here nothing is left to chance: k is larger than the number of clients that may be missing and of those that may
collude together, so whoever these are, all honest clients that sign the list of a sum remain connected by masks.
Missing clients, of whom there are at most n - threshold, may all be neighbours of one client: so many shares fewer than
k + 1 restore a secret. Proof: docs/reference/soundness.md, "Secure sums among neighbours".
"""

from __future__ import annotations

FROM_CLIENTS = 256  # of a sum; with fewer, everybody works with everybody
_FEWEST = 64  # neighbours, even if nobody is expected to fail or collude


def holds(clients: int, neighbours: int, threshold: int, colluders: int) -> bool:
    """Return whether so many neighbours are enough: no sum comes out without every honest client that signed its list.

    >>> holds(1000, 152, 900, 50), holds(1000, 150, 900, 50)
    (True, False)
    """
    even = neighbours % 2 == 0 and 2 <= neighbours <= clients - 2
    return even and neighbours > clients - threshold + colluders


def fewest(clients: int, threshold: int, colluders: int) -> int:
    """Return the fewest neighbours that are enough; 0, everybody, where these are more than half.

    >>> fewest(100, 90, 0), fewest(1000, 950, 0), fewest(1000, 900, 50), fewest(1000, 501, 10)
    (0, 64, 152, 0)
    """
    needed = max(_FEWEST, clients - threshold + colluders + 1)
    needed += needed % 2
    return needed if clients >= FROM_CLIENTS and needed <= clients // 2 else 0
