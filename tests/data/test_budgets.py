from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyeps.data.budgets import DISTRIBUTIONS, LOWEST, draw_budgets, read_budgets
from polyeps.errors import InputError


@given(name=st.sampled_from(sorted(DISTRIBUTIONS)), clients=st.integers(1, 60), seed=st.integers(0, 2**32 - 1))
def test_draws_are_positive_and_repeatable(name: str, clients: int, seed: int) -> None:
    one = draw_budgets(name, clients, np.random.default_rng(seed))
    two = draw_budgets(name, clients, np.random.default_rng(seed))
    assert (one.epsilons == two.epsilons).all()
    assert len(one.epsilons) == clients
    assert (one.epsilons >= LOWEST).all()


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("mixgauss1", [(0.9, 0.1, 0.01), (0.1, 10, 0.1)]),
        ("mixgauss2", [(0.9, 0.5, 0.01), (0.1, 10, 0.1)]),
        ("mixgauss3", [(0.9, 1, 0.1), (0.1, 10, 0.1)]),
        ("mixgauss4", [(0.5, 0.1, 0.01), (0.4, 1, 0.1), (0.1, 10, 1)]),
        ("pdp-fl-mixgauss2", [(0.9, 1, 0.1), (0.1, 10, 0.1)]),
        ("pdp-fl-mixgauss3", [(0.5, 0.1, 0.01), (0.4, 1, 0.1), (0.1, 10, 0.1)]),
        ("pfa-code-mixgauss1", [(0.9, 0.5, 0.01), (0.1, 10, 0.1)]),
        ("pfa-code-mixgauss2", [(0.9, 1, 0.1), (0.1, 10, 1)]),
        ("pfa-code-mixgauss3", [(0.9, 0.1, 0.01), (0.1, 10, 0.1)]),
    ],
)
def test_mixtures_have_the_printed_parts(name: str, parts: list[tuple[float, float, float]]) -> None:
    drawn = draw_budgets(name, 40_000, np.random.default_rng(5)).epsilons
    edges = [0.0, *(np.sqrt(a[1] * b[1]) for a, b in pairwise(parts)), np.inf]
    for (weight, mean, deviation), low, high in zip(parts, edges[:-1], edges[1:], strict=True):
        part = drawn[(drawn >= low) & (drawn < high)]
        assert len(part) / 40_000 == pytest.approx(weight, abs=0.02)
        assert part.mean() == pytest.approx(mean, rel=0.02)
        assert part.std() == pytest.approx(deviation, rel=0.1)


def test_simple_distributions() -> None:
    rng = np.random.default_rng(5)
    uniform = draw_budgets("uniform", 20_000, rng).epsilons
    assert (uniform.min(), uniform.max()) == pytest.approx((1, 10), abs=0.01)
    assert draw_budgets("gauss", 20_000, rng).epsilons.mean() == pytest.approx(3, abs=0.03)
    pareto = draw_budgets("pareto", 20_000, rng).epsilons
    assert pareto.min() == pytest.approx(0.5, abs=0.01)
    assert np.median(pareto) == pytest.approx(1.0, abs=0.03)


def test_raised_draws_are_counted() -> None:
    drawn = draw_budgets("gauss", 50_000, np.random.default_rng(0))
    assert 30 < drawn.raised < 120  # 0.135 % below zero
    assert f"{drawn.raised} of 50000" in str(drawn.warning)
    assert draw_budgets("uniform", 10, np.random.default_rng(0)).warning is None


def test_the_reference_code_draws_until_some_epsilon_is_high() -> None:
    for seed in range(20):
        assert draw_budgets("pfa-code-mixgauss3", 5, np.random.default_rng(seed)).epsilons.max() > 1


def test_bad_names_and_numbers_are_refused() -> None:
    with pytest.raises(InputError, match="mixgauss9"):
        draw_budgets("mixgauss9", 5, np.random.default_rng(0))
    with pytest.raises(InputError, match="at least 1"):
        draw_budgets("gauss", 0, np.random.default_rng(0))


def test_files_are_read_with_their_own_columns(tmp_path: Path) -> None:
    file = tmp_path / "budgets.csv"
    file.write_text("client,epsilon,delta,records\nward a,1.5,1e-6,300\nward b,0.2,,\n", encoding="utf-8")
    a, b = read_budgets(file, 1e-5)
    assert (a.client, a.budget.epsilon, a.budget.delta, a.records) == ("ward a", 1.5, 1e-6, 300)
    assert (b.client, b.budget.epsilon, b.budget.delta, b.records) == ("ward b", 0.2, 1e-5, None)
    file.write_text("\ufeffclient; epsilon\nward a;1.5\n", encoding="utf-8")  # as spreadsheets write it
    assert [(row.client, row.budget.epsilon) for row in read_budgets(file, 1e-5)] == [("ward a", 1.5)]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "client"),
        ("client,budget\na,1\n", "epsilon"),
        ("client,epsilon\n", "no clients"),
        ("client,epsilon\na,0\n", "client 'a'"),
        ("client,epsilon\na,nan\n", "client 'a'"),
        ("client,epsilon\na,lots\n", "client 'a'"),
        (
            "client;epsilon\na;0,5\n",
            "client 'a' in .*: epsilon is '0,5'; it must be a number, with a point for decimals",
        ),
        ("client,epsilon\na,1\na,2\n", "twice"),
        ("client,epsilon\n,1\n", "line 2"),
        ("client,epsilon,records\na,1,many\n", "client 'a'"),
    ],
)
def test_bad_files_are_refused_naming_the_place(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "budgets.csv"
    file.write_text(text)
    with pytest.raises(InputError, match=words):
        read_budgets(file, 1e-5)


def test_unreadable_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        read_budgets(tmp_path / "absent.csv", 1e-5)
    binary = tmp_path / "binary.csv"
    binary.write_bytes(b"\xff\xfe\x00client")
    with pytest.raises(InputError):
        read_budgets(binary, 1e-5)
    missing = tmp_path / "delta.csv"
    missing.write_text("client,epsilon\na,1\n")
    with pytest.raises(InputError, match="no delta"):
        read_budgets(missing, None)
