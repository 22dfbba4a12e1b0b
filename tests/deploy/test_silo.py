"""A silo against a hostile server: whatever it sends, nothing leaves but agreed replies and the word "declined"."""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, RecordDict
from flwr.common.serde import message_to_proto
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.silos import Sites, being, enrolling, over_the_wire, tasking

from polyeps.deploy import silo as silo_module
from polyeps.deploy.contract import SignedContract
from polyeps.deploy.keys import new_key, public_of
from polyeps.deploy.silo import Silo, check_proof
from polyeps.errors import InputError
from polyeps.ledger import Ledger
from polyeps.transport.client_files import Keeping
from polyeps.transport.flower_client import arrays

NODE = 100
SIZE = 6  # parameters of the logistic model


@pytest.fixture
def sites(tmp_path: Path) -> Sites:
    return Sites(tmp_path)


def ask(silo: Silo, message: Message) -> Message:
    being(NODE)
    return over_the_wire(silo.answer(message, NODE))


def enrolled(sites: Sites, **terms: Any) -> tuple[Silo, str]:
    """A silo that has agreed to a contract, and the name of the run."""
    silo, signed = sites.silo(), sites.signed(**terms)
    assert not ask(silo, enrolling(signed.encode())).has_error()
    return silo, signed.contract.run


def model(value: float = 0.0) -> dict[str, torch.Tensor]:
    return {"model": torch.full((SIZE,), value)}


def spent(sites: Sites) -> float:
    ledger = Ledger(sites.folder / "aspen" / "ledger.db")
    return ledger.spent("aspen") if "aspen" in ledger.clients else 0.0


def charges(sites: Sites) -> int:
    return Ledger(sites.folder / "aspen" / "ledger.db").account("aspen").charges


