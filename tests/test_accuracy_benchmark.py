"""The accuracy benchmark: what names of cells stand for, and a run of it on the smallest data."""

import json
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest

from polyeps.experiment import config

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "benchmarks" / "accuracy.py"


def ran(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def test_a_cell_method_and_seed() -> None:
    found = ran("--quick", "--json", "--cells", "digits-shards-mixgauss3", "--methods", "ours,weiavg/pixels")
    assert found.returncode == 0, found.stderr
    cell = json.loads(found.stdout)["digits-shards-mixgauss3"]
    assert set(cell) == {"ours", "weiavg/pixels"}
    for result in cell.values():
        assert set(result) == {"mean", "sd", "seeds", "learning_rate", "spent", "seconds"}
        assert 0.1 < result["mean"] < 1
        assert 0.9 < result["spent"] <= 1


@pytest.fixture
def accuracy() -> ModuleType:
    """The benchmark, which is in no package."""
    spec = spec_from_file_location("accuracy", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    found = module_from_spec(spec)
    sys.modules["accuracy"] = found
    spec.loader.exec_module(found)
    return found


def test_rates_that_the_results_have_are_not_chosen_again(accuracy: ModuleType) -> None:
    stored = json.loads((accuracy.RESULTS / "accuracy.json").read_text())
    for cell, found in stored.items():
        for method, result in found.items():
            assert accuracy.chosen_before(cell, method, "accuracy.json") == (result["learning_rate"],)
    assert accuracy.chosen_before("mnist-shards3-mixgauss1", "ours", "accuracy.json") == ()


def test_a_rate_is_searched_for_uphill_from_the_middle(accuracy: ModuleType) -> None:
    rates = [0.05, 0.15, 0.5, 1.5, 3.0, 6.0, 12.0]
    for best in rates:
        asked: list[float] = []

        def height(rate: float, best: float = best, asked: list[float] = asked) -> float:
            asked.append(rate)
            return -abs(rate - best)

        assert accuracy.best_of(rates, height) == best
        assert len(asked) == len(set(asked)) <= 5, "no rate is tried twice, nor are all"


def test_cells_of_other_numbers(accuracy: ModuleType) -> None:
    """Names beside the seven, each as far as validation of its experiment."""
    wanted: dict[str, tuple[str, int, dict[str, str | float]]] = {
        "mnist-shards2-mixgauss1": ("mnist", 50, {"partition": "shards", "shards_per_client": 2}),
        "fashion-two-labels-mixgauss2": ("fashion-mnist", 10, {"partition": "labels", "labels_per_client": 2}),
        "mnist-3-labels-gauss": ("mnist", 10, {"partition": "labels", "labels_per_client": 3}),
        "adult-mixgauss3": ("adult", 50, {"partition": "iid"}),
        "adult-dirichlet0.5-uniform1": ("adult", 50, {"partition": "dirichlet", "alpha": 0.5}),
    }
    for cell, (data, clients, partition) in wanted.items():
        found = accuracy.Recipe().experiment(cell, "ours", 1.0)
        assert found["data"] == {"name": data, "clients": clients, **partition}
        assert config.experiment(found | {"seeds": [1]}).data.clients == clients


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--cells", "mnist-shares-mixgauss1"], "is not DATA-PARTITION-BUDGETS"),
        (["--methods", "best"], "there is no method 'best'; choose from fedavg,"),
        (["--cells", "digits-iid-mixgauss9", "--methods", "ours", "--quick"], "mixgauss9"),
    ],
)
def test_wrong_names_are_said_in_a_sentence(arguments: list[str], said: str) -> None:
    found = ran(*arguments)
    assert found.returncode
    assert said in found.stderr
    assert "Traceback" not in found.stderr
