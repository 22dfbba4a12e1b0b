"""Parts of noise add up to what is paid for, whatever the size of the cohort, whoever fails, tells or is lied to."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.summed import work

from polyeps.algorithms import _secure_sums
from polyeps.algorithms._releases import FINE, NoiseKind, Release
from polyeps.algorithms._secure_sums import DRAWN, SecureSums
from polyeps.algorithms._sum_counts import Counts
from polyeps.core import AGREED, Ask, Payload, Profile, Replies, State, SumTerms, Task, Total
from polyeps.engine.noise import SeededStreams
from polyeps.errors import InputError
from polyeps.mechanisms.integer import UNIT, Grid

SIZE = 3
ENROLLED = 400
SLACK = 1e-9  # of floats
# Of colluders up to 0.35, and of dropouts as many as a secure sum could bear beside them.
shares = st.tuples(st.floats(0, 1), st.floats(0, 0.35)).map(lambda pair: (pair[0] * (1 - pair[1]) / 2, pair[1]))
rates = st.sampled_from([0.02, 0.1, 0.25, 0.5, 0.9, 1.0])
scales = st.floats(0.05, 20)
clips = st.floats(1e-3, 1e3)
parts = st.floats(0.01, 1.0)
told = st.tuples(shares, rates, scales, clips, parts)
EVERYBODY = tuple(Profile(str(place)) for place in range(ENROLLED))


def asked(release: Release, sums: SecureSums, cohort: int) -> Payload:
    return {DRAWN: torch.tensor(cohort), AGREED: sums.fingerprint(release)}


def setting(noise: NoiseKind, chosen: Any) -> tuple[Release, SecureSums]:
    (dropouts, colluders), rate, scale, clip, share = chosen
    counts = Counts.settled(ENROLLED, rate, dropouts, colluders, delta=1e-5, rounds=50)
    sums = SecureSums(scale, counts, partial(SeededStreams, 1, ["all"]))
    return Release("train", SIZE, clip, share, noise, ENROLLED), sums


class Answered(Ask):
    """All but some of those asked answer; notes how many answers a sum takes."""

    def __init__(self, missing: int, length: int) -> None:
        self.missing, self.length, self.least = missing, length, 0

    def __call__(self, task: Task) -> Replies:
        raise AssertionError(task)

    def total(self, task: Task, terms: SumTerms) -> Total:
        self.least = terms.least
        ids = task.to[self.missing :]
        numbers = torch.zeros(self.length, dtype=torch.float64 if terms.bits is None else torch.int64)
        return Total(ids, {task.action: numbers} if len(ids) >= terms.least else {})


def topped_up(release: Release, sums: SecureSums, cohort: int, missing: int, length: int) -> tuple[Fraction, Answered]:
    """The variance the server adds to a sum that opens, and what was asked."""
    added: list[Fraction] = []

    def noted(_: Any, __: Any, ___: Any, total: Any, variance: Fraction, ____: Any) -> Any:
        added.append(variance)
        return total

    ask = Answered(missing, length)
    with patch.object(SecureSums, "_topped_up", noted):
        sums.of(State(torch.zeros(SIZE), roster=EVERYBODY[:cohort]), ask, release, {})
    return (added or [Fraction(-1)])[0], ask


@pytest.mark.parametrize("noise", ["gaussian", "skellam", "discrete-gaussian"])
@given(cohort=st.integers(0, ENROLLED), lost=st.floats(0, 1), chosen=told)
@settings(max_examples=100, deadline=None)
def test_what_is_released_has_one_variance(noise: NoiseKind, cohort: int, lost: float, chosen: Any) -> None:
    """Exactly, whatever cohort was drawn and how many of it are missing; and whether it opens depends on the latter."""
    release, sums = setting(noise, chosen)
    counts = sums.counts
    rule = counts.rule(ENROLLED)
    whole = release.total(sums.noise_multiplier, ENROLLED, rule.surplus)
    cohort = ENROLLED if counts.rate == 1 else cohort
    missing = math.floor(lost * (rule.dropouts + 1))
    added, ask = topped_up(release, sums, cohort, missing, 4 if noise != "gaussian" else SIZE)
    if cohort < rule.fewest:
        assert added == whole
        assert not ask.least
        return
    assert ask.least == cohort - rule.dropouts
    part = release.part(sums.noise_multiplier, counts.parts(cohort))
    if added == -1:
        assert missing > rule.dropouts
    elif counts.rate == 1:
        assert added == 0
    else:
        assert added + (cohort - missing) * part == whole
        assert noise == "gaussian" or (added >= UNIT and (added == Fraction(float(added)) or added > 10**10))
        assert noise != "discrete-gaussian" or added >= release.part(sums.noise_multiplier, ENROLLED)


@given(cohort=st.integers(1, ENROLLED), chosen=told)
@settings(max_examples=100, deadline=None)
def test_gaussian_parts(cohort: int, chosen: Any) -> None:
    release, sums = setting("gaussian", chosen)
    with patch.object(_secure_sums, "normals_for", lambda _, values, __: torch.ones_like(values)):
        values = torch.zeros(1, SIZE, dtype=torch.float64)
        sent = sums.from_clients(release, work(sums.noise_multiplier, asked(release, sums, cohort)), values)
    part, priced = float(sent["train"][0, 0]), release.deviation(sums.noise_multiplier)
    assert release.event(sums.noise_multiplier).noise_multiplier * release.clip == priced
    honest = max(1, sums.counts.least(cohort) - sums.counts.colluders)
    assert honest * part**2 >= priced**2 * (1 - SLACK)


@pytest.mark.parametrize("noise", ["skellam", "discrete-gaussian"])
@given(cohort=st.integers(1, ENROLLED), chosen=told)
@settings(max_examples=60, deadline=None)
def test_parts_of_integers(noise: NoiseKind, cohort: int, chosen: Any) -> None:
    release, sums = setting(noise, chosen)
    grids: list[Grid] = []

    def noted(grid: Grid, values: torch.Tensor, _: Any) -> Any:
        grids.append(grid)
        return np.zeros((len(values), grid.dimension), np.int64)

    with patch.object(_secure_sums, "encode_rows", noted):
        sums.from_clients(release, work(sums.noise_multiplier, asked(release, sums, cohort)), torch.zeros(1, SIZE))
    (own,) = grids
    event = release.event(sums.noise_multiplier)
    part = Fraction(own.client_variance)
    priced = event.variance if noise == "skellam" else event.clients * event.deviation**2
    honest = max(1, sums.counts.least(cohort) - sums.counts.colluders)
    assert honest * part >= Fraction(priced) * Fraction(1 - SLACK)
    if noise == "discrete-gaussian":  # what a sum of them lacks to be one is less than is charged
        assert part >= Fraction(event.deviation) ** 2 * Fraction(1 - SLACK)
        assert cohort < event.clients  # and the server is one more
    assert own.largest_square <= Fraction(event.l2_sensitivity) ** 2
    assert (own.bits, own.granularity) == (sums.bits(release), release.clip / FINE)


@pytest.mark.parametrize("colluders", range(4))
@pytest.mark.parametrize("dropouts", range(4))
def test_no_lie_about_who_was_drawn_takes_noise_away(dropouts: int, colluders: int) -> None:
    """Every client may be told another number; it takes part where a sum's terms are what it then insists on."""
    counts = Counts(ENROLLED, 1.0, dropouts, colluders)
    for clients, threshold in itertools.combinations_with_replacement(range(1, 16), 2):
        clients, threshold = max(clients, threshold), min(clients, threshold)
        believed = [drawn for drawn in range(clients, 40) if counts.least(drawn) <= threshold]
        shares = [Fraction(1, counts.parts(drawn)) for drawn in believed]
        for own in shares:  # its own noise is enough, or that of the fewest honest ones, and there is but one sum
            assert own == 1 or (threshold - colluders) * min(shares) >= 1
            assert own == 1 or 2 * threshold > clients + colluders


