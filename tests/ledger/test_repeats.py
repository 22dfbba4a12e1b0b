"""Charges that the same clients pay again take one row, and nothing else about them differs from charges row by row."""

import json
import random
import sqlite3
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from dp_accounting import ComposedDpEvent
from support.forged import forge

from polyeps.accounting.affordability import known_epsilon
from polyeps.accounting.events import Gaussian, Poisson
from polyeps.accounting.histories import history_of
from polyeps.core import Budget
from polyeps.errors import BudgetExceeded, LedgerTampered, PolyepsError
from polyeps.ledger import Ledger
from polyeps.ledger.account import BudgetTerms, Charge
from polyeps.ledger.head_file import head_path
from polyeps.ledger.repeats import Repeats
from polyeps.report.ledger_history import read_history
from polyeps.report.ledger_words import rows_in_words

SIGMAS = (6.0, 9.0, 14.0)
PLANS = [Poisson(0.1, Gaussian(sigma)) for sigma in SIGMAS]
CLIENTS = [(f"a{number}", f"b{number}") for number in range(len(PLANS))]
ROUND = [Charge(clients, plan, 3) for clients, plan in zip(CLIENTS, PLANS, strict=True)]
ROUNDS = 20  # that the first clients can pay


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.db"


def created(path: Path) -> Ledger:
    """A ledger of two clients with every plan: budgets for so many rounds exactly, and for a few more."""
    terms = {}
    for clients, plan in zip(CLIENTS, PLANS, strict=True):
        most = known_epsilon(history_of(plan, 3 * ROUNDS), 1e-5, "zero-out", "pld")
        for client, share in zip(clients, (1.0, 1.1), strict=True):
            terms[client] = BudgetTerms(Budget(share * most, 1e-5), schedule="fixed", plan=plan)
    return Ledger.create(path, terms)


def state(ledger: Ledger) -> dict[str, tuple[Any, ...]]:
    accounts = {client: ledger.account(client) for client in ledger.clients}
    return {client: (one.spent(), one.charges, Counter(one.history), one.epsilon) for client, one in accounts.items()}


def kinds(ledger: Ledger) -> list[str]:
    return [row.kind for row in ledger.rows()][1 + 2 * len(PLANS) :]


def test_a_round_like_the_one_before_is_one_row(path: Path) -> None:
    ledger = created(path)
    for number in range(5):
        ledger.charge_all(ROUND, purpose=f"round {number}", once=True)
        assert ledger.paid(f"round {number}") == set(ledger.clients)
    ledger.charge_all(ROUND, purpose="round 4", once=True)  # paid already
    assert kinds(ledger) == ["charge"] * 3 + ["again"] * 4
    found = state(ledger)
    assert all(charges == 5 and history[plan] == 15 for (_, charges, history, _), plan in
               zip((found[first] for first, _ in CLIENTS), PLANS, strict=True))  # fmt: skip
    reopened = Ledger(path)
    assert state(reopened) == found
    assert reopened.paid("round 3") == set(ledger.clients)
    assert reopened.verify() == Ledger.verify_file(path) == ledger.head
    reopened.charge_all([Charge(one.clients, one.event, 3) for one in ROUND])  # the same, said anew
    assert kinds(ledger)[-1] == "again"
    told = [what for *_, what in rows_in_words(ledger.rows())]
    assert told[-2] == "charged again as in the rows 8 to 10 (round 4)"
    history = read_history(path)
    assert history.runs[0].charges == 18
    assert {one.name: one.charges for one in history.accounts} == dict.fromkeys(ledger.clients, 6)


