"""Random streams that say what a test tells them to, and e^ε to fifty digits."""

from collections.abc import Sequence
from decimal import Decimal, localcontext
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from polyeps.mechanisms.selection import WORD


class Scripted:
    """Gives every client its own row of whole numbers below 2⁵³, as uniforms; then it starts again."""

    exact = False

    def __init__(self, draws: Sequence[Sequence[int]]) -> None:
        self.draws = np.array(draws, dtype=np.int64).reshape(len(draws), -1)

    @property
    def clients(self) -> int:
        return len(self.draws)

    def uniforms(self, count: int) -> NDArray[np.float64]:
        rows = np.resize(self.draws.T, (count, self.clients)).T
        return np.asarray((rows + 1) / WORD)

    def normals(self, out: Tensor, rows: Sequence[int]) -> None:
        raise NotImplementedError

    def select(self, rows: Sequence[int]) -> "Scripted":
        return Scripted(self.draws[list(rows)].tolist())


def at_most_exp(ratio: Fraction, epsilon: float) -> bool:
    """Whether a ratio is at most e^ε, decided with fifty digits."""
    with localcontext() as context:
        context.prec = 50
        bound = Decimal(epsilon).exp()
        return Decimal(ratio.numerator) <= bound * Decimal(ratio.denominator)
