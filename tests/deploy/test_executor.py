"""The silo's process and one task of its SuperNode: large messages, tasks that nobody waits for, a clean stop."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch
from flwr.app import Message
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from support.silos import Sites, being, enrolling, tasking

from polyeps.deploy import executor
from polyeps.deploy.executor import run_silo, stopping
from polyeps.deploy.flower_runtime import Assignment, Endpoint
from polyeps.deploy.silo import Silo
from polyeps.errors import InputError

NODE = 100


class SuperNode:
    """The Runtime API of a SuperNode, with one message after the other."""

    def __init__(self, *messages: Message) -> None:
        self.messages, self.replies, self.ended = list(messages), list[Message](), list[str]()
        self.missing: set[str] = set()  # objects that are not there yet
        self.asked = 0

    def assignment(self) -> Assignment:
        task = Assignment(Endpoint("127.0.0.1:1", b"secret"), "token")
        message = self.messages.pop(0)
        task.client = _Client(self, message)
        return task


class _Client:
    def __init__(self, node: SuperNode, message: Message) -> None:
        self.supernode, self.message = node, message
        self.tree = get_object_tree(message)
        self.objects = {name: one.deflate() for name, one in get_all_nested_objects(message).items()}

    def PullTaskInput(self, _: Any) -> Any:
        return SimpleNamespace(context=SimpleNamespace(node_id=NODE), run=SimpleNamespace(run_id=1), task_id=7)

    def PullMessages(self, _: Any) -> Any:
        return SimpleNamespace(messages_list=[message_to_proto(self.message)], message_object_trees=[self.tree])

    def PullObject(self, request: Any) -> Any:
        self.supernode.asked += 1
        there = request.object_id not in self.supernode.missing
        return SimpleNamespace(object_available=there, object_content=self.objects[request.object_id] if there else b"")

    def PushMessages(self, request: Any) -> Any:
        self.supernode.replies.append(message_from_proto(request.messages_list[0]))
        return SimpleNamespace(session_id="", objects_to_push=[])

    def PushTaskOutput(self, request: Any) -> None:
        self.supernode.ended.append(request.sub_status)

    def PushObject(self, _: Any) -> None: ...
    def ConfirmMessageReceived(self, _: Any) -> None: ...
    def SendTaskHeartbeat(self, _: Any) -> None: ...
    def close(self) -> None: ...


@pytest.fixture
def sites(tmp_path: Path) -> Sites:
    return Sites(tmp_path)


def never() -> None:
    pytest.fail("nothing is missing")


def answer(silo: Silo, node: SuperNode, waiting: Callable[[], None] = never) -> Any:
    being(NODE)
    return executor._answer(silo, node.assignment(), silo.policy.folder / "task", waiting)


def test_a_message_arrives_as_it_was_sent(sites: Sites) -> None:
    message = tasking("a run", {"model": torch.arange(6.0)})
    task = SuperNode(message).assignment()
    task.open()
    arrived = task.content(100_000, never)
    assert arrived.content["payload"]["model"].numpy().tolist() == [0, 1, 2, 3, 4, 5]
    assert dict(arrived.content["task"]) == dict(message.content["task"])


def test_a_message_that_is_too_large_is_declined_before_it_is_read(sites: Sites) -> None:
    sites.write_policy("aspen", limits={"message_bytes": 50_000})
    silo, signed = sites.silo(), sites.signed()
    node = SuperNode(
        enrolling(signed.encode()),
        tasking(signed.contract.run, {"model": torch.zeros(2_000_000)}),
        tasking(signed.contract.run, {f"t{i}": torch.full((1,), float(i)) for i in range(300)}),
        tasking(signed.contract.run, {"model": torch.zeros(6)}),
    )
    for _ in range(4):
        assert answer(silo, node) is None
    assert [reply.has_error() for reply in node.replies] == [False, True, True, False]
    assert {reply.error.reason for reply in node.replies[1:3]} == {"declined"}
    assert node.ended == ["completed"] * 4
    text = (silo.policy.folder / "events.jsonl").read_text()
    assert text.count("more than limits.message_bytes = 50000") == 2
    assert not (silo.policy.folder / "task").exists()


def test_a_task_that_cannot_be_noted_is_declined(sites: Sites, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a full disk nothing could be recorded: the server is told at once, and nothing is charged."""
    silo, signed = sites.silo(), sites.signed()
    node = SuperNode(enrolling(signed.encode()), *(tasking(signed.contract.run, {"model": torch.zeros(6)}),) * 2)
    assert answer(silo, node) is None

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(executor, "replace_file", full)
        assert answer(silo, node) is None
    assert node.replies[1].error.reason == "declined"
    assert silo.ledger.account("aspen").charges == 0
    assert answer(silo, node) is None
    assert not node.replies[2].has_error()
    assert silo.ledger.account("aspen").charges == 1


