"""Small federations for tests: any algorithm by name, on digits, with budgets that are spent quickly."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from flwr.app import Context, Message, RecordDict
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity
from torch import Tensor

from polyeps.algorithms import ALGORITHMS
from polyeps.clients import Clients
from polyeps.core import ENTER, Budget, Payload, Records, Replies, State, Task
from polyeps.experiment import config
from polyeps.experiment import job as build
from polyeps.experiment.population import populate
from polyeps.ledger import Ledger
from polyeps.participation import Participation
from polyeps.secagg.messages import Step
from polyeps.server import Round, Transport, serve
from polyeps.transport.flower import OnFlower
from polyeps.transport.flower_client import client_app
from polyeps.transport.flower_sums import Seat
from polyeps.transport.memory import InMemory
from support.transports import AsBytes, alone, some_of

# Two high-ε clients among low-ε ones, so that every way to split finds two groups.
EPSILONS = (0.5, 0.6, 8.0, 0.55, 9.0, 0.65)
# Every algorithm under every kind of budgets it can spend, by the title a run gives it.
METHODS: dict[str, dict[str, Any]] = {
    name if place == 0 else f"{name} ({budgets})": {"name": name} | ({"budgets": budgets} if place else {})
    for name, entry in ALGORITHMS.items()
    for place, budgets in enumerate(entry.budgets)
}
PRIVATE = [
    title for title, method in METHODS.items() if method.get("budgets", ALGORITHMS[method["name"]].budgets[0]) != "none"
]


def local(title: str) -> str:
    """Return what the clients of a method do with their records."""
    return ALGORITHMS[METHODS[title]["name"]].local


def _table(algorithm: Any) -> Any:
    """Return the settings of a method that is named by its title."""
    if isinstance(algorithm, list):
        return [_table(one) for one in algorithm]
    table = {"name": algorithm} if isinstance(algorithm, str) else algorithm
    return {**table, **METHODS.get(table["name"], {})}


def experiment(algorithm: Any = "fedavg", **changes: Any) -> config.Experiment:
    """Six clients, three rounds, everything small; a change like training={"batch": 4} replaces single settings."""
    method = _table(algorithm)
    budgets: dict[str, Any] = {"epsilons": EPSILONS, "delta": 1e-3}
    if isinstance(method, dict) and method["name"] in ALGORITHMS and local(method["name"]) == "gradient":
        # Pure budgets; no whole numbers, which an index sent could equal by chance.
        budgets = {"epsilons": tuple(epsilon + 0.015625 for epsilon in EPSILONS), "delta": 0.0}
    values: dict[str, Any] = {
        "name": "small",
        "rounds": 3,
        "data": {"name": "digits", "clients": len(EPSILONS), "size": 60},
        "budgets": budgets,
        "training": {"batch": 6, "local_steps": 4, "learning_rate": 0.2},
        "algorithm": method,
    }
    for name, value in changes.items():
        values[name] = {**values[name], **value} if isinstance(value, dict) and name in values else value
    return config.experiment(values)


def guaranteed(budgets: Iterable[Budget | None] | None) -> tuple[Budget, ...]:
    """Return the budgets of clients that all have a guarantee."""
    assert budgets is not None
    found = tuple(budgets)
    assert None not in found
    return tuple(budget for budget in found if budget is not None)


def job_of(wanted: config.Experiment, seed: int = 1) -> build.Job:
    """The first method of an experiment, prepared."""
    return build.prepare(wanted, wanted.algorithm[0], populate(wanted, seed))


def ledger_of(job: build.Job, path: Path) -> Ledger | None:
    return None if job.budgets is None else Ledger.create(path, job.terms)


Wrap = Callable[[Clients, build.Job], Transport]


def in_memory(cohort: Clients, job: build.Job) -> Transport:
    return InMemory(cohort, job.algorithm, job.discloses)


def as_bytes(cohort: Clients, job: build.Job) -> Transport:
    return AsBytes(cohort, job.algorithm, job.discloses)


def on_flower(cohort: Clients, job: build.Job) -> Transport:
    return OnFlower(LocalGrid(cohort, job), rehearsal=True)


@dataclass
class Finished:
    state: State
    rounds: list[Round]
    ledger: Ledger | None
    cohort: Clients
    common: bool  # whether there is a common model

    @property
    def learned(self) -> Tensor:
        """The common model or, where there is none, the mean of the clients' own."""
        return self.state.model if self.common else self.cohort.memory["personal"].mean(0)

    def spent(self) -> dict[str, float]:
        return {client: self.ledger.spent(client) for client in self.ledger.clients} if self.ledger else {}


