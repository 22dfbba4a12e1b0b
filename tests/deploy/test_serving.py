"""The server of a contract: the run that a simulation has, stopped and continued; silos that fail, lie or come late."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import ConfigRecord, Message, MessageType
from flwr.common.serde import message_from_proto
from flwr.proto.message_pb2 import Message as ProtoMessage
from support.silos import NAMES, Lost, SiloGrid, Sites, served, simulated, vector

from polyeps.algorithms import ALGORITHMS
from polyeps.deploy import serving
from polyeps.deploy.contract import SignedContract
from polyeps.deploy.patient_grid import PatientGrid, restarted
from polyeps.deploy.serving import serve_contract
from polyeps.errors import InputError
from polyeps.experiment.journal import Journal
from polyeps.ledger import Ledger
from polyeps.model_files import read_model_file
from polyeps.transport.memory import InMemory


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving.EnrolledSilos, "poll", 0.01)
    monkeypatch.setattr(PatientGrid, "poll", 0.01)


@pytest.fixture
def sites(tmp_path: Path) -> Sites:
    return Sites(tmp_path)


def charges(sites: Sites, name: str) -> int:
    return Ledger(sites.folder / name / "ledger.db").account(name).charges


# The same run, deployed and simulated

DEPLOYABLE = [
    name
    for name, entry in ALGORITHMS.items()
    if entry.local != "sums" and "own" in entry.budgets and entry.common  # sums: test_contract_sums.py
]
OTHERS = {"idp": {"noise_multiplier": 2.0}}
PLANNED = {"training": {"batch": "auto", "local_steps": "auto"}}
ENCODED = {"model": {"encoder": "random-fourier", "encoder_size": 20}}
RECIPE = {
    "training": {"kind": "gradient", "clip": 0.5},
    "server": {"learning_rate": 0.5, "momentum": 0.9, "averaging": 0.9},
}


@pytest.mark.parametrize(
    ("name", "terms"),
    [
        *((name, OTHERS.get(name, {})) for name in DEPLOYABLE),
        ("balanced", RECIPE),
        ("weiavg", PLANNED),
        ("fedavg", ENCODED),
    ],
)
def test_a_deployed_run_is_the_simulated_one(name: str, terms: dict[str, Any], tmp_path: Path) -> None:
    """With the same streams, and every silo restarted between any two messages, model and charges are the same."""
    sites = Sites(tmp_path, rehearsal=7)
    # Of two outputs, the gradients are equal up to the sign: which of them FedSel takes would be a matter of rounding.
    model = "binary_logistic" if name.startswith("fedsel") else "logistic"
    signed = sites.signed(algorithm={"name": name}, **{**terms, "model": {"name": model, **terms.get("model", {})}})
    found = served(sites, SiloGrid(sites), signed)
    assert (found.rounds, found.reason) == (3, "all rounds were run")

    job = simulated(sites, signed.contract)
    ledger = Ledger.create(tmp_path / "simulated.db", job.terms)
    transport = InMemory(job.clients(ledger), job.algorithm, job.discloses or ("epsilon", "examples"))
    state = job.serve(transport, 3, "test")
    expected = job.population.model.unflatten(state.model)
    together = torch.cat([expected[key].flatten() for key in sorted(expected)])
    assert torch.allclose(vector(found.model), together, atol=1e-5)
    assert float(together.abs().max()) > 0.01  # something was learnt
    for client in NAMES:
        own = Ledger(tmp_path / client / "ledger.db")
        assert own.account(client).history == ledger.account(client).history
        assert own.account(client).charges == ledger.account(client).charges


def test_a_real_run_spends_what_was_reserved_and_sends_no_records(sites: Sites) -> None:
    signed, grid = sites.signed(), SiloGrid(sites)
    test = sites.folder / "birch" / "records.csv"
    found = served(sites, grid, signed, test=test)
    assert (found.rounds, found.reason) == (3, "all rounds were run")
    assert 0 <= found.metrics["accuracy"] <= 1
    for name in NAMES:
        ledger = Ledger(sites.folder / name / "ledger.db")
        assert ledger.account(name).charges == 3
        assert not any(ledger.account(name).reserved[signed.contract.run].values())
        ledger.verify()
    assert found.model is not None
    metadata, _ = read_model_file(found.model)
    assert metadata.features == ("age", "stay")
    assert metadata.clients is None  # what silos spent is in their own ledgers
    assert not any("seed" in said for said in metadata.guarantee["conditions"])
    # A rehearsal's streams are refused by a real silo, and real ones by a rehearsal's.
    again = served(sites, grid, signed)
    assert again == found


# A server that is stopped


@pytest.mark.parametrize("last", [1, 2])
def test_a_server_that_dies_after_the_replies_continues_without_a_second_charge(
    last: int, sites: Sites, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even in the last round, when no silo can pay for another one: their replies are kept, and heard after all."""
    signed, grid = sites.signed(), SiloGrid(sites)
    usual = Journal.write_round

    def die(self: Journal, job: str, round: int, *rest: Any) -> None:
        if round == last:
            raise KeyboardInterrupt
        usual(self, job, round, *rest)

    with monkeypatch.context() as patched:
        patched.setattr(Journal, "write_round", die)
        with pytest.raises(KeyboardInterrupt):
            served(sites, grid, signed)
    assert [charges(sites, name) for name in NAMES] == [last + 1] * 3
    said: list[str] = []
    found = served(sites, SiloGrid(sites), signed, progress=said.append)
    assert f"continuing after round {last} of 3" in said
    assert (found.rounds, found.reason) == (3, "all rounds were run")
    rounds = Journal(sites.folder / "run" / "serving.db").query("SELECT answered FROM rounds")
    assert [row["answered"] for row in rounds] == [3, 3, 3]
    assert [charges(sites, name) for name in NAMES] == [3, 3, 3]


