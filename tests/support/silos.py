"""Small federations of silos for tests: files as on real machines, and a grid that carries messages in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.supercore.task_identity import TaskIdentity

from polyeps.algorithms import ALGORITHMS
from polyeps.core import Budget, Payload
from polyeps.data.own_files import load_own
from polyeps.data.partition import divide
from polyeps.deploy.contract import Contract, SignedContract, read_draft
from polyeps.deploy.contract_job import as_agreed, contract_model, digest_of_model
from polyeps.deploy.keys import new_key, public_of
from polyeps.deploy.policy import Policy, read_policy
from polyeps.deploy.serving import Served, serve_contract
from polyeps.deploy.silo import CONTRACT, Silo
from polyeps.experiment import config
from polyeps.experiment.job import Job, prepare
from polyeps.experiment.population import Population
from polyeps.experiment.seeds import seed_for
from polyeps.model_files import read_model_file
from polyeps.transport.flower_client import arrays

NAMES = ("aspen", "birch", "cedar")
SCHEMA: dict[str, Any] = {
    "label": "readmitted",
    "classes": ["no", "yes"],
    "columns": {"stay": {"range": [0, 30]}, "age": {"range": [0, 110]}},  # not in the order of names
}


class Sites:
    """The folders of three silos and of a signer."""

    def __init__(self, folder: Path, *, rehearsal: int | None = None, records: int = 120) -> None:
        self.folder, self.rehearsal = folder, rehearsal
        self.signer = new_key(folder / "signer.key")
        self.keys: dict[str, Ed25519PrivateKey] = {}
        for place, name in enumerate(NAMES):
            (folder / name).mkdir()
            self.keys[name] = new_key(folder / name / "silo.key")
            (folder / name / "schema.toml").write_text(tomli_w.dumps(SCHEMA))
            (folder / name / "supernode.secret").touch(mode=0o600)
            _write_records(folder / name / "records.csv", records + 10 * place, place)
        for name in NAMES:
            self.write_policy(name)

    def policy_values(self, name: str) -> dict[str, Any]:
        return {
            "name": name,
            "key": "silo.key",
            "folder": "state",
            "ledger": "ledger.db",
            "algorithms": [name for name in ALGORITHMS if name != "fedsel-exact"],
            "models": ["logistic", "binary_logistic"],
            "encoders": ["random-fourier"],
            "data": {"file": "records.csv", "schema": "schema.toml"},
            "budget": {"epsilon": 6.0, "delta": 1e-5, "epsilon_per_run": 1.0 + NAMES.index(name)},
            "limits": {"rounds": 20},
            "discloses": ["epsilon", "examples"],
            "signers": {"lab": {"key": public_of(self.signer), "epsilon": 6.0}},
            "supernode": {"secret": "supernode.secret"},
            "sums": {
                "least_silos": 3,
                "colluders": 0,
                "silos": {one: public_of(key) for one, key in self.keys.items() if one != name},
            },
            "rehearsal": self.rehearsal is not None,
        }

    def write_policy(self, name: str, /, **changes: Any) -> None:
        """Write a policy; a change like limits={"rounds": 4} replaces single settings."""
        (self.folder / name / "policy.toml").write_text(tomli_w.dumps(_changed(self.policy_values(name), changes)))

    def policy(self, name: str = "aspen") -> Policy:
        return read_policy(self.folder / name / "policy.toml")

    def silo(self, name: str = "aspen") -> Silo:
        """A silo whose process has just begun."""
        return Silo(self.policy(name))

    def contract_values(self) -> dict[str, Any]:
        from datetime import date

        values: dict[str, Any] = {
            "name": "readmission",
            "rounds": 3,
            "delta": 1e-5,
            "seed": 7,
            "ends": date(2100, 1, 1),
            "silos": {name: public_of(key) for name, key in self.keys.items()},
            "data": SCHEMA,
            "training": {"batch": 12, "local_steps": 3, "learning_rate": 0.5},
            "algorithm": {"name": "fedavg"},
            "patience": {"enrolment": 5.0, "reply": 5.0},
        }
        return values if self.rehearsal is None else {**values, "rehearsal": self.rehearsal}

    def contract(self, **changes: Any) -> Contract:
        path = self.folder / "contract.toml"
        path.write_text(tomli_w.dumps(_changed(self.contract_values(), changes)))
        return read_draft(path, public_of(self.signer), digest_of_model)

    def signed(self, **changes: Any) -> SignedContract:
        return SignedContract.sign(self.contract(**changes), self.signer)


def simulated(sites: Sites, contract: Contract) -> Job:
    """The same run with all silos' records in one place, as a simulation would have it."""
    folder = sites.folder / "together"
    folder.mkdir()
    for name in NAMES:
        (folder / f"{name}.csv").write_bytes((sites.folder / name / "records.csv").read_bytes())
    declared = contract.data.declaration
    dataset = load_own(folder, label=declared.label, schema=declared.schema, classes=declared.classes)
    dataset = as_agreed(contract, dataset)
    partition = divide(dataset, "as-in-file", clients=None, generator=np.random.default_rng(0))
    model = contract_model(contract, dataset)
    start = model.start(torch.Generator().manual_seed(seed_for(contract.seed, "model")))
    given = {name: sites.policy(name).budget.epsilon_per_run for name in NAMES} | dict(contract.epsilon or {})
    budgets = tuple(Budget(given[name], contract.delta) for name in partition.ids)
    population = Population(dataset, partition, budgets, model, start, contract.seed, torch.device("cpu"))
    budgets_section = config.BudgetSettings(noise_multiplier=contract.noise_multiplier)
    wanted = contract.experiment.model_copy(update={"budgets": budgets_section})
    return prepare(wanted, contract.algorithm, population)


