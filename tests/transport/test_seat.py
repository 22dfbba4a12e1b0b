"""Seats in secure sums: one vector in one sum, whatever else happened since, and one message at a time."""

from __future__ import annotations

import stat
import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from support.deployed import DeployedGrid
from support.federations import experiment, job_of

from polyeps.core import ENTER, Algorithm, Ask, Replies, SumTerms, Task, Total
from polyeps.errors import InputError, MessageRefused
from polyeps.ledger.head_file import replace_file
from polyeps.secagg.messages import Step, SumSetup, open_signed, pack_names, pack_table, stamp, unpack_table
from polyeps.secagg.server import Sum
from polyeps.transport.flower import OnFlower
from polyeps.transport.flower_sums import Seat, clear_sums, run_sum, sum_name

NAMES, BITS, LENGTH, THRESHOLD = tuple("abcdef"), 16, 8, 4
ALGORITHM = Algorithm({}, lambda state, _: state, sums=lambda *_: SumTerms(len(NAMES), THRESHOLD, 0, BITS))
WRITES = "polyeps.transport.flower_sums.replace_file"
VECTORS = {name: torch.arange(LENGTH) * (place + 1) for place, name in enumerate(NAMES)}


def task(action: str = "train", round: int = 0, run: str = "run") -> Task:
    return Task(action, NAMES, {}, run, round)


def seats_in(folder: Path) -> dict[str, Seat]:
    keys = {name: Ed25519PrivateKey.generate() for name in NAMES}
    roster = {name: key.public_key().public_bytes_raw() for name, key in keys.items()}
    return {name: Seat(keys[name], roster, folder / name) for name in NAMES}


def summed(seats: Mapping[str, Seat], of: Task, last: Step = Step.UNMASK) -> Sum | None:
    """Have clients prepare their vectors and go through a sum, up to a step."""

    def exchange(asked: Mapping[str, Any], messages: Mapping[str, bytes]) -> Iterable[tuple[str, bytes]]:
        for name, message in messages.items() if asked["step"] <= last else ():
            yield name, seats[name].answer(name, asked, message)

    for name, seat in seats.items():
        seat.prepare(ALGORITHM, of, {"update": VECTORS[name]}, BITS)
    return run_sum(of, {name: seat.public for name, seat in seats.items()}, THRESHOLD, BITS, LENGTH, exchange, 0)


def asked_first(of: Task, **changes: Any) -> dict[str, Any]:
    asked = {"run": sum_name(of), "round": of.round, "clients": list(NAMES), "bits": BITS, "length": LENGTH}
    return {**asked, "threshold": THRESHOLD, "step": int(Step.ADVERTISE), **changes}


# One vector in one sum


@pytest.mark.parametrize(
    ("last", "between"),
    [
        (Step.ADVERTISE, [task("embed")]),
        (Step.SHARE, []),
        (Step.MASK, [task("embed")]),
        (Step.UNMASK, []),
        (Step.UNMASK, [task("embed")]),
        (Step.UNMASK, [task("embed"), task("third")]),
        (Step.UNMASK, [task(round=1)]),
        (Step.UNMASK, [task(run="other")]),
    ],
    ids=lambda value: (
        value.name if isinstance(value, Step) else "+".join(f"{t.run}.{t.action}.{t.round}" for t in value)
    ),
)
def test_a_sum_is_entered_once_whatever_came_since(last: Step, between: list[Task], tmp_path: Path) -> None:
    seats = seats_in(tmp_path)
    opened = summed(seats, task(), last)
    assert (opened is not None) == (last is Step.UNMASK)
    for other in between:
        assert summed(seats, other) is not None
    before = {file.name: file.read_bytes() for file in seats["b"].folder.iterdir()}
    forgotten = any(other.round for other in between)  # then the same task is refused, too
    with pytest.raises(MessageRefused, match="has already taken part") if forgotten else nullcontext():
        seats["b"].prepare(ALGORITHM, task(), {"update": VECTORS["c"]}, BITS)
    other_task = replace(task(), payload={"model": torch.ones(1)})
    with pytest.raises(MessageRefused, match="has already taken part in round 0 of 'run/train'"):
        seats["b"].prepare(ALGORITHM, other_task, {"update": VECTORS["b"]}, BITS)
    rest = {name: seat for name, seat in seats.items() if name != "a"}
    with pytest.raises(MessageRefused, match="has already taken part"):
        summed(rest, task())
    assert {file.name: file.read_bytes() for file in seats["b"].folder.iterdir()} == before


