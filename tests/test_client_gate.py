"""The gate: what a task may hold, checked before anybody pays, and replies that nobody can talk a client into."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.federations import asked_for_sums, experiment, honest_tasks, job_of, ledger_of
from support.transports import alone

from polyeps.client import answer
from polyeps.clients import Clients
from polyeps.core import ENTER, Action, Algorithm, Payload, Records, Spec, Task, Work, check_name
from polyeps.engine.noise import SeededStreams, SystemStreams
from polyeps.errors import InputError, TaskRefused
from polyeps.experiment.job import Job
from polyeps.messages import vector

SIZE = 650  # of the small federations' model


def clients(job: Job, tmp_path: Path) -> Clients:
    return job.clients(ledger_of(job, tmp_path / "a.db"))


def spent(cohort: Clients) -> set[float]:
    assert cohort.ledger is not None
    return {cohort.ledger.spent(client) for client in cohort.ids}


def put(tensor: torch.Tensor, value: float) -> torch.Tensor:
    tensor = tensor.clone()
    tensor[-1] = value
    return tensor


MODEL = torch.zeros(SIZE)
MODELS: dict[str, Any] = {
    "missing": None,
    "float64": MODEL.double(),
    "float16": MODEL.half(),
    "integers": MODEL.long(),
    "complex": MODEL.to(torch.complex64),
    "too short": MODEL[1:],
    "too long": torch.zeros(SIZE + 1),
    "a row for each client": MODEL.expand(6, -1),
    "a scalar": torch.tensor(0.0),
    "empty": MODEL[:0],
    "NaN": put(MODEL, math.nan),
    "infinite": put(MODEL, math.inf),
    "huge": put(MODEL, -1.1e9),
    "no tensor": [0.0] * SIZE,
    "sparse": MODEL.to_sparse(),
}


@pytest.mark.parametrize("case", MODELS)
@pytest.mark.parametrize("name", ["fedavg", "weiavg", "pfa-plus", "pdp-fl", "fedavg (maximum)"])
def test_a_model_that_is_none_costs_nobody_anything(name: str, case: str, tmp_path: Path) -> None:
    job = job_of(experiment(name))
    cohort = clients(job, tmp_path)
    payload = {} if case == "missing" else {"model": MODELS[case]}
    with pytest.raises(TaskRefused, match=r"'model'"):
        answer(cohort, job.algorithm, Task("train", cohort.ids, payload, "run", 0))
    assert spent(cohort) == {0.0}
    assert answer(cohort, job.algorithm, Task("train", cohort.ids, {"model": MODEL}, "run", 0)).ids == cohort.ids


def test_what_an_action_does_not_take_is_refused(tmp_path: Path) -> None:
    job = job_of(experiment("fedavg"))
    cohort = clients(job, tmp_path)
    for extra in ("rate", "clip", "scale", "honest", "noise"):
        payload = {"model": MODEL, extra: torch.tensor(0.5, dtype=torch.float64)}
        with pytest.raises(TaskRefused, match=f"'train' takes model, not '{extra}'; leave it out"):
            answer(cohort, job.algorithm, Task("train", cohort.ids, payload, "run", 0))
    assert spent(cohort) == {0.0}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"action": "steal"}, "asks for 'steal', which this algorithm does not know; it knows train"),
        ({"action": None}, "asks for None"),
        ({"action": ENTER}, "asks for 'enter'"),
        ({"round": -1}, "the round of a task must be a whole number from 0 to 999999, not -1"),
        ({"round": 10**6}, "not 1000000"),
        ({"round": 1.0}, "not 1.0"),
        ({"round": True}, "not True"),
        ({"round": "0"}, "not '0'"),
        ({"run": "x" * 256}, "the name of a run has 256 bytes, and at most 255 are allowed"),
        ({"run": "\ud800"}, "the name of a run must be printable text, not '.ud800'"),
        ({"run": 3}, "must be printable text, not 3"),
        ({"to": ("0", "1", "0")}, "a task must name clients, each of them once"),
        ({"to": ("0", 1)}, "a task must name clients, each of them once"),
        ({"to": "01"}, "a task must name clients, each of them once"),
        ({"to": ("0", "zoe")}, "client 'zoe' does not belong to this federation"),
        ({"summed": True}, "'train' is not made for secure sums"),
        ({"payload": [MODEL]}, "must be named tensors, not list"),
    ],
)
def test_a_task_says_what_who_and_when_or_is_refused(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    job = job_of(experiment("fedavg"))
    cohort = clients(job, tmp_path)
    task = Task("train", cohort.ids, {"model": MODEL}, "run", 0)
    with pytest.raises(TaskRefused, match=said):
        answer(cohort, job.algorithm, replace(task, **changes))
    assert spent(cohort) == {0.0}


def test_clients_of_one_run_take_part_in_no_other(tmp_path: Path) -> None:
    job = job_of(experiment("fedavg"))
    cohort = replace(clients(job, tmp_path), run="ours")
    task = Task("train", cohort.ids, {"model": MODEL}, "theirs", 0)
    with pytest.raises(TaskRefused, match="take part in the run 'ours', not in 'theirs'"):
        answer(cohort, job.algorithm, task)
    assert spent(cohort) == {0.0}
    assert answer(alone(cohort, "2"), job.algorithm, replace(task, to=("2",), run="ours")).ids == ("2",)


# Subspaces


def subspace(**changes: Any) -> Payload:
    """A subspace of one direction for each of the model's two tensors, 640 and 10 long."""
    basis = {"basis": torch.full((SIZE,), 0.03), "ranks": torch.tensor([1, 1]), "centre": torch.zeros(0)}
    return {"model": MODEL, **basis, **changes}