def served(sites: Sites, grid: SiloGrid, signed: SignedContract, **others: Any) -> Served:
    """Serve a contract into the folder of some silos."""
    return serve_contract(signed, grid.connected, sites.folder / "run", **others)


def vector(path: Path | None) -> torch.Tensor:
    """Return the trained parameters of a model file, in the order of their names."""
    assert path is not None
    _, tensors = read_model_file(path)
    return torch.cat([tensors[name].flatten() for name in sorted(tensors)])


def _changed(values: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    for name, value in changes.items():
        added = isinstance(value, dict) and name in values and "kind" not in value  # another kind has other settings
        both = {**values[name], **value} if added else value
        values[name] = {key: one for key, one in both.items() if one is not None} if isinstance(both, dict) else both
    return {name: value for name, value in values.items() if value is not None}


def _write_records(path: Path, count: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    lines = ["age,stay,readmitted"]
    for age, stay in zip(rng.integers(18, 90, count), rng.integers(0, 30, count), strict=True):
        lines.append(f"{age},{stay},{'yes' if age / 110 + stay / 30 + rng.normal(0, 0.1) > 1 else 'no'}")
    path.write_text("\n".join(lines) + "\n")


# Messages of a server, as it would write them


def being(node: int) -> None:
    """Be the executor of a task at a node: Flower's messages take their sender from here."""
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, node, 1


def over_the_wire(message: Message) -> Message:
    """Return a message as it arrives."""
    proto = message_to_proto(message)
    arrived = type(proto)()
    arrived.ParseFromString(proto.SerializeToString())
    return message_from_proto(arrived)


def enrolling(signed: bytes, node: int = 100) -> Message:
    being(1)
    record = RecordDict({CONTRACT: ConfigRecord({"signed": signed})})
    return over_the_wire(Message(record, dst_node_id=node, message_type=MessageType.QUERY))


def tasking(run: Any, payload: Payload, round: Any = 0, action: Any = "train", node: int = 100, **more: Any) -> Message:
    being(1)
    task = ConfigRecord({"action": action, "run": run, "round": round, **more})
    record = RecordDict({"task": task, "payload": arrays(payload)})
    return over_the_wire(Message(record, dst_node_id=node, message_type=MessageType.TRAIN))


class SiloGrid:
    """Silos at nodes 100, 101, ...; each is opened anew for every message, as if it were restarted in between.

    `before` is called with the node and the message before a silo answers, and may raise `Lost`.
    """

    def __init__(self, sites: Sites, names: Iterable[str] = NAMES, *, anew: bool = True) -> None:
        self.sites, self.anew = sites, anew
        self.nodes = {100 + NAMES.index(name): name for name in names}
        self.open: dict[int, Silo] = {}
        self.waiting: dict[str, Message] = {}
        self.sent: list[bytes] = []
        self.replied: list[bytes] = []
        self.before: Callable[[int, Message], None] = lambda *_: None

    @contextmanager
    def connected(self) -> Iterator[SiloGrid]:
        being(1)
        yield self

    def get_node_ids(self) -> Iterable[int]:
        return list(self.nodes)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        names = []
        for message in messages:
            names.append(f"message {len(self.sent)}")
            arrived = over_the_wire(message)
            arrived.metadata.__dict__["_message_id"] = names[-1]
            self.sent.append(message_to_proto(message).SerializeToString())
            self.waiting[names[-1]] = arrived
        return names

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        replies = []
        for name in message_ids:
            message = self.waiting.get(name)
            if message is None:
                continue
            node = message.metadata.dst_node_id
            try:
                self.before(node, message)
            except Lost:
                continue
            if self.anew or node not in self.open:
                self.open[node] = self.sites.silo(self.nodes[node])
            being(node)
            reply = self.open[node].answer(message, node)
            being(1)
            self.replied.append(message_to_proto(reply).SerializeToString())
            del self.waiting[name]
            replies.append(over_the_wire(reply))
        return replies


class Lost(Exception):  # noqa: N818
    """A message that does not arrive (yet)."""
