"""Personal models: Ditto's steps, the same for one client and for many, and never on the wire."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from reference.fedhdp import ditto_step
from reference.local_training import example_gradient, sets_of
from support.federations import EPSILONS, as_bytes, experiment, finish, in_memory, job_of

from polyeps.algorithms._personal_models import personal_models
from polyeps.client import answer
from polyeps.clients import Clients
from polyeps.core import ENTER, Replies, SumTerms, Task, Total
from polyeps.errors import InputError
from polyeps.experiment.job import Job
from polyeps.participation import Participation
from polyeps.server import Transport
from polyeps.transport.memory import InMemory

CLOSE: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-5}
LEVELS = [
    {"name": "private", "epsilon": 2.0},
    {"name": "careful", "epsilon": 5.0, "share": 0.4},
    {"name": "open", "share": 0.2},
]
PULLS = {"private": 0.3, "careful": 0.05, "open": 0.0}
STEPS, BATCH, RATE = 3, 6, 0.2


def job(**options: Any) -> Job:
    algorithm = {"name": "fedhdp", "pull": PULLS, **options}
    return job_of(
        experiment(
            algorithm,
            data={"name": "digits", "clients": 5, "size": 40},
            budgets={"epsilons": None, "levels": LEVELS},
            training={"batch": BATCH, "local_steps": STEPS, "learning_rate": RATE},
        )
    )


def own_steps(wanted: Job, cohort: Clients, client: str, received: Any, own: Any, number: int, rate: float) -> Any:
    """A client's update and its personal model after a round, step by step and record by record."""
    (place,) = cohort.places([client]).tolist()
    model = wanted.population.model
    features = cohort.data.features.reshape(-1, *model.input_shape)
    first, end = cohort.data.spans[place].tolist()
    assert wanted.groups is not None
    pull = PULLS[wanted.groups[place]]
    moved, personal = received.clone().double().numpy(), own.clone().double().numpy()
    for batch in sets_of(cohort.streams([client], number), end - first, BATCH, STEPS):
        rows = [first + record for record in batch]

        def gradient(vector: Any, rows: list[int] = rows) -> Any:
            at = torch.from_numpy(vector).float()
            each = [example_gradient(model, at, features[row], cohort.data.labels[row]) for row in rows]
            return torch.stack(each).mean(0).double().numpy()

        moved, personal = (
            moved - RATE * gradient(moved),
            ditto_step(personal, received.double().numpy(), gradient(personal), rate, pull),
        )
    return moved - received.double().numpy(), personal


@pytest.mark.parametrize("rate", [None, 0.07])
def test_both_models_take_dittos_steps(rate: float | None) -> None:
    wanted = job(personal_rate=rate)
    cohort = wanted.clients(None)
    cohort = replace(cohort, guaranteed=np.zeros(len(cohort.ids), dtype=bool))
    own = dict.fromkeys(cohort.ids, wanted.population.start)
    received = wanted.population.start
    for number in range(2):
        answer(cohort, wanted.algorithm, Task(ENTER, cohort.ids, {}, round=number))
        payload = {"model": received, "clip": torch.tensor(1e9, dtype=torch.float64)}
        some = cohort.ids[number:]  # the first client is left out of the second round
        replies = answer(cohort, wanted.algorithm, Task("train", some, payload, round=number))
        for place, client in enumerate(some):
            update, personal = own_steps(wanted, cohort, client, received, own[client], number, rate or RATE)
            torch.testing.assert_close(replies.payload["update"][place].double(), torch.from_numpy(update), **CLOSE)
            own[client] = torch.from_numpy(personal).float()
        kept = personal_models(cohort.memory, received)
        assert kept is not None
        torch.testing.assert_close(kept, torch.stack([own[client] for client in cohort.ids]), **CLOSE)
        received = received + replies.payload["update"].mean(0)


def test_alone_and_as_bytes_a_client_has_the_same_personal_model(tmp_path: Path) -> None:
    wanted = job()
    drawn = Participation("poisson", 0.6)
    batched = finish(wanted, tmp_path / "a.db", in_memory, participation=drawn)
    alone = finish(wanted, tmp_path / "b.db", as_bytes, participation=drawn)
    for name in ("personal", "started"):
        torch.testing.assert_close(batched.cohort.memory[name], alone.cohort.memory[name], **CLOSE)
    torch.testing.assert_close(batched.state.model, alone.state.model, **CLOSE)


def test_personal_models_leave_the_common_one_as_it_is(tmp_path: Path) -> None:
    with_them = finish(job(), tmp_path / "a.db")
    without = finish(job(personal=False, pull=0.0), tmp_path / "b.db")
    torch.testing.assert_close(with_them.state.model, without.state.model, **CLOSE)
    assert "personal" not in without.cohort.memory


class Spying(InMemory):
    """Looks for personal models in all that passes, client by client and in sums."""

    def look(self, payload: Any) -> None:
        kept = self.clients.memory["personal"]
        known = kept[self.clients.memory["started"] > 0]
        for tensor in payload.values():
            if tensor.is_floating_point() and tensor.shape[-1:] == kept.shape[-1:]:
                rows = tensor.reshape(-1, kept.shape[-1])
                seen = (rows[:, None] == known[None]).float().mean(-1)
                assert not len(known) or float(seen.max()) < 0.9
        assert not {"personal", "started"} & set(payload)

    def __call__(self, task: Task) -> Replies:
        self.look(task.payload)
        replies = super().__call__(task)
        self.look(replies.payload)
        return replies

    def total(self, task: Task, terms: SumTerms) -> Total:
        total = super().total(task, terms)
        self.look(total.payload)
        return total


@pytest.mark.parametrize("trust", ["server", "secure-sum"])
def test_personal_models_are_never_sent(tmp_path: Path, trust: str) -> None:
    def spying(cohort: Clients, wanted: Job) -> Transport:
        return Spying(cohort, wanted.algorithm, wanted.discloses)

    found = finish(job(trust=trust, pull=0.3), tmp_path / "a.db", spying)
    personal, model = found.cohort.memory["personal"], found.state.model
    assert bool((found.cohort.memory["started"] > 0).all())
    distances = (personal - model).norm(dim=1)
    assert float(distances.min()) > 0.01
    spread = np.asarray(torch.cdist(personal, personal) + 9 * torch.eye(len(personal)))
    assert spread.min() > 0.01  # everybody has one of its own


def test_who_was_never_drawn_holds_the_common_model() -> None:
    memory = {"personal": torch.ones(3, 4), "started": torch.tensor([1.0, 0.0, 1.0])}
    found = personal_models(memory, torch.full((4,), 7.0))
    assert found is not None
    assert found[:, 0].tolist() == [1.0, 7.0, 1.0]
    assert personal_models({}, torch.ones(4)) is None


def test_without_levels_pull_names_groups_by_their_epsilon() -> None:
    pull = {f"{epsilon:g}": 0.1 * (place + 1) for place, epsilon in enumerate(EPSILONS)}
    assert job_of(experiment({"name": "fedhdp", "pull": pull})).groups is not None
    with pytest.raises(InputError, match=r"pull names no λ for the group '0.65'"):
        job_of(experiment({"name": "fedhdp", "pull": {key: value for key, value in pull.items() if key != "0.65"}}))