@pytest.mark.parametrize(
    "lie",
    [
        {DRAWN: torch.tensor(0)},
        {DRAWN: torch.tensor(-3)},
        {DRAWN: torch.tensor(ENROLLED + 1)},
        {DRAWN: torch.tensor(10**18)},
        {DRAWN: torch.tensor(2.5)},
        {DRAWN: torch.tensor(math.nan)},
        {DRAWN: torch.tensor([5, 5])},
        {DRAWN: torch.tensor(True)},
        {DRAWN: None},
        {AGREED: None},
        {AGREED: torch.zeros(4, dtype=torch.int64)},
        {AGREED: torch.zeros(4)},
        {AGREED: torch.zeros(0)},
    ],
)
@pytest.mark.parametrize("noise", ["gaussian", "skellam"])
def test_what_was_not_agreed_to_is_refused(lie: dict[str, Any], noise: NoiseKind) -> None:
    release, sums = setting(noise, ((0.1, 0.1), 0.5, 1.0, 1.0, 1.0))
    honest = asked(release, sums, 7)
    payload = {name: value for name, value in {**honest, **lie}.items() if value is not None}
    sums.fits(release)(honest)
    assert sums.agrees(release, honest)
    assert not sums.agrees(release, payload)
    for attempt in (
        lambda made, told: sums.fits(made)(told),
        sums.terms,
        lambda *_: sums.from_clients(release, work(1.0, payload), torch.zeros(1, SIZE)),
    ):
        with pytest.raises(InputError, match=r"agreed to|as one integer|cannot have been drawn"):
            attempt(release, payload)


def test_a_fingerprint_stands_for_everything_that_decides_the_noise() -> None:
    chosen = ((0.1, 0.1), 0.5, 1.0, 1.0, 1.0)
    release, sums = setting("skellam", chosen)
    others = [setting("skellam", ((0.2, 0.1), *chosen[1:])), setting("skellam", ((0.1, 0.2), *chosen[1:]))]
    for place, other in ((1, 0.4), (2, 1.1), (3, 2.0), (4, 0.5)):
        others.append(setting("skellam", (*chosen[:place], other, *chosen[place + 1 :])))
    others.append(setting("discrete-gaussian", chosen))
    others.append((release, SecureSums(sums.noise_multiplier, sums.counts, sums.streams, group="open")))
    prints = {tuple(one.fingerprint(made).tolist()) for made, one in [(release, sums), *others]}
    assert len(prints) == 1 + len(others)


def test_noise_is_never_less_than_what_clients_pay_for() -> None:
    release, sums = setting("gaussian", ((0.1, 0.0), 1.0, 1.0, 1.0, 1.0))
    with pytest.raises(InputError, match=r"paid for the noise multiplier 2, and the sum is made for 1"):
        sums.from_clients(release, work(2.0, asked(release, sums, 7)), torch.zeros(1, SIZE))