def events(sites: Sites) -> list[dict[str, Any]]:
    lines = (sites.folder / "aspen" / "state" / "events.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def declined(silo: Silo, message: Message) -> None:
    """Check that the reply to a message holds the one word and no content."""
    reply = ask(silo, message)
    if reply.has_error():
        assert reply.error.reason == "declined"
        assert b"patient" not in message_to_proto(reply).SerializeToString()
    else:
        assert list(reply.content) == ["reply"]
        assert dict(reply.content["reply"]) == {"answered": False, "ready": reply.content["reply"]["ready"]}


def test_an_enrolled_silo_discloses_what_its_policy_says_and_proves_its_key(sites: Sites) -> None:
    signed = sites.signed()
    reply = ask(sites.silo(), enrolling(signed.encode()))
    profile = dict(reply.content["profile"])
    proof, identity = profile.pop("proof"), profile.pop("identity")
    assert profile == {"id": "aspen", "examples": 120, "epsilon": 1.0, "ready": True}
    assert identity.hex() == public_of(sites.keys["aspen"])
    shown = {"identity": identity, "proof": proof}
    check_proof(signed.contract, "aspen", NODE, shown)
    other = sites.contract(name="another")
    for contract, name, node, content in [
        (signed.contract, "aspen", NODE + 1, shown),  # copied by another node
        (other, "aspen", NODE, shown),  # of another contract
        (signed.contract, "birch", NODE, shown),
        (signed.contract, "dogwood", NODE, shown),
        (signed.contract, "aspen", NODE, {"identity": identity}),
        (signed.contract, "aspen", NODE, {"identity": identity, "proof": "text"}),
        (signed.contract, "aspen", NODE, {"identity": b"", "proof": proof}),
    ]:
        with pytest.raises(InputError):
            check_proof(contract, name, node, content)
    sites.write_policy("birch", discloses=[])
    silent = ask(sites.silo("birch"), enrolling(signed.encode()))
    assert set(silent.content["profile"]) == {"id", "ready", "identity", "proof"}


def test_a_task_is_answered_and_charged_once(sites: Sites) -> None:
    silo, run = enrolled(sites)
    first = ask(silo, tasking(run, model()))
    assert first.content["reply"]["answered"]
    once = spent(sites)
    assert 0 < once < 6
    again = ask(sites.silo(), tasking(run, model()))  # restarted in between, and asked again
    assert again.content["payload"]["update"].numpy().tolist() == first.content["payload"]["update"].numpy().tolist()
    assert spent(sites) == once
    assert [event["event"] for event in events(sites)] == ["agreed", "answered", "answered"]


def test_the_noise_of_a_real_silo_cannot_be_repeated(sites: Sites, tmp_path: Path) -> None:
    """The same silo, copied before it answers, gives the same task another answer."""
    _, run = enrolled(sites)
    shutil.copytree(sites.folder / "aspen", tmp_path / "copy")
    first = ask(sites.silo(), tasking(run, model())).content["payload"]["update"].numpy()
    shutil.rmtree(sites.folder / "aspen")
    shutil.copytree(tmp_path / "copy", sites.folder / "aspen")
    second = ask(sites.silo(), tasking(run, model())).content["payload"]["update"].numpy()
    assert (first != second).sum() >= SIZE - 1


# A hostile server


def test_no_round_beyond_the_contract_is_answered(sites: Sites) -> None:
    silo, run = enrolled(sites)
    reserved = Ledger(sites.folder / "aspen" / "ledger.db").account("aspen").committed
    answered = 0
    for round in range(12):  # the contract has three
        reply = ask(silo, tasking(run, model(float(round)), round))
        answered += not reply.has_error() and bool(reply.content["reply"]["answered"])
    assert answered == 3
    ledger = Ledger(sites.folder / "aspen" / "ledger.db")
    assert ledger.account("aspen").history == reserved
    assert [event["event"] for event in events(sites)][-1] == "declined"


def test_asking_for_the_same_round_in_many_ways_costs_and_yields_no_more(sites: Sites) -> None:
    """Different models in one round are different tasks, each paid for: no average of fresh noise is free."""
    silo, run = enrolled(sites)
    updates = []
    for value in range(40):
        reply = ask(silo, tasking(run, model(value / 100)))
        if not reply.has_error() and reply.content["reply"]["answered"]:
            updates.append(reply)
    assert len(updates) == charges(sites) == 3


def test_a_reply_that_is_no_longer_kept_is_paid_for_again(sites: Sites) -> None:
    silo, run = enrolled(sites)
    for round, paid in [(0, 1), (1, 2), (0, 3), (1, 3)]:  # the fourth would be a fourth use
        ask(silo, tasking(run, model(), round))
        assert charges(sites) == paid


def test_a_task_that_nobody_waits_for_any_more_is_not_paid_for(sites: Sites) -> None:
    silo, run = enrolled(sites)
    late = tasking(run, model())
    late.metadata.ttl = 5.0
    late.metadata.__dict__["_created_at"] = time.time() - 10.0
    declined(silo, late)
    assert charges(sites) == 0
    assert "too late" in events(sites)[-1]["reason"]
    in_time = tasking(run, model())
    in_time.metadata.ttl = 5.0
    assert ask(silo, in_time).content["reply"]["answered"]


def other_messages(sites: Sites, run: str) -> Iterator[Message]:
    """Messages that must be refused, each a variation of an honest one."""
    flat = torch.zeros(SIZE)
    yield tasking(run, {})
    yield tasking(run, {"model": flat, "clip": torch.tensor(100.0)})
    yield tasking(run, {"model": flat, "noise_multiplier": torch.tensor(0.0)})
    yield tasking(run, {"model": flat, "rate": torch.tensor(1.0)})
    yield tasking(run, {"model": flat, "records": torch.tensor(1)})
    yield tasking(run, {"weights": flat})
    for bad in (math.nan, math.inf, -math.inf, 1e30):
        yield tasking(run, {"model": torch.cat([flat[1:], torch.tensor([bad])])})
    yield tasking(run, {"model": flat.double()})
    yield tasking(run, {"model": flat.int()})
    yield tasking(run, {"model": torch.zeros(SIZE + 1)})
    yield tasking(run, {"model": torch.zeros(1, SIZE)})
    yield tasking(run, {"model": torch.zeros(0)})
    yield tasking(run, {"model": torch.zeros(2_000_000)})
    for action in ("evaluate", "enter", "project", "", "train ", 3, "__class__"):
        yield tasking(run, model(), action=action)
    for round in (-1, 10**7, 2**62, 1.5, "0", True):
        yield tasking(run, model(), round)
    for other in ("", "readmission", run + "0", run[:-1], run.upper(), "../../etc/passwd", f"x/{'0' * 64}", 7, b"run"):
        yield tasking(other, model())
    for bits in (1, 63, 2**40, 0.5, "16"):
        yield tasking(run, model(), bits=bits)
    being(1)
    for kind in (MessageType.EVALUATE, "train.sum", "train.records", "query.records"):
        record = RecordDict({"task": ConfigRecord({"action": "train", "run": run, "round": 0})})
        yield over_the_wire(Message(record, dst_node_id=NODE, message_type=kind))
    yield over_the_wire(Message(RecordDict(), dst_node_id=NODE, message_type=MessageType.TRAIN))
    yield over_the_wire(Message(RecordDict(), dst_node_id=NODE, message_type=MessageType.QUERY))
    arrays = RecordDict({"task": ArrayRecord(), "payload": ConfigRecord()})
    yield over_the_wire(Message(arrays, dst_node_id=NODE, message_type=MessageType.TRAIN))


def test_other_messages_are_declined_free_of_charge(sites: Sites) -> None:
    silo, run = enrolled(sites)
    for message in other_messages(sites, run):
        declined(silo, message)
    assert charges(sites) == 0
    honest = ask(silo, tasking(run, model()))
    assert honest.content["reply"]["answered"]
    assert charges(sites) == 1
    refusals = [event for event in events(sites) if event["event"] == "refused"]
    assert len(refusals) > 40
    assert all(event["reason"] for event in refusals)


_ANY = st.one_of(
    st.integers(-(2**63), 2**63 - 1), st.floats(), st.booleans(), st.text(max_size=20), st.binary(max_size=20)
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    task=st.dictionaries(st.sampled_from(["action", "round", "bits", "clip", "run"]), _ANY, max_size=5),
    kind=st.sampled_from([MessageType.TRAIN, MessageType.QUERY, MessageType.EVALUATE, "train.sum"]),
    named=st.booleans(),
)
def test_no_header_gets_more_than_was_agreed(
    shared: tuple[Sites, Silo, str], task: dict[str, Any], kind: str, named: bool
) -> None:
    sites, silo, run = shared
    being(1)
    header = {**task, **({"run": run} if named else {})}
    record = RecordDict({"task": ConfigRecord(header), "payload": arrays({"model": torch.zeros(SIZE)})})
    reply = ask(silo, over_the_wire(Message(record, dst_node_id=NODE, message_type=kind)))
    assert reply.has_error()
    assert reply.error.reason == "declined"
    assert charges(sites) == 0


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Sites, Silo, str]:
    sites = Sites(tmp_path_factory.mktemp("shared"))
    return sites, *enrolled(sites)