@pytest.mark.parametrize(
    "changes", [{}, {"clients": list(NAMES[:5])}, {"threshold": 5}, {"clients": list(NAMES[:4])}], ids=str
)
def test_a_vector_is_used_under_one_set_of_terms(changes: dict[str, Any], tmp_path: Path) -> None:
    """Even if the vector lies there: nothing of the first sum was masked, and another one was entered in between."""
    seat = seats_in(tmp_path)["b"]
    seat.prepare(ALGORITHM, task(), {"update": VECTORS["b"]}, BITS)
    vector = (seat.folder / "vector").read_bytes()
    first = seat.answer("b", asked_first(task()), b"")
    seat.prepare(ALGORITHM, task("embed"), {"update": VECTORS["b"]}, BITS)
    assert seat.answer("b", asked_first(task("embed")), b"")
    (seat.folder / "vector").write_bytes(vector)
    if changes:
        with pytest.raises(MessageRefused, match="has already taken part in round 0"):
            seat.answer("b", asked_first(task(), **changes), b"")
    else:
        assert seat.answer("b", asked_first(task()), b"") == first
    with pytest.raises(MessageRefused):
        seat.answer("b", asked_first(task(), **changes, step=int(Step.SHARE)), b"")


def test_rounds_and_names_are_told_apart(tmp_path: Path) -> None:
    seats = seats_in(tmp_path)
    for of in (task(), task(round=1), task(round=11), task("train1", 1)):
        found = summed(seats, of)
        assert found is not None
        assert found.total.tolist() == (torch.arange(LENGTH) * 21).tolist()
    for seat in seats.values():
        files = {file.name: file for file in seat.folder.iterdir()}
        assert len(files) == 2  # of other rounds, only that they were
        assert "sums" in files
        assert {stat.S_IMODE(file.stat().st_mode) for file in files.values()} == {0o600}


