"""The noise table of CMP-Fed against figures computed elsewhere."""

from __future__ import annotations

import math
from typing import Any

import pytest
from polyeps_reproductions.cmp_fed_noise import Setting, table, theorem_1_applies

from polyeps.core import Budget
from polyeps.errors import InputError

RELATIVE = 3e-4


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return table(Setting(6000, 100, 180, Budget(1.0, 1e-4)))


@pytest.mark.parametrize(
    ("account", "sigma", "enough"),
    [
        ("theorem 1 of the paper", 3.6871, ["Poisson", "fixed size"]),
        ("Poisson cohorts", 1.5134, ["Poisson"]),
        ("Poisson cohorts, Rényi", 1.6760, ["Poisson"]),
        ("Poisson cohorts, a client replaced", 2.0559, ["Poisson"]),
        ("cohorts of a fixed size", 3.2401, ["Poisson", "fixed size"]),
        ("cohorts of a fixed size, Rényi", 5.0825, ["Poisson", "fixed size"]),
        ("one release charged, Rényi", 1.1850, []),
        ("two releases, each from a cohort of its own, Rényi", 1.3921, []),
    ],
)
def test_every_account_asks_for_its_noise(found: dict[str, Any], account: str, sigma: float, enough: list[str]) -> None:
    (row,) = [row for row in found["accounts"] if row["account"] == account]
    assert row["sigma"] == pytest.approx(sigma, rel=RELATIVE)
    assert row["enough_for"] == enough


@pytest.mark.parametrize(
    ("account", "poisson", "fixed"),
    [
        ("theorem 1 of the paper", 0.253, 0.789),
        ("one release charged, Rényi", 1.829, 15.03),
        ("two releases, each from a cohort of its own, Rényi", 1.207, 9.39),
    ],
)
def test_what_it_truly_costs(found: dict[str, Any], account: str, poisson: float, fixed: float) -> None:
    (row,) = [row for row in found["accounts"] if row["account"] == account]
    assert row["true_poisson"] == pytest.approx(poisson, rel=1e-3)
    assert row["true_fixed"] == pytest.approx(fixed, rel=2e-3)
    assert row["true_if_draws_are_known"] > row["true_poisson"]


def test_a_theorem_whose_conditions_fail_is_marked(found: dict[str, Any]) -> None:
    failing = [row["account"] for row in found["accounts"] if not row["conditions_hold"]]
    assert failing == ["theorem 1 of the paper"]
    # By hand: with one client of a million, α = 2.5 and σ = 2, 1 + ⅔·4·ln(1/(10⁻⁶·2.5·5)) is about 31.
    rarely = Setting(1_000_000, 1, 180, Budget(1.0, math.exp(-0.75)))
    assert theorem_1_applies(rarely, 2.0)
    assert not theorem_1_applies(rarely, 0.8)  # σ² below 0.7


def test_dropouts(found: dict[str, Any]) -> None:
    assert [row["dropped"] for row in found["dropouts"]] == [0.05, 0.1, 0.2, 0.3]
    assert [row["true"] for row in found["dropouts"]] == pytest.approx([1.057, 1.123, 1.291, 1.529], rel=5e-4)


def test_skellam_noise(found: dict[str, Any]) -> None:
    """Elsewhere a bound for any noise was taken, which symmetric noise stays well below; never below a Gaussian's."""
    rows = [row for row in found["integers"] if row["noise"] == "skellam"]
    for row, elsewhere in zip(rows, [1.536, 1.238, 1.222], strict=True):
        assert 1.0 < row["true"] < 0.85 * elsewhere
        assert 1.676 < row["sigma"] < 1.676 * row["true"]


def test_discrete_gaussians_come_down_to_ideal_ones(found: dict[str, Any]) -> None:
    rows = [row for row in found["integers"] if row["noise"] == "discrete-gaussian"]
    assert [row["steps"] for row in rows] == [256, 1024, 4096]
    for row, dearer in zip(rows, [1.13, 1.012, 1.001], strict=True):
        assert 1.5134 < row["sigma"] < 1.5134 * dearer
        assert 0.814 < row["true"] < 0.814 * dearer**2


def test_meaningless_settings_are_refused() -> None:
    with pytest.raises(InputError, match="delta above 0"):
        Setting(6000, 100, 180, Budget(1.0, 0.0))
    with pytest.raises(InputError, match="coordinates"):
        Setting(6000, 100, 180, Budget(1.0, 1e-4), coordinates=0)
