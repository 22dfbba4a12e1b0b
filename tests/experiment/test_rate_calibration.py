"""Sampling rates by budget (IDP): the price, the mean batch, limits and refusals."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import dp_accounting
import numpy as np
import pytest
import torch
from dp_accounting.pld import PLDAccountant
from support.federations import EPSILONS, experiment, finish, job_of

from polyeps.algorithms.idp import idp
from polyeps.client import answer
from polyeps.clients import Clients
from polyeps.core import Budget, Records, Task
from polyeps.engine.noise import SeededStreams
from polyeps.errors import InputError
from polyeps.experiment.noise_calibration import cost_of
from polyeps.experiment.rate_calibration import rates_by_budget
from polyeps.models import binary_logistic
from polyeps.training import dp_sgd

STEPS = 4


def found(budgets: list[Budget | None], sizes: list[int], batch: float = 8, common: float | None = None) -> Any:
    algorithm = idp(dp_sgd(binary_logistic(1), steps=STEPS, clip=1.0, learning_rate=0.1, batch=batch))
    held = np.array(sizes)
    cost = cost_of(algorithm, [str(row) for row in range(len(sizes))], {"records": held})
    return rates_by_budget(budgets, cost, held, batch, 10, common, None)


def independent_epsilon(rate: float, sigma: float, steps: int, delta: float) -> float:
    """The ε of Poisson-sampled Gaussian steps by Google's accountant alone."""
    event = dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(sigma))
    accountant = PLDAccountant(dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE)
    return float(accountant.compose(event, steps).get_epsilon(delta))


def test_every_rate_spends_its_budget_and_batches_have_the_usual_size() -> None:
    budgets: list[Budget | None] = [Budget(0.3, 1e-5), Budget(1.0, 1e-5), Budget(1.0, 1e-4), Budget(6.0, 1e-5)]
    sizes = [100, 200, 200, 400]
    noise, rates = found(budgets, sizes)
    assert len(set(noise)) == 1
    assert (rates * sizes).mean() == pytest.approx(8, rel=0.05)
    for rate, budget in list(zip(rates, budgets, strict=True))[::2]:
        assert budget is not None
        spent = independent_epsilon(rate, noise[0], STEPS * 10, budget.delta)
        assert 0.98 * budget.epsilon < spent < 1.002 * budget.epsilon
    assert rates[0] < rates[1] < rates[2] < rates[3]


def test_equal_budgets_are_plain_dp_sgd() -> None:
    job, plain = (job_of(experiment(name, budgets={"epsilons": (2.0,) * 6})) for name in ("idp", "fedavg"))
    np.testing.assert_allclose(job.settings["rate"], 6 / 60, rtol=0.03)
    np.testing.assert_allclose(job.noise_multiplier, plain.noise_multiplier, rtol=0.03)


def test_a_large_budget_pays_for_all_records_and_no_more(tmp_path: Path) -> None:
    noise, rates = found([Budget(0.5, 1e-5), Budget(500.0, 1e-5)], [100, 100])
    assert noise.tolist() == [0.2, 0.2]  # the least there is
    assert 0 < rates[0] < 1e-5 < rates[1] <= 1
    _, whole = found([Budget(0.5, 1e-5), Budget(40.0, 1e-5)], [100, 100], common=5.0)
    assert whole[1] == 1
    job = job_of(experiment("idp", budgets={"noise_multiplier": 30.0}))
    assert set(job.noise_multiplier) == {30.0}
    done = finish(job, tmp_path / "a.db")
    assert all(done.spent()[str(row)] <= epsilon for row, epsilon in enumerate(EPSILONS))
    assert len(done.rounds) == 3


def test_clients_without_a_guarantee_get_no_noise_and_usual_batches() -> None:
    noise, rates = found([None, Budget(1.0, 1e-5)], [50, 100])
    assert noise[0] == 0
    assert noise[1] > 0
    assert rates[0] == 8 / 50
    noise, rates = found([None], [50])
    assert (noise.tolist(), rates.tolist()) == ([0.0], [8 / 50])


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"training": {"rate": 0.1}}, "training.rate"),
        ({"algorithm": {"name": "idp", "form": "published"}}, "form"),
        ({"budgets": {"delta": 0.0}}, "budgets.delta"),
    ],
)
def test_what_does_not_go_together_is_refused(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(InputError, match=named):
        job_of(experiment(changes.pop("algorithm", "idp"), **changes))


def test_a_clients_records_count_in_proportion_to_its_rate() -> None:
    """All divide by the same batch. Each record here moves the model by exactly one clip, and there is no noise."""
    records, steps, batch = 400, 50, 8.0
    training = dp_sgd(binary_logistic(1), steps=steps, clip=1.0, learning_rate=1e-6, batch=batch)
    data = Records(
        torch.full((2 * records, 1), 1e4), torch.ones(2 * records, dtype=torch.int64), torch.tensor([0, records, 800])
    )
    rates = np.array([0.01, 0.2])
    cohort = Clients(
        ("a", "b"),
        data,
        np.zeros(2),
        lambda ids, round: SeededStreams(3, ids, round),
        repeatable=True,
        ledger=None,
        settings={"rate": rates},
        guaranteed=np.array(False),
    )
    algorithm = idp(training)
    free = replace(algorithm, actions={"train": replace(algorithm.actions["train"], price=None)})
    replies = answer(cohort, free, Task("train", ("a", "b"), {"model": torch.zeros(1)}, run="test"))
    drawn = replies.payload["update"][:, 0].double().numpy() * batch / 1e-6
    expected = rates * records * steps
    assert np.all(abs(drawn - expected) < 5 * np.sqrt(expected))
