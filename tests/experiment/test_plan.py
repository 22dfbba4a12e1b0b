from typing import Any

import dp_accounting as dp
import pytest

from polyeps.accounting import epsilon
from polyeps.accounting.events import Gaussian, Poisson
from polyeps.core import Budget
from polyeps.errors import InputError
from polyeps.experiment.plan import ClientPlan, plan_dp_sgd

SCHEDULE = {"batch": 8, "local_steps": 10, "rounds": 50, "participation": 0.8}


def plan(clients: list[tuple[str, Budget, int]], schedule: dict[str, Any], **others: Any) -> list[ClientPlan]:
    return plan_dp_sgd(clients, **schedule, **others)[1]


def cost(sigma: float, rounds: int, records: int = 1200) -> float:
    return epsilon(dp.SelfComposedDpEvent(Poisson(8 / records, Gaussian(sigma)), 10 * rounds), 1e-5)


def test_each_client_gets_the_noise_its_budget_needs() -> None:
    clients = [("a", Budget(0.5, 1e-5), 1200), ("b", Budget(5.0, 1e-5), 1200), ("c", Budget(0.5, 1e-5), 300)]
    rows = plan(clients, SCHEDULE)
    assert [row.client for row in rows] == ["a", "b", "c"]
    assert rows[2].sigma > rows[0].sigma > rows[1].sigma
    for row in rows:
        assert row.rounds_expected == 40
        assert 0.99 * row.epsilon <= row.spent <= row.epsilon
        assert row.rounds_affordable >= 40
        assert cost(row.sigma, row.rounds_affordable, row.records) <= row.epsilon
        assert cost(row.sigma, row.rounds_affordable + 1, row.records) > row.epsilon
        assert row.limit == "budget"
        assert 0.3 < row.leaves_early < 0.6


def test_one_noise_for_all_makes_strict_clients_leave_early() -> None:
    clients = [
        ("strict", Budget(0.05, 1e-5), 1200),
        ("middle", Budget(0.6, 1e-5), 1200),
        ("high", Budget(9.0, 1e-5), 1200),
    ]
    strict, middle, high = plan(clients, SCHEDULE, sigma=1.0)
    assert strict.rounds_affordable == 0
    assert strict.spent == 0.0
    assert 0 < middle.rounds_affordable < 50
    assert middle.limit == "budget"
    assert (high.rounds_affordable, high.limit) == (50, "rounds")
    assert high.spent == pytest.approx(cost(1.0, 40), rel=1e-9)
    assert high.leaves_early == 0.0


@pytest.mark.parametrize(
    "change", [{"batch": 0}, {"local_steps": 0}, {"rounds": 0}, {"participation": 0.0}, {"participation": 1.1}]
)
def test_impossible_schedules_are_refused(change: dict[str, float]) -> None:
    with pytest.raises(InputError):
        plan([("a", Budget(1.0, 1e-5), 50)], SCHEDULE | change)


def test_a_client_with_too_few_records_is_named() -> None:
    with pytest.raises(InputError, match="client 'small' has 5 records, fewer than a batch of 8"):
        plan([("small", Budget(1.0, 1e-5), 5)], SCHEDULE)
    with pytest.raises(InputError, match="sigma"):
        plan([("a", Budget(1.0, 1e-5), 50)], SCHEDULE, sigma=-1.0)