def test_budgets_end_where_they_would_row_by_row(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = created(path)
    for _ in range(ROUNDS):
        assert ledger.surely_affords(ROUND) <= all(all(ledger.can_afford(charge)) for charge in ROUND)
        ledger.charge_all(ROUND)
    assert not ledger.surely_affords(ROUND)
    with pytest.raises(BudgetExceeded, match="'a0'"):
        ledger.charge_all(ROUND)
    monkeypatch.setattr(Repeats, "are", lambda *_: False)
    slow = created(path.with_name("slow.db"))
    for _ in range(ROUNDS):
        slow.charge_all(ROUND)
    assert state(ledger) == state(slow) == state(Ledger(path))


def test_no_account_is_looked_at_while_a_round_is_known_to_fit(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = created(path)
    ledger.charge_all(ROUND)
    ledger.charge_all(ROUND)  # that it is the same is seen here
    assert ledger.surely_affords(ROUND)
    looked: list[str] = []
    monkeypatch.setattr("polyeps.ledger.state.following", lambda *_: looked.append("at an account"))
    for _ in range(ROUNDS - 2):
        assert ledger.surely_affords(ROUND)
        ledger.charge_all(ROUND)
    assert not ledger.surely_affords(ROUND)
    assert not looked


@pytest.mark.parametrize("seed", range(6))
def test_whatever_comes_between_accounts_are_the_same(path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two openings of one file take turns; the control never repeats rows."""
    drawn = random.Random(seed)
    control = created(path.with_name("control.db"))
    openings = [created(path), Ledger(path)]
    some = [Charge(("a0",), PLANS[0]), Charge(("b2",), PLANS[2], 2)]
    are = Repeats.are
    for number in range(60):
        ledger, what = drawn.choice(openings), drawn.random()

        def act(on: Ledger, number: int = number, what: float = what) -> str:
            try:
                if what < 0.6:
                    on.charge_all(ROUND, purpose=f"{number}" if what < 0.3 else "")
                elif what < 0.75:
                    on.charge_all(some)
                elif what < 0.85:
                    on.charge_all([*ROUND, *some[:1]])
                elif what < 0.9:
                    on.change_budget("a1", Budget(0.1 + what, 1e-5), "asked for")
                else:
                    run = f"run {number}"
                    on.reserve(run, some)
                    on.charge_all(some, run=run)
                    on.release(run)
            except PolyepsError as problem:
                return str(problem)
            return ""

        monkeypatch.setattr(Repeats, "are", lambda *_: False)
        expected = act(control)
        monkeypatch.setattr(Repeats, "are", are)
        assert act(ledger) == expected
        if drawn.random() < 0.2:
            ledger.refresh()
            assert state(ledger) == state(control)
    for ledger in (*openings, Ledger(path)):
        ledger.refresh()
        assert state(ledger) == state(control)
    assert "again" in kinds(openings[0])
    assert "again" not in kinds(control)


def test_a_reservation_is_never_charged_by_repetition(path: Path) -> None:
    ledger = created(path)
    ledger.reserve("run", [Charge(one.clients, one.event, 9) for one in ROUND])
    for _ in range(3):
        ledger.charge_all(ROUND, run="run")
    assert kinds(ledger).count("charge") == 9
    with pytest.raises(BudgetExceeded, match="used it up"):
        ledger.charge_all(ROUND, run="run")


def test_an_event_that_was_changed_meanwhile_is_charged_as_it_is(path: Path) -> None:
    """A composition holds a list; the object is the same, and what it says is not."""
    event = ComposedDpEvent([Gaussian(40.0)])
    charges = [Charge((name,), event) for name in ("a", "b")]
    ledger = Ledger.create(path, {name: BudgetTerms(Budget(5.0, 1e-5)) for name in ("a", "b")})
    ledger.charge_all(charges)
    ledger.charge_all(charges)
    event.events.append(Gaussian(20.0))
    ledger.charge_all(charges)
    assert ledger.account("a").history == {Gaussian(40.0): 3, Gaussian(20.0): 1} == Ledger(path).account("b").history


@pytest.mark.parametrize(
    "content",
    [{"first": 8, "last": 9}, {"first": 1, "last": 10}, {"first": 8, "last": 10, "run": "run"}, {"first": "8"}, {}],
)
def test_repetitions_of_other_rows_are_refused(path: Path, content: dict[str, Any]) -> None:
    ledger = created(path)
    ledger.charge_all(ROUND)
    forge(path, content, kind="again")
    with sqlite3.connect(path) as connection:
        seq, digest = connection.execute("SELECT seq, hash FROM rows ORDER BY seq DESC").fetchone()
    connection.close()
    head_path(path).write_text(json.dumps({"seq": seq, "hash": digest}))
    for call in (lambda: Ledger(path), lambda: ledger.charge_all(ROUND)):
        with pytest.raises(LedgerTampered, match="row 11 cannot be understood"):
            call()


def test_many_threads_that_look_count_every_charge_once(path: Path) -> None:
    ledger = created(path)
    ledger.charge_all(ROUND)
    done = threading.Event()

    def look() -> None:
        while not done.is_set():
            ledger.spent("a0")

    watching = [threading.Thread(target=look) for _ in range(4)]
    for thread in watching:
        thread.start()
    for _ in range(ROUNDS - 1):
        ledger.charge_all(ROUND)
    done.set()
    for thread in watching:
        thread.join()
    assert {charges for _, charges, *_ in state(ledger).values()} == {ROUNDS}