@pytest.mark.parametrize(
    "changes",
    [
        {"ranks": torch.tensor([1, 2])},
        {"ranks": torch.tensor([1, 1, 0])},
        {"ranks": torch.tensor([-1, 1])},
        {"ranks": torch.tensor([2**62, 2**62])},
        {"ranks": torch.tensor([1.0, 1.0])},
        {"basis": torch.full((SIZE - 1,), 0.03)},
        {"basis": torch.full((2, SIZE), 0.03)},
        {"basis": torch.full((SIZE,), 1.5)},
        {"basis": torch.full((SIZE,), math.nan)},
        {"centre": torch.zeros(3)},
        {"centre": torch.full((SIZE,), math.inf)},
    ],
)
@pytest.mark.parametrize("name", ["pfa-plus", "pdp-fl-plus"])
def test_a_subspace_that_is_none_costs_nobody_anything(name: str, changes: dict[str, Any], tmp_path: Path) -> None:
    job = job_of(experiment(name))
    cohort = clients(job, tmp_path)
    with pytest.raises(TaskRefused):
        answer(cohort, job.algorithm, Task("project", cohort.ids, subspace(**changes), "run", 0))
    assert spent(cohort) == {0.0}
    assert answer(cohort, job.algorithm, Task("project", cohort.ids, subspace(), "run", 0)).ids == cohort.ids


# Sums


def entered(job: Job, tmp_path: Path) -> Clients:
    cohort = clients(job, tmp_path)
    answer(cohort, job.algorithm, Task(ENTER, cohort.ids, {}, "run", 0))
    return cohort


def number(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float64)


DRAWN = [None, 1e18, 7, 6.5, 0, -1, 0.5, math.nan, math.inf]


@pytest.mark.parametrize("drawn", DRAWN)
@pytest.mark.parametrize("summed", [True, False])
@pytest.mark.parametrize("method", [{"name": "cmp-fed", "rank": 2}, {"name": "dp-randagg", "rank": 0}], ids=str)
def test_no_message_talks_a_client_out_of_its_noise(
    method: dict[str, Any], summed: bool, drawn: float | None, tmp_path: Path
) -> None:
    job = job_of(experiment(method, model={"name": "mlp", "hidden": [8]}))
    cohort = entered(job, tmp_path)
    action, payload = next(iter(asked_for_sums(job, tmp_path / "b.db").items()))
    told = {name: tensor for name, tensor in payload.items() if name != "drawn"}
    told = told if drawn is None else {**told, "drawn": torch.tensor(drawn)}
    with pytest.raises(TaskRefused):
        answer(cohort, job.algorithm, Task(action, cohort.ids, told, "run", 0, summed=summed))
    assert bool((cohort.memory["progress"][:, 1] == 0).all())  # nothing is remembered of it
    with pytest.raises(TaskRefused, match="only answered into secure sums, never in the clear"):
        answer(cohort, job.algorithm, Task(action, cohort.ids, payload, "run", 0))
    assert answer(cohort, job.algorithm, Task(action, cohort.ids, payload, "run", 0, summed=True)).ids == cohort.ids


def test_a_trusted_server_cannot_ask_for_parts_of_noise(tmp_path: Path) -> None:
    job = job_of(experiment("fedhdp"))
    cohort = entered(job, tmp_path)
    asked = {"model": MODEL, "clip": number(1.0), "honest": number(5.4)}
    with pytest.raises(TaskRefused, match="takes model, clip, not 'honest'"):
        answer(cohort, job.algorithm, Task("train", cohort.ids, asked, "run", 0))


@pytest.mark.parametrize("clip", [0.0, -1.0, 1e31, math.nan, math.inf])
def test_clips_are_within_what_clients_agreed_to(clip: float, tmp_path: Path) -> None:
    job = job_of(experiment("fedhdp"))
    cohort = entered(job, tmp_path)
    with pytest.raises(TaskRefused, match="'clip' must lie between"):
        answer(cohort, job.algorithm, Task("train", cohort.ids, {"model": MODEL, "clip": number(clip)}, "run", 0))


