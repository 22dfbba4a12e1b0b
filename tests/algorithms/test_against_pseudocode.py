"""Whole runs of WeiAvg, PFA, PFA+ and PDP-FL against the papers' pseudocode as plain loops."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from reference import federated
from reference.federated import Choice, Vector
from reference.local_training import dp_sgd_client
from support.federations import experiment, finish, guaranteed, job_of
from support.prescribed import MODEL, TRAINING, Prescribed, drawn

from polyeps.algorithms import ALGORITHMS
from polyeps.algorithms._averaging import public_clients
from polyeps.participation import Participation

EPSILONS = (0.5, 8.0, 0.6, 9.0, 0.7, 10.0, 0.55)
PUBLIC = frozenset("135")
CLOSE: dict[str, Any] = {"rtol": 2e-4, "atol": 2e-5}
START = torch.linspace(-1, 1, MODEL.size)


def choice_of(rank: Any, subspace: str, per_tensor: bool, weights: str) -> Choice:
    budgets = {str(place): epsilon for place, epsilon in enumerate(EPSILONS)}
    return Choice(rank, subspace, federated.spans_of(MODEL, per_tensor), budgets if weights == "epsilon" else None)


def start() -> Vector:
    return START.double().numpy()


every_choice = pytest.mark.parametrize("weights", ["epsilon", "count"])
every_rank = pytest.mark.parametrize("rank", [1, 2, "auto"])
every_subspace = pytest.mark.parametrize("subspace", ["set", "mean", "centred"])
every_cut = pytest.mark.parametrize("per_tensor", [True, False])
every_cohort = pytest.mark.parametrize("share", [None, 0.45])  # all, or three of seven: sometimes none of one group


@every_cohort
def test_weiavg(share: float | None) -> None:
    clients = Prescribed(EPSILONS, drawn())
    done = clients.run(ALGORITHMS["weiavg"].build(TRAINING), rounds=6, share=share, start=START)
    choice = choice_of(1, "set", True, "epsilon")
    np.testing.assert_allclose(
        done.model.numpy(), federated.weiavg(start(), clients.cohorts, clients.updates, choice), **CLOSE
    )


@every_cohort
@every_choice
@every_cut
@every_subspace
@every_rank
@pytest.mark.parametrize("name", ["pfa", "pfa-plus"])
def test_projected(name: str, rank: Any, subspace: str, per_tensor: bool, weights: str, share: float | None) -> None:
    algorithm = ALGORITHMS[name].build(TRAINING, rank=rank, subspace=subspace, per_tensor=per_tensor, weights=weights)
    clients = Prescribed(EPSILONS, drawn(), per_tensor)
    done = clients.run(algorithm, rounds=6, share=share, start=START)
    expected = getattr(federated, name.replace("-", "_"))(
        start(), clients.cohorts, clients.updates, PUBLIC, choice_of(rank, subspace, per_tensor, weights)
    )
    np.testing.assert_allclose(done.model.numpy(), expected, **CLOSE)
    if share is None:
        thin = {task.round for task in clients.tasks if task.action == "project"}
        assert thin == (set() if name == "pfa" else {1, 2, 3, 4, 5})


@every_cut
@every_subspace
def test_cohorts_of_the_sampled_runs_include_rounds_without_one_group(subspace: str, per_tensor: bool) -> None:
    """The comparison above covers the rounds it means to cover."""
    clients = Prescribed(EPSILONS, drawn(), per_tensor)
    clients.run(ALGORITHMS["pfa"].build(TRAINING, subspace=subspace), rounds=6, share=0.45)
    counts = {len(PUBLIC & set(cohort)) for cohort in clients.cohorts}
    assert {0, 1, 2} <= counts


@every_choice
@every_cut
@every_subspace
def test_pdp_fl_combines_as_published_given_its_groups(subspace: str, per_tensor: bool, weights: str) -> None:
    weighing = "noise" if weights == "epsilon" else "count"

    def updates(client: str, number: int, model: Vector) -> Vector:
        return drawn(spread=0.1 if client in PUBLIC else 4.0)(client, number, model)

    clients = Prescribed([None] * 7, updates, per_tensor)
    options = {"subspace": subspace, "per_tensor": per_tensor, "weights": weighing}
    # By norms: 24 coordinates are too few to tell noise from signal.
    algorithm = ALGORITHMS["pdp-fl"].build(TRAINING, grouping="robust", **options)
    done = clients.run(algorithm, rounds=4, start=START)
    # What each round knew: the squared lengths so far, by their geometric mean.
    model, choices, logs = start(), [], list[Vector]()
    spans = federated.spans_of(MODEL, per_tensor)
    for number in range(4):
        rows = {client: updates(client, number, model) for client in map(str, range(7))}
        logs.append(np.array([np.log(np.linalg.norm(row)) for row in rows.values()]))
        squares = np.exp(2 * np.mean(logs, axis=0))
        least = squares.min()
        noise = np.maximum(squares - least, least * np.sqrt(2 / MODEL.size)) / MODEL.size
        trust = {client: 1 / (noise[int(client)] + least / MODEL.size) for client in rows}
        choices.append(Choice(1, subspace, spans, trust if weighing == "noise" else None))
        model = federated.pdp_fl(start(), [list(rows)] * (number + 1), updates, [PUBLIC] * (number + 1), choices)
    np.testing.assert_allclose(done.model.numpy(), model, **CLOSE)


@pytest.mark.parametrize(("name", "options"), [
    ("weiavg", {}),
    ("pfa", {"rank": 2}),
    ("pfa", {"subspace": "centred", "per_tensor": False, "weights": "count"}),
    ("pfa-plus", {}),
    ("pfa-plus", {"subspace": "mean", "rank": "auto"}),
])  # fmt: skip
def test_real_training_with_its_noise(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    wanted = experiment({"name": name, **options}, training={"local_steps": 2, "batch": 3})
    job = job_of(wanted)
    done = finish(job, tmp_path / "a.db", participation=Participation("uniform", 0.7))
    population, settings = job.population, wanted.training
    cohort = job.clients(None)
    records = replace(population.records, features=population.records.features.flatten(1))

    def updates(client: str, number: int, model: Vector) -> Vector:
        (place,) = cohort.places([client])
        update = dp_sgd_client(
            population.model,
            torch.from_numpy(model).float(),
            records.select([int(place)]),
            cohort.streams((client,), number),
            int(settings.batch) / int(population.partition.sizes[place]),
            int(settings.local_steps),
            settings.clip,
            float(job.noise_multiplier[place]),
            settings.learning_rate,
        )
        return update.double().numpy()

    budgets = {
        client: budget.epsilon for client, budget in zip(population.ids, guaranteed(population.budgets), strict=True)
    }
    choice = Choice(
        options.get("rank", 1),
        options.get("subspace", "set"),
        federated.spans_of(population.model, options.get("per_tensor", True)),
        budgets if options.get("weights", "epsilon") == "epsilon" else None,
    )
    cohorts = [sorted(round.traffic, key=int) for round in done.rounds]
    begin = population.start.double().numpy()
    if name == "weiavg":
        expected = federated.weiavg(begin, cohorts, updates, choice)
    else:
        enrolled = Prescribed([budget.epsilon for budget in guaranteed(population.budgets)], updates).profiles()
        public = public_clients(enrolled, "mixture")
        assert public == {"2", "4"}
        expected = getattr(federated, name.replace("-", "_"))(begin, cohorts, updates, public, choice)
    np.testing.assert_allclose(done.state.model.numpy(), expected, rtol=2e-3, atol=2e-4)
