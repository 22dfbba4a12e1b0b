"""The accounts of CMP-Fed's noise against figures computed elsewhere."""

from __future__ import annotations

import math
from typing import Any

import pytest
from polyeps_reproductions.cmp_fed_noise import accounts, dropouts, integers, theorem_1, theorem_1_applies

from polyeps.core import Budget

RELATIVE = 3e-4


@pytest.fixture(scope="module")
def found() -> dict[str, list[Any]]:
    return {row[0]: row[1:] for row in accounts([], False).rows}


@pytest.mark.parametrize(
    ("account", "sigma", "enough"),
    [
        ("theorem 1 of the paper", 3.6871, "Poisson and fixed size"),
        ("Poisson cohorts", 1.5134, "Poisson"),
        ("Poisson cohorts, Rényi", 1.6760, "Poisson"),
        ("Poisson cohorts, a client replaced", 2.0559, "Poisson"),
        ("cohorts of a fixed size", 3.2401, "Poisson and fixed size"),
        ("cohorts of a fixed size, Rényi", 5.0825, "Poisson and fixed size"),
        ("one release charged, Rényi", 1.1850, "neither"),
        ("two releases, each from a cohort of its own, Rényi", 1.3921, "neither"),
    ],
)
def test_every_account_asks_for_its_noise(found: dict[str, list[Any]], account: str, sigma: float, enough: str) -> None:
    assert float(found[account][0]) == pytest.approx(sigma, rel=RELATIVE)
    assert found[account][-1].removesuffix(", but its conditions fail") == enough


@pytest.mark.parametrize(
    ("account", "poisson", "fixed"),
    [
        ("theorem 1 of the paper", 0.253, 0.789),
        ("one release charged, Rényi", 1.829, 15.03),
        ("two releases, each from a cohort of its own, Rényi", 1.207, 9.39),
    ],
)
def test_certified_prices(found: dict[str, list[Any]], account: str, poisson: float, fixed: float) -> None:
    _, true_poisson, true_fixed, known = map(float, found[account][:4])
    assert true_poisson == pytest.approx(poisson, rel=1e-3)
    assert true_fixed == pytest.approx(fixed, rel=2e-3)
    assert known > true_poisson


def test_a_theorem_whose_conditions_fail_is_marked(found: dict[str, list[Any]]) -> None:
    assert [name for name, row in found.items() if "conditions fail" in row[-1]] == ["theorem 1 of the paper"]
    assert not theorem_1_applies(theorem_1())
    # By hand: with one client of a million, α = 2.5 and σ = 2, 1 + ⅔·4·ln(1/(10⁻⁶·2.5·5)) is about 31.
    rarely = (1e-6, Budget(1.0, math.exp(-0.75)))
    assert theorem_1_applies(2.0, *rarely)
    assert not theorem_1_applies(0.8, *rarely)  # σ² below 0.7


def test_dropouts() -> None:
    rows = dropouts([], False).rows
    assert [row[0] for row in rows] == ["5 %", "10 %", "20 %", "30 %"]
    assert [float(row[1]) for row in rows] == pytest.approx([1.057, 1.123, 1.291, 1.529], rel=5e-4)


def test_noise_on_integers() -> None:
    """Elsewhere a bound for any noise was taken, which symmetric noise stays well below; never below a Gaussian's."""
    rows = [(noise, steps, float(true), float(sigma)) for noise, steps, true, sigma in integers([], False).rows]
    for (noise, _, true, sigma), elsewhere in zip(rows[:3], [1.536, 1.238, 1.222], strict=True):
        assert noise == "skellam"
        assert 1.0 < true < 0.85 * elsewhere
        assert 1.676 < sigma < 1.676 * true
    assert [row[:2] for row in rows[3:]] == [("discrete-gaussian", steps) for steps in (256, 1024, 4096)]
    for (_, _, true, sigma), more in zip(rows[3:], [1.13, 1.012, 1.001], strict=True):
        assert 1.5134 < sigma < 1.5134 * more  # they come down to ideal Gaussians
        assert 0.814 <= true < 0.814 * more**2
