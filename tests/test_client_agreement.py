"""What a client agrees to: by what it remembers, before it pays."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from polyeps.accounting.events import PureDpEvent
from polyeps.client import answer, profiles
from polyeps.clients import Clients
from polyeps.core import Action, Algorithm, Ask, Budget, Payload, Records, Spec, State, Task, Work
from polyeps.engine.noise import SeededStreams
from polyeps.errors import TaskRefused
from polyeps.ledger import Ledger
from polyeps.ledger.account import BudgetTerms

IDS = ("a", "b", "c", "d")


def marked(name: str) -> Action:
    """An action that remembers to have been done; `second` is only done after `first`."""

    def run(work: Work) -> tuple[Payload, Payload]:
        return {"seen": torch.ones(len(work.rows))}, {name: torch.ones(len(work.rows))}

    def allows(payload: Payload, memory: Payload) -> Tensor:
        return memory["first"] > payload["least"] if name == "second" else memory["first"] == 0

    takes = {"least": Spec(())}
    return Action(run, lambda scale, _: PureDpEvent(1 / scale), allows, pure=True, takes=takes)


def federation(path: Path, scale: list[float]) -> tuple[Algorithm, Clients]:
    def round(state: State, _: Ask) -> State:
        return state

    algorithm = Algorithm({"first": marked("first"), "second": marked("second")}, round, unit="client")
    terms = {client: BudgetTerms(Budget(3.0, 0.0), "client", "zero-out") for client in IDS}
    cohort = Clients(
        IDS,
        Records(torch.zeros(4, 1), torch.zeros(4), torch.arange(5)),
        np.array(scale),
        lambda ids, round: SeededStreams(1, ids, round),
        True,
        Ledger.create(path, terms),
        memory={"first": torch.zeros(4), "second": torch.zeros(4)},
    )
    return algorithm, cohort


def ask(name: str, to: tuple[str, ...], round: int = 0) -> Task:
    return Task(name, to, {"least": torch.tensor(0.5)}, "run", round)


def test_a_second_phase_only_after_the_first(tmp_path: Path) -> None:
    algorithm, cohort = federation(tmp_path / "a.db", [1.0, 1.0, 0.5, 1.0])
    assert cohort.ledger is not None
    assert answer(cohort, algorithm, ask("second", IDS)).ids == ()
    assert {cohort.ledger.spent(client) for client in IDS} == {0.0}
    assert answer(cohort, algorithm, ask("first", ("b", "c"))).ids == ("b", "c")
    assert answer(cohort, algorithm, ask("second", ("d", "c", "b", "a"))).ids == ("b",)  # c can pay no more
    assert [cohort.ledger.spent(client) for client in IDS] == [0.0, 2.0, 2.0, 0.0]
    assert answer(cohort, algorithm, ask("first", IDS, round=1)).ids == ("a", "d")


def test_an_answer_of_the_wrong_shape_is_no_agreement(tmp_path: Path) -> None:
    algorithm, cohort = federation(tmp_path / "a.db", [1.0] * 4)
    strange = Task("second", IDS, {"least": torch.full((5, 1), -1.0)}, "run", 0)
    with pytest.raises(TaskRefused, match="'least' must be a single number of float32"):
        answer(cohort, algorithm, strange)
    assert cohort.ledger is not None
    assert {cohort.ledger.spent(client) for client in IDS} == {0.0}


def test_clients_with_equal_scales_pay_alike_in_one_charge(tmp_path: Path) -> None:
    algorithm, cohort = federation(tmp_path / "a.db", [1.0, 0.5, 1.0, 0.25])
    assert [face.ready for face in profiles(cohort, algorithm, ())] == [True, True, True, False]
    assert answer(cohort, algorithm, ask("first", ("c", "d", "b", "a"))).ids == ("c", "b", "a")
    assert cohort.ledger is not None
    charges = [row.content for row in cohort.ledger.rows() if row.kind == "charge"]
    assert sorted(sorted(charge["clients"]) for charge in charges) == [["a", "c"], ["b"]]