def test_a_task_whose_run_is_over_is_given_up_for_the_next(sites: Sites) -> None:
    silo, signed = sites.silo(), sites.signed()
    node = SuperNode(tasking("an ended run", {}), enrolling(signed.encode()))
    node.missing = set(get_all_nested_objects(node.messages[0]))
    second = node.assignment

    def another() -> None:
        if node.asked > 2:
            raise executor._AbandonedError(second())

    instead = answer(silo, node, another)
    assert isinstance(instead, Assignment)
    assert (node.replies, node.ended) == ([], ["failed"])  # ended without a reply: the SuperNode waits for none
    node.missing.clear()
    being(NODE)
    assert executor._answer(silo, instead, silo.policy.folder / "task", never) is None
    assert [reply.has_error() for reply in node.replies] == [False]


def test_a_silo_that_stops_leaves_a_task_that_does_not_arrive(sites: Sites) -> None:
    silo, node = sites.silo(), SuperNode(tasking("a run", {}))
    node.missing = set(get_all_nested_objects(node.messages[0]))
    stop = threading.Event()
    stop.set()
    assert answer(silo, node, lambda: executor._next(Endpoint("127.0.0.1:1"), None, stop)) is None
    assert (node.replies, node.ended) == ([], [])
    assert not (silo.policy.folder / "task").exists()


def test_a_failed_task_does_not_end_the_silo(sites: Sites, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever one task raises, the next is answered; a SuperNode that is away is waited for."""
    stop, seen = threading.Event(), list[str]()
    problems: list[Exception] = [httpx.ConnectError("away"), ValueError("bad bytes"), InputError("no message")]

    def acquire(*_: Any) -> None:
        seen.append("looked")
        if problems:
            raise problems.pop()
        stop.set()

    monkeypatch.setattr(executor, "_PAUSE", 0.0)
    monkeypatch.setattr(executor, "_POLL", 0.0)
    monkeypatch.setattr("polyeps.deploy.flower_runtime.acquire", acquire)
    (sites.folder / "aspen" / "supernode.secret").write_bytes(b"secret")
    (sites.folder / "aspen" / "state").mkdir()
    (sites.folder / "aspen" / "state" / "task").write_text("{}")  # left by a process that was killed
    run_silo(sites.policy(), stop)
    assert len(seen) == 4
    assert not (sites.folder / "aspen" / "state" / "task").exists()


def test_a_silo_runs_once(sites: Sites, monkeypatch: pytest.MonkeyPatch) -> None:
    (sites.folder / "aspen" / "supernode.secret").write_bytes(b"secret")

    def acquire(*_: Any) -> None:
        with pytest.raises(InputError, match="another process is the silo 'aspen'"):
            run_silo(sites.policy(), threading.Event())
        stop.set()

    stop = threading.Event()
    monkeypatch.setattr("polyeps.deploy.flower_runtime.acquire", acquire)
    run_silo(sites.policy(), stop)


def test_the_first_signal_asks_to_stop_and_the_second_stops() -> None:
    with stopping() as stop:
        signal.raise_signal(signal.SIGTERM)
        assert stop.is_set()
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    with stopping() as stop:
        signal.raise_signal(signal.SIGINT)
        assert stop.is_set()
