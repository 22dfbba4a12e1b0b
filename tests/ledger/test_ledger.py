import json
import math
import os
import subprocess
import sys
import threading
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import dp_accounting as dp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.affordable import affordable

from polyeps.accounting import epsilon
from polyeps.accounting.events import FixedSize, Gaussian, Poisson, PureDpEvent, SkellamDpEvent
from polyeps.accounting.histories import history_of
from polyeps.accounting.rdp import filter_epsilon
from polyeps.core import Budget
from polyeps.errors import BudgetExceeded, InputError, LedgerError, LedgerTampered, UnknownEvent
from polyeps.ledger import Ledger
from polyeps.ledger.account import BudgetTerms, Charge
from polyeps.ledger.hash_chain import Chain, Draft

STEP = Poisson(0.01, Gaussian(1.0))
BUDGET = Budget(1.0, 1e-5)
TERMS = BudgetTerms(BUDGET, schedule="fixed", plan=STEP)
ADAPTIVE = BudgetTerms(BUDGET)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.db"


def test_charges_add_up_across_runs(path: Path) -> None:
    ledger = Ledger.create(path, {"a": TERMS})
    ledger.charge(STEP, uses=100, purpose="first run")
    ledger.close()
    again = Ledger(path)
    again.charge(STEP, uses=50, purpose="second run")
    assert again.spent("a") == pytest.approx(epsilon(dp.SelfComposedDpEvent(STEP, 150), 1e-5), rel=1e-9)
    assert again.account("a").charges == 2


def test_mixed_methods_compose(path: Path) -> None:
    ledger = Ledger.create(path, {"a": BudgetTerms(BUDGET, schedule="fixed")})
    ledger.reserve("both", [Charge(("a",), STEP, 100), Charge(("a",), PureDpEvent(0.2), unit="client")])
    ledger.charge(STEP, uses=100)
    ledger.charge(PureDpEvent(0.2), unit="client", purpose="a FedSel report")
    together = dp.ComposedDpEvent([dp.SelfComposedDpEvent(STEP, 100), PureDpEvent(0.2)])
    assert ledger.spent("a") == pytest.approx(epsilon(together, 1e-5), rel=1e-9)


def test_what_does_not_fit_is_refused_and_not_written(path: Path) -> None:
    ledger = Ledger.create(path, {"a": TERMS})
    ledger.charge(STEP, uses=100)
    spent = ledger.spent("a")
    with pytest.raises(
        BudgetExceeded, match=rf"client 'a' has spent {spent:.4g} of its ε = 1 and has {1 - spent:.4g} left"
    ):
        ledger.charge(STEP, uses=100_000)
    assert ledger.spent("a") == spent
    assert len(ledger.rows()) == 3


def test_a_budget_can_be_spent_nearly_to_the_end_but_never_beyond(path: Path) -> None:
    ledger = Ledger.create(path, {"a": TERMS})
    most = affordable(ledger, STEP, uses=10)
    for _ in range(most):
        ledger.charge(STEP, uses=10)
    assert 0.97 < ledger.spent("a") <= 1.0
    with pytest.raises(BudgetExceeded):
        ledger.charge(STEP, uses=10)
    assert affordable(ledger, STEP, uses=10) == 0


