"""How strong a guarantee is, in words: strong, moderate or weak, and what a guess of 50 % could become."""

from __future__ import annotations

import math

CERTAIN = "practical certainty"
STRONG, MODERATE = 1.0, 5.0  # up to which ε a guarantee is called so; a guess of 50 % can become 73 % and 99.3 %


def strength(epsilon: float | None) -> str:
    """Return the word for a guarantee; None: there is none.

    >>> strength(1.0), strength(4.9), strength(5.1), strength(None)
    ('strong', 'moderate', 'weak', 'none')
    """
    if epsilon is None:
        return "none"
    return "strong" if epsilon <= STRONG else "moderate" if epsilon <= MODERATE else "weak"


def sure(epsilon: float) -> str:
    r"""Return the most that a guess of 50 % can become: in as many digits as tell it from certainty, rounded up.

    >>> sure(0.5), sure(8), sure(30)
    ('62.3\xa0%', '99.97\xa0%', 'practical certainty')
    """
    doubt = 100 / (1 + math.exp(min(epsilon, 700.0)))
    for digits in (1, 2, 3, 4):
        left = math.floor(doubt * 10**digits)
        if left:
            return f"{100 - left / 10**digits:.{digits}f}\u00a0%"
    return CERTAIN


def raised(epsilon: float) -> str:
    r"""Say what a guarantee allows.

    >>> raised(8.0)
    'could raise a 50\xa0% guess to 99.97\xa0%'
    """
    return f"could raise a 50\u00a0% guess to {sure(epsilon)}"