def test_a_folder_belongs_to_one_contract_and_one_process(sites: Sites) -> None:
    served(sites, SiloGrid(sites), sites.signed())
    with pytest.raises(InputError, match="holds the run of another contract"):
        served(sites, SiloGrid(sites), sites.signed(name="another"))
    grid = SiloGrid(sites)

    def serve_meanwhile(*_: Any) -> None:
        grid.before = lambda *_: None
        with pytest.raises(InputError, match="another process serves"):
            serve_contract(sites.signed(name="b"), SiloGrid(sites).connected, sites.folder / "b")

    grid.before = serve_meanwhile
    serve_contract(sites.signed(name="b"), grid.connected, sites.folder / "b")


# Silos that fail, come late, or are others


def test_a_straggler_misses_a_round_and_stays_in_the_run(sites: Sites) -> None:
    signed, grid = sites.signed(patience={"reply": 0.4}), SiloGrid(sites)
    calls = {"late": 0}

    def late(node: int, message: Message) -> None:
        task = message.metadata.message_type == MessageType.TRAIN
        if node == 101 and task and message.metadata.group_id.startswith("1/"):
            calls["late"] += 1
            raise Lost

    grid.before = late
    found = served(sites, grid, signed)
    assert found.rounds == 3
    assert calls["late"]
    rounds = Journal(sites.folder / "run" / "serving.db").query("SELECT answered FROM rounds ORDER BY round")
    assert [row["answered"] for row in rounds] == [3, 2, 3]
    assert [charges(sites, name) for name in NAMES] == [3, 2, 3]


def test_a_silo_that_was_restarted_in_a_task_is_asked_again(sites: Sites, monkeypatch: pytest.MonkeyPatch) -> None:
    signed, grid = sites.signed(), SiloGrid(sites)
    usual, failed = grid.pull_messages, set[str]()

    def crash_once(names: Any) -> Any:
        replies = list(usual(names))
        for place, reply in enumerate(replies):
            round = reply.metadata.group_id.partition("/")[0]
            key = f"{reply.metadata.src_node_id}/{round}/{reply.metadata.message_type}"
            if key not in failed:  # the silo has answered, and was killed before the reply was on its way
                failed.add(key)
                replies[place] = _as_restarted(reply)
        return replies

    monkeypatch.setattr(grid, "pull_messages", crash_once)
    found = served(sites, grid, signed)
    assert found.rounds == 3
    assert len(failed) == 12
    assert [charges(sites, name) for name in NAMES] == [3, 3, 3]
    rounds = Journal(sites.folder / "run" / "serving.db").query("SELECT answered FROM rounds")
    assert [row["answered"] for row in rounds] == [3, 3, 3]


def _as_restarted(reply: Message) -> Message:
    found = restarted(reply)
    for name in ("_src_node_id", "_dst_node_id", "_reply_to_message_id"):
        found.metadata.__dict__[name] = reply.metadata.__dict__[name]
    return found


def test_a_silo_that_joins_late_takes_part(sites: Sites) -> None:
    signed = sites.signed(least_silos=2, patience={"enrolment": 0.5})
    grid = SiloGrid(sites, NAMES[:2])

    def join(_: int, message: Message) -> None:
        if message.metadata.message_type == MessageType.TRAIN and message.metadata.group_id.startswith("0/"):
            grid.nodes[102] = "cedar"

    grid.before = join
    assert served(sites, grid, signed).rounds == 3
    rounds = Journal(sites.folder / "run" / "serving.db").query("SELECT answered FROM rounds ORDER BY round")
    answered = [row["answered"] for row in rounds]
    assert (answered[0], answered[-1]) == (2, 3)


