"""Rare failures: (0, p)-DP releases, whose probabilities are taken from δ."""

import math

import dp_accounting as dp
import pytest

from polyeps.accounting import Accountant, epsilon, rdp
from polyeps.accounting.events import (
    DiscreteGaussianSumDpEvent,
    Gaussian,
    Poisson,
    PureDpEvent,
    RareFailureDpEvent,
    canonical_json,
    event_from_dict,
    event_to_dict,
)
from polyeps.accounting.histories import history_of, on_one_sample

ACCOUNTANTS: tuple[Accountant, ...] = ("pld", "rdp")


@pytest.mark.parametrize("accountant", ACCOUNTANTS)
@pytest.mark.parametrize("other", [Gaussian(2.0), Poisson(0.01, Gaussian(1.0)), PureDpEvent(0.3)])
def test_failures_are_taken_from_delta(other: dp.DpEvent, accountant: Accountant) -> None:
    both = dp.ComposedDpEvent([other, dp.SelfComposedDpEvent(RareFailureDpEvent(1e-7), 40)])
    assert epsilon(both, 1e-5, accountant=accountant) == epsilon(other, 1e-5 - 4e-6, accountant=accountant)


@pytest.mark.parametrize("accountant", ACCOUNTANTS)
def test_nothing_left_of_delta_is_no_guarantee(accountant: Accountant) -> None:
    failure = RareFailureDpEvent(1e-6)
    for delta, uses in [(1e-5, 11), (1e-6, 1), (0.0, 1), (1e-7, 1)]:
        event = dp.ComposedDpEvent([PureDpEvent(0.1), dp.SelfComposedDpEvent(failure, uses)])
        assert epsilon(event, delta, accountant=accountant) == math.inf
        assert epsilon(dp.SelfComposedDpEvent(failure, uses), delta, accountant=accountant) == math.inf
    assert epsilon(failure, 1e-5, accountant=accountant) == 0.0
    assert epsilon(RareFailureDpEvent(1.0), 0.5, accountant=accountant) == math.inf
    assert epsilon(RareFailureDpEvent(0.0), 0.0, accountant=accountant) == 0.0


def test_failures_on_a_sample_are_not_amplified() -> None:
    inner = dp.ComposedDpEvent([Gaussian(1.0), dp.SelfComposedDpEvent(RareFailureDpEvent(2.0**-27), 3)])
    history = history_of(Poisson(0.01, inner), 5)
    assert history == {Poisson(0.01, Gaussian(1.0)): 5, RareFailureDpEvent(3 * 2.0**-27): 5}
    assert history_of(Poisson(0.01, on_one_sample(inner)), 5) == history
    integers = DiscreteGaussianSumDpEvent(2.0, 3.0, 20, 5)
    mixed = on_one_sample(dp.ComposedDpEvent([integers, RareFailureDpEvent(2.0**-27), Gaussian(1.0)]))
    assert RareFailureDpEvent(2.0**-27) in history_of(Poisson(0.5, mixed))
    assert history_of(Poisson(0.5, RareFailureDpEvent(2.0**-27))) == {RareFailureDpEvent(2.0**-27): 1}


def test_the_filter_keeps_a_fixed_share_of_delta_for_failures() -> None:
    step, share = Poisson(0.01, Gaussian(1.0)), rdp.FAILURE_SHARE * 1e-5
    alone = rdp.filter_epsilon({step: 100}, 12.0, 1e-5, "add-remove")
    within = rdp.filter_epsilon({step: 100, RareFailureDpEvent(share / 100): 99}, 12.0, 1e-5, "add-remove")
    beyond = rdp.filter_epsilon({step: 100, RareFailureDpEvent(share / 100): 101}, 12.0, 1e-5, "add-remove")
    assert alone == within < beyond == math.inf
    assert alone > epsilon(dp.SelfComposedDpEvent(step, 100), 1e-5, accountant="rdp")


def test_failures_can_be_described() -> None:
    event = RareFailureDpEvent(1e-9)
    assert event_from_dict(event_to_dict(event)) == event
    assert canonical_json(event) == '{"kind":"rare-failure","probability":1e-09}'