def test_an_array_that_lies_about_its_size_is_declined(sites: Sites) -> None:
    silo, run = enrolled(sites)
    for shape in (b"(600000000000, )", b"(6, 100000000)  ", b"(-6,)           "):
        message = tasking(run, model())
        array = message.content["payload"]["model"]
        assert b"(6,)" in array.data
        lie = array.data.replace(b"(6,), }" + b" " * (len(shape) - 4), shape + b", }")
        assert lie != array.data
        array.data = lie
        declined(silo, message)
    assert charges(sites) == 0


def test_a_contract_is_not_accepted_in_parts(sites: Sites, tmp_path: Path) -> None:
    silo, signed = sites.silo(), sites.signed()
    stranger = new_key(tmp_path / "stranger.key")
    theirs = signed.contract.model_copy(update={"signer": public_of(stranger)})
    content = signed.encode()
    for bad in [
        b"",
        content[:-20],
        content.replace(b'"rounds":3', b'"rounds":9'),
        content.replace(b'"clip":1.0', b'"clip":9.0'),
        SignedContract.sign(theirs, stranger).encode(),  # a valid contract of somebody unknown
        SignedContract(signed.contract, b"\0" * 64).encode(),
        sites.signed(rounds=1000).encode(),
        sites.signed(ends=date(2020, 1, 1)).encode(),
        sites.signed(rehearsal=1).encode(),
        sites.signed(silos={"aspen": public_of(stranger)}).encode(),
    ]:
        declined(silo, enrolling(bad))
        declined(silo, tasking(signed.contract.run, model()))
    ledger = Ledger(sites.folder / "aspen" / "ledger.db")
    assert not ledger.runs
    assert not list((sites.folder / "aspen" / "state" / "contracts").iterdir())


