"""Federations on Flower's messages: nodes that fail, and a whole ServerApp."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Error, Message
from support.federations import LocalGrid, experiment, finish, job_of, ledger_of

from polyeps.core import State, Task
from polyeps.experiment.job import Job
from polyeps.participation import Participation
from polyeps.server import Round, serve
from polyeps.transport.flower import OnFlower


@pytest.fixture
def job() -> Job:
    return job_of(experiment("fedavg"))


class BrokenGrid(LocalGrid):
    """Nodes in `failing` answer with an error, as Flower does for an app that raised."""

    def send_and_receive(self, messages: Iterable[Message], **_: Any) -> Iterable[Message]:
        asked = list(messages)
        broken = [Message(Error(1, "it broke"), reply_to=m) for m in asked if m.metadata.dst_node_id in self.failing]
        return [*broken, *super().send_and_receive(asked)]


@pytest.mark.parametrize("grid_of", [LocalGrid, BrokenGrid])
def test_a_node_that_fails_counts_as_one_that_declined(grid_of: type[LocalGrid], job: Job, tmp_path: Path) -> None:
    ledger = ledger_of(job, tmp_path / "a.db")
    assert ledger is not None
    grid = grid_of(job.clients(ledger), job)
    seen: list[Round] = []

    def observe(round: Round, _: State) -> None:
        seen.append(round)
        grid.failing = {101, 104} if len(seen) == 1 else set()  # in the second round

    serve(job.algorithm, OnFlower(grid), job.state, rounds=3, participation=Participation(), seed=5, observe=observe)
    assert [round.declined for round in seen] == [(), ("1", "4"), ()]
    assert set(seen[1].traffic) == {"0", "2", "3", "5"}
    assert set(seen[1].active) == set(ledger.clients)  # one missed message does not end a client's part
    assert [ledger.account(client).charges for client in ledger.clients] == [3, 2, 3, 3, 2, 3]


@pytest.mark.parametrize("grid_of", [LocalGrid, BrokenGrid])
def test_a_node_that_does_not_introduce_itself_is_not_enrolled(
    grid_of: type[LocalGrid], job: Job, tmp_path: Path
) -> None:
    grid = grid_of(job.clients(ledger_of(job, tmp_path / "a.db")), job)
    grid.failing = {100}
    assert [profile.id for profile in OnFlower(grid).profiles()] == ["1", "2", "3", "4", "5"]


def test_asking_twice_who_is_there_is_no_second_name(job: Job, tmp_path: Path) -> None:
    transport = OnFlower(LocalGrid(job.clients(ledger_of(job, tmp_path / "a.db")), job))
    assert transport.profiles() == transport.profiles()


def test_replies_come_in_the_order_asked_for(job: Job, tmp_path: Path) -> None:
    transport = OnFlower(LocalGrid(job.clients(ledger_of(job, tmp_path / "a.db")), job))
    transport.profiles()
    task = Task("train", ("4", "0", "2"), {"model": job.population.start}, "run", 0)
    assert transport(task).ids == ("4", "0", "2")  # LocalGrid answers the other way round


def test_hidden_fields_are_not_in_the_message(tmp_path: Path) -> None:
    job = job_of(experiment("fedavg", budgets={"disclosed": False}))
    profiles = OnFlower(LocalGrid(job.clients(ledger_of(job, tmp_path / "a.db")), job)).profiles()
    assert {(profile.examples, profile.epsilon, profile.group) for profile in profiles} == {(None, None, None)}


def test_a_grid_runs_a_whole_federation(job: Job, tmp_path: Path) -> None:
    transport = OnFlower(LocalGrid(job.clients(ledger_of(job, tmp_path / "a.db")), job))
    everyone = replace(job.participation, quorum=1)
    found = serve(job.algorithm, transport, job.state, rounds=3, participation=everyone, seed=5, run="test")
    expected = finish(job_of(experiment("fedavg")), tmp_path / "b.db").state
    assert found.round == 3
    torch.testing.assert_close(found.model, expected.model, rtol=1e-4, atol=1e-5)
