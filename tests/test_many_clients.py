"""Very many clients: what is looked at together, computed once or forgotten is as if each client were alone."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.datasets import load_digits

from polyeps.accounting.events import Gaussian, Poisson, PureDpEvent, check_event
from polyeps.accounting.histories import history_of
from polyeps.algorithms._averaging import epsilons
from polyeps.core import Budget, Profile, State, check_name
from polyeps.data.own_tables import _numbered
from polyeps.data.public_loaders import load_dataset
from polyeps.errors import InputError
from polyeps.experiment.noise_calibration import Cost, sound_noise
from polyeps.ledger import Ledger
from polyeps.ledger.account import BudgetTerms, Charge, Standing


@pytest.mark.parametrize("wrong", ["a\nb", "\ud800", "ä" * 128, 7])
def test_one_wrong_name_among_many_is_refused(wrong: Any) -> None:
    good = [f"client {place}" for place in range(50)]
    check_name("a client's id", *good)
    check_name("a client's id", *good, "x" * 255)
    with pytest.raises(InputError, match=r"a client's id (must be printable|has 256 bytes)"):
        check_name("a client's id", *good, wrong)


def test_whole_numbers_are_named_as_cells_are() -> None:
    cells = np.random.default_rng(1).integers(-5, 20, 200)
    together, numbers = _numbered(cells, str, "client")
    one_by_one, same = _numbered(cells.tolist(), str, "client")
    assert together == one_by_one
    assert numbers.tolist() == same.tolist()


def test_digits_are_those_of_scikit_learn() -> None:
    found, published = load_dataset("digits"), load_digits()
    pixels = np.concatenate([found.features, found.test_features])
    assert np.array_equal(pixels, published.images[:, None].astype(np.float32) / np.float32(16))
    assert np.array_equal(np.concatenate([found.labels, found.test_labels]), published.target)


def test_an_event_that_is_remembered_vouches_for_no_equal_one() -> None:
    check_event(Gaussian(1.0))
    assert history_of(Poisson(0.5, Gaussian(1.0)), 3) == {Poisson(0.5, Gaussian(1.0)): 3}
    assert Gaussian(True) == Gaussian(1.0)
    with pytest.raises(InputError, match="noise_multiplier of a gaussian event must be"):
        check_event(Gaussian(True))
    with pytest.raises(InputError, match="noise_multiplier of a gaussian event must be"):
        history_of(Gaussian(True))


def test_a_history_can_be_changed_without_changing_the_next_one() -> None:
    event = Gaussian(3.0)
    history_of(event, 2).clear()
    assert history_of(event, 2) == {event: 2}


def test_budgets_of_the_roster_or_else_of_everybody() -> None:
    everybody = tuple(Profile(name, epsilon=place + 1.0) for place, name in enumerate("abcd"))
    state = State(None, enrolled=everybody, roster=everybody[:2])  # type: ignore[arg-type]
    assert epsilons(state, "ba") == [2.0, 1.0]
    assert epsilons(state, "bd") == [2.0, 4.0]


def test_standings_that_nobody_has_any_more_are_forgotten(tmp_path: Path) -> None:
    """A run of many rounds would otherwise keep what every client had spent after each of them."""
    event = Poisson(0.01, Gaussian(2.0))
    terms = BudgetTerms(Budget(9.0, 1e-5), schedule="fixed", plan=event)
    names = tuple("abc")
    ledger = Ledger.create(tmp_path / "ledger.db", dict.fromkeys(names, terms))
    for round in range(30):
        some = names if round % 2 else names[:2]
        ledger.charge_all([Charge(some, event)], purpose=f"run/{round}")
        ledger.can_afford(Charge(some, event))
    gc.collect()
    held = [one for one in gc.get_objects() if type(one) is Standing and one.terms.plan == event]
    assert len(held) < 8
    assert [ledger.account(name).charges for name in names] == [30, 30, 15]
    again = Ledger(tmp_path / "ledger.db")
    assert [again.spent(name) for name in names] == [ledger.spent(name) for name in names]


def test_the_smallest_budget_answers_for_all_that_share_a_standing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    event = Poisson(0.01, Gaussian(2.0))
    terms = BudgetTerms(Budget(1.0, 1e-5), schedule="fixed", plan=event)
    names = tuple(f"client {place}" for place in range(40))
    budgets = np.linspace(3.0, 1.0, 40)
    asked: list[float] = []
    real = Standing.affords

    def affords(self: Standing, history: Any, epsilon: float) -> bool:
        asked.append(epsilon)
        return real(self, history, epsilon)

    ledger = Ledger.create(tmp_path / "l.db", {n: terms.with_epsilon(e) for n, e in zip(names, budgets, strict=True)})
    monkeypatch.setattr(Standing, "affords", affords)
    assert all(ledger.can_afford(Charge(names, event)))
    assert asked == [1.0]
    dear = Charge(names, event, 1_000_000)
    assert not any(ledger.can_afford(dear))
    between = Charge(names, event, 8000)
    assert ledger.can_afford(between) == [ledger.can_afford(Charge((name,), event, 8000))[0] for name in names]
    assert 0 < sum(ledger.can_afford(between)) < 40


def test_a_pure_price_is_that_of_three_digits() -> None:
    budgets = [Budget(float(epsilon), 0.0) for epsilon in np.geomspace(0.1, 10, 5000)]
    budgets += [Budget(epsilon, 0.0) for epsilon in (0.3, 1.0, 2.25)]
    ids = [str(place) for place in range(len(budgets))]
    cost = Cost(lambda sigma, _: PureDpEvent(1 / sigma), ids, {}, "record", "zero-out")

    class Settings:
        class budgets:  # noqa: N801
            noise_multiplier = None

    spent = 1 / sound_noise(Settings, budgets, cost, 1, None)  # type: ignore[arg-type]
    own = np.array([budget.epsilon for budget in budgets])
    assert (spent < own).all()
    assert (spent > 0.99 * own).all()
    assert spent[-3:] == pytest.approx(own[-3:], rel=1e-13)
    assert len(set(spent.tolist())) < 2000
