"""The accuracy benchmark: what names of cells stand for, and a run of it on the smallest data."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

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
