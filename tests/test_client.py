"""The client's side: it pays before it works, once for the same work, and declines what it cannot afford."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.federations import experiment, honest_tasks, job_of, promised
from support.transports import alone

from polyeps.client import answer, profiles
from polyeps.clients import Clients
from polyeps.core import Action, Algorithm, Payload, Records, Task, Work
from polyeps.errors import BudgetExceeded, InputError
from polyeps.experiment.job import Job
from polyeps.ledger import Ledger
from polyeps.ledger.account import Charge


@pytest.fixture
def job() -> Job:
    return job_of(experiment("fedavg"))


@pytest.fixture
def ledger(job: Job, tmp_path: Path) -> Ledger:
    return Ledger.create(tmp_path / "a.db", job.terms)


def training(job: Job, *clients: str, round: int = 0) -> Task:
    return Task("train", clients, {"model": torch.zeros(job.population.model.size)}, "run", round)


def charges(ledger: Ledger) -> int:
    return sum(row.kind == "charge" for row in ledger.rows())


def test_strangers_and_unknown_actions_are_refused_in_one_sentence(job: Job, ledger: Ledger) -> None:
    cohort = job.clients(ledger)
    with pytest.raises(InputError, match=r"client 'zoe' does not belong to this federation; enrol it first$"):
        answer(cohort, job.algorithm, training(job, "0", "zoe"))
    with pytest.raises(InputError, match=r"asks for 'steal', which this algorithm does not know; it knows train$"):
        answer(cohort, job.algorithm, replace(training(job, "0"), action="steal"))
    assert charges(ledger) == 0


def test_two_clients_cannot_share_a_name(job: Job) -> None:
    cohort = job.clients(None)
    with pytest.raises(InputError, match="have the same id"):
        replace(cohort, ids=("0", "1", "2", "0", "4", "5"))


def test_one_who_cannot_pay_does_not_keep_others_from_answering(job: Job, ledger: Ledger) -> None:
    cohort = job.clients(ledger)
    for round in range(3):
        answer(cohort, job.algorithm, training(job, "1", round=round))
    spent = ledger.spent("1")
    replies = answer(cohort, job.algorithm, training(job, "0", "1", "2", round=3))
    assert replies.ids == ("0", "2")
    assert len(replies.payload["update"]) == 2
    assert ledger.spent("1") == spent


def test_another_process_spends_between_the_check_and_the_charge(
    job: Job, ledger: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Ledger(tmp_path / "a.db")
    cohort = job.clients(ledger)
    price = job.algorithm.actions["train"].price
    assert price is not None
    event = price(float(cohort.noise_multiplier[1]), {"records": 60.0})
    real, tries = ledger.charge_all, 0

    def charge_all(asked: Any, **how: Any) -> None:
        nonlocal tries
        tries += 1
        if tries == 1:  # too late for the check, just in time for the charge
            other.charge_all([Charge(("1",), event, uses=3)], purpose="another run")
        real(asked, **how)

    monkeypatch.setattr(ledger, "charge_all", charge_all)
    replies = answer(cohort, job.algorithm, training(job, "0", "1", "2"))
    assert replies.ids == ("0", "2")
    assert tries == 2
    ledger.verify()
    assert job.budgets is not None
    assert other.spent("1") <= promised(job.budgets)[1].epsilon
    with pytest.raises(BudgetExceeded):
        other.charge_all([Charge(("1",), event)])


@pytest.mark.parametrize("repeatable", [True, False])
def test_the_same_work_is_free_only_where_its_noise_repeats(repeatable: bool, job: Job, ledger: Ledger) -> None:
    cohort = job.clients(ledger)
    cohort.repeatable = repeatable
    first = answer(cohort, job.algorithm, training(job, "0", "2"))
    paid, spent = charges(ledger), ledger.spent("0")
    again = answer(cohort, job.algorithm, training(job, "0", "2"))
    assert again.ids == first.ids
    if repeatable:
        assert torch.equal(again.payload["update"], first.payload["update"])
        assert (charges(ledger), ledger.spent("0")) == (paid, spent)
    else:
        assert ledger.spent("0") > spent


def test_other_work_is_never_free(job: Job, ledger: Ledger) -> None:
    # The same noise on another model would let the server take the difference and the noise away.
    cohort = job.clients(ledger)
    first = training(job, "2")
    others = (
        replace(first, payload={"model": first.payload["model"] + 1e-6}),
        replace(first, round=1),
    )
    answer(cohort, job.algorithm, first)
    spent = ledger.spent("2")
    for other in others:
        assert answer(cohort, job.algorithm, other).ids == ("2",)
        assert ledger.spent("2") > spent
        spent = ledger.spent("2")
    assert answer(cohort, job.algorithm, replace(first, run="another")).ids == ()  # the budget was for three


def test_repeated_work_is_done_even_when_the_purse_is_empty(job: Job, ledger: Ledger) -> None:
    cohort = job.clients(ledger)
    for round in range(3):
        last = answer(cohort, job.algorithm, training(job, "0", round=round))
    assert last.ready == (False,)
    again = answer(cohort, job.algorithm, training(job, "0", round=2))
    assert torch.equal(again.payload["update"], last.payload["update"])


def counting() -> Algorithm:
    """Every client counts how often it was asked."""

    def run(work: Work) -> tuple[Payload, Payload]:
        count = work.memory["count"] + 1
        return {"count": count}, {"count": count}

    return Algorithm({"count": Action(run, None)}, lambda state, _: state, memory={"count": ()})


def test_memory_is_kept_for_each_client_apart(job: Job) -> None:
    cohort = replace(job.clients(None), memory={"count": torch.zeros(6)})
    algorithm = counting()
    for to in (("0", "3"), ("3", "5"), ("5", "3")):
        last = answer(cohort, algorithm, Task("count", to, {}))
    assert (last.ids, last.payload["count"].tolist()) == (("5", "3"), [2.0, 3.0])
    assert cohort.memory["count"].tolist() == [1, 0, 0, 3, 0, 2]
    answer(alone(cohort, "3"), algorithm, Task("count", ("3",), {}))
    assert cohort.memory["count"].tolist() == [1, 0, 0, 4, 0, 2]  # alone or together, it is the same client


def test_clients_show_what_they_choose_to(job: Job, ledger: Ledger) -> None:
    cohort: Clients = job.clients(ledger)
    assert {(face.examples, face.epsilon) for face in profiles(cohort, job.algorithm, ())} == {(None, None)}
    open_ones = profiles(cohort, job.algorithm, ("examples", "epsilon"))
    assert [(face.examples, face.epsilon) for face in open_ones][2] == (60, 8.0)
    assert all(face.ready for face in open_ones)
    for round in range(3):
        answer(cohort, job.algorithm, training(job, "4", round=round))
    assert [face.ready for face in profiles(cohort, job.algorithm, ())] == [True] * 4 + [False, True]


@pytest.mark.parametrize("name", ["fedavg", "fedsel", {"name": "fedhdp", "trust": "server"}], ids=str)
def test_a_client_made_of_its_own_numbers_alone_is_a_row_of_the_population(name: Any, tmp_path: Path) -> None:
    """As it is deployed: no other client, no row of a table, and the same reply at the same price."""
    job = job_of(experiment(name, data={"partition": "dirichlet", "alpha": 5.0, "size": None}))
    population, sizes = job.population, job.population.partition.sizes
    assert len(set(sizes.tolist())) > 1
    everyone = population.records
    mine = slice(int(everyone.offsets[2]), int(everyone.offsets[3]))
    one = Records(everyone.features[mine], everyone.labels[mine], torch.tensor([0, int(sizes[2])]))
    own = Clients(
        ids=("2",),
        data=one,
        noise_multiplier=job.noise_multiplier[2:3].copy(),
        streams=job.clients(None).streams,
        repeatable=True,
        ledger=Ledger.create(tmp_path / "own.db", {"2": job.terms["2"]}),
        groups=None if job.groups is None else (job.groups[2],),
    )
    together = job.clients(Ledger.create(tmp_path / "all.db", job.terms))
    for task in honest_tasks(job, tmp_path / "asked.db"):
        if "2" in task.to:
            found, expected = (answer(c, job.algorithm, replace(task, to=("2",))) for c in (own, together))
            assert found.ids == expected.ids
            for tensor, kept in expected.payload.items():
                torch.testing.assert_close(found.payload[tensor], kept, rtol=1e-5, atol=1e-6)
    assert own.ledger is not None
    assert together.ledger is not None
    assert own.ledger.spent("2") == together.ledger.spent("2") > 0
