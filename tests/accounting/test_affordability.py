import numpy as np
import pytest
from dp_accounting.dp_event import DpEvent
from hypothesis import given
from hypothesis import strategies as st

from polyeps.accounting import affordability, best_accountant
from polyeps.accounting.events import Gaussian, Poisson, PureDpEvent, SkellamDpEvent
from polyeps.core import Budget


@given(limit=st.integers(0, 5000), most=st.one_of(st.none(), st.integers(0, 6000)))
def test_affordable_finds_the_last_that_fits(limit: int, most: int | None) -> None:
    asked: list[int] = []

    def within(k: int) -> bool:
        asked.append(k)
        return k <= limit

    assert affordability.affordable(within, most) == (limit if most is None else min(limit, most))
    assert len(asked) < 40


def test_affordable_is_zero_when_nothing_fits() -> None:
    assert affordability.affordable(lambda _: False) == 0


def test_what_is_known_decides_without_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    step, budget = Poisson(0.0123, Gaussian(1.87)), Budget(2.0, 1e-5)
    spent = affordability.known_epsilon({step: 500}, budget.delta, "add-remove", "pld")
    assert spent < 2.0
    monkeypatch.setattr(affordability, "history_epsilon", lambda *_: pytest.fail("computed again"))
    assert affordability.fits({step: 499}, budget, "add-remove", "pld")
    assert affordability.fits({step: 1}, budget, "add-remove", "pld")
    assert not affordability.fits({step: 501}, Budget(spent / 2, 1e-5), "add-remove", "pld")
    assert affordability.known_epsilon({step: 500}, budget.delta, "add-remove", "pld") == spent


def test_mixed_histories_are_compared_step_by_step() -> None:
    step, report = Poisson(0.02, Gaussian(3.3)), PureDpEvent(0.1)
    budget = Budget(1.0, 1e-5)
    assert affordability.fits({step: 100, report: 2}, budget, "add-remove", "pld")
    assert affordability.fits({report: 1, step: 100}, budget, "add-remove", "pld")
    assert not affordability.fits({step: 100, report: 100}, budget, "add-remove", "pld")


@pytest.mark.parametrize("small", [0.01, np.float64(0.01)])
@pytest.mark.parametrize("large", [1.0, 1, np.float64(1.0)])
def test_equal_steps_that_are_written_differently_are_not_mixed_up(small: float, large: float) -> None:
    """900 small steps and a large one must not vouch for a small one and 900 large ones, whatever type numbers have."""
    budget = Budget(11.0, 0.0)
    known: dict[DpEvent, int] = {PureDpEvent(0.01): 900, PureDpEvent(1.0): 1}
    assert affordability.known_epsilon(known, 0.0, "zero-out", "pld") == pytest.approx(10.0)
    asked: dict[DpEvent, int] = {PureDpEvent(small): 1, PureDpEvent(large): 900}
    assert not affordability.fits(asked, budget, "zero-out", "pld")
    assert affordability.known_epsilon(asked, 0.0, "zero-out", "pld") == pytest.approx(900.01)


def test_integer_noise_is_priced_by_renyi() -> None:
    assert best_accountant({Gaussian(1.0): 1, Poisson(0.1, SkellamDpEvent(1, 1, 9)): 1}) == "rdp"
    assert best_accountant({Gaussian(1.0): 1, PureDpEvent(1.0): 1}) == "pld"
