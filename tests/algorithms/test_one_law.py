"""What a round releases has one law: its true cost, dropouts and all, is no more than what is certified.

Here an observer knows how many of the others were drawn and how many of them failed; both have the same chances whether
or not the client's vector is there. What is left is the pair of laws, with the client's vector and with zeros in its
place, of mixtures over whether the client was drawn: with the variances the code really gives, one coordinate along
the vector and the size of the noise in all others. Their losses are put on a grid and composed over all rounds.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache, lru_cache, partial
from unittest.mock import patch

import dp_accounting as dp
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy import stats
from support.summed import work

from polyeps.accounting import epsilon
from polyeps.algorithms import _secure_sums as releases
from polyeps.algorithms._releases import Release, round_price
from polyeps.algorithms._secure_sums import DRAWN, SecureSums
from polyeps.algorithms._sum_counts import Counts
from polyeps.core import AGREED, Ask, Payload, Profile, Replies, State, SumTerms, Task, Total
from polyeps.engine.noise import SeededStreams

DELTA, ROUNDS, SIZE = 1e-4, 100, 3
STEP, REACH = 2.0**-11, 16.0  # of the grid of losses
Floats = NDArray[np.float64]
# Of (clients drawn, clients missing): the variance of what is released, in units of the one paid for; None: nothing is.
Law = Callable[[int, int], float | None]


class Answering(Ask):
    """So many of those asked answer, with zeros and no noise."""

    def __init__(self, missing: int) -> None:
        self.missing, self.asked = missing, 0

    def __call__(self, task: Task) -> Replies:
        raise AssertionError(task)

    def total(self, task: Task, terms: SumTerms) -> Total:
        assert terms.bits is None
        self.asked = len(task.to)
        ids = task.to[self.missing :]
        return Total(ids, {task.action: torch.zeros(SIZE)} if len(ids) >= terms.least else {})


def secure(enrolled: int, rate: float, dropouts: float, colluders: float = 0.0, scale: float = 1.0) -> SecureSums:
    counts = Counts.settled(enrolled, rate, dropouts, colluders, delta=DELTA, rounds=ROUNDS)
    return SecureSums(scale, counts, partial(SeededStreams, 1, ["all"]))


def law_of(sums: SecureSums, entered: int | None = None) -> Law:
    """What clients and server really add: their deviations are read off, every normal number being 1."""
    release = Release("train", SIZE, 1.0, clients=sums.counts.enrolled)
    everybody = tuple(Profile(str(place)) for place in range(sums.counts.enrolled))

    @cache
    def law(drawn: int, missing: int) -> float | None:
        ask = Answering(missing)
        state = State(torch.zeros(SIZE, dtype=torch.float64), roster=everybody[:drawn], entered=everybody[:entered])
        with patch.object(releases, "normals_for", lambda _, values, __: torch.ones_like(values)):
            found = sums.of(state, ask, release, {})
            if found is None:
                return None
            own = 0.0
            if ask.asked:
                told: Payload = {DRAWN: torch.tensor(drawn), AGREED: sums.fingerprint(release)}
                zeros = torch.zeros(1, SIZE, dtype=torch.float64)
                own = float(sums.from_clients(release, work(sums.noise_multiplier, told), zeros)["train"][0, 0])
        answered = drawn - missing if ask.asked else 0
        return (answered * own**2 + float(found[0]) ** 2) / sums.noise_multiplier**2

    return law


def as_it_was(dropouts: float) -> Law:
    """The rule before: shares of a cohort, and noise of whoever answers."""

    def law(drawn: int, missing: int) -> float | None:
        if not drawn:
            return 1 / (1 - dropouts)
        least = max(drawn // 2 + 1, math.ceil(drawn * (1 - dropouts) - 1e-9))
        return (drawn - missing) / (drawn * (1 - dropouts)) if drawn - missing >= least else None

    return law


def losses(
    absent: float | None, present: float | None, rate: float, scale: float, others: int
) -> tuple[Floats, Floats]:
    """Losses and their probabilities with the vector, of one round; `others` coordinates show the noise's size."""
    if present is None:
        return np.zeros(1), np.ones(1)
    if absent is None or (others == ALL and absent != present):
        along = np.linspace(-9, 9, 2001)  # whether it was drawn is seen
        weight = stats.norm.pdf(along)
        shift = 1 / (scale * math.sqrt(present))
        loss = shift * (along + shift / 2)
        return np.append(loss, 0.0), np.append(rate * weight / weight.sum(), 1 - rate)
    wide = scale * math.sqrt(max(absent, present))
    along = np.linspace(-8 * wide, 8 * wide + 1, 601)
    sizes = np.zeros(1)
    if others:
        edges = stats.chi2.ppf([1e-9, 1 - 1e-9], others)
        sizes = np.linspace(edges[0] * min(absent, present), edges[1] * max(absent, present), 200) * scale**2

    def density(variance: float, mean: float) -> Floats:
        spread = scale * math.sqrt(variance)
        found: Floats = stats.norm.logpdf(along, mean, spread)[:, None]
        if others:
            found = found + stats.chi2.logpdf(sizes / spread**2, others)[None] - 2 * math.log(spread)
        return found

    out, zeros, there = density(absent, 0.0), density(present, 0.0), density(present, 1.0)
    first = np.logaddexp(np.log1p(-rate) + out, math.log(rate) + there)
    second = np.logaddexp(np.log1p(-rate) + out, math.log(rate) + zeros)
    weight = np.exp(first)
    return (first - second).ravel(), (weight / weight.sum()).ravel()


