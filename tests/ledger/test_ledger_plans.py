"""What may be asked of a ledger: anything within an adaptive budget, or a plan made beforehand; and reservations."""

import math
from itertools import product
from pathlib import Path

import dp_accounting as dp
import pytest
from scipy.stats import norm
from support.affordable import affordable

from polyeps.accounting import epsilon
from polyeps.accounting.events import Gaussian, Poisson, PureDpEvent, TogetherDpEvent
from polyeps.core import Adjacency, Budget
from polyeps.errors import BudgetExceeded, InputError, UnknownEvent
from polyeps.ledger import Ledger
from polyeps.ledger.account import BudgetTerms, Charge, ClientAccount

BUDGET = Budget(1.0, 1e-3)
STEP = Poisson(0.01, Gaussian(1.0))
A = ("a",)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.db"


Second = tuple[dp.DpEvent, int]  # what is asked after the first answer, and how often
BRANCHES: list[Second] = [(Gaussian(2.597), 1), (PureDpEvent(0.17156), 6)]  # each within ε = 1 after PureDpEvent(0.05)


def hockey_stick(event: dp.DpEvent, uses: int, ratio: float) -> float:
    """Σ max(0, p − ratio·q) of the worst pair that an event, used several times, stands for."""
    if isinstance(event, PureDpEvent):
        more = 1 / (1 + math.exp(-event.epsilon))
        likely = [(more**k * (1 - more) ** (uses - k), math.comb(uses, k)) for k in range(uses + 1)]
        pairs = zip(likely, reversed(likely), strict=True)
        return sum(count * max(0.0, p - ratio * q) for (p, count), (q, _) in pairs)
    shift = math.sqrt(uses) / event.noise_multiplier
    where = math.log(ratio) / shift
    return float(norm.sf(where - shift / 2) - ratio * norm.sf(where + shift / 2))


def worst(first: float, events: list[Second]) -> float:
    """The δ at ε = 1 of a pure first answer that decides which of several events follows."""
    more = 1 / (1 + math.exp(-first))
    return sum(
        p * max(hockey_stick(event, uses, math.e * q / p) for event, uses in [*events, (PureDpEvent(0.0), 1)])
        for p, q in ((more, 1 - more), (1 - more, more))
    )


def test_the_attack_works_against_exact_composition() -> None:
    """Either branch alone costs at most ε = 1, but choosing between them by the first answer costs more."""
    for second, uses in BRANCHES:
        both = dp.ComposedDpEvent([PureDpEvent(0.05), dp.SelfComposedDpEvent(second, uses)])
        assert epsilon(both, 1e-3) <= 1.0
        assert worst(0.05, [(second, uses)]) <= 1e-3
    assert worst(0.05, BRANCHES) > 1.25e-3


@pytest.mark.parametrize("first", [0.02, 0.05, 0.1, 0.5])
def test_no_choice_by_earlier_answers_passes_the_budget(path: Path, first: float) -> None:
    ledger = Ledger.create(path, {"a": BudgetTerms(BUDGET)})
    ledger.charge(PureDpEvent(first))
    asked: list[Second] = [*BRANCHES, (Gaussian(2.596), 1), (PureDpEvent(0.9527), 1)]
    asked += [(Gaussian(sigma), uses) for sigma in (2.8, 3.2, 3.8, 5.0) for uses in (1, 2, 4)]
    asked += [(PureDpEvent(value), uses) for value in (0.8, 0.3, 0.15, 0.1, 0.05) for uses in (1, 3, 6, 12)]
    events = [(event, uses) for event, uses in asked if ledger.can_afford(Charge(A, event, uses)) == [True]]
    assert events
    assert worst(first, events) <= 1e-3
    assert not set(BRANCHES) <= set(events)
    for event, uses in asked:
        if (event, uses) not in events:
            with pytest.raises(BudgetExceeded, match="nothing was charged"):
                ledger.charge(event, uses=uses)


