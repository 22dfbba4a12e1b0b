"""What `polyeps run` says about each client at the end, with --alone and without."""

from pathlib import Path

from support.commands import refused, run, run_json

TOML = """
rounds = 2
seeds = 2
metrics = [{metrics}]
[data]
name = "digits"
size = 40
{own}
[budgets]
epsilons = [0.5, 8.0, 9.0]
[training]
local_steps = 2
"""


def written(folder: Path, metrics: str = "", own: str = "own_test = 0.25") -> str:
    path = folder / "small.toml"
    path.write_text(TOML.format(metrics=metrics, own=own))
    return str(path)


def test_a_run_prints_figures_of_clients_and_the_largest_class(tmp_path: Path) -> None:
    said = run("run", written(tmp_path), "-o", str(tmp_path / "run")).stdout
    assert "On each client's own test records, accuracy (simulation only)" in " ".join(said.split())
    assert "Always guessing the class with most training records: " in said
    assert "Is joining" not in said


def test_alone_adds_both_methods_and_the_table(tmp_path: Path) -> None:
    file = written(tmp_path, '"auc", "confusion"')
    said = run("run", file, "--alone", "-o", str(tmp_path / "run"))
    assert "Is joining fedavg worth it? auc" in said.stdout
    found = run_json("report", str(tmp_path / "run"), "-o", str(tmp_path / "page.html"))
    assert [method["label"] for method in found["methods"]] == ["fedavg", "alone", "alone at home"]
    assert all(0 < method["majority_accuracy"] < 0.3 for method in found["methods"])
    (table,) = found["joining"]
    assert len(table["rows"]) == 3
    assert {row["against_home"]["outcome"] for row in table["rows"]} == {"unknown"}  # ten records and ten classes
    assert len(found["on_own_records"]["alone"]) == 3
    assert sum(map(sum, found["final"]["fedavg-1"]["confusion"])) == 297


def test_alone_without_own_records_compares_on_all_of_them(tmp_path: Path) -> None:
    said = run("run", written(tmp_path, own=""), "--alone", "-o", str(tmp_path / "run")).stdout
    assert "each client compared on all test records, since none belong to a client" in said
    assert "joint, own" not in said


def test_alone_is_not_for_resuming_and_metrics_are_checked_before_a_run(tmp_path: Path) -> None:
    refused("run", "--resume", str(tmp_path / "x"), "--alone", naming=("leave out", "--alone"))
    folder = tmp_path / "run"
    refused("run", written(tmp_path, '"f1"'), "-o", str(folder), naming=("f1 is for two classes", "write f1_macro"))
    refused("run", written(tmp_path, '"auk"'), "-o", str(folder), naming=("no metric 'auk'", "did you mean 'auc'"))
    assert not folder.exists()
