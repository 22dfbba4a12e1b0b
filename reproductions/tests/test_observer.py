"""What an observer infers of budgets that nobody transmitted."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from polyeps_reproductions.observer import Facts, Inferred, fit_of, infer, silent_coordinates
from support.federations import EPSILONS, experiment, finish, job_of
from torch import Tensor

from polyeps.accounting.calibration import calibrate
from polyeps.clients import Clients
from polyeps.core import Budget, Profile, Replies, Task
from polyeps.errors import InputError
from polyeps.experiment.job import Job
from polyeps.models import cnn, logistic
from polyeps.server import Transport
from polyeps.transport.memory import InMemory

# PDP-FL's setting, with fewer rounds.
FACTS = Facts(steps=94, learning_rate=0.01, clip=1.0, batch=64, records=6000, rounds=2, delta=1e-5)
SILENT, SIZE = 670, 7850


def simulated(scales: Any, rounds: int, seed: int = 0, signal: float = 0.4) -> list[Tensor]:
    """Updates with noise of these scales, and a signal of that length that leaves the last coordinates alone."""
    drawn = np.random.default_rng(seed)
    found = []
    for _ in range(rounds):
        rows = drawn.normal(size=(len(scales), SIZE)) * np.asarray(scales)[:, None] * FACTS.deviation
        shown = drawn.normal(size=SIZE - SILENT) ** 3  # few coordinates carry most of it
        rows[:, : SIZE - SILENT] += signal * shown / np.linalg.norm(shown)
        found.append(torch.from_numpy(rows).float())
    return found


def test_silent_coordinates_give_every_scale_away() -> None:
    scales = np.geomspace(0.5, 15, 400)
    silent = torch.arange(SIZE - SILENT, SIZE)
    found = infer(simulated(scales, 1), FACTS, silent)
    error = np.sqrt(np.mean((found.noise_multiplier / scales - 1) ** 2))
    assert error == pytest.approx(1 / math.sqrt(2 * SILENT), rel=0.15)  # 2.7 %, whatever the noise
    as_mask = torch.zeros(SIZE, dtype=torch.bool).index_fill(0, silent, True)
    assert np.array_equal(infer(simulated(scales, 1), FACTS, as_mask).noise_multiplier, found.noise_multiplier)


def test_budgets_follow_from_scales() -> None:
    budgets = [Budget(epsilon, 1e-5) for epsilon in (0.1, 0.4, 1.0, 3.0, 10.0, 20.0)]
    scales = calibrate(budgets, FACTS.step(6000), 94 * 2, tolerance=1e-3).noise_multiplier
    truth = [budget.epsilon for budget in budgets]
    known = fit_of(infer(simulated(scales, 2), FACTS, torch.arange(SIZE - SILENT, SIZE)), truth)
    assert known.r_squared > 0.99
    assert known.relative_error < 0.1  # at few steps ε reacts to σ more than in proportion
    blind = fit_of(infer(simulated(scales, 2), FACTS), truth)
    assert blind.r_squared > 0.99  # what all clients share cancels
    assert blind.relative_error < 0.15
    alone = infer([rows[:1] for rows in simulated(scales, 2)], FACTS)
    assert 1 < alone.noise_multiplier[0] / scales[0] < 1.1  # one client by itself: its signal counts as noise


def test_many_clients_are_read_off_a_curve() -> None:
    scales = np.geomspace(2, 20, 30)
    silent = torch.arange(SIZE - SILENT, SIZE)
    rows = simulated(scales, 1)
    many = infer(rows, FACTS, silent)
    few = infer([rows[0][:10]], FACTS, silent)
    np.testing.assert_allclose(many.epsilon[:10], few.epsilon, rtol=5e-3)
    assert np.all(np.diff(many.epsilon[[0, 10, 20, 29]]) < 0)


def test_clients_never_heard_and_records_of_their_own() -> None:
    rows = simulated([5.0, 5.0, 5.0], 2)
    rows[0][1] = rows[1][1] = math.nan
    rows[0][2] = math.nan
    facts = Facts(94, 0.01, 1.0, 64, [6000, 6000, 3000], 2, 1e-5)
    found = infer(rows, facts)
    assert np.isnan(found.epsilon).tolist() == [False, True, False]
    assert found.epsilon[2] > 1.5 * found.epsilon[0]  # twice the rate, about twice the cost
    assert fit_of(found, [1.0, 1.0, 1.0]).relative_error >= 0
    nobody = Inferred(np.array([np.nan]), np.array([np.nan]))
    assert math.isnan(fit_of(nobody, [1.0]).r_squared)
    assert math.isnan(fit_of(Inferred(np.ones(2), np.ones(2)), [2.0, 2.0]).r_squared)


def test_nonsense_is_refused() -> None:
    with pytest.raises(InputError, match="one matrix per round"):
        infer([], FACTS)
    with pytest.raises(InputError, match="above 0"):
        Facts(0, 0.1, 1, 4, 10, 1, 1e-5)
    with pytest.raises(InputError, match="one for each"):
        fit_of(Inferred(np.ones(2), np.ones(2)), [1.0])
    with pytest.raises(InputError, match="not a dense one"):
        silent_coordinates(cnn(), torch.zeros(2, 1, 28, 28))


def test_black_pixels_are_silent() -> None:
    features = torch.rand(5, 1, 2, 3)
    features[:, 0, 0, 1] = 0
    mask = silent_coordinates(logistic(6, 4), features)
    assert mask.nonzero()[:, 0].tolist() == [1, 7, 13, 19]


@pytest.mark.parametrize("known", [True, False])
def test_a_federation_that_tells_no_budget(known: bool, tmp_path: Path) -> None:
    wanted = experiment("pdp-fl", budgets={"disclosed": False}, rounds=8)
    job = job_of(wanted)
    heard: list[Tensor] = []

    class Listener(Transport):
        def __init__(self, inner: Transport) -> None:
            self.inner = inner

        def profiles(self) -> tuple[Profile, ...]:
            return self.inner.profiles()

        def __call__(self, task: Task) -> Replies:
            replies = self.inner(task)
            rows = torch.full((len(EPSILONS), job.population.model.size), math.nan)
            rows[[int(client) for client in replies.ids]] = replies.payload["update"]
            heard.append(rows)
            return replies

    def listening(cohort: Clients, job: Job) -> Transport:
        return Listener(InMemory(cohort, job.algorithm, job.discloses))

    finish(job, tmp_path / "a.db", listening, rounds=8)
    settings = wanted.training
    steps, batch = int(settings.local_steps), int(settings.batch)
    facts = Facts(steps, settings.learning_rate, settings.clip, batch, 60, wanted.rounds, 1e-3)
    silent = silent_coordinates(job.population.model, job.population.test[0]) if known else None
    assert silent is None or 20 <= int(silent.sum()) <= 200
    found = infer(heard, facts, silent)
    verdict = fit_of(found, EPSILONS)
    assert verdict.r_squared > 0.95
    assert verdict.relative_error < (0.15 if known else 0.25)
    np.testing.assert_allclose(found.noise_multiplier, job.noise_multiplier, rtol=0.2 if known else 0.35)
