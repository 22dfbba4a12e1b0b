import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyeps.accounting import affordability, cache, epsilon, history_epsilon
from polyeps.accounting.calibration import calibrate, calibrate_each
from polyeps.accounting.events import FixedSize, Gaussian, Poisson
from polyeps.accounting.histories import fold_gaussians
from polyeps.core import Budget
from polyeps.errors import InputError
from polyeps.ledger.account import BudgetTerms, ClientAccount, Schedule


def price(sigma: float) -> Poisson:
    return Poisson(8 / 1200, Gaussian(sigma))


def budgets_between(low: float, high: float, count: int) -> list[Budget]:
    return [Budget(float(value), 1e-5) for value in np.geomspace(low, high, count)]


@pytest.mark.parametrize(("budget", "sigma"), [(1.0, 2.350), (10.0, 0.650)])
def test_reference_scales(budget: float, sigma: float) -> None:
    answer = calibrate([Budget(budget, 1e-5)], price, 8000, tolerance=1e-4)
    assert answer.noise_multiplier[0] == pytest.approx(sigma, abs=1e-3)


def test_every_answer_is_within_its_budget_and_close_to_it() -> None:
    budgets = budgets_between(0.05, 20, 37)
    answer = calibrate(budgets, price, 800)
    wanted = np.array([budget.epsilon for budget in budgets])
    assert (answer.certified <= wanted).all()
    assert (answer.certified >= 0.99 * wanted).all()
    assert (np.diff(answer.noise_multiplier) <= 0).all()
    from polyeps.accounting import pld

    for budget, scale, certified in list(zip(budgets, answer.noise_multiplier, answer.certified, strict=True))[::9]:
        again = pld.pld_epsilon({price(float(scale)): 800}, budget.delta, "add-remove")
        assert again == pytest.approx(certified, rel=1e-12)


def test_budgets_may_differ_in_delta_and_keep_their_order() -> None:
    budgets = [Budget(1.0, 1e-5), Budget(0.5, 1e-3), Budget(1.0, 1e-3), Budget(0.5, 1e-5)]
    answer = calibrate(budgets, Gaussian, 10)
    assert answer.noise_multiplier[3] > answer.noise_multiplier[0] > answer.noise_multiplier[2]
    for budget, scale, certified in zip(budgets, answer.noise_multiplier, answer.certified, strict=True):
        assert certified == pytest.approx(epsilon(Gaussian(scale / 10**0.5), budget.delta), rel=1e-9)


@settings(max_examples=15, deadline=None)
@given(
    wanted=st.lists(st.floats(0.05, 30), min_size=1, max_size=6),
    rate=st.floats(0.001, 0.9),
    uses=st.integers(1, 3000),
    fixed=st.booleans(),
)
def test_any_price_can_be_inverted(wanted: list[float], rate: float, uses: int, fixed: bool) -> None:
    draw = max(1, round(1000 * rate))
    answer = calibrate(
        [Budget(value, 1e-6) for value in wanted],
        (lambda sigma: FixedSize(1000, draw, Gaussian(sigma)))
        if fixed
        else lambda sigma: Poisson(rate, Gaussian(sigma)),
        uses,
        adjacency="replace-one" if fixed else "add-remove",
    )
    assert (answer.certified <= wanted).all()
    assert (answer.certified >= 0.99 * np.array(wanted)).all()


def test_a_price_with_a_fixed_part_says_when_a_budget_is_out_of_reach() -> None:
    with pytest.raises(InputError, match=r"epsilon 0\.1 cannot be reached"):
        calibrate([Budget(0.1, 1e-5)], lambda sigma: Gaussian(fold_gaussians(sigma, 2.0)), 1)
    with pytest.raises(InputError, match="at least 1"):
        calibrate([Budget(0.1, 1e-5)], Gaussian, 0)