def test_a_fixed_schedule_needs_a_plan(path: Path) -> None:
    ledger = Ledger.create(path, {"a": BudgetTerms(BUDGET, schedule="fixed")})
    for event in (PureDpEvent(0.05), Gaussian(20.0)):
        assert ledger.can_afford(Charge(A, event)) == [False]
        assert affordable(ledger, event) == 0
        with pytest.raises(BudgetExceeded, match=r'no plan yet.*reserve the whole run.*schedule = "adaptive"'):
            ledger.charge(event)
    assert len(ledger.rows()) == 2


@pytest.mark.parametrize("second", [Gaussian(2.596), PureDpEvent(0.9527), Gaussian(1e6), PureDpEvent(0.05)])
def test_a_plan_is_not_followed_by_another(path: Path, second: dp.DpEvent) -> None:
    ledger = Ledger.create(path, {"a": BudgetTerms(BUDGET, schedule="fixed")})
    ledger.reserve("first", [Charge(A, PureDpEvent(0.05))])
    ledger.charge(PureDpEvent(0.05))
    for opened in (ledger, Ledger(path)):
        for run in ("", "first"):
            with pytest.raises(BudgetExceeded, match=r"used it up|not in its plan"):
                opened.charge(second, run=run)
            assert opened.can_afford(Charge(A, second), run=run) == [False]
        with pytest.raises(BudgetExceeded, match=r'not in its plan.*schedule = "adaptive"'):
            opened.reserve("second", [Charge(A, second)])
    ledger.release("first")
    for again in ("second", "third"):
        with pytest.raises(BudgetExceeded, match=r'not in its plan.*schedule = "adaptive"'):
            ledger.reserve(again, [Charge(A, second)])
    with pytest.raises(BudgetExceeded, match="not in its plan"):
        ledger.charge(second)
    ledger.change_budget("a", Budget(100.0, 1e-3), "more, but not another plan")
    with pytest.raises(BudgetExceeded, match="not in its plan"):
        ledger.charge(second)


def test_a_plan_of_one_event_may_be_repeated_while_it_fits(path: Path) -> None:
    plan = dp.SelfComposedDpEvent(STEP, 10)
    ledger = Ledger.create(path, {"a": BudgetTerms(Budget(1.0, 1e-5), schedule="fixed", plan=plan)})
    for event in (STEP, plan, dp.SelfComposedDpEvent(plan, 3)):  # the same step, however it is put
        ledger.charge(event)
    assert ledger.spent("a") == epsilon(dp.SelfComposedDpEvent(STEP, 41), 1e-5)
    for other in (Poisson(0.01, Gaussian(1.01)), Gaussian(1e6), dp.ComposedDpEvent([STEP, Gaussian(1e6)])):
        with pytest.raises(BudgetExceeded, match="not in its plan"):
            ledger.charge(other)
    with pytest.raises(BudgetExceeded, match="this charge would bring it to"):
        ledger.charge(STEP, uses=100_000)
    ledger.reserve("run", [Charge(A, STEP, 5)])
    ledger.charge(STEP, uses=2, run="run")
    ledger.release("run")
    ledger.charge(STEP)
    assert Ledger(path).spent("a") == ledger.spent("a") == epsilon(dp.SelfComposedDpEvent(STEP, 44), 1e-5)


def test_a_plan_of_several_parts_keeps_their_proportion() -> None:
    both = dp.SelfComposedDpEvent(Poisson(1.0, _together(20.0, 30.0)), 2)

    account = ClientAccount.opened(BudgetTerms(BUDGET, schedule="fixed", plan=both))
    for times, parts in product((1, 3), ((1, 1), (2, 2), (1, 2), (2, 1), (1, 0))):
        added = {Gaussian(sigma): times * count for sigma, count in zip((20.0, 30.0), parts, strict=True) if count}
        assert (account.obstacle(added) != "plan") == (parts[0] == parts[1])


def _together(*sigmas: float) -> dp.DpEvent:

    return TogetherDpEvent([Gaussian(sigma) for sigma in sigmas])