def test_too_few_silos_are_named(sites: Sites) -> None:
    signed = sites.signed(patience={"enrolment": 0.3})
    sites.write_policy("birch", algorithms=["weiavg"])  # declines
    with pytest.raises(InputError, match=r"1 of 3 silos.*without birch, cedar; 1 connected nodes declined"):
        served(sites, SiloGrid(sites, NAMES[:2]), signed)
    assert charges(sites, "aspen") == 0
    assert not (sites.folder / "run" / "models").exists()


def test_a_round_that_nobody_answers_is_not_counted(sites: Sites) -> None:
    signed, grid = sites.signed(patience={"reply": 0.2}), SiloGrid(sites)

    def cut(_: int, message: Message) -> None:
        if message.metadata.group_id.startswith("1/"):
            raise Lost

    grid.before = cut
    with pytest.raises(InputError, match=r"no silo answered round 2.*the model is as it was after round 1"):
        served(sites, grid, signed)
    grid.before = lambda *_: None
    assert served(sites, SiloGrid(sites), signed).rounds == 3
    assert [charges(sites, name) for name in NAMES] == [3, 3, 3]


def test_an_imposter_is_left_out(sites: Sites) -> None:
    """A node that copies another silo's answers, and one that is not enrolled, have no part in the run."""
    signed, grid = sites.signed(least_silos=2, patience={"enrolment": 0.5}), SiloGrid(sites)
    usual = grid.sites.silo

    class Copied:
        """Answers as cedar at node 102, with what birch said at node 101."""

        def answer(self, message: Message, _: int) -> Message:
            return usual("birch").answer(message, 101)

    grid.sites = type("Copying", (), {"silo": lambda _, name: Copied() if name == "cedar" else usual(name)})()
    found = serve_contract(signed, grid.connected, sites.folder / "run")
    assert found.rounds == 3
    rows = Journal(sites.folder / "run" / "serving.db").query("SELECT DISTINCT client FROM answers ORDER BY client")
    assert [row["client"] for row in rows] == ["aspen", "birch"]


def test_a_silo_does_not_speak_for_another_one(sites: Sites, monkeypatch: pytest.MonkeyPatch) -> None:
    """A SuperLink does not look whose number a reply bears: aspen says that birch has nothing left to spend."""
    signed, grid = sites.signed(patience={"reply": 0.4}), SiloGrid(sites)
    usual = grid.pull_messages

    def lying(names: Any) -> Any:
        replies = list(usual(names))
        for reply in replies:
            if reply.metadata.src_node_id == 100 and reply.metadata.message_type == MessageType.TRAIN:
                reply.metadata.__dict__["_src_node_id"] = 101
                reply.content["reply"] = ConfigRecord({"answered": False, "ready": False})
        return replies[::-1]  # what aspen says comes last

    monkeypatch.setattr(grid, "pull_messages", lying)
    assert served(sites, grid, signed).rounds == 3
    journal = Journal(sites.folder / "run" / "serving.db")
    heard = journal.query("SELECT DISTINCT client FROM answers WHERE answered ORDER BY client")
    assert [row["client"] for row in heard] == ["birch", "cedar"]
    assert {row["answered"] for row in journal.query("SELECT answered FROM rounds")} == {2}
    ids = [message_from_proto(ProtoMessage.FromString(sent)).metadata.group_id for sent in grid.sent]
    assert len(set(ids)) == len(ids)  # a name that could be guessed would let aspen reply to birch's question


def test_a_silo_whose_budget_is_used_up_leaves_and_the_others_go_on(sites: Sites) -> None:
    """A contract for half of the rounds in expectation: whoever was drawn as often as planned declines more."""
    signed = sites.signed(rounds=6, participation={"kind": "uniform", "share": 0.67, "quorum": 1})
    found = served(sites, SiloGrid(sites), signed)
    assert found.model is not None
    for name in NAMES:
        ledger = Ledger(sites.folder / name / "ledger.db")
        assert ledger.account(name).charges <= 5
        assert ledger.account(name).spent() <= 6.0


def test_an_ended_or_altered_contract_is_not_served(sites: Sites) -> None:
    from datetime import date

    with pytest.raises(InputError, match="ended on 2020-01-01"):
        served(sites, SiloGrid(sites), sites.signed(ends=date(2020, 1, 1)))
    other = sites.contract().model_copy(update={"model_digest": "0" * 64})
    with pytest.raises(InputError, match="builds another model"):
        served(sites, SiloGrid(sites), SignedContract.sign(other, sites.signer))
    assert not (sites.folder / "run").exists()