def test_a_price_that_jumps_gets_the_noise_above_the_jump() -> None:
    def jumping(sigma: float) -> Gaussian:
        return Gaussian(sigma if sigma > 3 else sigma / 4)

    answer = calibrate([Budget(2.0, 1e-5)], jumping, 1)
    assert answer.certified[0] <= epsilon(Gaussian(3.0), 1e-5) < 0.99 * 2.0
    assert answer.noise_multiplier[0] == pytest.approx(3.0, rel=1e-3)


def test_progress_reaches_the_end() -> None:
    seen: list[tuple[int, int]] = []
    calibrate(budgets_between(0.5, 2, 5), Gaussian, 3, progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (5, 5)


COMPANY = [Budget(value, delta) for value in (0.0713, 0.5, 0.999, 1.0, 3.3, 17.0) for delta in (1e-5, 1e-7)]


@pytest.mark.parametrize("schedule", ["fixed", "adaptive"])
def test_a_scale_does_not_depend_on_whom_it_was_calibrated_with(schedule: Schedule, tmp_path: Path) -> None:
    crowd = [*COMPANY, *budgets_between(0.07, 17, 60)]
    many = calibrate(crowd, price, 700, schedule=schedule)
    for row in range(0, len(COMPANY), 3):
        for others in ([], crowd[row + 1 : row + 5]):
            affordability._known.clear()
            few = calibrate([*others, COMPANY[row]], price, 700, schedule=schedule, directory=tmp_path)
            assert few.noise_multiplier[-1] == many.noise_multiplier[row]
            assert few.certified[-1] == many.certified[row]


def test_prices_that_differ_do_not_disturb_each_other() -> None:
    def of(records: int) -> Callable[[float], Poisson]:
        return lambda sigma: Poisson(8 / records, Gaussian(sigma))

    sizes = [200, 300, 1200, 300, 5000]
    budgets = [Budget(1.0, 1e-5), Budget(2.5, 1e-5), Budget(0.5, 1e-6), Budget(1.0, 1e-5), Budget(1.0, 1e-5)]
    together = calibrate_each(budgets, lambda sigma, row: of(sizes[row])(sigma), 300)
    for row, budget in enumerate(budgets):
        alone = calibrate([budget], of(sizes[row]), 300, accountant=None)
        assert (alone.noise_multiplier[0], alone.certified[0]) == (
            together.noise_multiplier[row],
            together.certified[row],
        )


def test_ten_thousand_budgets_are_served_at_once() -> None:
    budgets = budgets_between(1, 2, 10_000)
    asked: set[float] = set()

    def counted(sigma: float) -> Poisson:
        asked.add(sigma)
        return price(sigma)

    answer = calibrate(budgets, counted, 500)
    assert len(set(answer.noise_multiplier.tolist())) < 110
    assert len(asked) < 160  # and not two for each step of the ladder


def test_what_was_calibrated_is_not_computed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    budgets = budgets_between(1, 2, 5)
    calibrate(budgets, price, 200, directory=tmp_path)
    affordability._known.clear()
    answer = calibrate(budgets, price, 200, directory=tmp_path)
    assert sum(map(len, affordability._known.values())) == len(
        set(answer.noise_multiplier.tolist())
    )  # one ε for each, none skipped
    monkeypatch.setattr(affordability, "history_epsilon", lambda *_: pytest.fail("computed again"))
    for budget, scale in zip(budgets, answer.noise_multiplier, strict=True):
        assert affordability.fits({price(float(scale)): 199}, budget, "zero-out", "pld")


def test_no_kept_number_is_believed(tmp_path: Path) -> None:
    """A file with right names and wrong scales: too little noise, a little too little, too much, nonsense."""
    budgets = budgets_between(1, 2, 3)
    right = calibrate(budgets, price, 300, directory=tmp_path)
    (file,) = tmp_path.iterdir()
    original = file.read_text()
    content = json.loads(original)

    def forged(change: Callable[[float], Any]) -> str:
        return json.dumps(dict(content, scales=[[step, change(scale)] for step, scale in content["scales"]]))

    for bad in (
        "",
        "{",
        "[]",
        "[" * 100_000,
        original[: len(original) // 2],
        json.dumps({"scales": []}),
        json.dumps(dict(content, scales=[[0, 1], None, "x"])),
        json.dumps(dict(content, subject=dict(content["subject"], uses=1))),
        *(forged(lambda scale, by=by: scale * by) for by in (0.5, 0.99, 0.995, 1.01, 2, -1, 0, 1e300)),  # type: ignore[misc]
        forged(lambda _: math.nan),
        forged(lambda _: "1"),
        forged(lambda scale: [scale]),
        json.dumps(dict(content, scales=content["scales"][::-1][:1] + [[s, 0.3] for s, _ in content["scales"][1:]])),
    ):
        file.write_text(bad)
        affordability._known.clear()
        again = calibrate(budgets, price, 300, directory=tmp_path)
        assert (again.noise_multiplier == right.noise_multiplier).all()
        for budget, scale in zip(budgets, again.noise_multiplier, strict=True):
            history = {price(float(scale)): 300}
            known = affordability.known_epsilon(history, budget.delta, "zero-out", "pld")
            assert known == history_epsilon(history, budget.delta, "zero-out", "pld") <= budget.epsilon
        assert json.loads(file.read_text()) == content


def test_kept_files_are_private_and_links_are_not_followed(tmp_path: Path) -> None:
    folder, elsewhere = tmp_path / "cache", tmp_path / "elsewhere"
    calibrate([Budget(1.0, 1e-5)], Gaussian, 3, directory=folder)
    (file,) = folder.iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    assert folder.stat().st_mode & 0o777 == 0o700
    elsewhere.write_text(file.read_text().replace("scales", "others"))
    file.unlink()
    file.symlink_to(elsewhere)
    before = elsewhere.read_text()
    calibrate([Budget(1.0, 1e-5)], Gaussian, 3, directory=folder)
    assert elsewhere.read_text() == before
    assert not file.is_symlink()


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 10.0])
def test_adaptive_plans_fit_into_adaptive_ledgers(epsilon: float) -> None:
    budget = Budget(epsilon, 1e-5)
    answer = calibrate_each([budget], lambda sigma, _: price(sigma), 8000, schedule="adaptive")
    account = ClientAccount.opened(BudgetTerms(budget, schedule="adaptive"))
    planned = account.with_charge(price(float(answer.noise_multiplier[0])), 8000)
    assert account.affords(planned)
    assert account.spent(planned) == answer.certified[0] >= 0.99 * epsilon
    exact = calibrate([budget], price, 8000)
    assert (
        exact.noise_multiplier[0] < answer.noise_multiplier[0] < 1.13 * exact.noise_multiplier[0]
    )  # what the filter costs


@pytest.mark.parametrize("wanted", [1e-8, 1e-13, 1e-200])
def test_budgets_below_the_least_that_noise_can_cost(wanted: float) -> None:
    """At a δ of 1e-4 enough noise costs nothing at all, and hardly more noise than that costs far too little."""
    answer = calibrate([Budget(wanted, 1e-4)], lambda sigma: Poisson(1 / 60, Gaussian(sigma)), 180)
    assert answer.certified[0] <= wanted
    assert 500 < answer.noise_multiplier[0] < 2000


def test_a_cache_that_cannot_be_written_is_no_obstacle(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    answer = calibrate([Budget(1.0, 1e-5)], Gaussian, 1, directory=blocked)
    assert answer.certified[0] <= 1.0


def test_the_cache_lies_where_the_platform_wants_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("POLYEPS_CACHE", str(tmp_path / "mine"))
    assert cache.default_directory() == tmp_path / "mine"
    monkeypatch.delenv("POLYEPS_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache.default_directory() == tmp_path / "polyeps"
