"""Where whole clients are protected everybody pays for every round, by the price their method has on paper."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from dp_accounting import SelfComposedDpEvent
from support.federations import experiment, finish, job_of

from polyeps.accounting import epsilon
from polyeps.accounting.events import Gaussian, Poisson
from polyeps.errors import InputError
from polyeps.participation import Participation

LEVELS = [
    {"name": "private", "epsilon": 1.5},
    {"name": "careful", "epsilon": 4.0, "share": 0.3},
    {"name": "open", "share": 0.2},
]


def levels_of(name: str = "fedhdp", **changes: Any) -> Any:
    settings: dict[str, Any] = {
        "data": {"name": "digits", "clients": 10, "size": 30},
        "budgets": {"epsilons": None, "levels": LEVELS},
        "participation": {"kind": "poisson", "share": 0.3},
        **changes,
    }
    return experiment({"name": name, "personal": False}, **settings)


@pytest.mark.parametrize("name", ["fedhdp", "fedhdp (minimum)"])
def test_everybody_pays_for_every_round_drawn_or_not(tmp_path: Path, name: str) -> None:
    job = job_of(levels_of(name))
    found = finish(job, tmp_path / "ledger.db", rounds=2, participation=Participation("poisson", 0.3))
    drawn = [set(round.invited) for round in found.rounds]
    never = set(found.cohort.ids) - drawn[0] - drawn[1]
    assert never
    spent = found.spent()
    assert set(spent) == set(job.terms)
    assert never & set(spent)
    for place, client in enumerate(found.cohort.ids):
        if client in spent:
            noise = float(job.noise_multiplier[place])
            expected = epsilon(SelfComposedDpEvent(Poisson(0.3, Gaussian(noise)), 2), 1e-3)
            assert spent[client] == pytest.approx(expected, rel=1e-6)
        else:
            assert job.groups is not None
            assert job.groups[place] == "open"


def test_all_rounds_use_up_what_was_agreed_and_no_more(tmp_path: Path) -> None:
    job = job_of(levels_of())
    found = finish(job, tmp_path / "ledger.db", participation=Participation("poisson", 0.3))
    assert len(found.rounds) == 3
    for client, spent in found.spent().items():
        budget = job.terms[client].budget.epsilon
        assert 0.99 * budget < spent <= budget


def test_a_round_drawn_with_certainty_costs_what_its_noise_costs(tmp_path: Path) -> None:
    job = job_of(levels_of(participation={"kind": "full"}))
    found = finish(job, tmp_path / "ledger.db", rounds=1)
    for client, spent in found.spent().items():
        (place,) = found.cohort.places([client]).tolist()
        assert spent == pytest.approx(epsilon(Gaussian(float(job.noise_multiplier[place])), 1e-3), rel=1e-6)


@pytest.mark.parametrize(
    "participation",
    [
        {"kind": "uniform", "share": 0.5},
        {"kind": "epoch", "share": 0.5},
        {"kind": "poisson", "share": 0.5, "with_public": True},
    ],
)
@pytest.mark.parametrize("name", ["fedhdp", "fedhdp (minimum)", "fedhdp (none)"])
def test_cohorts_in_which_one_takes_anothers_place_are_refused(name: str, participation: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=r"one client takes the place of another.*poisson"):
        job_of(levels_of(name, participation=participation))


def test_open_clients_are_refused_where_everybody_needs_a_budget() -> None:
    with pytest.raises(InputError, match=r"chose a privacy level without an epsilon.*choose fedhdp"):
        job_of(experiment("fedavg", budgets={"epsilons": None, "levels": LEVELS}, data={"clients": 10}))
