"""Public counts of secure sums: how many clients may be missing or collude, and which variance is released.

n clients are drawn. Of them at most D fail to answer and at most C disclose their noise to others: counts that are
public and fixed before the first round. Each client adds v/max(1, n - D - C), so the honest ones that answer add at
least v, the variance that is paid for. A sum is opened if at most D are missing, whatever n is, and the server tops its
noise up to one variance V. So neither the noise nor the existence of a sum reveals whether one more client was drawn.

Masks hold if a sum takes more than (n + C)/2 answers (see `secagg.messages`), so D > 0 needs n ≥ 2D + C + 1, and V
decreases with the size of the smallest cohort. Cohorts below a public size are therefore not asked at all: the server
releases noise instead, as it does for an empty cohort. One client matters to that if the others are just one too few,
which is so rare that its probability is charged (docs/reference/soundness.md, "Secure sums with one law").
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache

import numpy as np

from polyeps.algorithms._averaging import Federation
from polyeps.errors import InputError

SET_ASIDE = 0.01  # the share of δ that may pay for cohorts of the one size at which a client matters
_SLACK = 1e-9  # of floats: 0.1 of 30 clients are 3


@dataclass(frozen=True)
class Rule:
    """The server's rule for a round, given how many clients entered it."""

    fewest: int  # the smallest cohort that is asked; for a smaller one the server releases noise alone
    dropouts: int  # the most clients drawn that may be missing in a sum that is opened
    surplus: Fraction  # the released variance over the one that is paid for


@dataclass(frozen=True)
class Counts:
    """The counts of one federation, or of one privacy group of it."""

    enrolled: int
    rate: float  # the probability of every client to be drawn; 1: all take part, which is no secret
    dropouts: int
    colluders: int
    rare: float = 0.0  # the most that a round may be charged for cohorts that are too small

    @classmethod
    def settled(
        cls, enrolled: int, rate: float, dropouts: float, colluders: float = 0.0, *, delta: float = 0.0, rounds: int = 1
    ) -> Counts:
        """Return the counts for shares of the expected cohort: colluders rounded up, dropouts as many as possible.

        Fewer dropouts are allowed where cohorts may be too small for them.
        """
        for name, share in (("dropouts", dropouts), ("colluders", colluders)):
            if not 0 <= share < 1:
                raise InputError(f"{name} must be at least 0 and below 1, not {share}")
        if not dropouts + colluders < 1:
            raise InputError("dropouts and colluders leave no client to add noise; together they must be below 1")
        most = (1 - colluders) / 2
        if dropouts > most + _SLACK:
            raise InputError(
                f"dropouts must be at most (1 - colluders)/2, here {most:g}, not {dropouts:g}: a secure sum opens "
                "nothing if fewer than (1 + colluders)/2 of those drawn answer, so noise for more dropouts is in vain"
            )
        expected = enrolled * rate
        rare = SET_ASIDE * delta / max(1, rounds) if rate < 1 else 0.0
        missing, colluding = math.floor(dropouts * expected + _SLACK), math.ceil(colluders * expected - _SLACK)
        counts = cls(enrolled, rate, missing, min(enrolled, colluding), rare)
        return replace(counts, dropouts=counts.rule(enrolled).dropouts)

    @classmethod
    def of(cls, federation: Federation, dropouts: float, colluders: float = 0.0, group: str | None = None) -> Counts:
        """Return the counts of all clients of a federation, or of one group."""
        enrolled = federation.clients if group is None else federation.sizes[group]
        rate, rounds, delta = federation.rate, federation.rounds, federation.delta
        return cls.settled(enrolled, rate, dropouts, colluders, delta=delta, rounds=rounds)

    @property
    def failure(self) -> float:
        """The probability that is charged for a round: 0 where every cohort is asked."""
        return self.rare if self.dropouts or self.colluders else 0.0

    @property
    def expected(self) -> float:
        return self.rate * self.enrolled

    def parts(self, drawn: int) -> int:
        """Return the number of parts into which each of so many clients divides the variance that is paid for."""
        return max(1, drawn - self.dropouts - self.colluders)

    def least(self, drawn: int) -> int:
        """Return the fewest answers that a client insists on, for enough noise and masks that cannot be opened twice.

        If no more than the colluders were drawn, each client adds all of the noise itself and needs no masks.
        """
        return min(drawn, max(drawn - self.dropouts, (drawn + self.colluders) // 2 + 1))

    @lru_cache(maxsize=256)  # noqa: B019 - of frozen counts
    def rule(self, entered: int) -> Rule:
        """Return the rule for a round that so many clients have paid for: a number independent of their data."""
        lost = self.dropouts + self.colluders
        fewest = _fewest(entered, self.rate, self.rare) if lost and self.rate < 1 else 1
        smallest = entered if self.rate == 1 else fewest
        dropouts = min(self.dropouts, max(0, (smallest - self.colluders - 1) // 2))
        # n/max(1, n - lost) grows up to lost + 1 and falls from there.
        widest = entered if self.rate == 1 else min(max(fewest, lost + 1), max(entered, 1))
        return Rule(fewest, dropouts, Fraction(max(widest, 1), self.parts(max(widest, 1))))

    @property
    def surplus(self) -> Fraction:
        """The released variance over the one that is paid for, when no client is missing."""
        return self.rule(self.enrolled).surplus

    @property
    def sizes(self) -> tuple[int, int]:
        """The smallest and the largest likely cohort, to check that noise can be drawn."""
        if self.rate == 1:
            return self.enrolled, self.enrolled
        spread = 6 * math.sqrt(self.expected)
        likely = max(1, math.floor(self.expected - spread), self.rule(self.enrolled).fewest)
        return likely, max(likely, math.ceil(self.expected + spread))


def _fewest(entered: int, rate: float, rare: float) -> int:
    """Return the largest size m such that a client rarely turns a cohort of m - 1 into one of m.

    It does if it is drawn with m - 1 of the others. (For one client or none the released law is the same.)
    """
    from scipy.stats import binom  # which takes half a second to import

    sizes = np.arange(2, math.floor(rate * entered) + 1)
    matters = np.flatnonzero(rate * binom.pmf(sizes - 1, entered - 1, rate) > rare)
    return 1 + (int(matters[0]) if len(matters) else len(sizes))
