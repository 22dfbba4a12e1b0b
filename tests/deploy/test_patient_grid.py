"""Waiting for replies: for a finite time, not for silos that are away, and never for what nobody would hear."""

from __future__ import annotations

import time
from collections.abc import Iterable

import httpx
import pytest
from flwr.app import Message, MessageType, RecordDict
from support.silos import being

from polyeps.deploy import patient_grid
from polyeps.deploy.patient_grid import PatientGrid, restarted


class Nodes:
    """A grid whose nodes reply at once, never, or after having been restarted so many times."""

    def __init__(self, restarts: dict[int, int], silent: Iterable[int] = ()) -> None:
        self.restarts, self.silent, self.connected = restarts, set(silent), {*restarts, *silent}
        self.waiting: dict[str, Message] = {}
        self.sent: list[Message] = []

    def get_node_ids(self) -> Iterable[int]:
        return self.connected

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        names = []
        for message in messages:
            names.append(f"message {len(self.sent)}")
            message.metadata.__dict__["_message_id"] = names[-1]
            self.sent.append(message)
            self.waiting[names[-1]] = message
        return names

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        replies = []
        for name in list(message_ids):
            message = self.waiting[name]
            node = message.metadata.dst_node_id
            if node in self.silent:
                continue
            being(node)
            self.restarts[node] -= 1
            reply = restarted(message) if self.restarts[node] >= 0 else Message(RecordDict(), reply_to=message)
            being(1)
            replies.append(reply)
        return replies


def ask(grid: PatientGrid, nodes: Iterable[int], timeout: float) -> set[int]:
    being(1)
    messages = [Message(RecordDict(), dst_node_id=node, message_type=MessageType.TRAIN) for node in nodes]
    return {
        reply.metadata.src_node_id
        for reply in grid.send_and_receive(messages, timeout=timeout)
        if not reply.has_error()
    }


def test_a_silo_that_is_away_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patient_grid, "_GONE", 0.3)
    nodes = Nodes({1: 0}, silent=[2, 3])
    grid = PatientGrid(nodes, 0.01)
    nodes.connected.discard(2)  # the SuperLink has not heard of it for a while
    began = time.monotonic()
    assert ask(grid, [1, 2], 60.0) == {1}
    assert 0.2 < time.monotonic() - began < 30
    before = time.monotonic()
    assert ask(grid, [1, 2], 60.0) == {1}
    assert time.monotonic() - before < 0.25  # it is still away
    nodes.connected.add(2)
    nodes.silent.discard(2)
    nodes.restarts[2] = 0
    assert ask(grid, [1, 2], 60.0) == {1, 2}
    assert ask(grid, [1, 3], 0.5) == {1}  # it is connected and silent: the time-out ends the wait


def test_a_silo_that_is_restarted_for_ever_is_asked_five_times() -> None:
    nodes = Nodes({1: 2, 2: 1000})
    assert ask(PatientGrid(nodes, 0.01), [1, 2], 60.0) == {1}
    assert len(nodes.sent) == 3 + 5


def test_a_reply_that_cannot_be_read_is_that_of_one_silo(caplog: pytest.LogCaptureFixture) -> None:
    """Flower reads all replies at once, and fails if one is no message."""
    nodes = Nodes({1: 0, 2: 0, 3: 0})
    usual = nodes.pull_messages

    def reading(message_ids: Iterable[str]) -> Iterable[Message]:
        names = list(message_ids)
        if any(nodes.waiting[name].metadata.dst_node_id == 2 for name in names):
            raise ValueError("no message")
        return usual(names)

    nodes.pull_messages = reading  # type: ignore[method-assign]
    assert ask(PatientGrid(nodes, 0.01), [1, 2, 3], 0.5) == {1, 3}
    assert "node 2 sends what cannot be read" in caplog.text

    def gone(message_ids: Iterable[str]) -> Iterable[Message]:
        raise httpx.ConnectError("gone")

    nodes.pull_messages = gone  # type: ignore[method-assign]
    with pytest.raises(httpx.ConnectError):
        ask(PatientGrid(nodes, 0.01), [1], 0.5)


def test_no_message_outlives_the_wait_for_its_reply() -> None:
    nodes = Nodes({1: 1})
    ask(PatientGrid(nodes, 0.01), [1], 5.0)
    first, again = (message.metadata.ttl for message in nodes.sent)
    assert first == 5.0 + patient_grid._CLOCKS
    assert again <= first