def test_terms_are_adaptive_unless_said_otherwise() -> None:
    assert BudgetTerms(BUDGET).schedule == "adaptive"
    assert BudgetTerms(BUDGET).order is not None
    for wrong in (
        {"schedule": "sometimes"},
        {"plan": STEP},
        {"schedule": "fixed", "plan": dp.NoOpDpEvent()},
        {"schedule": "fixed", "plan": dp.ComposedDpEvent([STEP])},
        {"order": 1.0},
        {"order": math.nan},
    ):
        with pytest.raises(InputError):
            BudgetTerms(BUDGET, **wrong)


def test_ledgers_of_version_1_that_were_called_fixed_are_filtered(path: Path) -> None:
    """They took any event, also adaptively chosen ones, so exact composition proves nothing about them."""

    ledger = Ledger.create(path)
    content = {"client": "a", "epsilon": 1.0, "delta": 1e-3, "unit": "record", "adjacency": "zero-out"}
    ledger._chain.append(lambda: [("budget", {**content, "schedule": "fixed", "order": None})])
    assert ledger.account("a").terms == BudgetTerms(BUDGET)
    assert Ledger(path).account("a").terms.schedule == "adaptive"


def test_a_reservation_counts_until_it_is_released(path: Path) -> None:
    ledger = Ledger.create(path, {"a": BudgetTerms(BUDGET)})
    most = affordable(ledger, Gaussian(30.0))
    ledger.reserve("one", [Charge(A, Gaussian(30.0), most - 5)])
    assert ledger.spent("a") == 0.0
    other = Ledger(path)
    assert affordable(other, Gaussian(30.0)) == 5
    with pytest.raises(BudgetExceeded, match=r"holds .* in reserve and has .* left; .*nothing was reserved"):
        other.reserve("two", [Charge(A, Gaussian(30.0), 3), Charge(A, Gaussian(30.0), 3)])
    assert "two" not in other.runs
    with pytest.raises(BudgetExceeded, match=r"in reserve .* nothing was charged"):
        other.charge(Gaussian(30.0), uses=6)
    other.reserve("two", [Charge(A, Gaussian(30.0), 5)])
    for uses in (4, 3):
        ledger.charge(Gaussian(30.0), uses=uses, run="one")
    assert affordable(ledger, Gaussian(30.0)) == 0
    assert affordable(ledger, Gaussian(30.0), run="one") == most - 12
    ledger.release("one")
    ledger.release("one")  # as after a crash
    assert affordable(ledger, Gaussian(30.0)) == most - 12
    assert Ledger(path).account("a").history == {Gaussian(30.0): 7}  # what was charged stays
    for run in ("one", "three"):
        assert ledger.can_afford(Charge(A, Gaussian(30.0)), run=run) == [False]
        with pytest.raises(BudgetExceeded, match=r"has ended|has not reserved"):
            ledger.charge(Gaussian(30.0), run=run)
    for again in ("one", "two"):
        with pytest.raises(InputError, match=r"already; give every run a name of its own"):
            ledger.reserve(again, [Charge(A, Gaussian(30.0))])
    rows = len(ledger.rows())
    ledger.reserve("two", [Charge(A, Gaussian(30.0), 5)])  # the very same, as after a crash
    assert len(ledger.rows()) == rows