def finish(
    job: build.Job,
    path: Path,
    wrap: Wrap = in_memory,
    *,
    rounds: int = 3,
    order: list[int] | None = None,
    participation: Participation | None = None,
) -> Finished:
    """Run a job's rounds over a transport."""
    ledger = ledger_of(job, path)
    cohort = job.clients(ledger)
    if order is not None:
        cohort = some_of(cohort, np.array(order))
    seen: list[Round] = []
    state = serve(
        job.algorithm,
        wrap(cohort, job),
        job.state,
        rounds=rounds,
        participation=participation or replace(job.participation, quorum=1),
        seed=5,
        run="test",
        observe=lambda round, _: seen.append(round),
    )
    return Finished(state, seen, ledger, cohort, job.entry.common)


class LocalGrid(Grid):  # type: ignore[misc]
    """Flower's messages, written and read as Flower does, handed to ClientApps in this process.

    With a folder, clients have seats in secure sums; `lost` says whose message of a step does not arrive.
    """

    def __init__(self, cohort: Clients, job: build.Job, folder: Path | None = None) -> None:
        self.nodes = {100 + place: alone(cohort, client) for place, client in enumerate(cohort.ids)}
        keys = {client: Ed25519PrivateKey.generate() for client in cohort.ids}
        roster = {client: key.public_key().public_bytes_raw() for client, key in keys.items()}
        self.seats = {client: Seat(keys[client], roster, folder / client) for client in keys} if folder else {}
        self.app = client_app(
            lambda context: (self.nodes[context.node_id], job.algorithm, job.discloses),
            (lambda context: self.seats[self.nodes[context.node_id].ids[0]]) if folder else None,
            rehearsal=cohort.repeatable,
        )
        self.failing: set[int] = set()
        self.lost: Mapping[Step, set[str]] = {}
        self.carried: list[bytes] = []  # all that went over the wire
        # What Flower's own process for a ServerApp sets before the app begins.
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1

    def get_node_ids(self) -> Iterable[int]:
        return list(self.nodes)

    def send_and_receive(self, messages: Iterable[Message], **_: Any) -> Iterable[Message]:
        replies = []
        for message in messages:
            node = message.metadata.dst_node_id
            if node in self.failing:
                continue
            if "sum" in message.content:
                step = Step(int(message.content["sum"]["step"]))
                if any(self.nodes[node].ids[0] in self.lost.get(before, ()) for before in Step if before <= step):
                    continue
            arrived = self._over_the_wire(message)
            reply = self.app(arrived, Context(1, node, {}, RecordDict(), {}))
            replies.append(self._over_the_wire(reply))
        return replies[::-1]  # replies come in any order

    def _over_the_wire(self, message: Message) -> Message:
        proto = message_to_proto(message)
        content = proto.SerializeToString()
        self.carried.append(content)
        arrived = type(proto)()
        arrived.ParseFromString(content)
        return message_from_proto(arrived)

    def set_run(self, run: Any) -> None:
        raise NotImplementedError

    @property
    def run(self) -> Any:
        raise NotImplementedError

    def create_message(self, *_: Any, **__: Any) -> Message:
        raise NotImplementedError

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        raise NotImplementedError

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        raise NotImplementedError


def with_zero_features(records: Records) -> Records:
    return replace(records, features=torch.zeros_like(records.features))


class Recorder(InMemory):
    """Keeps every task that clients are asked."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.tasks: list[Task] = []

    def __call__(self, task: Task) -> Replies:
        self.tasks.append(task)
        return super().__call__(task)


def honest_tasks(job: build.Job, path: Path) -> list[Task]:
    """All that is asked in two rounds."""
    recorder = Recorder(job.clients(ledger_of(job, path)), job.algorithm, job.discloses)
    serve(job.algorithm, recorder, job.state, rounds=2, participation=Participation(), seed=5, run="test")
    return recorder.tasks


def asked_for_sums(job: build.Job, path: Path) -> dict[str, Payload]:
    """What clients are asked for sums in the first round, by action."""
    first: dict[str, Payload] = {}
    for task in honest_tasks(job, path):
        if task.action != ENTER:
            first.setdefault(task.action, task.payload)
    return first
