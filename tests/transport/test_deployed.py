"""Deployed clients: entropy of the system, memory that survives a process, and every reply sent exactly once."""

from __future__ import annotations

import stat
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from support.deployed import DeployedGrid, on_its_own
from support.federations import LocalGrid, experiment, job_of, ledger_of
from support.grouped import federation

from polyeps.algorithms.fedhdp import fedhdp
from polyeps.client import answer
from polyeps.clients import Clients
from polyeps.core import ENTER, Replies, SumTerms, Task, Work
from polyeps.engine.noise import SeededStreams, SystemStreams
from polyeps.errors import InputError
from polyeps.experiment.job import Job
from polyeps.ledger import Ledger
from polyeps.participation import Participation
from polyeps.server import Round, serve
from polyeps.transport import codec
from polyeps.transport.client_files import MOST_REPLIES, Keeping
from polyeps.transport.flower import OnFlower
from polyeps.transport.flower_client import client_app

SECRET = "patient 4711 has 3 records"


@pytest.fixture
def job() -> Job:
    return job_of(experiment("fedavg"))


def opened(job: Job, tmp_path: Path, client: str = "2") -> Clients:
    """A client whose process has just begun."""
    path = tmp_path / "a.db"
    ledger = Ledger(path) if path.exists() else ledger_of(job, path)
    return on_its_own(job.clients(ledger), client, tmp_path)


def training(job: Job, model: float = 0.0, round: int = 0) -> Task:
    return Task("train", ("2",), {"model": torch.full((job.population.model.size,), model)}, "test", round)


# Entropy


def unfit(job: Job, tmp_path: Path) -> dict[str, Clients]:
    fit = replace(opened(job, tmp_path), run="test")
    return {
        "repeatable": replace(fit, repeatable=True),
        "seeded": replace(fit, streams=partial(SeededStreams, 7)),
        "seeded and repeatable": replace(fit, streams=partial(SeededStreams, 7), repeatable=True),
        "forgetful": replace(fit, keeper=None),
        "of any run": replace(fit, run=None),
        "of a run without a name": replace(fit, run=""),
    }


@pytest.mark.parametrize(
    "case", ["repeatable", "seeded", "seeded and repeatable", "forgetful", "of any run", "of a run without a name"]
)
def test_clients_that_protect_nobody_are_not_deployed(case: str, job: Job, tmp_path: Path) -> None:
    grid = LocalGrid(job.clients(None), job)
    cohort = unfit(job, tmp_path)[case]
    grid.app = client_app(lambda _: (cohort, job.algorithm, job.discloses))
    transport = OnFlower(grid)
    assert transport.profiles() == ()
    transport._nodes = {"2": 102}
    for run in ("test", "another", ""):
        assert transport(replace(training(job), run=run)).ids == ()
    assert cohort.ledger is not None
    assert cohort.ledger.spent("2") == 0
    fit = replace(opened(job, tmp_path), run="test")
    grid.app = client_app(lambda _: (fit, job.algorithm, job.discloses))
    assert transport(replace(training(job), run="another")).ids == ()
    assert transport(training(job)).ids == ("2",)


@pytest.mark.parametrize("name", ["fedhdp", "cmp-fed", "dp-randagg"])
def test_a_deployed_server_has_no_seeded_secrets(name: str, tmp_path: Path) -> None:
    job = job_of(experiment(name, participation={"kind": "poisson", "share": 0.5}))
    transport = OnFlower(LocalGrid(job.clients(ledger_of(job, tmp_path / "a.db")), job))
    with pytest.raises(InputError, match="the server's noise is seeded"):
        serve(job.algorithm, transport, job.state, rounds=1, participation=job.participation, seed=None)
    unseeded = replace(job.algorithm, seeded=False)
    with pytest.raises(InputError, match=r"seed = 5 makes cohorts predictable.*give seed = None"):
        serve(unseeded, transport, job.state, rounds=1, participation=job.participation, seed=5)


