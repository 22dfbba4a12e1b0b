"""What every algorithm must do, whatever it is, under every kind of budgets it can spend."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import dp_accounting
import numpy as np
import pytest
import torch
from support.federations import (
    METHODS,
    PRIVATE,
    Finished,
    as_bytes,
    experiment,
    finish,
    guaranteed,
    in_memory,
    job_of,
    ledger_of,
    on_flower,
    with_zero_features,
)

from polyeps.accounting import epsilon
from polyeps.client import answer
from polyeps.clients import Clients
from polyeps.core import ENTER, Ask, Profile, Replies, SumTerms, Task, Total
from polyeps.errors import InputError, UnknownEvent
from polyeps.experiment.job import Job
from polyeps.experiment.noise_calibration import cost_of
from polyeps.participation import Participation
from polyeps.server import Transport
from polyeps.transport.memory import InMemory

every_algorithm = pytest.mark.parametrize("name", METHODS)
every_private = pytest.mark.parametrize("name", PRIVATE)
CLOSE: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-5}


def first_task(job: Job, clients: tuple[str, ...], profiles: tuple[Profile, ...] = ()) -> Task:
    """The first request the server makes, addressed to these clients."""
    asked: list[Task] = []

    class StoppedError(Exception):
        pass

    class Asked(Ask):
        def __call__(self, task: Task) -> Replies:
            asked.append(task)
            raise StoppedError

        def total(self, task: Task, terms: SumTerms) -> Total:
            raise AssertionError(terms, self(replace(task, summed=True)))

    profiles = profiles or tuple(
        Profile(client, epsilon=budget.epsilon, group=job.groups[place] if job.groups else None)
        for place, (client, budget) in enumerate(
            zip(job.population.ids, guaranteed(job.population.budgets), strict=True)
        )
    )
    with pytest.raises(StoppedError):
        job.algorithm.round(replace(job.state, enrolled=profiles, roster=profiles), Asked())
    return replace(asked[0], to=clients, run="test")


def charged(job: Job, done: Finished) -> set[str]:
    """Who has paid for something: clients that answered, or everybody, where rounds have a price."""
    if job.algorithm.round_price is not None:
        return set(job.population.ids)
    return {client for round in done.rounds for client in round.traffic}


def entered(cohort: Clients, job: Job) -> None:
    """Let everybody pay for the first round, where rounds have a price."""
    if job.algorithm.round_price is not None:
        assert answer(cohort, job.algorithm, Task(ENTER, cohort.ids, {}, run="test")).ids == cohort.ids


# 1, 2: one client alone, bytes and Flower's messages change nothing


@every_algorithm
@pytest.mark.parametrize("wrap", [as_bytes, on_flower])
def test_one_by_one_and_over_the_wire_as_all_at_once(name: str, wrap: Any, tmp_path: Path) -> None:
    job = job_of(experiment(name))
    together = finish(job, tmp_path / "a.db")
    if wrap is on_flower and job.algorithm.trust == "secure-sum":
        with pytest.raises(InputError, match="without the server seeing a single reply, which this transport cannot"):
            finish(job_of(experiment(name)), tmp_path / "b.db", wrap)
        return
    apart = finish(job_of(experiment(name)), tmp_path / "b.db", wrap)
    torch.testing.assert_close(apart.learned, together.learned, **CLOSE)
    assert together.learned.abs().sum() > 0
    assert apart.spent() == together.spent()
    for one, other in zip(together.rounds, apart.rounds, strict=True):
        assert one.traffic == other.traffic  # to the byte
        assert (one.invited, one.declined, one.active) == (other.invited, other.declined, other.active)
    for name_of, kept in together.cohort.memory.items():
        torch.testing.assert_close(apart.cohort.memory[name_of], kept, **CLOSE)


# 3, 4: budgets


@every_private
def test_spends_what_was_planned_and_no_more(name: str, tmp_path: Path) -> None:
    job = job_of(experiment(name))
    done = finish(job, tmp_path / "a.db")
    asked = charged(job, done)
    assert asked
    for client, budget in zip(job.population.ids, guaranteed(job.budgets), strict=True):
        spent = done.spent()[client]
        assert spent <= budget.epsilon
        if client in asked:
            assert spent >= 0.95 * budget.epsilon
        else:
            assert spent == 0
    assert not set(done.rounds[-1].active) & asked  # nobody who took part could afford another round


@every_private
@pytest.mark.parametrize("wrap", [in_memory, as_bytes, on_flower])
def test_declines_beyond_the_budget_whatever_the_server_asks(name: str, wrap: Any, tmp_path: Path) -> None:
    job = job_of(experiment(name))
    done = finish(job, tmp_path / "a.db")
    assert done.ledger is not None
    rows, spent = len(done.ledger.rows()), done.spent()
    served = charged(job, done)
    transport = wrap(done.cohort, job)
    assert not {profile.id for profile in transport.profiles() if profile.ready} & served
    clients = tuple(client for client in done.cohort.ids if client in served)
    overreaching = replace(first_task(job, clients), round=99)
    assert transport(overreaching).ids == ()
    if job.algorithm.round_price is not None:
        entering = transport(Task(ENTER, clients, {}, "test", 99))
        assert (entering.ids, set(entering.exhausted)) == ((), set(clients))
    assert done.spent() == spent
    assert len(done.ledger.rows()) == rows


@every_private
def test_charges_before_it_works(name: str, tmp_path: Path) -> None:
    job = job_of(experiment(name))
    ledger = ledger_of(job, tmp_path / "a.db")
    assert ledger is not None
    cohort = job.clients(ledger)
    task = first_task(job, cohort.ids)
    if job.algorithm.round_price is not None:
        assert answer(cohort, job.algorithm, task).ids == ()  # nobody has paid yet
    entered(cohort, job)

    def fail(work: Any) -> Any:
        assert all(ledger.spent(client) > 0 for client in cohort.ids)  # on disk by now
        raise RuntimeError("the data cannot be read")

    action = replace(job.algorithm.actions[task.action], run=fail)
    with pytest.raises(RuntimeError):
        answer(cohort, replace(job.algorithm, actions={task.action: action}), task)
    assert all(ledger.spent(client) > 0 for client in cohort.ids)


@every_private
def test_without_a_price_or_a_ledger_nothing_is_done(name: str, tmp_path: Path) -> None:
    job = job_of(experiment(name))
    task = first_task(job, job.population.ids)
    if job.algorithm.round_price is not None:
        with pytest.raises(InputError, match="no ledger"):
            entered(job.clients(None), job)
        return
    free = replace(job.algorithm.actions[task.action], price=None)
    with pytest.raises(UnknownEvent, match="no price"):
        answer(
            job.clients(ledger_of(job, tmp_path / "a.db")), replace(job.algorithm, actions={task.action: free}), task
        )
    with pytest.raises(InputError, match="no ledger"):
        answer(job.clients(None), job.algorithm, task)


# 6: seeds, numbering, chunks


@every_algorithm
def test_same_seed_same_run_in_any_order_of_clients(name: str, tmp_path: Path) -> None:
    some = Participation("uniform" if job_of(experiment(name)).algorithm.round_price is None else "poisson", 0.7)
    first = finish(job_of(experiment(name)), tmp_path / "a.db", participation=some)
    again = finish(job_of(experiment(name)), tmp_path / "b.db", participation=some)
    mixed = finish(job_of(experiment(name)), tmp_path / "c.db", participation=some, order=[3, 1, 5, 0, 2, 4])
    assert torch.equal(first.learned, again.learned)
    torch.testing.assert_close(mixed.learned, first.learned, **CLOSE)
    assert mixed.spent() == first.spent()
    other = finish(job_of(experiment(name), seed=2), tmp_path / "d.db", participation=some)
    assert not torch.allclose(other.learned, first.learned)


@every_algorithm
def test_chunks_change_nothing(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = finish(job_of(experiment(name)), tmp_path / "a.db")
    monkeypatch.setattr("polyeps.engine.memory.CPU_MEMORY", 1)  # one client at a time
    again = finish(job_of(experiment(name)), tmp_path / "b.db")
    torch.testing.assert_close(again.learned, first.learned, **CLOSE)


# 7: what is hidden stays hidden


class Spy(Transport):
    """Carries messages, and keeps all of them."""

    def __init__(self, inner: Transport) -> None:
        self.inner, self.seen = inner, list[Any]()

    def profiles(self) -> tuple[Profile, ...]:
        profiles = self.inner.profiles()
        self.seen += [value for profile in profiles for value in (profile.examples, profile.epsilon, profile.group)]
        return profiles

    def __call__(self, task: Task) -> Replies:
        replies = self.inner(task)
        for payload in (task.payload, replies.payload):
            for tensor in payload.values():
                self.seen += tensor.double().flatten().tolist()
        return replies

    def total(self, task: Task, terms: SumTerms) -> Total:
        total = self.inner.total(task, terms)
        for payload in (task.payload, total.payload):
            for tensor in payload.values():
                self.seen += tensor.double().flatten().tolist()
        return total


@every_algorithm
def test_a_hidden_budget_is_refused_or_never_seen(name: str, tmp_path: Path) -> None:
    job = job_of(experiment(name, budgets={"disclosed": False}))
    if "group" in job.algorithm.needs:
        pytest.skip("the level a client chose is public, and its ε with it")
    spies: list[Spy] = []

    def spying(cohort: Clients, job: Job) -> Transport:
        spies.append(Spy(InMemory(cohort, job.algorithm, job.discloses)))
        return spies[0]

    if "epsilon" in job.algorithm.needs:
        with pytest.raises(InputError, match="client '0' does not disclose its epsilon"):
            finish(job, tmp_path / "a.db", spying)
        return
    done = finish(job, tmp_path / "a.db", spying)
    assert done.rounds
    secrets = {float(budget.epsilon) for budget in guaranteed(job.population.budgets)} | {
        float(scale) for scale in job.noise_multiplier if scale
    }
    numbers = np.array([value for value in spies[0].seen if value is not None])
    for secret in secrets:
        assert not np.isclose(numbers, secret, rtol=1e-7, atol=0).any(), secret
    assert None in spies[0].seen


@every_private
def test_needed_fields_are_declared(name: str) -> None:
    """A round never looks at a field its algorithm does not say it needs."""
    job = job_of(experiment(name))
    disclosed: Any = {need: job.groups[0] if need == "group" and job.groups else 1 for need in job.algorithm.needs}
    profiles = tuple(Profile(client, **disclosed) for client in job.population.ids)
    assert first_task(job, job.population.ids, profiles).payload


# 9: prices


@every_private
def test_a_price_paid_three_times_is_the_price_of_three(name: str, tmp_path: Path) -> None:
    job = job_of(experiment(name))
    done = finish(job, tmp_path / "a.db")
    assert done.ledger is not None
    for place, client in enumerate(job.population.ids):
        paid = sum(client in round.traffic for round in done.rounds)
        if job.algorithm.round_price is not None:
            paid = len(done.rounds)
        if not paid:
            continue
        price = cost_of(job.algorithm, job.population.ids, job.settings).event(job.noise_multiplier[place], place)
        event = dp_accounting.SelfComposedDpEvent(price, paid)
        accounted = epsilon(event, done.ledger.account(client).terms.budget.delta, adjacency=job.algorithm.adjacency)
        assert math.isclose(done.ledger.spent(client), accounted, rel_tol=1e-9)


@every_private
def test_noise_is_as_large_as_its_price_says(name: str, tmp_path: Path) -> None:
    # Features of zero leave the weights no gradient, so what moves them is noise alone.
    wanted = experiment(name)
    job = job_of(wanted)
    cohort = job.clients(ledger_of(job, tmp_path / "a.db"))
    cohort.data = with_zero_features(cohort.data)
    if job.algorithm.round_price is not None:
        pytest.skip("noise is added to sums, not by this action")
    task = first_task(job, cohort.ids)
    replies = answer(cohort, job.algorithm, task)
    if "update" not in replies.payload:
        pytest.skip("this action does not send its update")
    weights = replies.payload["update"][:, : 64 * 10]
    settings = wanted.training
    batch, steps = int(settings.batch), int(settings.local_steps)
    expected = job.noise_multiplier * settings.clip * settings.learning_rate / batch * math.sqrt(steps)
    ratio = weights.std(1).numpy() / expected
    assert np.all(abs(ratio - 1) < 6 / math.sqrt(2 * weights.shape[1]))
