"""Alone: each client's model is that of a federation in which it is the only client."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.federations import LocalGrid, experiment, finish, job_of

from polyeps.client import answer
from polyeps.clients import Clients
from polyeps.core import Task
from polyeps.experiment import run as runs
from polyeps.experiment.evaluation import measure
from polyeps.experiment.job import Job
from polyeps.experiment.journal import Journal
from polyeps.experiment.population import populate
from polyeps.experiment.progress import Watch
from polyeps.server import Transport
from polyeps.transport.flower import OnFlower


@pytest.mark.parametrize("budgets", ["own", "none"])
def test_it_is_fedavg_of_one_client_for_every_client(budgets: str, tmp_path: Path) -> None:
    together = finish(job_of(experiment({"name": "alone", "budgets": budgets})), tmp_path / "a.db")
    models = together.cohort.memory["personal"]
    assert not torch.allclose(models[0], models[1])
    for place in range(len(models)):
        job = job_of(experiment({"name": "fedavg", "budgets": budgets}))
        single = finish(job, tmp_path / f"{place}.db", order=[place])
        torch.testing.assert_close(models[place], single.state.model, rtol=1e-4, atol=1e-5)
        client = job.population.ids[place]
        assert together.spent().get(client) == single.spent().get(client)


def test_nothing_of_a_model_leaves_the_client() -> None:
    job = job_of(experiment({"name": "alone", "budgets": "none"}))
    cohort = job.clients(None)
    replies = answer(cohort, job.algorithm, Task("train", cohort.ids, {"model": job.state.model}, run="test"))
    assert {name: tensor.tolist() for name, tensor in replies.payload.items()} == {"trained": [1] * 6}
    assert cohort.memory["personal"].abs().sum() > 0


def test_clients_that_were_never_drawn_keep_the_first_model(tmp_path: Path) -> None:
    wanted = experiment("alone", rounds=1, participation={"kind": "uniform", "share": 0.5}, data={"own_test": 0.3})
    runs.run(wanted, tmp_path / "run")
    (job,) = Journal(tmp_path / "run" / "journal.db").jobs()
    found = job["facts"]["clients"]["on_all"]["accuracy"]
    first = measure(populate(wanted, 1), populate(wanted, 1).start)["accuracy"]
    assert sorted(value == pytest.approx(first) for value in found) == [False] * 3 + [True] * 3


def stop(_job: str, round: Any, *_: Any) -> None:
    if round.number == 1:
        raise KeyboardInterrupt


def test_a_run_that_was_interrupted_ends_with_the_same_models_of_clients(tmp_path: Path) -> None:
    wanted = experiment("alone", data={"own_test": 0.3}, metrics=["auc"])
    runs.run(wanted, tmp_path / "a")
    with pytest.raises(KeyboardInterrupt):
        runs.run(wanted, tmp_path / "b", watch=Watch(round_done=stop))
    runs.resume(tmp_path / "b")
    found = [{job["job"]: job["facts"] for job in Journal(tmp_path / name / "journal.db").jobs()} for name in "ab"]
    assert found[0] == found[1]
    assert found[0]["alone-1"]["clients"]["personal"]
    assert (tmp_path / "a" / "clients.csv").read_bytes() == (tmp_path / "b" / "clients.csv").read_bytes()


@pytest.mark.parametrize("name", ["alone", "fedavg"])
def test_no_figures_of_clients_cross_a_deployed_federation(name: str, tmp_path: Path) -> None:
    """Metrics of clients are computed by the simulation's journal; messages hold what actions give, and no more."""
    job = job_of(experiment(name, metrics=["auc"]))
    transports: list[OnFlower] = []

    def listening(cohort: Clients, job: Job) -> Transport:
        transports.append(OnFlower(LocalGrid(cohort, job), rehearsal=True))
        return transports[0]

    finish(job, tmp_path / "a.db", listening)
    grid = transports[0].grid
    assert isinstance(grid, LocalGrid)
    said = b"".join(grid.carried)
    assert b"trained" in said or b"update" in said
    for word in (b"accuracy", b"auc", b"loss", b"metric", b"majority"):
        assert word not in said
