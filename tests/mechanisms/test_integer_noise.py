import bisect
import random
from collections import Counter
from collections.abc import Callable, Sequence
from decimal import Decimal, localcontext
from fractions import Fraction
from itertools import accumulate

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.stats import chisquare
from support import lattice_oracles as oracles

from polyeps.engine.noise import SeededStreams
from polyeps.errors import InputError
from polyeps.mechanisms.integer_noise import NoiseName, NoiseTable, add_noise, table_for
from polyeps.mechanisms.random_words import SeededWords

LAWS: dict[NoiseName, Callable[[Fraction, int], dict[int, Decimal]]] = {
    "skellam": oracles.skellam_law,
    "discrete-gaussian": oracles.gaussian_law,
}
SAMPLERS: dict[NoiseName, Callable[[Fraction, random.Random], int]] = {
    "skellam": oracles.skellam,
    "discrete-gaussian": oracles.discrete_gaussian,
}
KINDS: list[NoiseName] = ["skellam", "discrete-gaussian"]


class Scripted:
    """Words given beforehand, for one client."""

    clients = 1

    def __init__(self, words: Sequence[int]) -> None:
        self._words = list(words)

    def fill(self, out: NDArray[np.uint64], rows: Sequence[int]) -> None:
        assert list(rows) == [0]
        out[0] = [self._words.pop(0) for _ in range(out.shape[1])]


def sample(table: NoiseTable, count: int, seed: int = 1, clients: int = 1) -> NDArray[np.int64]:
    values = np.zeros((clients, count), np.int64)
    add_noise(table, values, SeededWords(SeededStreams(seed, range(clients), 0), "test"), range(clients))
    return values


def probabilities(table: NoiseTable) -> NDArray[np.float64]:
    return np.array([count / 2**128 for count in table.counts()])


def p_value(drawn: Sequence[int], table: NoiseTable) -> float:
    """Chi-square of draws against a table's law, rare values taken together."""
    chance = probabilities(table)
    seen = Counter(drawn)
    often = np.flatnonzero(chance * len(drawn) >= 10)
    observed = np.array([seen[table.first + int(place)] for place in often])
    expected = chance[often] * len(drawn)
    rest = len(drawn) - observed.sum(), len(drawn) - expected.sum()
    return float(chisquare(np.append(observed, rest[0]), np.append(expected, rest[1])).pvalue)


@pytest.mark.parametrize("noise", KINDS)
@pytest.mark.parametrize("variance", [Fraction(1, 4), Fraction(3), Fraction(16), Fraction(2025, 2)])
def test_a_table_is_as_near_its_law_as_it_says(noise: NoiseName, variance: Fraction) -> None:
    table = table_for(noise, float(variance))
    law = LAWS[noise](variance, 2 - 2 * table.first)
    counts = dict(enumerate(table.counts(), start=table.first))
    with localcontext() as context:
        context.prec = oracles.DIGITS
        gaps = [abs(Decimal(counts.get(k, 0)) / Decimal(2**128) - chance) for k, chance in law.items()]
        assert sum(gaps) / 2 <= Decimal(table.distance)
    assert set(counts) <= set(law)
    assert table.distance <= 2.0**-100


@pytest.mark.parametrize("noise", KINDS)
def test_tables_of_all_sizes_have_the_variance_asked_for(noise: NoiseName) -> None:
    for deviation in (2.0, 300.0, 30_000.0):
        table = table_for(noise, deviation**2)
        place = table.first + np.arange(len(table.high))
        chance = probabilities(table)
        assert chance @ place.astype(float) ** 2 == pytest.approx(deviation**2, rel=1e-9)
        assert table.distance <= 2.0**-100
    drawn = sample(table, 400_000)
    assert abs(drawn.mean()) < 5 * 30_000 / 400_000**0.5
    assert drawn.std() == pytest.approx(30_000, rel=0.006)  # five deviations