def test_the_tasks_of_two_contracts_do_not_mix(sites: Sites) -> None:
    silo, first = enrolled(sites)
    second = sites.signed(name="second", training={"clip": 0.5, "batch": 12, "local_steps": 1})
    declined(silo, tasking(second.contract.run, model()))
    ask(silo, enrolling(second.encode()))
    assert ask(silo, tasking(second.contract.run, model())).content["reply"]["answered"]
    ledger = Ledger(sites.folder / "aspen" / "ledger.db")
    account = ledger.account("aspen")
    assert account.charges == 1
    assert set(account.reserved) == {first, second.contract.run}
    assert sum(account.reserved[first].values()) > sum(account.reserved[second.contract.run].values())


def test_after_its_end_a_contract_is_not_answered(sites: Sites, monkeypatch: pytest.MonkeyPatch) -> None:
    silo, run = enrolled(sites, ends=date(2090, 1, 1))
    for module in ("polyeps.deploy.silo", "polyeps.deploy.agreement"):
        monkeypatch.setattr(f"{module}.today", lambda: date(2090, 1, 2))
    declined(silo, tasking(run, model()))
    assert charges(sites) == 0
    ledger = sites.silo().ledger  # started after the end, it releases what was reserved
    assert not ledger.runs[run].open
    assert not ledger.account("aspen").committed
    monkeypatch.setattr("polyeps.deploy.silo.today", lambda: date(2089, 1, 1))
    monkeypatch.setattr("polyeps.deploy.agreement.today", lambda: date(2089, 1, 1))
    declined(sites.silo(), tasking(run, model()))  # a clock that goes back opens nothing again
    assert charges(sites) == 0


def test_a_contract_of_another_version_does_not_keep_a_silo_from_starting(sites: Sites) -> None:
    silo, run = enrolled(sites)
    path = sites.folder / "aspen" / "state" / "contracts" / run.rpartition("/")[2]
    path.write_bytes(path.read_bytes().replace(b'"decay"', b'"decoy"'))
    declined(sites.silo(), tasking(run, model()))
    assert "decoy" in events(sites)[-1]["reason"]
    assert charges(sites) == 0
    assert ask(silo, tasking(run, model())).content["reply"]["answered"]  # it has read the contract before


def test_a_new_contract_finds_free_what_an_ended_one_has_not_used(
    sites: Sites, monkeypatch: pytest.MonkeyPatch
) -> None:
    sites.write_policy("aspen", budget={"epsilon": 1.4})
    silo, run = enrolled(sites, ends=date(2090, 1, 1))
    second = sites.signed(name="second")
    declined(silo, enrolling(second.encode()))
    for module in ("polyeps.deploy.silo", "polyeps.deploy.agreement"):
        monkeypatch.setattr(f"{module}.today", lambda: date(2090, 1, 2))
    assert not ask(silo, enrolling(second.encode())).has_error()
    assert not silo.ledger.runs[run].open


def test_no_text_of_an_error_is_sent(sites: Sites, caplog: pytest.LogCaptureFixture) -> None:
    silo, run = enrolled(sites)
    part = silo._agreed[run]

    def fail(_: Any) -> Any:
        raise RuntimeError("patient 4711")

    broken = replace(part.algorithm, actions={"train": replace(part.algorithm.actions["train"], run=fail)})
    silo._agreed[run] = replace(part, algorithm=broken)
    declined(silo, tasking(run, model()))
    (sites.folder / "aspen" / "records.csv").write_text("age,stay,readmitted\npatient 4711,1,no\n")
    declined(sites.silo(), tasking(run, model()))
    assert "patient 4711" in caplog.text
    assert any("patient 4711" in event.get("reason", "") for event in events(sites))