@pytest.mark.parametrize("fails", ["sums", ".sum"])
@pytest.mark.parametrize("before", list(Step))
def test_a_step_is_written_down_before_anything_is_sent(
    fails: str, before: Step, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that dies in a step, or finds its disk full, takes the step again and sends what it would have sent."""
    seats, of = seats_in(tmp_path), task()

    def full(target: Path, *arguments: Any) -> None:
        if target.name.endswith(fails):
            raise OSError("full")
        replace_file(target, *arguments)

    def exchange(asked: Mapping[str, Any], messages: Mapping[str, bytes]) -> Iterable[tuple[str, bytes]]:
        for name, message in messages.items():
            if asked["step"] == before and (fails == ".sum" or before is Step.ADVERTISE):
                with monkeypatch.context() as patched:
                    patched.setattr(WRITES, full)
                    with pytest.raises(OSError, match="full"):
                        seats[name].answer(name, asked, message)
            yield name, seats[name].answer(name, asked, message)

    for name, seat in seats.items():
        seat.prepare(ALGORITHM, of, {"update": VECTORS[name]}, BITS)
    found = run_sum(of, {name: seat.public for name, seat in seats.items()}, THRESHOLD, BITS, LENGTH, exchange, 0)
    assert found is not None
    assert found.total.tolist() == (torch.arange(LENGTH) * 21).tolist()
    assert not any((seat.folder / "vector").exists() for seat in seats.values())


def test_a_server_that_is_restarted_finds_the_same_sum(tmp_path: Path) -> None:
    """After any step, it begins the sum anew with the same clients, and reads the same messages."""
    seats = seats_in(tmp_path)
    sent: dict[int, list[tuple[str, bytes]]] = {}
    last = [Step.ADVERTISE]

    def exchange(asked: Mapping[str, Any], messages: Mapping[str, bytes]) -> Iterable[tuple[str, bytes]]:
        answers = [(name, seats[name].answer(name, asked, message)) for name, message in messages.items()]
        assert sent.setdefault(asked["step"], answers) == answers
        return answers if asked["step"] <= last[0] else []

    for last[0] in Step:
        for name, seat in seats.items():
            seat.prepare(ALGORITHM, task(), {"update": VECTORS[name]}, BITS)
        public = {name: seat.public for name, seat in seats.items()}
        found = run_sum(task(), public, THRESHOLD, BITS, LENGTH, exchange, 0)
    assert found is not None
    assert found.total.tolist() == (torch.arange(LENGTH) * 21).tolist()


@pytest.mark.parametrize(("least", "colluders"), [(THRESHOLD + 1, 0), (1, 1)])
def test_a_client_insists_on_its_own_rules(least: int, colluders: int, tmp_path: Path) -> None:
    seat = replace(seats_in(tmp_path)["b"], least=least, colluders=colluders)
    with pytest.raises(MessageRefused, match=f"this client insists on {least} and {colluders}"):
        seat.check(ALGORITHM, task(), BITS)
    with pytest.raises(MessageRefused, match="this client insists on"):
        seat.prepare(ALGORITHM, task(), {"update": VECTORS["b"]}, BITS)


def test_secrets_are_forgotten_and_sums_are_not(tmp_path: Path) -> None:
    seats = seats_in(tmp_path)
    summed(seats, task(), Step.SHARE)
    folder = seats["b"].folder
    assert len(list(folder.iterdir())) == 3
    clear_sums(folder)
    assert [file.name for file in folder.iterdir()] == ["sums"]
    with pytest.raises(MessageRefused, match="has already taken part"):
        seats["b"].prepare(ALGORITHM, task(), {"update": VECTORS["b"]}, BITS)


@pytest.mark.parametrize("before", [Step.SHARE, Step.MASK])
def test_a_sum_begun_without_the_list_is_on_it_before_the_vector_leaves(before: Step, tmp_path: Path) -> None:
    """As after an update of a client in the middle of a sum."""
    seats = seats_in(tmp_path)
    answered = Seat.answer

    def lost(seat: Seat, name: str, asked: Mapping[str, Any], message: bytes) -> bytes:
        if asked["step"] == before:
            (seat.folder / "sums").unlink()
        return answered(seat, name, asked, message)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Seat, "answer", lost)
        assert summed(seats, task()) is not None
    with pytest.raises(MessageRefused, match="has already taken part"):
        seats["b"].prepare(ALGORITHM, replace(task(), payload={"a": torch.ones(1)}), {"update": VECTORS["b"]}, BITS)


def test_damage_is_found(tmp_path: Path) -> None:
    seats = seats_in(tmp_path)
    summed(seats, task())
    (tmp_path / "b" / "sums").write_bytes(b"torn")
    with pytest.raises(InputError, match="is damaged"):
        seats["b"].prepare(ALGORITHM, task(round=1), {"update": VECTORS["b"]}, BITS)


METHODS = {"cmp-fed": {"name": "cmp-fed", "rank": 2}, "dp-randagg": {"name": "dp-randagg", "rank": 0}}


class _Remembered(Ask):
    """An ask that says which run and round it is, and remembers what was asked and summed."""

    def __init__(self, transport: OnFlower, round: int) -> None:
        self.transport, self.round = transport, round
        self.asked: list[tuple[Task, SumTerms, Total]] = []

    def __call__(self, task: Task) -> Replies:
        raise AssertionError(task)

    def total(self, task: Task, terms: SumTerms) -> Total:
        task = replace(task, run="test", round=self.round)
        self.asked.append((task, terms, self.transport.total(task, terms)))
        return self.asked[-1][-1]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("left_out", ["0", "3", None])
def test_no_sum_is_opened_twice_for_the_difference(method: str, left_out: str | None, tmp_path: Path) -> None:
    """The server repeats each sum of a round, without one client: a client's reply is recalled free of charge."""
    changes: dict[str, Any] = {
        "budgets": {"epsilons": (8.0,) * 6},
        "model": {"name": "mlp", "hidden": [8]},
        "training": {"batch": 6, "local_steps": 2, "learning_rate": 0.2, "clip": 1.0},
        "participation": {"kind": "full"},
    }
    job = job_of(experiment({**METHODS[method], "noise": "skellam", "dropouts": 0.34}, **changes))
    grid = DeployedGrid(job, tmp_path)
    transport = OnFlower(grid)
    roster = transport.profiles()
    ids = tuple(face.id for face in roster)
    transport(Task(ENTER, ids, {}, "test", 0))
    ask = _Remembered(transport, 0)
    job.algorithm.round(replace(job.state, roster=roster, enrolled=roster), ask)
    assert all(total.payload for *_, total in ask.asked)
    assert grid.ledger is not None
    spent = {client: grid.ledger.spent(client) for client in ids}
    for of, terms, first in ask.asked:
        again = transport.total(replace(of, to=tuple(client for client in ids if client != left_out)), terms)
        if left_out is None:  # the very same, once more
            assert again.payload.keys() == first.payload.keys()
            assert all(torch.equal(again.payload[name], first.payload[name]) for name in first.payload)
        else:
            assert again.payload == {}
    assert {client: grid.ledger.spent(client) for client in ids} == spent


# One message at a time


def late(*arguments: Any) -> None:
    """Write a file, slowly in a thread of that name."""
    if threading.current_thread().name == "slow":
        time.sleep(0.1)
    replace_file(*arguments)


@pytest.mark.parametrize(("slow", "quick"), [("out", "in"), ("in", "out")])
def test_a_late_step_brings_no_shares_back(
    slow: str, quick: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two lists of clients at once, and the first is slow to be written: no client gives both shares of one other."""
    seats = seats_in(tmp_path)
    of, target = task(), "a"
    setup = SumSetup(sum_name(of), 0, seats["a"].roster, BITS, LENGTH, THRESHOLD)
    summed(seats, of, Step.MASK)
    lists = {"in": NAMES, "out": NAMES[1:]}
    signed: dict[str, dict[str, bytes]] = {which: {} for which in lists}
    shares: dict[str, dict[str, bytes]] = {name: {} for name in NAMES[1:]}
    monkeypatch.setattr(WRITES, late)

    def confirm(name: str, which: str) -> None:
        body = stamp(setup, Step.CONFIRM, name, pack_names(lists[which]))
        try:
            signed[which][name] = seats[name].answer(name, asked_first(of, step=int(Step.CONFIRM)), body)
        except MessageRefused:
            return

    def unmask(name: str, which: str) -> None:
        body = stamp(setup, Step.UNMASK, name, pack_table(signed[which]))
        try:
            sent = seats[name].answer(name, asked_first(of, step=int(Step.UNMASK)), body)
        except MessageRefused:
            return
        shares[name][which] = unpack_table(open_signed(setup, Step.UNMASK, name, sent))[target]

    threads = [threading.Thread(target=confirm, args=(name, slow), name="slow") for name in NAMES[1:]]
    for thread in threads:
        thread.start()
    time.sleep(0.03)
    for name in NAMES[1:]:
        confirm(name, quick)
    for name in NAMES[1:]:
        unmask(name, quick)
    for thread in threads:
        thread.join()
    for name in NAMES[1:]:
        unmask(name, slow)
    assert sum(len(signed[which]) for which in lists) == len(NAMES) - 1
    assert all(len(given) == 1 for given in shares.values())


def test_a_task_and_a_step_wait_for_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A task that is slow to be prepared does not put a vector under a sum that was entered meanwhile."""
    seat = seats_in(tmp_path)["b"]
    seat.prepare(ALGORITHM, task(), {"update": VECTORS["b"]}, BITS)
    monkeypatch.setattr(WRITES, late)
    other, later = {"update": VECTORS["c"]}, replace(task(), payload={"model": torch.ones(1)})
    thread = threading.Thread(target=seat.prepare, args=(ALGORITHM, later, other, BITS), name="slow")
    thread.start()
    time.sleep(0.03)
    seat.answer("b", asked_first(task()), b"")
    before = (seat.folder / "vector").read_bytes()
    thread.join()
    assert (seat.folder / "vector").read_bytes() == before
    assert before.endswith(VECTORS["c"].numpy().astype(np.uint64).tobytes())


# Neighbours


def test_many_clients_work_with_neighbours_and_the_sum_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("polyeps.secagg.neighbours.FROM_CLIENTS", len(NAMES))
    monkeypatch.setattr("polyeps.secagg.neighbours._FEWEST", 2)
    seats, of, said = seats_in(tmp_path), task(), set()

    def exchange(asked: Mapping[str, Any], messages: Mapping[str, bytes]) -> Iterable[tuple[str, bytes]]:
        said.add(asked["neighbours"])
        for name, message in messages.items():
            if not (name == "c" and asked["step"] == Step.MASK):
                yield name, seats[name].answer(name, asked, message)

    for name, seat in seats.items():
        seat.prepare(ALGORITHM, of, {"update": VECTORS[name]}, BITS)
    found = run_sum(of, {name: seat.public for name, seat in seats.items()}, 5, BITS, LENGTH, exchange, 0)
    assert said == {2}
    assert found is not None
    assert found.total.tolist() == (torch.arange(LENGTH) * (21 - 3)).tolist()


@pytest.mark.parametrize(
    ("threshold", "colluders", "near", "refuses"),
    [
        (5, 0, 2, ""),
        (5, 1, 2, "from 1 colluders; take more"),  # which the server does not know of
        (5, 1, 4, ""),
        (4, 0, 2, "from 0 colluders and a threshold of 4; take more"),
        (5, 0, 3, "3 neighbours of 6 clients do not protect them"),
        (5, 0, -2, "-2 neighbours of 6 clients do not protect them"),
    ],
)
def test_a_client_refuses_fewer_neighbours_than_its_terms_need(
    threshold: int, colluders: int, near: int, refuses: str, tmp_path: Path
) -> None:
    seat = seats_in(tmp_path)["b"]
    algorithm = replace(ALGORITHM, sums=lambda *_: SumTerms(len(NAMES), 4, colluders, BITS))
    seat.prepare(algorithm, task(), {"update": VECTORS["b"]}, BITS)
    asked = asked_first(task(), threshold=threshold, neighbours=near)
    with pytest.raises(MessageRefused, match=refuses) if refuses else nullcontext():
        assert seat.answer("b", asked, b"")