def composed(law: Law, enrolled: int, rate: float, scale: float, fail: float, others: int) -> tuple[Floats, Floats]:
    """The losses of all rounds, where each of the others drawn fails with probability `fail`."""
    edges = np.arange(-REACH, REACH, STEP)
    found = np.zeros(len(edges))
    drawn = stats.binom.pmf(np.arange(enrolled), enrolled - 1, rate)
    known: dict[tuple[float | None, float | None], float] = {}
    for size in np.flatnonzero(drawn > 1e-12):
        for missing in range(int(size) + 1):
            chance = drawn[size] * stats.binom.pmf(missing, size, fail)
            if chance > 1e-12:
                pair = law(int(size), missing), law(int(size) + 1, missing)
                pair = tuple(None if one is None else round(one, 6) for one in pair)  # type: ignore[assignment]
                known[pair] = known.get(pair, 0.0) + chance
    for (absent, present), chance in known.items():
        loss, weight = losses(absent, present, rate, scale, others)
        places = np.clip(np.rint((loss + REACH) / STEP).astype(int), 0, len(edges) - 1)
        found += chance * np.bincount(places, weight, len(edges))
    # The cyclic transform of all rounds; losses beyond the reach have next to no weight.
    shifted = np.fft.rfft(np.roll(found, -round(REACH / STEP)))
    total = np.roll(np.fft.irfft(shifted**ROUNDS, len(edges)), round(REACH / STEP))
    return edges, total


def true_delta(law: Law, enrolled: int, rate: float, scale: float, fail: float, others: int, at: float) -> float:
    edges, total = composed(law, enrolled, rate, scale, fail, others)
    beyond = edges > at
    return float(total[beyond] @ -np.expm1(at - edges[beyond]))


def certified(sums: SecureSums) -> float:
    release = Release("train", SIZE, 1.0, clients=sums.counts.enrolled)
    price = round_price(sums.counts.rate, (release,), sums.noise_multiplier, sums.counts.failure)
    return epsilon(dp.SelfComposedDpEvent(price, ROUNDS), DELTA)


SETTINGS = [(40, 0.25, 6.0, 0.1), (200, 0.05, 4.0, 0.1), (160, 0.5, 6.0, 0.05), (150, 0.6, 8.0, 0.1)]
FAIL = 0.05  # of clients that are drawn
ALL = 10**5  # so many other coordinates that the size of the noise is seen exactly


@lru_cache(maxsize=1)  # the next test is of the same setting
def settled(enrolled: int, rate: float, scale: float, dropouts: float) -> tuple[SecureSums, Law]:
    sums = secure(enrolled, rate, dropouts, scale=scale)
    return sums, law_of(sums)


@pytest.mark.parametrize("others", [0, 100, ALL])
@pytest.mark.parametrize(("enrolled", "rate", "scale", "dropouts"), SETTINGS)
def test_the_true_cost_is_no_more_than_what_is_certified(
    enrolled: int, rate: float, scale: float, dropouts: float, others: int
) -> None:
    sums, law = settled(enrolled, rate, scale, dropouts)
    at = certified(sums)
    for fail in (0.0, FAIL):
        assert true_delta(law, enrolled, rate, scale, fail, others, at) <= 1.02 * DELTA  # as fine as the grid is
    if not sums.counts.dropouts:  # else the server's surplus makes it cheaper than it need be
        assert true_delta(law, enrolled, rate, scale, 0.0, others, 0.97 * at) > DELTA


@pytest.mark.parametrize(("enrolled", "rate", "scale", "dropouts"), SETTINGS)
def test_the_rule_before_cost_more(enrolled: int, rate: float, scale: float, dropouts: float) -> None:
    at = certified(secure(enrolled, rate, dropouts, scale=scale))
    assert true_delta(as_it_was(dropouts), enrolled, rate, scale, FAIL, ALL, at) > 1.5 * DELTA


@pytest.mark.parametrize("colluders", [0.0, 0.05])
def test_fewer_may_have_paid_for_a_round_than_are_enrolled(colluders: float) -> None:
    """Then cohorts are smaller, and what was settled for all would not do."""
    sums = secure(300, 0.4, 0.08, colluders)
    assert sums.counts.dropouts == 9
    assert sums.counts.failure == pytest.approx(0.01 * DELTA / ROUNDS)
    for entered in (300, 200, 100, 30, 5, 1):
        rule, law = sums.counts.rule(entered), law_of(sums, entered)
        matters = stats.binom.pmf(rule.fewest - 1, entered - 1, 0.4) * 0.4 if rule.fewest > 1 else 0.0
        assert matters <= sums.counts.failure
        for missing in {0, rule.dropouts, rule.dropouts + 1}:
            sizes = {*range(rule.fewest, rule.fewest + 4), (rule.fewest + entered) // 2, entered}
            for drawn in (size for size in sizes if missing <= size <= entered):
                wanted = float(rule.surplus) if missing <= rule.dropouts else None
                assert law(drawn, missing) == (wanted if wanted is None else pytest.approx(wanted, rel=1e-6))


def test_small_cohorts_bear_dropouts_only_where_that_is_rare() -> None:
    for enrolled, rate in ((40, 0.25), (400, 0.25), (6000, 1 / 60)):
        sums = secure(enrolled, rate, 0.1, 0.05)
        rule = sums.counts.rule(enrolled)
        assert not sums.counts.dropouts or rule.fewest >= 2 * sums.counts.dropouts + sums.counts.colluders + 1
    assert secure(40, 0.25, 0.1).counts.dropouts == 0
    assert secure(400, 0.25, 0.1).counts.dropouts == 10
    assert replace(secure(400, 0.25, 0.1).counts, dropouts=0).failure == 0
