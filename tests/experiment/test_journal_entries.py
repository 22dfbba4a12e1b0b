"""What a journal is told about a method: what it does with its options, and whose budgets it spends."""

import inspect
from pathlib import Path
from typing import Any

import pytest
from support.federations import experiment, job_of

from polyeps.algorithms import ALGORITHMS
from polyeps.experiment.journal_entries import _OTHERWISE, facts

SECRET = {"kind": "poisson", "share": 0.8}
EQUAL = {"epsilons": None, "epsilon": 4.0}


def told(method: dict[str, Any], **changes: Any) -> dict[str, Any]:
    wanted = experiment(method, **changes)
    return facts(job_of(wanted), wanted)


@pytest.mark.parametrize(
    ("method", "words"),
    [
        ({"name": "cmp-fed"}, "two thin factors"),
        ({"name": "cmp-fed", "directions": "model"}, "directions of the public model"),
        ({"name": "dp-randagg", "rank": 1}, "random coordinates"),
        ({"name": "dp-randagg", "rank": 0}, "DP-FedAvg"),
        ({"name": "fedhdp"}, "personal models"),
    ],
)
def test_a_summary_says_what_the_options_do(method: dict[str, Any], words: str) -> None:
    assert words in told(method, participation=SECRET, model={"name": "mlp", "hidden": [8]})["summary"]


def test_a_budget_of_a_controls_own_is_named() -> None:
    assert "ε = 0.25" in told({"name": "fedavg (minimum)", "epsilon": 0.25})["summary"]


@pytest.mark.parametrize(("name", "option", "value"), _OTHERWISE)
def test_options_that_change_a_summary_exist(name: str, option: str, value: Any) -> None:
    default = inspect.signature(ALGORITHMS[name].build).parameters[option].default
    assert type(default) is type(value)
    assert default != value


@pytest.mark.parametrize("whose", ["minimum", "maximum"])
def test_one_budget_for_all_is_everybodys_own(whose: str, tmp_path: Path) -> None:
    name = f"fedavg ({whose})"
    assert told({"name": name}, budgets=EQUAL)["budgets"] == "own"
    assert told({"name": name})["budgets"] == whose
    assert told({"name": name, "epsilon": 3.5}, budgets=EQUAL)["budgets"] == whose
    lines = "".join(f"{client},4,{1e-3 if client else 1e-4}\n" for client in range(6))
    (tmp_path / "budgets.csv").write_text(f"client,epsilon,delta\n{lines}")
    unlike = {"epsilons": None, "file": tmp_path / "budgets.csv"}
    assert told({"name": name}, budgets=unlike)["budgets"] == whose  # δ is a part of a budget
