"""A disk that fails at any step of a task: no release without its charge, no second charge, and then it goes on."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Message
from support.real_federation import can_mount, small_disk
from support.silos import Sites, being, enrolling, tasking

from polyeps.deploy.silo import Silo
from polyeps.ledger import Ledger

NODE = 100
WRITING = ("write", "pwrite", "fsync", "replace", "link")  # the calls of the system that a full disk fails
ROUNDS = 20


def ask(silo: Silo, run: str, round: int) -> bool:
    """Ask for a round; return whether anything was released."""
    being(NODE)
    reply: Message = silo.answer(tasking(run, {"model": torch.zeros(6)}, round), NODE)
    return not reply.has_error() and bool(reply.content["reply"]["answered"])


def agreed(sites: Sites) -> tuple[Silo, str]:
    silo, signed = sites.silo(), sites.signed(rounds=ROUNDS)
    being(NODE)
    assert not silo.answer(enrolling(signed.encode()), NODE).has_error()
    return silo, signed.contract.run


def charges(sites: Sites) -> int:
    """Return the charges on the disk, as somebody else reads them."""
    ledger = Ledger(sites.folder / "aspen" / "ledger.db")
    ledger.verify()
    return ledger.account("aspen").charges


class Disk:
    """Counts the calls that write, and fails some of them."""

    def __init__(self) -> None:
        self.calls, self.first, self.many = 0, -1, False

    @contextmanager
    def failing(self, monkeypatch: pytest.MonkeyPatch, first: int, many: bool) -> Iterator[None]:
        self.calls, self.first, self.many = 0, first, many
        with monkeypatch.context() as patched:
            for name in WRITING:
                patched.setattr(os, name, self._instead(getattr(os, name)))
            yield

    def _instead(self, usual: Any) -> Any:
        def call(*given: Any, **more: Any) -> Any:
            self.calls += 1
            if self.calls == self.first or (self.many and self.calls > self.first):
                raise OSError(28, "No space left on device")
            return usual(*given, **more)

        return call


@pytest.mark.parametrize("many", [False, True], ids=["one call fails", "all calls from there on fail"])
def test_a_disk_that_fails_at_any_step(many: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sites = Sites(tmp_path, records=40)
    silo, run = agreed(sites)
    disk, paid, rounds = Disk(), 0, 0
    with disk.failing(monkeypatch, -1, False):
        assert ask(silo, run, rounds)
    steps, paid, rounds = disk.calls, 1, 1
    assert steps >= 6  # attempt, head, reply: each written and flushed
    for step in range(1, steps + 1):
        with disk.failing(monkeypatch, step, many):
            released = ask(silo, run, rounds)
        assert charges(sites) in (paid, paid + 1)
        if released:
            assert charges(sites) == paid + 1  # never a release without its charge
        silo = sites.silo() if step % 2 else silo  # restarted, or not
        assert ask(silo, run, rounds)
        assert charges(sites) == paid + 1  # never a second charge
        paid, rounds = paid + 1, rounds + 1
        if rounds == ROUNDS:
            break


def test_a_disk_with_any_room_left(tmp_path: Path) -> None:
    """The same on a real disk, with every amount of room: SQLite's own writes fail as well."""
    if not can_mount():
        pytest.skip("needs the right to mount a small disk")
    with small_disk(tmp_path / "sites", "1500k"):
        sites = Sites(tmp_path / "sites", records=40)
        silo, run = agreed(sites)
        filling, refused = tmp_path / "sites" / "filling", 0
        for round in range(ROUNDS):
            disk = os.statvfs(filling.parent)
            filling.write_bytes(b"0" * max(0, (disk.f_bavail - round // 2) * disk.f_frsize))
            before = charges(sites)
            released = ask(silo, run, round)
            refused += not released
            assert charges(sites) == before + 1 if released else charges(sites) in (before, before + 1)
            filling.unlink()
            assert ask(silo, run, round)
            assert charges(sites) == before + 1
        assert 0 < refused < ROUNDS  # both were seen
        silo.ledger.close()