# What goes wrong stays with the client


@pytest.mark.parametrize("kind", [RuntimeError, InputError, KeyError, OSError, MemoryError, AssertionError])
def test_no_text_of_an_exception_is_sent(kind: Any, job: Job, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def fail(_: Work) -> Any:
        raise kind(SECRET)

    broken = replace(job.algorithm, actions={"train": replace(job.algorithm.actions["train"], run=fail)})
    grid = DeployedGrid(job, tmp_path, broken)
    transport = OnFlower(grid)
    assert len(transport.profiles()) == 6
    assert transport(replace(training(job), to=("0", "2"))).ids == ()
    sent = b"".join(grid.carried)
    assert SECRET.encode() not in sent
    assert kind.__name__.encode() not in sent
    assert b"declined" in sent
    assert SECRET in caplog.text  # in the client's own log


def test_a_client_that_cannot_open_itself_says_one_word(job: Job, tmp_path: Path) -> None:
    def fail(_: Context) -> Any:
        raise RuntimeError(SECRET)

    grid = LocalGrid(job.clients(None), job)
    grid.app = client_app(fail)
    assert OnFlower(grid).profiles() == ()
    assert SECRET.encode() not in b"".join(grid.carried)


# Exactly once


def test_the_same_task_has_one_answer_and_one_price(job: Job, tmp_path: Path) -> None:
    first = answer(opened(job, tmp_path), job.algorithm, training(job))
    ledger = Ledger(tmp_path / "a.db")
    spent = ledger.spent("2")
    again = answer(opened(job, tmp_path), job.algorithm, training(job))  # another process, the same task
    assert torch.equal(again.payload["update"], first.payload["update"])
    assert (again.ids, again.ready) == (first.ids, first.ready)
    assert Ledger(tmp_path / "a.db").spent("2") == spent
    other = answer(opened(job, tmp_path), job.algorithm, training(job, model=0.1))
    assert Ledger(tmp_path / "a.db").spent("2") > spent
    assert not torch.equal(other.payload["update"], first.payload["update"])
    for model, kept in ((0.0, first), (0.1, other)):
        found = answer(opened(job, tmp_path), job.algorithm, training(job, model=model))
        assert torch.equal(found.payload["update"], kept.payload["update"])


def test_another_run_or_round_is_another_task(job: Job, tmp_path: Path) -> None:
    first = answer(opened(job, tmp_path), job.algorithm, training(job))
    later = answer(opened(job, tmp_path), job.algorithm, training(job, round=1))
    other = answer(opened(job, tmp_path), job.algorithm, replace(training(job), run="other"))
    updates = [replies.payload["update"] for replies in (first, later, other)]
    assert not torch.equal(updates[0], updates[1])
    assert not torch.equal(updates[0], updates[2])
    assert Ledger(tmp_path / "a.db").account("2").charges == 3
    assert answer(opened(job, tmp_path), job.algorithm, training(job, round=2)).exhausted == ("2",)
    found = answer(opened(job, tmp_path), job.algorithm, training(job, round=1))  # even with an empty purse
    assert torch.equal(found.payload["update"], updates[1])


def test_only_so_many_replies_of_a_round_are_kept(tmp_path: Path) -> None:
    job = job_of(experiment("fedavg (none)"))

    def ask(model: float) -> torch.Tensor:
        cohort = on_its_own(job.clients(None), "2", tmp_path)
        return answer(cohort, job.algorithm, training(job, model)).payload["update"]

    found = [ask(number / 10) for number in range(MOST_REPLIES + 1)]
    (file,) = (tmp_path / "2").glob("*.memory")
    held = [name for name in codec.decode(file.read_bytes()) if name.startswith("reply/")]
    assert len(held) == MOST_REPLIES
    assert torch.equal(ask(MOST_REPLIES / 10), found[-1])


def test_a_keeper_is_one_clients_own(job: Job, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="a keeper belongs to one client, and these are 6"):
        replace(job.clients(None), keeper=Keeping(tmp_path))


def test_a_reply_that_could_not_be_kept_is_not_sent(job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "polyeps.transport.client_files.replace_file", lambda *_: (_ for _ in ()).throw(OSError("full"))
    )
    with pytest.raises(OSError, match="full"):
        answer(opened(job, tmp_path), job.algorithm, training(job))


def test_two_processes_of_a_client_answer_one_after_the_other(job: Job, tmp_path: Path) -> None:
    cohorts = [opened(job, tmp_path) for _ in range(4)]
    found: list[Replies] = []
    threads = [
        threading.Thread(target=lambda cohort=cohort: found.append(answer(cohort, job.algorithm, training(job))))
        for cohort in cohorts
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert all(torch.equal(one.payload["update"], found[0].payload["update"]) for one in found)
    assert Ledger(tmp_path / "a.db").account("2").charges == 1


def test_files_are_the_owners_and_damage_is_found(job: Job, tmp_path: Path) -> None:
    answer(opened(job, tmp_path), job.algorithm, training(job))
    files = list((tmp_path / "2").iterdir())
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}
    (memory,) = (file for file in files if file.suffix == ".memory")
    memory.write_bytes(memory.read_bytes()[:-40])
    with pytest.raises(InputError, match="is damaged"):
        answer(opened(job, tmp_path), job.algorithm, training(job))


# Memory


def test_one_report_an_epoch_whatever_process_is_asked(tmp_path: Path) -> None:
    job = job_of(experiment("fedsel", rounds=4))
    model = torch.zeros(job.population.model.size)

    def report(epoch: int, value: float, round: int) -> Replies:
        payload = {"model": model + value, "epoch": torch.tensor(epoch)}
        return answer(opened(job, tmp_path), job.algorithm, Task("report", ("2",), payload, "run", round))

    assert report(1, 0.0, 0).ids == ("2",)
    assert report(1, 0.1, 1).ids == ()
    assert report(2, 0.1, 1).ids == ("2",)
    assert report(1, 0.2, 2).ids == ()
    cohort = opened(job, tmp_path)
    Keeping(tmp_path / "2").recall(cohort, Task("report", ("2",), {}, "run", 3))
    assert cohort.memory["progress"].tolist() == [[2.0, 1.0]]
    assert cohort.memory["residual"].abs().sum() > 0


def test_a_round_paid_for_is_worked_for_once_whatever_process_is_asked(tmp_path: Path) -> None:
    job = job_of(experiment("fedhdp"))
    payload = {"model": torch.zeros(job.population.model.size), "clip": torch.tensor(1.0, dtype=torch.float64)}
    train = Task("train", ("2",), payload, "run", 0)
    assert answer(opened(job, tmp_path), job.algorithm, train).ids == ()
    assert answer(opened(job, tmp_path), job.algorithm, Task(ENTER, ("2",), {}, "run", 0)).ids == ("2",)
    first = answer(opened(job, tmp_path), job.algorithm, train)
    assert first.ids == ("2",)
    entered = answer(opened(job, tmp_path), job.algorithm, Task(ENTER, ("2",), {}, "run", 0))
    assert entered.ids == ("2",)  # repeated, not paid again, and no second work for it
    other = replace(train, payload={**payload, "model": payload["model"] + 1})
    assert answer(opened(job, tmp_path), job.algorithm, other).ids == ()
    again = answer(opened(job, tmp_path), job.algorithm, train)
    assert torch.equal(again.payload["update"], first.payload["update"])
    assert Ledger(tmp_path / "a.db").account("2").charges == 1
    cohort = opened(job, tmp_path)
    assert cohort.keeper is not None
    cohort.keeper.recall(cohort, train)
    assert cohort.memory["personal"].abs().sum() > 0


METHOD = {"name": "cmp-fed", "rank": 2, "noise": "skellam", "dropouts": 0.34}
CHANGES: dict[str, Any] = {
    "budgets": {"epsilons": (8.0,) * 6},
    "model": {"name": "mlp", "hidden": [8]},
    "training": {"batch": 6, "local_steps": 2, "learning_rate": 0.2, "clip": 1.0},
    "participation": {"kind": "full"},
}


def test_directions_that_are_paid_for_work_across_processes(tmp_path: Path) -> None:
    job = job_of(experiment(METHOD, **CHANGES))
    grid = DeployedGrid(job, tmp_path)
    algorithm = replace(job.algorithm, seeded=False)
    state = serve(algorithm, OnFlower(grid), job.state, rounds=2, participation=Participation(), seed=None, run="test")
    assert state.model.any()
    assert {"right"} <= set(state.kept)
    assert grid.ledger is not None
    assert {grid.ledger.account(client).charges for client in grid.ledger.clients} == {2}
    for file in grid.folder.rglob("*.memory"):
        assert b"passed on/" not in file.read_bytes()  # used, and forgotten


def test_what_waits_for_the_second_release_is_on_the_disk(tmp_path: Path) -> None:
    job = job_of(experiment(METHOD, **CHANGES))
    asked: list[Task] = []

    class Heard(OnFlower):
        def total(self, task: Task, terms: SumTerms) -> Any:
            asked.append(replace(task, to=("2",), summed=True))
            return super().total(task, terms)

    grid = DeployedGrid(job, tmp_path)
    algorithm = replace(job.algorithm, seeded=False)
    serve(algorithm, Heard(grid), job.state, rounds=1, participation=Participation(), seed=None, run="test")
    again = tmp_path / "again"
    again.mkdir()
    answer(opened(job, again), job.algorithm, Task(ENTER, ("2",), {}, "test", 0))
    assert answer(opened(job, again), job.algorithm, asked[0]).ids == ("2",)
    (file,) = (again / "2").glob("*.memory")
    assert b"passed on/update" in file.read_bytes()
    first = answer(opened(job, again), job.algorithm, asked[1])
    assert first.ids == ("2",)
    assert b"passed on/" not in file.read_bytes()
    assert torch.equal(answer(opened(job, again), job.algorithm, asked[1]).payload["embed"], first.payload["embed"])
    answer(opened(job, again), job.algorithm, Task(ENTER, ("2",), {}, "test", 1))
    assert answer(opened(job, again), job.algorithm, replace(asked[1], round=1)).ids == ()


# Nodes that come and go


def test_nodes_that_join_late_or_start_anew_come_in(job: Job, tmp_path: Path) -> None:
    grid = DeployedGrid(job, tmp_path)
    grid.failing = {105}
    seen: list[Round] = []

    def observe(round: Round, _: Any) -> None:
        seen.append(round)
        if len(seen) == 1:
            grid.failing = set()  # the last one joins
            grid.restart(101, 999)  # and another has a new number

    serve(
        job.algorithm,
        OnFlower(grid),
        job.state,
        rounds=3,
        participation=Participation(),
        seed=None,
        run="test",
        observe=observe,
    )
    assert [set(round.traffic) for round in seen] == [set("01234"), set("012345"), set("012345")]
    assert grid.ledger is not None
    assert grid.ledger.account("1").charges == 3


def test_a_stranger_who_takes_a_name_changes_nothing(job: Job, tmp_path: Path) -> None:
    grid = DeployedGrid(job, tmp_path)
    seen: list[Round] = []

    def observe(round: Round, _: Any) -> None:
        seen.append(round)
        grid.nodes[777], grid.names[777] = grid.nodes[102], "2"

    serve(
        job.algorithm,
        OnFlower(grid),
        job.state,
        rounds=2,
        participation=Participation(),
        seed=None,
        run="test",
        observe=observe,
    )
    assert [set(round.traffic) for round in seen] == [set("012345")] * 2


def test_a_lost_round_is_not_paid_twice(job: Job, tmp_path: Path) -> None:
    grid = DeployedGrid(job, tmp_path)

    class ServerDiedError(Exception):
        pass

    def die(*_: Any) -> None:
        raise ServerDiedError

    with pytest.raises(ServerDiedError):
        serve(
            job.algorithm,
            OnFlower(grid),
            job.state,
            rounds=1,
            participation=Participation(),
            seed=None,
            run="test",
            observe=die,
        )
    assert grid.ledger is not None
    spent = {client: grid.ledger.spent(client) for client in grid.ledger.clients}
    serve(job.algorithm, OnFlower(grid), job.state, rounds=1, participation=Participation(), seed=None, run="test")
    assert {client: grid.ledger.spent(client) for client in grid.ledger.clients} == spent


def _invited(rounds: list[tuple[str, ...]], round: Round, _: Any) -> None:
    rounds.append(round.invited)


@pytest.mark.parametrize("kind", ["poisson", "uniform", "epoch", "full"])
def test_without_a_seed_cohorts_are_the_systems(kind: Any, job: Job, tmp_path: Path) -> None:
    seen: list[list[tuple[str, ...]]] = [[], []]
    for rounds in seen:
        cohort = replace(job.clients(None), noise_multiplier=job.noise_multiplier * 0)
        transport = OnFlower(LocalGrid(cohort, job), rehearsal=True)
        serve(
            job.algorithm,
            transport,
            job.state,
            rounds=20,
            participation=Participation(kind, 0.5 if kind != "full" else 1.0),
            seed=None,
            observe=partial(_invited, rounds),
        )
    assert len(seen[0]) == len(seen[1]) == 20
    assert (seen[0] == seen[1]) == (kind == "full")


def test_streams_of_a_deployed_client_never_repeat() -> None:
    assert not (SystemStreams(2).uniforms(3) == SystemStreams(2).uniforms(3)).any()


# Replies of every kind


def arrays(**tensors: Any) -> dict[str, Any]:
    return {"payload": ArrayRecord({name: Array(np.asarray(tensor)) for name, tensor in tensors.items()})}


UPDATE = np.zeros(650, np.float32)
YES = {"reply": ConfigRecord({"answered": True, "ready": True})}
SPOILT: dict[str, dict[str, Any]] = {
    "wrong shape": YES | arrays(update=UPDATE[:-1]),
    "another shape": YES | arrays(update=UPDATE[None]),
    "a scalar": YES | arrays(update=np.float32(1)),
    "nothing in it": YES | arrays(update=UPDATE[:0]),
    "another name": YES | arrays(Update=UPDATE),
    "one more name": YES | arrays(update=UPDATE, more=UPDATE),
    "complex": YES | arrays(update=UPDATE.astype(np.complex64)),
    "double": YES | arrays(update=UPDATE.astype(np.float64)),
    "integers": YES | arrays(update=UPDATE.astype(np.int64)),
    "text": YES | arrays(update=np.array(["a"] * 650)),
    "NaN": YES | arrays(update=UPDATE + np.float32("nan")),
    "infinite": YES | arrays(update=UPDATE - np.float32("inf")),
    "huge": YES | arrays(update=UPDATE + np.float32(1e30)),
    "no tensors": YES | arrays(),
    "no payload": YES,
    "a payload of another kind": YES | {"payload": ConfigRecord({"update": 3})},
    "no fields": {"reply": ConfigRecord({})} | arrays(update=UPDATE),
    "a field missing": {"reply": ConfigRecord({"answered": True})} | arrays(update=UPDATE),
    "no reply": arrays(update=UPDATE),
    "empty": {},
    "pickled": YES
    | {"payload": ArrayRecord({"update": Array(dtype="object", shape=(1,), stype="numpy.ndarray", data=b"\x80N.")})},
}


@pytest.mark.parametrize("case", SPOILT)
def test_one_malformed_reply_ends_nothing(case: str, job: Job, tmp_path: Path) -> None:
    grid = DeployedGrid(job, tmp_path)
    honest, seen, states = grid.app, list[Round](), list[Any]()

    def app(message: Message, context: Context) -> Message:
        reply = honest(message, context)
        spoilt = context.node_id == 103 and "task" in message.content and not seen
        return Message(RecordDict(SPOILT[case]), reply_to=message) if spoilt else reply

    def observe(round: Round, state: Any) -> None:
        seen.append(round)
        states.append(state)

    grid.app = app
    state = serve(
        job.algorithm,
        OnFlower(grid),
        job.state,
        rounds=2,
        participation=Participation(),
        seed=None,
        run="test",
        observe=observe,
    )
    assert [set(round.traffic) for round in seen] == [set("01245"), set("012345")]  # asked again in the next round
    assert [round.discarded for round in seen] == [("3",), ()]
    assert [round.declined for round in seen] == [("3",), ()]
    assert torch.isfinite(state.model).all()
    assert states[0].model.any()


@pytest.mark.parametrize(
    "spoilt",
    [
        {},
        YES,
        YES | {"shapes": ConfigRecord({})},
        YES | {"shapes": ConfigRecord({"subspace": [3]})},
        YES | {"shapes": ConfigRecord({"subspace": "text"})},
        YES | {"shapes": ConfigRecord({"subspace": [2**40, 2**40]})},
        YES | {"shapes": ConfigRecord({"other": [64]})},
        {"reply": ConfigRecord({})},
    ],
)
def test_one_malformed_shape_spoils_no_sum(spoilt: dict[str, Any], tmp_path: Path) -> None:
    job = job_of(experiment(METHOD, **CHANGES))
    grid = DeployedGrid(job, tmp_path)
    honest = grid.app

    def app(message: Message, context: Context) -> Message:
        reply = honest(message, context)
        if context.node_id == 100 and "task" in message.content and message.content["task"]["action"] != ENTER:
            return Message(RecordDict(spoilt), reply_to=message)
        return reply

    grid.app = app
    algorithm = replace(job.algorithm, seeded=False)
    state = serve(algorithm, OnFlower(grid), job.state, rounds=1, participation=Participation(), seed=None, run="test")
    assert state.model.any()


@pytest.mark.parametrize(
    "told",
    [
        {},
        {"id": 3, "ready": True},
        {"id": "", "ready": True},
        {"id": "x" * 999, "ready": True},
        {"id": "x\n", "ready": True},
        {"id": "x", "ready": "yes"},
        {"id": "x", "ready": True, "epsilon": float("nan")},
        {"id": "x", "ready": True, "epsilon": -1.0},
        {"id": "x", "ready": True, "epsilon": "1"},
        {"id": "x", "ready": True, "examples": 0},
        {"id": "x", "ready": True, "examples": 1.5},
        {"id": "x", "ready": True, "group": "g" * 999},
    ],
)
def test_a_node_that_introduces_itself_badly_is_left_out(told: dict[str, Any], job: Job, tmp_path: Path) -> None:
    grid = DeployedGrid(job, tmp_path)
    honest = grid.app

    def app(message: Message, context: Context) -> Message:
        if context.node_id == 103:
            return Message(RecordDict({"profile": ConfigRecord(told)}), reply_to=message)
        return honest(message, context)

    grid.app = app
    assert [face.id for face in OnFlower(grid).profiles()] == ["0", "1", "2", "4", "5"]


def test_an_empty_message_is_no_task(job: Job, tmp_path: Path) -> None:
    grid = DeployedGrid(job, tmp_path)
    reply = grid.app(
        grid._over_the_wire(Message(RecordDict(), dst_node_id=102, message_type="train")),
        Context(1, 102, {}, RecordDict(), {}),
    )
    assert reply.error.reason == "declined"


def test_a_server_with_noise_of_the_system_is_not_seeded() -> None:
    seeded = federation(("strict", "open"), {"strict": 1.0, "open": 0.0})
    assert fedhdp(seeded, personal=False).seeded
    assert not fedhdp(replace(seeded, noise=lambda _: SystemStreams(2)), personal=False).seeded