@pytest.mark.parametrize("noise", KINDS)
@pytest.mark.parametrize("variance", [0.25, 3.0, 16.0, 40_000.0])
def test_draws_follow_the_table(noise: NoiseName, variance: float) -> None:
    table = table_for(noise, variance)
    assert p_value(sample(table, 300_000).ravel().tolist(), table) > 1e-4


@pytest.mark.parametrize("noise", KINDS)
@pytest.mark.parametrize("variance", [Fraction(1, 4), Fraction(7, 2)])
def test_samplers_made_of_rationals_follow_the_table(noise: NoiseName, variance: Fraction) -> None:
    source = random.Random(5)
    drawn = [SAMPLERS[noise](variance, source) for _ in range(6_000)]
    assert p_value(drawn, table_for(noise, float(variance))) > 1e-4


@pytest.mark.parametrize("clients", [2, 5, 16])
def test_skellam_of_agents_adds_up_to_skellam(clients: int) -> None:
    share, total = table_for("skellam", 20.0 / clients), table_for("skellam", 20.0)
    law = np.ones(1)
    for _ in range(clients):
        law = np.convolve(law, probabilities(share))
    first = clients * share.first
    inside = law[total.first - first : total.first - first + len(total.high)]
    assert np.abs(inside - probabilities(total)).sum() + law.sum() - inside.sum() < 1e-13
    assert p_value(sample(share, 100_000, clients=clients).sum(0).tolist(), total) > 1e-4


@pytest.mark.parametrize("noise", KINDS)
@pytest.mark.parametrize("variance", [0.3, 16.0, 250_000.0])
def test_any_word_is_looked_up_as_by_bisection(noise: NoiseName, variance: float) -> None:
    table = table_for(noise, variance)
    thresholds = list(accumulate(table.counts()))[:-1]
    source = random.Random(3)
    edges = [threshold >> 64 for threshold in source.sample(thresholds, min(20, len(thresholds)))]
    near = [edge + step for edge in edges for step in (-1, 1)]
    tails = [source.randrange(1 << source.randrange(1, 64)) for _ in range(500)]
    words = [word for word in near + tails + [2**64 - 1 - word for word in tails] if 0 <= word < 2**64]
    seconds = [source.randrange(1 << 64) for _ in words]  # used only where the first word is a threshold's
    high = {threshold >> 64 for threshold in thresholds}
    for word, second in zip(words, seconds, strict=True):
        value = np.zeros((1, 1), np.int64)
        add_noise(table, value, Scripted([word, second]), [0])
        exact = word << 64 | (second if word in high or word == 2**64 - 1 else 0)
        assert value[0, 0] == table.first + bisect.bisect_right(thresholds, exact)


@pytest.mark.parametrize("noise", KINDS)
def test_a_second_word_decides_when_the_first_is_a_thresholds(noise: NoiseName) -> None:
    table = table_for(noise, 16.0)
    for place in range(len(table.high) - 1):
        high, low = int(table.high[place]), int(table.low[place])
        for second, above in ((low, 1), (low - 1, 0)):
            value = np.zeros((1, 1), np.int64)
            add_noise(table, value, Scripted([high, second]), [0])
            assert value[0, 0] == table.first + place + above


def test_the_distance_can_be_charged() -> None:
    table = table_for("skellam", 22_500.0)
    assert (1 + np.e) * 180 * 100 * 2**21 * table.distance < 1e-20  # P' ≤ e^ε·(Q' + t) + δ + t, t = draws · distance


@pytest.mark.parametrize("variance", [0.0, -1.0, float("nan"), 2.0**-21, 1.1e10, float("inf")])
def test_noise_out_of_reach_is_refused(variance: float) -> None:
    with pytest.raises(InputError, match="granularity"):
        table_for("skellam", variance)


def test_values_in_pieces_are_refused() -> None:
    values = np.zeros((4, 4), np.int64)[:, :3]
    with pytest.raises(InputError, match="contiguous"):
        add_noise(table_for("skellam", 16.0), values, SeededWords(SeededStreams(1, range(4), 0), "x"), range(4))
