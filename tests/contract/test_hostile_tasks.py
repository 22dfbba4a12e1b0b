"""Hostile tasks for every algorithm: refused before anybody pays, or answered as the action says; nothing else.

In the suite about 1 500 tasks; POLYEPS_FUZZ=20000 gives as many as one likes.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MessageType, RecordDict
from flwr.common.serde import message_to_proto
from support.federations import METHODS, LocalGrid, experiment, honest_tasks, job_of, ledger_of

from polyeps.client import answer
from polyeps.clients import Clients
from polyeps.core import ENTER, Task
from polyeps.errors import PolyepsError
from polyeps.experiment.job import Job
from polyeps.ledger import Ledger
from polyeps.messages import usable_rows
from polyeps.transport.flower_client import DECLINED

EACH = max(1, int(os.environ.get("POLYEPS_FUZZ", "1500")) // len(METHODS))
ANEW = 40  # tasks after which budgets are full again: most are refused, but some are paid for
# Secure sums of floats and of integers, of two releases and of one; FedHDP with a server that sees nothing.
MORE: dict[str, dict[str, Any]] = {
    "cmp-fed": {"noise": "skellam", "dropouts": 0.34},
    "dp-randagg": {"noise": "skellam", "dropouts": 0.34},
    "fedhdp": {"trust": "secure-sum"},
}
CASES: list[tuple[str, dict[str, Any]]] = [(name, {}) for name in METHODS] + list(MORE.items())


Change = Callable[[Task, np.random.Generator], Task]


def one_tensor(change: Callable[[torch.Tensor, np.random.Generator], Any]) -> Change:
    """Change one tensor of the payload."""

    def changed(task: Task, dice: np.random.Generator) -> Task:
        tensors = [name for name, held in task.payload.items() if isinstance(held, torch.Tensor)]
        if not tensors:
            return replace(task, payload={"model": change(torch.zeros(3), dice)})
        name = tensors[dice.integers(len(tensors))]
        held = task.payload[name].to_dense().clone()
        held = held.real.clone() if held.is_complex() else held
        return replace(task, payload={**task.payload, name: change(held, dice)})

    return changed


def with_entry(*values: float) -> Change:
    def put(tensor: torch.Tensor, dice: np.random.Generator) -> torch.Tensor:
        if not tensor.numel():
            return tensor
        value = values[dice.integers(len(values))]
        if not tensor.is_floating_point():
            value = int(min(max(value, -(2**62)), 2**62)) if math.isfinite(value) else 2**62
            tensor = tensor.to(torch.int64)
        flat = tensor.flatten()
        flat[dice.integers(len(flat))] = value
        return flat.reshape(tensor.shape)

    return one_tensor(put)


def header(name: str, *values: Any) -> Change:
    return lambda task, dice: replace(task, **{name: values[dice.integers(len(values))]})


def shape(tensor: torch.Tensor, dice: np.random.Generator) -> torch.Tensor:
    shapes = [tensor[None], tensor.flatten()[:-1], tensor.new_zeros(0), torch.cat([tensor.flatten()] * 2), tensor.sum()]
    return shapes[dice.integers(len(shapes))]


def kind(tensor: torch.Tensor, dice: np.random.Generator) -> torch.Tensor:
    kinds = [torch.float64, torch.float16, torch.int32, torch.int64, torch.complex64, torch.bool, torch.uint8]
    return tensor.to(kinds[dice.integers(len(kinds))])


def renamed(task: Task, dice: np.random.Generator) -> Task:
    payload = dict(task.payload)
    if payload:
        payload[str(dice.choice(["", "Model", "honest", "weights", "../x", "\ud800"]))] = payload.popitem()[1]
    return replace(task, payload=payload)


CHANGES: list[Change] = [
    lambda task, _: task,  # sent again, or out of order
    lambda task, dice: replace(task, round=int(dice.integers(0, 4))),
    one_tensor(lambda tensor, _: tensor + 1 if tensor.is_floating_point() else tensor),
    lambda task, _: replace(task, payload=dict(list(task.payload.items())[1:])),
    lambda task, _: replace(task, payload={**task.payload, "extra": torch.zeros(3)}),
    lambda task, _: replace(task, payload={**task.payload, "honest": torch.tensor(1e18, dtype=torch.float64)}),
    lambda task, _: replace(task, payload=None),  # type: ignore[arg-type]
    lambda task, _: replace(task, payload={}),
    renamed,
    one_tensor(shape),
    one_tensor(kind),
    one_tensor(lambda _, dice: [None, [1.0, 2.0], "text", 3][dice.integers(4)]),
    one_tensor(lambda tensor, _: tensor.to_sparse() if tensor.ndim else tensor),
    with_entry(math.nan),
    with_entry(math.inf, -math.inf),
    with_entry(1e30, -1e30, 3e38),
    with_entry(-1.0, -(2.0**40), 2.0**40, 1e-40, 0.0),
    header("action", "steal", "", ENTER, "train", "embed", "project", 7, None, "__class__", ["train"]),
    header("round", -1, 10**6, 2**31, 2**63, -(2**63), 1.5, "3", True, None, math.nan),
    header("run", "x" * 300, "\ud800", "a\nb", 5, None, b"run", "é" * 200),
    header("to", ("0", "0"), ("0", "stranger"), (0, 1), "01", None, ("",), ("\ud800",), [["0"]]),
    lambda task, _: replace(task, summed=not task.summed),
]


def snapshot(cohort: Clients) -> tuple[int, dict[str, torch.Tensor]]:
    seq = cohort.ledger.head.seq if cohort.ledger else 0
    return seq, {name: kept.clone() for name, kept in cohort.memory.items()}


def try_out(cohort: Clients, job: Job, task: Task) -> str:
    """Ask, and see that what is refused changes nothing, and what is answered is as the action says."""
    seq, memory = snapshot(cohort)
    try:
        replies = answer(cohort, job.algorithm, task)
    except PolyepsError:
        replies = None
    if replies is None:
        assert (cohort.ledger.head.seq if cohort.ledger else 0) == seq, task
        assert all(torch.equal(cohort.memory[name], kept) for name, kept in memory.items()), task
        return "refused"
    assert set(replies.ids) <= set(task.to)
    if not replies.ids:
        return "declined"
    if task.action == ENTER:
        assert set(replies.payload) == {"entered"}
        return "entered"
    assert task.summed == (job.algorithm.trust == "secure-sum")
    gives = job.algorithm.actions[task.action].gives
    assert gives is not None
    assert bool(usable_rows(replies.payload, len(replies.ids), gives(task.payload)).all())
    return "answered"


@pytest.mark.parametrize(
    ("name", "options"), CASES, ids=[f"{n}{'-' + '-'.join(map(str, o.values())) if o else ''}" for n, o in CASES]
)
def test_hostile_tasks_are_refused_before_anybody_pays(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    job = job_of(experiment({"name": name, **options} if options else name))
    tasks = honest_tasks(job, tmp_path / "honest.db")
    dice = np.random.default_rng(len(name))
    outcomes: list[str] = []
    cohort = job.clients(None)
    for number in range(EACH):
        if number % ANEW == 0:
            if cohort.ledger:
                cohort.ledger.verify()
            cohort = job.clients(ledger_of(job, tmp_path / f"{number}.db"))
            if job.algorithm.round_price is not None:
                assert try_out(cohort, job, Task(ENTER, cohort.ids, {}, "test", 0)) == "entered"
        task = tasks[dice.integers(len(tasks))]
        task = replace(task, round=int(dice.integers(0, 2)) if dice.random() < 0.2 else task.round)
        for _ in range(1 + (dice.random() < 0.3)):
            task = CHANGES[dice.integers(len(CHANGES))](task, dice) if isinstance(task.payload, dict) else task
        outcomes.append(try_out(cohort, job, task))
    assert outcomes.count("refused") > 0.4 * len(outcomes)
    assert set(outcomes) & {"answered", "entered", "declined"}


# Through a ClientApp, no text but one word


def records(task: Task, dice: np.random.Generator) -> RecordDict:
    """A task as a message, spoilt on the wire."""
    fields: dict[str, Any] = {"action": task.action, "run": task.run, "round": task.round}
    arrays = {name: Array(tensor.numpy()) for name, tensor in task.payload.items()}
    spoil = dice.integers(10)
    if spoil == 0:
        fields.pop(str(dice.choice(sorted(fields))))
    elif spoil == 1:
        fields["round"] = [-1, 10**9, 1.5, "3", b"3", [1], True][dice.integers(7)]
    elif spoil == 2:
        fields["action"] = [3, "steal", b"train", ["train"], ""][dice.integers(5)]
    elif spoil == 3:
        fields["run"] = [3, "x" * 999, b"run", [1.0]][dice.integers(4)]
    elif spoil == 4:
        fields["bits"] = [-1, 0, 63, 1.5, "16", 16][dice.integers(6)]
    elif spoil == 5:
        arrays = {name: Array(dtype="object", shape=(1,), stype="numpy.ndarray", data=b"\x80\x04N.") for name in arrays}
    elif spoil == 6:
        arrays = {name: Array(np.array(["text"])) for name in arrays}
    elif spoil == 7:
        arrays = {name: Array(tensor.to(torch.complex64).numpy()) for name, tensor in task.payload.items()}
    content: dict[str, Any] = {"task": ConfigRecord(fields), "payload": ArrayRecord(arrays)}
    if spoil == 8:
        content.pop(str(dice.choice(sorted(content))))
    elif spoil == 9:
        content["task"], content["payload"] = ArrayRecord({}), ConfigRecord({})
    return RecordDict(content)


@pytest.mark.parametrize("name", METHODS)
def test_no_exception_text_leaves_a_client(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "polyeps.transport.flower_client")
    job = job_of(experiment(name))
    tasks = honest_tasks(job, tmp_path / "honest.db")
    ledger = ledger_of(job, tmp_path / "a.db")
    grid = LocalGrid(job.clients(ledger), job)
    dice = np.random.default_rng(len(name))
    for _ in range(max(12, EACH // 5)):
        content = records(tasks[dice.integers(len(tasks))], dice)
        message = Message(content, dst_node_id=102, message_type=MessageType.TRAIN)
        seq = ledger.head.seq if isinstance(ledger, Ledger) else 0
        reply = grid.app(grid._over_the_wire(message), Context(1, 102, {}, RecordDict(), {}))
        if reply.has_error():
            assert reply.error.reason == DECLINED
            assert (ledger.head.seq if isinstance(ledger, Ledger) else 0) == seq
        else:
            assert set(reply.content) <= {"reply", "payload"}
        assert len(message_to_proto(reply).SerializeToString()) < 10_000