@pytest.mark.parametrize("clip", [0.99, 1.01, 50.0])
def test_a_clip_that_does_not_adapt_is_the_one_agreed_to(clip: float, tmp_path: Path) -> None:
    job = job_of(experiment({"name": "fedhdp", "adaptive": False}, training={"clip": 1.0}))
    cohort = entered(job, tmp_path)
    asked = {"model": MODEL, "clip": number(clip)}
    with pytest.raises(TaskRefused, match="'clip' must lie between 1 and 1"):
        answer(cohort, job.algorithm, Task("train", cohort.ids, asked, "run", 0))
    assert answer(cohort, job.algorithm, Task("train", cohort.ids, {**asked, "clip": number(1.0)}, "run", 0)).ids


@pytest.mark.parametrize("rate", [0.0, -0.5, 1.5, math.nan, 1e9])
def test_learning_rates_only_fall(rate: float, tmp_path: Path) -> None:
    job = job_of(experiment({"name": "dp-randagg", "rank": 0, "rate_decay": 0.9}))
    cohort = entered(job, tmp_path)
    asked = {**asked_for_sums(job, tmp_path / "b.db")["train"], "rate": number(rate)}
    with pytest.raises(TaskRefused, match="'rate' must lie between"):
        answer(cohort, job.algorithm, Task("train", cohort.ids, asked, "run", 0, summed=True))
    asked["rate"] = number(0.9)
    assert answer(cohort, job.algorithm, Task("train", cohort.ids, asked, "run", 0, summed=True)).ids == cohort.ids


def test_a_round_nobody_paid_for_does_not_lose_what_is_passed_on(tmp_path: Path) -> None:
    job = job_of(experiment({"name": "cmp-fed", "rank": 2}, model={"name": "mlp", "hidden": [8]}))
    cohort = entered(job, tmp_path)
    payloads = asked_for_sums(job, tmp_path / "b.db")

    def ask(action: str, round: int) -> tuple[str, ...]:
        payload = payloads[action]
        return answer(cohort, job.algorithm, Task(action, cohort.ids, payload, "run", round, summed=True)).ids

    assert ask("subspace", 0) == cohort.ids
    assert ask("subspace", 1) == ask("embed", 1) == ()
    assert ask("embed", 0) == cohort.ids
    assert ask("embed", 0) == ()


# Names


@pytest.mark.parametrize("name", ["\ud800", "a\udcffb", "a\nb", "x" * 300, 3, None, b"a"])
def test_names_that_cannot_be_written_are_refused_in_one_sentence(name: Any) -> None:
    with pytest.raises(InputError, match=r"^a client's id (must be printable text|has 300 bytes)[^\n]*$") as caught:
        Clients(
            (name,),
            Records(torch.zeros(1, 1), torch.zeros(1), torch.arange(2)),
            np.ones(1),
            lambda ids, round: SeededStreams(1, ids, round),
            True,
            None,
        )
    str(caught.value).encode()
    check_name("a client's id", "Klinik Süd 7")


# Speed


def test_a_payload_is_checked_once_and_not_for_every_client() -> None:
    size = 1 << 20

    def run(work: Work) -> tuple[Payload, Payload]:
        return {"one": torch.ones(work.clients)}, {}

    algorithm = Algorithm(
        {"go": Action(run, None, takes={"model": vector(size)}, gives=lambda _: {"one": Spec(())})},
        lambda state, _: state,
    )

    def seconds(count: int) -> float:
        cohort = Clients(
            tuple(map(str, range(count))),
            Records(torch.zeros(count, 1), torch.zeros(count), torch.arange(count + 1)),
            np.ones(count),
            lambda ids, round: SeededStreams(1, ids, round),
            True,
            None,
        )
        began = time.perf_counter()
        assert answer(cohort, algorithm, Task("go", cohort.ids, {"model": torch.zeros(size)}, "run", 0)).ids
        return time.perf_counter() - began

    assert min(seconds(1000) for _ in range(3)) < 50 * min(seconds(1) for _ in range(3)) + 0.2


IDEAL: list[Any] = [
    {"name": "fedsel", "value": "pm"},
    {"name": "fedsel-flat", "value": "hm"},
    {"name": "cmp-fed", "rank": 2},
    {"name": "fedhdp", "trust": "secure-sum"},
    {"name": "fedavg", "form": "published"},
]


@pytest.mark.parametrize("method", IDEAL, ids=str)
def test_a_deployed_client_pays_for_nothing_that_floating_point_noise_would_need(
    method: dict[str, Any], tmp_path: Path
) -> None:
    job = job_of(experiment(method, model={"name": "mlp", "hidden": [8]}))
    assert job.algorithm.arithmetic == "ideal"
    first = honest_tasks(job, tmp_path / "b.db")[0]
    deployed = replace(clients(job, tmp_path), repeatable=False, streams=lambda ids, _: SystemStreams(len(ids)))
    with pytest.raises(TaskRefused, match="low digits leak"):
        answer(deployed, job.algorithm, first)
    assert spent(deployed) == {0.0}