@settings(max_examples=20, deadline=None)
@given(
    charges=st.lists(
        st.tuples(
            st.sampled_from([Poisson(0.01, Gaussian(4.0)), Gaussian(20.0), PureDpEvent(0.05)]), st.integers(1, 60)
        ),
        max_size=8,
    )
)
def test_spent_never_passes_the_budget_and_replays_the_same(
    charges: list[tuple[dp.DpEvent, int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("ledger") / "ledger.db"
    ledger = Ledger.create(path, {"a": ADAPTIVE})
    order = ledger.account("a").terms.order
    assert order is not None
    paid: list[dp.DpEvent] = []

    def cost(events: list[dp.DpEvent]) -> float:
        return filter_epsilon(history_of(dp.ComposedDpEvent(events)), order, 1e-5, "zero-out") if events else 0.0

    for event, uses in charges:
        try:
            ledger.charge(event, uses=uses)
            paid.append(dp.SelfComposedDpEvent(event, uses))
        except BudgetExceeded:
            assert cost([*paid, dp.SelfComposedDpEvent(event, uses)]) > 1.0
    assert ledger.spent("a") <= 1.0
    assert Ledger(path).spent("a") == ledger.spent("a") == pytest.approx(cost(paid), rel=1e-9)


def test_budgets_are_set_once_and_changed_only_on_record(path: Path) -> None:
    ledger = Ledger.create(path, {"a": TERMS})
    with pytest.raises(LedgerError, match="client 'a' has a budget of ε = 1"):
        ledger.enroll({"b": TERMS, "a": BudgetTerms(Budget(5.0, 1e-5))})
    assert ledger.clients == ["a"]
    with pytest.raises(InputError, match="reason"):
        ledger.change_budget("a", Budget(2.0, 1e-5), " ")
    ledger.charge(STEP, uses=100)
    spent = ledger.spent("a")
    ledger.change_budget("a", Budget(2.0, 1e-5), "the board agreed")
    assert ledger.account("a").terms.budget.epsilon == 2.0
    assert ledger.spent("a") == spent
    assert ledger.rows()[-1].content["reason"] == "the board agreed"
    assert Ledger(path).account("a").terms.budget.epsilon == 2.0


def test_units_and_adjacencies_are_not_mixed_up(path: Path) -> None:
    ledger = Ledger.create(path, {"a": TERMS})
    with pytest.raises(UnknownEvent, match="client-level event"):
        ledger.charge(STEP, unit="client")
    ledger = Ledger.create(path.with_name("adaptive.db"), {"a": ADAPTIVE})
    with pytest.raises(UnknownEvent, match=r"fixed-size|SampledWithoutReplacement"):
        ledger.charge(FixedSize(100, 10, Gaussian(5.0)))
    with pytest.raises(UnknownEvent):
        ledger.charge(dp.ZCDpEvent(0.1))
    with pytest.raises(BudgetExceeded):
        ledger.charge(dp.NonPrivateDpEvent())
    assert len(ledger.rows()) == 2
    drawn = FixedSize(100, 10, Gaussian(5.0))
    terms = BudgetTerms(Budget(3.0, 1e-5), adjacency="replace-one", schedule="fixed", plan=drawn)
    replace = Ledger.create(path.with_name("other.db"), {"a": terms})
    replace.charge(drawn)
    assert replace.spent("a") > 0


def test_integer_noise_can_be_charged(path: Path) -> None:
    ledger = Ledger.create(path, {"a": BudgetTerms(Budget(2.0, 1e-5), unit="client")})
    ledger.charge(Poisson(0.02, SkellamDpEvent(100.0, 10.0, 400.0)), uses=5, unit="client")
    assert 0 < ledger.spent("a") < 2.0


def test_adaptive_schedules_are_filtered_by_one_order(path: Path) -> None:
    step = Poisson(0.01, Gaussian(3.0))
    terms = {"fixed": BudgetTerms(BUDGET, schedule="fixed", plan=step), "adaptive": ADAPTIVE}
    ledger = Ledger.create(path, terms)
    ledger.charge(step, uses=100, clients=["fixed", "adaptive"])
    assert ledger.spent("adaptive") > ledger.spent("fixed")
    order = ledger.account("adaptive").terms.order
    ledger.change_budget("adaptive", Budget(4.0, 1e-5), "test")
    assert ledger.account("adaptive").terms.order == order  # settled beforehand, or the filter proves nothing
    assert Ledger(path).account("adaptive").terms.order == order


def test_a_budget_without_delta_adds_pure_costs(path: Path) -> None:
    ledger = Ledger.create(path, {"a": BudgetTerms(Budget(1.0, 0.0), unit="client")})
    ledger.charge(PureDpEvent(0.4), uses=2, unit="client")
    assert ledger.spent("a") == pytest.approx(0.8)
    for event in (PureDpEvent(0.3), Gaussian(100.0)):
        with pytest.raises(BudgetExceeded):
            ledger.charge(event, unit="client")


def test_cohorts_are_charged_together_or_not_at_all(path: Path) -> None:
    names = [f"c{number}" for number in range(40)]
    budgets = {name: Budget(0.3 if name == "c7" else 1.0, 1e-5) for name in names}
    ledger = Ledger.create(
        path, {name: BudgetTerms(budget, schedule="fixed", plan=STEP) for name, budget in budgets.items()}
    )
    charge = Charge(tuple(names), STEP, 100)
    afford = ledger.can_afford(charge)
    assert [name for name, able in zip(names, afford, strict=True) if not able] == ["c7"]
    with pytest.raises(BudgetExceeded, match="'c7'"):
        ledger.charge_all([charge])
    assert all(ledger.spent(name) == 0 for name in names)
    able = tuple(name for name in names if name != "c7")
    for _ in range(3):
        ledger.charge_all([Charge(able, STEP, 20), Charge(("c7",), STEP, 1)])
    kinds = [row.kind for row in ledger.rows()]
    assert kinds.count("cohort") == 1  # a group is named once
    assert (kinds.count("charge"), kinds.count("again")) == (2, 2)
    again = Ledger(path)
    assert again.spent("c0") == ledger.spent("c0") > ledger.spent("c7") > 0


def test_one_call_can_charge_a_client_twice(path: Path) -> None:
    ledger = Ledger.create(path, {"a": BudgetTerms(BUDGET, schedule="fixed", plan=Gaussian(6.0))})
    with pytest.raises(BudgetExceeded):
        ledger.charge_all([Charge(("a",), Gaussian(6.0), 1), Charge(("a",), Gaussian(6.0), 2)])
    ledger.charge_all([Charge(("a",), Gaussian(6.0)), Charge(("a",), Gaussian(6.0))])
    assert ledger.spent("a") == pytest.approx(epsilon(dp.SelfComposedDpEvent(Gaussian(6.0), 2), 1e-5), rel=1e-9)


def test_charging_a_thousand_clients_is_quick(path: Path) -> None:
    names = tuple(f"client-{number}" for number in range(1000))
    step = Poisson(8 / 1200, Gaussian(2.36))
    ledger = Ledger.create(path, dict.fromkeys(names, BudgetTerms(BUDGET, schedule="fixed", plan=step)))
    charge = Charge(names, step, 10)
    ledger.charge_all([charge])  # works out the cost once
    times = []
    for _ in range(15):  # processor time: how long a disk takes to sync is not the ledger's affair
        start = time.process_time()
        ledger.charge_all([charge])
        times.append(time.process_time() - start)
    assert min(times) < 0.020, times


@pytest.mark.parametrize(
    "charge",
    [
        lambda ledger: ledger.charge(STEP, clients=["nobody"]),
        lambda ledger: ledger.charge(STEP, clients=[]),
        lambda ledger: ledger.charge(STEP, clients=["a", "a"]),
        lambda ledger: ledger.charge(STEP, uses=0),
        lambda ledger: ledger.charge(STEP, uses=1.5),
        lambda ledger: ledger.charge(STEP, uses=2.0),
        lambda ledger: ledger.charge(STEP, uses=True),
        lambda ledger: ledger.charge(STEP, uses=math.nan),
        lambda ledger: ledger.charge(STEP, uses="2"),
        lambda ledger: ledger.charge_all([Charge(("a",), STEP, -1)]),
        lambda ledger: ledger.reserve("run", [Charge(("a",), STEP, math.inf)]),  # type: ignore[arg-type]
        lambda ledger: ledger.reserve("run", []),
        lambda ledger: ledger.reserve(" ", [Charge(("a",), STEP)]),
        lambda ledger: ledger.reserve("\ud800", [Charge(("a",), STEP)]),
        lambda ledger: ledger.release("run"),
        lambda ledger: ledger.charge(STEP, purpose="\udfff"),
        lambda ledger: ledger.enroll({"\ud800": TERMS}),
        lambda ledger: ledger.change_budget("a", BUDGET, "\ud800"),
        lambda ledger: ledger.charge(PureDpEvent(math.nan)),
        lambda ledger: ledger.charge(Gaussian(math.inf)),
        lambda ledger: ledger.charge(Gaussian(-1.0)),
        lambda ledger: ledger.spent("nobody"),
    ],
)
def test_meaningless_charges_are_refused(path: Path, charge: object) -> None:
    ledger = Ledger.create(path, {"a": TERMS})
    with pytest.raises(InputError):
        charge(ledger)  # type: ignore[operator]
    assert len(ledger.rows()) == 2


def test_several_clients_must_be_named(path: Path) -> None:
    ledger = Ledger.create(path, {"a": TERMS, "b": TERMS})
    with pytest.raises(InputError, match="holds 2 clients"):
        ledger.charge(STEP)


def test_threads_share_a_ledger(path: Path) -> None:
    ledger = Ledger.create(path, {"a": ADAPTIVE})
    most = affordable(ledger, Gaussian(30.0))
    refused = []

    def work() -> None:
        for _ in range(most):
            try:
                ledger.charge(Gaussian(30.0))
            except BudgetExceeded:
                refused.append(1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ledger.account("a").charges == most
    assert len(refused) == 3 * most
    assert ledger.spent("a") <= 1.0


def test_two_open_ledgers_see_each_other(path: Path) -> None:
    one = Ledger.create(path, {"a": ADAPTIVE})
    two = Ledger(path)
    one.charge(Gaussian(10.0))
    two.charge(Gaussian(10.0))
    one.refresh()
    assert one.spent("a") == two.spent("a")
    assert one.head == two.head


def test_a_clock_that_runs_backwards_changes_nothing_but_the_time(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hours = iter(range(100, 0, -1))
    backwards = lambda: datetime(2026, 1, 1, tzinfo=UTC) + timedelta(hours=next(hours))  # noqa: E731
    monkeypatch.setattr("polyeps.ledger.hash_chain.now", backwards)
    ledger = Ledger.create(path, {"a": TERMS})
    ledger.charge(STEP)
    ledger.charge(STEP)
    times = [row.time for row in ledger.rows()]
    assert times == sorted(times, reverse=True)
    assert Ledger(path).verify().seq == 4


def charge_until_refused(ledger: Ledger, words: str) -> int:
    """How many charges were acknowledged before one failed."""
    for paid in range(10_000):
        try:
            ledger.charge(Gaussian(10_000.0), purpose="x" * 200)
        except LedgerError as problem:
            if words not in str(problem):
                raise
            return paid
    pytest.fail("the disk never filled up")


def test_a_full_disk_charges_nothing(path: Path) -> None:
    ledger = Ledger.create(path, {"a": ADAPTIVE})
    connection = ledger._chain._open()
    (pages,) = connection.execute("PRAGMA page_count").fetchone()
    connection.execute(f"PRAGMA max_page_count = {pages}")
    paid = charge_until_refused(ledger, "is full; nothing was written")
    assert ledger.account("a").charges == paid
    connection.execute("PRAGMA max_page_count = 100000")
    ledger.charge(Gaussian(1000.0))  # usable again
    assert Ledger(path).account("a").charges == paid + 1


def test_a_full_file_system_loses_no_acknowledged_charge(tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=96k", "tmpfs", str(small)], capture_output=True)
    if mounted.returncode:
        pytest.skip("needs the right to mount a small file system")
    try:
        ledger = Ledger.create(small / "ledger.db", {"a": ADAPTIVE})
        paid = charge_until_refused(ledger, "")
        ledger.close()
        again = Ledger(small / "ledger.db")
        assert again.account("a").charges in (paid, paid + 1)  # one may be written but not acknowledged
        again.close()
    finally:
        subprocess.run(["umount", str(small)], check=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become somebody without write permission")
def test_a_read_only_ledger_can_be_read_but_not_charged(path: Path) -> None:
    Ledger.create(path, {"a": ADAPTIVE}).charge(Gaussian(30.0))
    path.chmod(0o444)
    path.with_name("ledger.db.head").chmod(0o444)
    script = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from polyeps.accounting.events import Gaussian\n"
        "from polyeps.errors import LedgerError\n"
        "from polyeps.ledger import Ledger\n"
        "os.setuid(65534)\n"
        "ledger = Ledger(Path(sys.argv[1]))\n"
        "print(ledger.account('a').charges)\n"
        "try: ledger.charge(Gaussian(9.0))\n"
        "except LedgerError as e: print(e)\n"
    )
    for folder in (path.parent, *path.parent.parents):
        if folder.stat().st_uid == os.getuid() and folder != Path("/"):
            folder.chmod(folder.stat().st_mode | 0o055)
    ran = subprocess.run([sys.executable, "-c", script, str(path)], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines()[0] == "1"
    assert "read-only; nothing was written" in ran.stdout
    assert Ledger(path).account("a").charges == 1


def test_a_ledger_that_does_not_verify_cannot_be_charged(path: Path) -> None:
    ledger = Ledger.create(path, {"a": TERMS})
    ledger.charge(STEP)
    ledger.close()
    head = path.with_name("ledger.db.head")
    head.write_text(head.read_text().replace('"seq": 3', '"seq": 4'))
    with pytest.raises(LedgerTampered, match="row 4 is missing"):
        ledger.charge(STEP)
    with pytest.raises(LedgerTampered):
        Ledger(path)


def test_racing_and_dying_processes_brick_and_lose_nothing(tmp_path: Path) -> None:
    """In a process of its own, because forking one that runs threads is asking for trouble."""
    worker = Path(__file__).parents[1] / "support" / "crash.py"
    ran = subprocess.run(
        [sys.executable, str(worker), str(tmp_path), "12", "40", "1"], capture_output=True, text=True, timeout=300
    )
    assert ran.returncode == 0, ran.stderr
    outcome = json.loads(ran.stdout)
    creating, charging = outcome["deaths"]
    assert creating > 10
    assert charging > 5
    assert outcome["race"]["bricked"] == []
    assert outcome["race"]["winners"][:6] == [1] * 6
    assert max(outcome["race"]["winners"]) == 1  # of those that were killed, none may have lived to tell
    reported = outcome["kill"]
    ledger = Ledger(tmp_path / "ledger.db")
    ledger.verify()
    rows = ledger.rows()
    written = [row.content["purpose"] for row in rows if row.kind == "charge"]
    assert len(reported["acknowledged"]) > 20
    assert set(reported["acknowledged"]) <= set(written)
    assert (
        set(reported["reserved"]) <= ledger.runs.keys() == {row.content["run"] for row in rows if row.kind == "reserve"}
    )
    assert len(written) == len(set(written)) == ledger.account("client").charges
    account = ledger.account("client")
    assert ledger.spent("client") <= account.spent(account.committed) <= 2.0
    assert account.committed[Gaussian(60.0)] == len(written) + sum(
        3 - sum(row.content.get("run") == name for row in rows if row.kind == "charge")
        for name, run in ledger.runs.items()
        if run.open
    )
    ledger.charge(Gaussian(1e6))  # and it still works


def test_many_budgets_that_differ_in_epsilon_share_a_row_and_everything_but_the_budget(path: Path) -> None:
    epsilons = {f"c{place}": 0.5 + 0.01 * place for place in range(200)}
    plan = Gaussian(20.0)
    terms = {name: BudgetTerms(Budget(one, 1e-5), schedule="fixed", plan=plan) for name, one in epsilons.items()}
    ledger = Ledger.create(path, terms)
    assert [row.kind for row in ledger.rows()] == ["opened", "budgets"]
    whole = tuple(terms)
    most = {name: sum(fits(terms[name], plan, uses) for uses in range(1, 60)) for name in ("c0", "c90", "c199")}
    for uses in range(1, 60):
        able = ledger.can_afford(Charge(whole, plan))
        assert [able[whole.index(name)] for name in most] == [uses <= count for count in most.values()]
        assert able == sorted(able)  # larger budgets afford more
        paying = [name for name, can in zip(whole, able, strict=True) if can]
        if not paying:
            break
        ledger.charge(plan, clients=paying)
    again = Ledger(path)
    for one in (ledger, again):
        assert {name: one.account(name).charges for name in most} == most
        assert all(one.account(name).terms == agreed for name, agreed in terms.items())
        assert all(one.spent(name) <= epsilons[name] for name in whole)
    with pytest.raises(BudgetExceeded, match="client 'c0'"):
        again.charge(plan, clients=["c199", "c0"])
    assert len({id(again.account(name).standing) for name in whole}) < 60


def fits(terms: BudgetTerms, plan: dp.DpEvent, uses: int) -> bool:
    """Whether so many uses fit, by the accountant itself."""
    return epsilon(dp.SelfComposedDpEvent(plan, uses), terms.budget.delta) <= terms.budget.epsilon


def test_a_forged_row_of_budgets_is_refused(path: Path) -> None:
    """Rewritten together with its head, so that only its content is wrong."""
    content = {"clients": ["a", "b"], "epsilons": [1.0, math.nan], "delta": 1e-5, "unit": "record"}
    content |= {"adjacency": "zero-out", "schedule": "fixed", "order": None, "plan": None}
    for epsilons in ([1.0], [1.0, -1.0], [1.0, "2"], [1.0, None]):
        path.unlink(missing_ok=True)
        path.with_name(path.name + ".head").unlink(missing_ok=True)
        Chain.create(path, [("opened", {"ledger": "x"}), ("budgets", {**content, "epsilons": epsilons})])
        with pytest.raises(LedgerTampered, match="row 2 cannot be understood"):
            Ledger(path)


def test_numbers_of_another_type_buy_nothing(path: Path) -> None:
    """An own algorithm may compute its price with numpy; equal events are then written differently."""
    names = [f"c{place}" for place in range(20)]
    ledger = Ledger.create(path, {name: BudgetTerms(Budget(11.0, 0.0), "client") for name in names})
    ledger.charge(PureDpEvent(0.01), uses=900, clients=["c0"], unit="client")
    ledger.charge(PureDpEvent(np.float64(1.0)), clients=["c0"], unit="client")
    ledger.charge(PureDpEvent(np.float64(0.01)), clients=["c1"], unit="client")
    with pytest.raises(BudgetExceeded, match="would bring it to 900"):
        ledger.charge(PureDpEvent(1.0), uses=900, clients=["c1"], unit="client")
    assert ledger.spent("c1") == 0.01


@pytest.mark.parametrize("twice", ["later", "later, many", "in one row"])
def test_no_row_opens_an_account_again(path: Path, twice: str) -> None:
    """It would forget what the client has spent, and a head that was stored elsewhere would still be continued."""
    content = {"delta": 1e-5, "unit": "record", "adjacency": "zero-out", "schedule": "adaptive", "order": 20.0}
    charge = {"clients": ["a"], "event": {"kind": "gaussian", "noise_multiplier": 20.0}, "uses": 1, "unit": "record"}
    opened: list[Draft] = [("opened", {"ledger": "x"}), ("budget", {"client": "a", "epsilon": 1.0, **content})]
    match twice:
        case "later":
            opened += [("charge", charge), ("budget", {"client": "a", "epsilon": 1.0, **content})]
        case "later, many":
            opened += [("charge", charge), ("budgets", {"clients": ["b", "a"], "epsilons": [1.0, 1.0], **content})]
        case _:
            opened[1] = ("budgets", {"clients": ["a", "b", "a"], "epsilons": [1.0, 1.0, 9.0], **content})
    Chain.create(path, opened)
    with pytest.raises(LedgerTampered, match=f"row {len(opened)} cannot be understood: one of the clients"):
        Ledger(path)


def test_verifying_a_file_opens_no_account_and_finds_the_same(path: Path, tmp_path: Path) -> None:
    ledger = Ledger.create(path, {"a": ADAPTIVE})
    assert Ledger.verify_file(path) == ledger.head
    kept = tmp_path / "kept"
    kept.write_bytes(path.with_name(path.name + ".head").read_bytes())
    ledger.charge(Gaussian(20.0))
    assert Ledger.verify_file(path, kept) == ledger.head
    kept.write_text(f"2 {'0' * 64}")
    with pytest.raises(LedgerTampered, match="does not continue"):
        Ledger.verify_file(path, kept)