def test_a_run_is_charged_what_it_reserved_and_nothing_else(path: Path) -> None:
    ledger = Ledger.create(path, {"a": BudgetTerms(BUDGET), "b": BudgetTerms(BUDGET), "c": BudgetTerms(BUDGET)})
    ledger.reserve("run", [Charge(("a", "b"), Gaussian(30.0), 3), Charge(A, PureDpEvent(0.01))])
    ledger.charge_all([Charge(("a", "b"), Gaussian(30.0), 2), Charge(A, PureDpEvent(0.01))], run="run")
    for charge in (
        Charge(A, Gaussian(30.0), 2),
        Charge(A, Gaussian(31.0)),
        Charge(A, PureDpEvent(0.01)),
        Charge(("a", "b"), PureDpEvent(0.001)),
        Charge(("b", "c"), Gaussian(30.0)),
    ):
        with pytest.raises(BudgetExceeded, match="run 'run' has not reserved this for client"):
            ledger.charge_all([charge], run="run")
    with pytest.raises(BudgetExceeded):  # together too many
        ledger.charge_all([Charge(A, Gaussian(30.0)), Charge(A, Gaussian(30.0))], run="run")
    assert ledger.can_afford(Charge(("a", "b", "c"), Gaussian(30.0)), run="run") == [True, True, False]
    ledger.charge_all([Charge(("a", "b"), Gaussian(30.0))], run="run", purpose="last", once=True)
    ledger.charge_all([Charge(("a", "b"), Gaussian(30.0))], run="run", purpose="last", once=True)  # paid already
    again = Ledger(path)
    assert again.account("a").reserved == ledger.account("a").reserved == {"run": {}}
    assert again.account("b").history == {Gaussian(30.0): 3}
    assert again.spent("c") == 0


def test_many_clients_reserve_together(path: Path) -> None:
    names = tuple(f"c{number}" for number in range(40))
    ledger = Ledger.create(path, {name: BudgetTerms(Budget(0.1 if name == "c7" else 1.0, 1e-3)) for name in names})
    with pytest.raises(BudgetExceeded, match="'c7'"):
        ledger.reserve("run", [Charge(names, Gaussian(30.0), 20)])
    able = tuple(name for name in names if name != "c7")
    ledger.reserve("run", [Charge(able, Gaussian(30.0), 20)])
    ledger.charge_all([Charge(able[:20], Gaussian(30.0), 20)], run="run")
    ledger.release("run")
    assert [row.kind for row in ledger.rows()].count("cohort") == 2
    assert Ledger(path).spent("c0") == ledger.spent("c0") > ledger.spent("c39") == 0


def test_parallel_runs_do_not_spend_twice(path: Path) -> None:
    """Two processes that each saw room for a run: only one gets it."""
    ledgers = [Ledger.create(path, {"a": BudgetTerms(BUDGET)}), Ledger(path)]
    half = affordable(ledgers[0], Gaussian(30.0)) // 2 + 1
    assert all(ledger.can_afford(Charge(A, Gaussian(30.0), half)) == [True] for ledger in ledgers)
    ledgers[0].reserve("0", [Charge(A, Gaussian(30.0), half)])
    with pytest.raises(BudgetExceeded):
        ledgers[1].reserve("1", [Charge(A, Gaussian(30.0), half)])
    with pytest.raises(BudgetExceeded):
        ledgers[1].charge(Gaussian(30.0), uses=half)


def test_delta_is_not_introduced_later(path: Path) -> None:
    ledger = Ledger.create(path, {"a": BudgetTerms(Budget(1.0, 0.0))})
    with pytest.raises(InputError, match="δ = 0"):
        ledger.change_budget("a", Budget(1.0, 1e-5), "more")


@pytest.mark.parametrize("adjacency", ["zero-out", "replace-one"])
def test_a_budget_that_hides_numbers_of_records_pays_for_no_release_that_tells_them(
    adjacency: Adjacency, tmp_path: Path
) -> None:
    """The price of such a release is the same number, but it is not a price of what is hidden."""
    ledger = Ledger.create(tmp_path / "a.db", {"ward": BudgetTerms(Budget(4.0, 1e-5), adjacency="add-remove")})
    step = Poisson(0.01, Gaussian(3.0))
    asked = Charge(("ward",), step, adjacency=adjacency)
    with pytest.raises(UnknownEvent, match="public rate"):
        ledger.charge_all([asked])
    ledger.charge_all([Charge(("ward",), step, adjacency="add-remove")])
    with pytest.raises(UnknownEvent, match="public rate"):  # also once the same event was charged rightly
        ledger.charge_all([asked])
    with pytest.raises(UnknownEvent, match="public rate"):
        ledger.can_afford(asked)
    assert Ledger(tmp_path / "a.db").account("ward").charges == 1
