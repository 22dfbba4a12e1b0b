"""The example of own parts: in TOML and in Python, with calibration, ledger, journal and report, and on its pages."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from support.commands import refused, run

from polyeps.experiment.journal import Journal
from polyeps.experiment.outcome import read
from polyeps.ledger import Ledger

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "examples" / "own_parts"
PAGES = {
    "own-algorithm": "trimmed_mean.py",
    "own-encoder": "random_projection.py",
    "own-metric": "balanced_accuracy.py",
    "own-models": "small_net.py",
    "own-tracker": "best_round.py",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the run of experiment.toml."""
    folder = tmp_path_factory.mktemp("own") / "run"
    spoken = run("run", str(FOLDER / "experiment.toml"), "--trust-code", "--output", str(folder))
    assert "balanced_accuracy" in spoken.stdout
    assert "trimmed_mean-1: " in spoken.stderr  # the tracker
    return folder


def test_budgets_are_spent_and_charged(folder: Path) -> None:
    budgets = tomllib.loads((FOLDER / "experiment.toml").read_text())["budgets"]["epsilons"]
    ledger = Ledger(folder / "ledgers" / "trimmed_mean-1.db")
    for client, budget in enumerate(budgets):
        assert 0.95 * budget <= ledger.spent(str(client)) <= budget
        assert read(folder).spent["trimmed_mean", 1][str(client)] == ledger.spent(str(client))


def test_journal_and_report_have_the_metric_and_the_summary(folder: Path, tmp_path: Path) -> None:
    journal = Journal(folder / "journal.db")
    values = journal.query("SELECT value FROM metrics WHERE name = 'balanced_accuracy' AND job = 'trimmed_mean-1'")
    assert len(values) == 12
    assert 0.5 < values[-1]["value"] < 1
    assert "without the smallest and largest values" in journal.jobs()[0]["facts"]["summary"]
    assert journal.jobs()[0]["facts"]["parameters"] == 32 * 16 + 16 + 32 + 16 * 10 + 10  # encoded, and its own model
    run("report", str(folder), "--output", str(tmp_path / "page.html"))
    page = (tmp_path / "page.html").read_text()
    assert '<th scope="col">balanced_accuracy</th>' in page
    assert "trimmed_mean" in page


def test_the_same_in_python_gives_the_same_numbers(folder: Path, tmp_path: Path) -> None:
    script = str(FOLDER / "own_parts.py")
    ran = subprocess.run([sys.executable, "-W", "error", script], cwd=tmp_path, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    last = read(folder).accuracy["trimmed_mean", 1][-1]
    assert ran.stdout.splitlines()[0] == f"trimmed-mean: {last:.1%} of the test digits read correctly"
    assert list(tmp_path.iterdir()) == []
    assert list(FOLDER.glob("*.pyc")) == []


def test_an_option_changes_the_result_and_a_wrong_one_is_refused(folder: Path, tmp_path: Path) -> None:
    file = str(FOLDER / "experiment.toml")
    names = ["--set", "algorithm=[{name='trimmed_mean:trimmed_mean', trim=0.0}, {name='fedavg'}]"]
    run("run", file, "--trust-code", "--output", str(tmp_path / "untrimmed"), *names)
    models = read(tmp_path / "untrimmed").models
    torch.testing.assert_close(models["trimmed_mean", 1], models["fedavg", 1])
    assert not torch.allclose(read(folder).models["trimmed_mean", 1], models["trimmed_mean", 1])
    wrong = {"trim=0.5": "trim is 0.5; it must be", "trim='much'": "valid number", "cut=1": "algorithm.cut (of"}
    for option, said in wrong.items():
        change = f"algorithm=[{{name='trimmed_mean:trimmed_mean', {option}}}]"
        refused("run", file, "--trust-code", "--set", change, naming=(said,))


@pytest.mark.parametrize(("page", "file"), PAGES.items())
def test_the_pages_print_the_files(page: str, file: str) -> None:
    text = (ROOT / "docs" / "guides" / f"{page}.md").read_text()
    assert f"```python\n{(FOLDER / file).read_text()}```" in text
    name = f'"{Path(file).stem}:'
    assert name in text
    assert name in (FOLDER / "experiment.toml").read_text()
    assert len(text.splitlines()) <= (250 if page == "own-models" else 60)
