"""Integer noise a second way: laws by series in exact or 80-digit arithmetic, and samplers that use rationals only."""

import random
from decimal import Decimal, localcontext
from fractions import Fraction

DIGITS = 80


def skellam_law(variance: Fraction, reach: int) -> dict[int, Decimal]:
    """P[X = k] = e^(−μ)·Σ_m (μ/2)^(2m+|k|)/(m!·(m+|k|)!) for |k| ≤ reach."""
    with localcontext() as context:
        context.prec = DIGITS
        half = Decimal(variance.numerator) / Decimal(2 * variance.denominator)
        law = {}
        for k in range(reach + 1):
            term = (-2 * half).exp()
            for factor in range(1, k + 1):
                term *= half / factor
            total, m = Decimal(0), 0
            while term > Decimal(10) ** -DIGITS or m < half:
                total += term
                m += 1
                term *= half * half / (m * (m + k))
            law[k] = law[-k] = total
    return law


def gaussian_law(variance: Fraction, reach: int) -> dict[int, Decimal]:
    """P[X = k] ∝ e^(−k²/2σ²), each weight by its own exponential, for |k| ≤ reach."""
    with localcontext() as context:
        context.prec = DIGITS
        scale = Decimal(variance.denominator) / Decimal(2 * variance.numerator)
        weights = {k: (-k * k * scale).exp() for k in range(-reach, reach + 1)}
        total = sum(weights.values())
        return {k: weight / total for k, weight in weights.items()}


def coin(chance: Fraction, source: random.Random) -> bool:
    """True with exactly this probability."""
    return source.randrange(chance.denominator) < chance.numerator


def exponential_coin(exponent: Fraction, source: random.Random) -> bool:
    """True with probability e^(−exponent) (Canonne, Kamath and Steinke 2020, algorithm 1)."""
    while exponent > 1:
        if not exponential_coin(Fraction(1), source):
            return False
        exponent -= 1
    tries = 1
    while coin(exponent / tries, source):
        tries += 1
    return tries % 2 == 1


def discrete_laplace(scale: int, source: random.Random) -> int:
    """P[X = k] ∝ e^(−|k|/scale) (their algorithm 2)."""
    while True:
        offset = source.randrange(scale)
        if not exponential_coin(Fraction(offset, scale), source):
            continue
        rounds = 0
        while exponential_coin(Fraction(1), source):
            rounds += 1
        magnitude = offset + scale * rounds
        negative = source.randrange(2) == 1
        if not (negative and magnitude == 0):
            return -magnitude if negative else magnitude


def discrete_gaussian(variance: Fraction, source: random.Random) -> int:
    """P[X = k] ∝ e^(−k²/2σ²), by rejection from the discrete Laplace (their algorithm 3)."""
    scale = 1
    while scale * scale <= variance:
        scale += 1
    while True:
        candidate = discrete_laplace(scale, source)
        if exponential_coin((abs(candidate) - variance / scale) ** 2 / (2 * variance), source):
            return candidate


def poisson(mean: Fraction, source: random.Random) -> int:
    """Exact, from rationals: parts of mean ≤ 1/2 by rejection from a geometric law, accepting with (2λ)^n/n! ≤ 1."""
    if mean > Fraction(1, 2):
        return poisson(Fraction(1, 2), source) + poisson(mean - Fraction(1, 2), source)
    while True:
        n = 0
        while source.randrange(2):
            n += 1
        accept = Fraction(1)
        for factor in range(1, n + 1):
            accept *= 2 * mean / factor
        if coin(accept, source):
            return n


def skellam(variance: Fraction, source: random.Random) -> int:
    """The difference of two Poisson numbers of mean μ/2."""
    return poisson(variance / 2, source) - poisson(variance / 2, source)