# Killed between any two steps


class Killed(BaseException):
    """The process ends here."""


@pytest.mark.parametrize("step", ["begin", "charged", "keep", "kept", "noted"])
def test_a_silo_killed_in_a_task_pays_once(step: str, sites: Sites, monkeypatch: pytest.MonkeyPatch) -> None:
    silo, run = enrolled(sites)

    def die(*_: Any, **__: Any) -> Any:
        raise Killed

    with monkeypatch.context() as patched:
        if step == "begin":
            patched.setattr(Keeping, "begin", die)
        elif step == "charged":
            patched.setattr("polyeps.client._work", die)
        elif step == "keep":
            patched.setattr(Keeping, "keep", die)
        elif step == "kept":
            usual = Keeping.keep

            def keep_and_die(*given: Any) -> None:
                usual(*given)
                raise Killed

            patched.setattr(Keeping, "keep", keep_and_die)
        else:
            patched.setattr(Silo, "_note", die)
        with pytest.raises(Killed):
            ask(silo, tasking(run, model()))
    assert charges(sites) == (0 if step == "begin" else 1)
    for _ in range(2):
        reply = ask(sites.silo(), tasking(run, model()))
        assert reply.content["reply"]["answered"]
        assert charges(sites) == 1
    # The attempt is over: the next round is a new one.
    assert ask(sites.silo(), tasking(run, model(), 1)).content["reply"]["answered"]
    assert charges(sites) == 2


def test_an_attempt_that_was_cut_off_covers_its_own_task_alone(sites: Sites, monkeypatch: pytest.MonkeyPatch) -> None:
    silo, run = enrolled(sites)

    def die(*_: Any) -> Any:
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr("polyeps.client._work", die)
        with pytest.raises(Killed):
            ask(silo, tasking(run, model()))
    assert charges(sites) == 1
    assert ask(sites.silo(), tasking(run, model(0.5))).content["reply"]["answered"]  # another model: another release
    assert charges(sites) == 2
    assert ask(sites.silo(), tasking(run, model())).content["reply"]["answered"]  # given up, so paid for again
    assert charges(sites) == 3


@pytest.mark.parametrize("step", ["reserved", "kept"])
def test_a_silo_killed_while_it_agrees_reserves_once(step: str, sites: Sites, monkeypatch: pytest.MonkeyPatch) -> None:
    signed = sites.signed()

    def die(*_: Any, **__: Any) -> Any:
        raise Killed

    with monkeypatch.context() as patched:
        if step == "reserved":
            patched.setattr(silo_module, "replace_file", die)
        else:
            patched.setattr(Silo, "_note", die)
        with pytest.raises(Killed):
            ask(sites.silo(), enrolling(signed.encode()))
    rows = Ledger(sites.folder / "aspen" / "ledger.db").head
    assert not ask(sites.silo(), enrolling(signed.encode())).has_error()
    assert Ledger(sites.folder / "aspen" / "ledger.db").head == rows


def test_a_full_disk_stops_the_reply_and_nothing_else(sites: Sites, monkeypatch: pytest.MonkeyPatch) -> None:
    silo, run = enrolled(sites)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("polyeps.transport.client_files.replace_file", full)
        declined(silo, tasking(run, model()))
        assert charges(sites) == 0  # the attempt could not be written, so it was not charged
    reply = ask(silo, tasking(run, model()))
    assert reply.content["reply"]["answered"]
    assert charges(sites) == 1


def test_the_log_is_bounded(sites: Sites, monkeypatch: pytest.MonkeyPatch) -> None:
    silo, _ = enrolled(sites)
    monkeypatch.setattr("polyeps.deploy.own_figures._LARGEST", 2000)
    for _ in range(60):
        silo.refuse(InputError("x" * 10_000))
    files = sorted(path.name for path in (sites.folder / "aspen" / "state").glob("events*"))
    assert files == ["events.jsonl", "events.jsonl.1"]
    assert (sites.folder / "aspen" / "state" / "events.jsonl").stat().st_size < 3000
