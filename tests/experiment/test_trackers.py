"""Built-in trackers, with the real packages: what they log, that it stays here, and what they are not told."""

import json
import os
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.federations import EPSILONS, experiment

from polyeps.errors import InputError
from polyeps.experiment import config, trackers
from polyeps.experiment.outcome import Outcome, read
from polyeps.experiment.progress import Watch
from polyeps.experiment.run import resume, run

# Of the packages: mlflow's use of SQLAlchemy, wandb's temporary folders.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
ALL = ("tensorboard", "mlflow", "wandb")
PROXY = "http://127.0.0.1:9"  # where nobody listens


@pytest.fixture(scope="module")
def nowhere() -> Iterator[pytest.MonkeyPatch]:
    """No settings of the user, and no way out."""
    patch = pytest.MonkeyPatch()
    for name in [name for name in os.environ if name.startswith(("MLFLOW_", "WANDB_"))]:
        patch.delenv(name)
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        patch.setenv(name, PROXY)
    yield patch
    patch.undo()


def small(disclosed: bool = True, **changes: Any) -> config.Experiment:
    return experiment(
        ["fedavg", "fedavg (none)"], budgets={"disclosed": disclosed}, data={"own_test": 0.2}, rounds=2, **changes
    )


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory, nowhere: pytest.MonkeyPatch) -> Outcome:
    for package in ("mlflow", "tensorboard", "wandb"):
        pytest.importorskip(package, reason=f"the extra {package} is not installed")
    return run(small(), tmp_path_factory.mktemp("tracked") / "run", trackers=ALL)


def events(folder: Path) -> tuple[dict[str, list[tuple[int, float]]], str]:
    """The scalars of a TensorBoard folder, and all its texts."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder)).Reload()
    scalars = {tag: [(one.step, one.value) for one in found.Scalars(tag)] for tag in found.Tags()["scalars"]}
    texts = [one.tensor_proto.string_val[0].decode() for tag in found.Tags()["tensors"] for one in found.Tensors(tag)]
    return scalars, "\n".join(texts)


def test_tensorboard_reads_what_the_run_measured(outcome: Outcome) -> None:
    for method in ("fedavg", "fedavg (none)"):
        scalars, texts = events(outcome.folder / "tensorboard" / f"{method}-1")
        assert [step for step, _ in scalars["accuracy"]] == [1, 2]
        assert [value for _, value in scalars["accuracy"]] == pytest.approx(outcome.accuracy[method, 1])
        assert "| training.clip | 1.0 |" in texts
        assert "own accuracy" in scalars
        for client, spent in outcome.spent[method, 1].items():
            assert f"| {client} | {EPSILONS[int(client)]} | {spent} |" in texts


def test_mlflow_has_a_run_for_each_job(outcome: Outcome) -> None:
    connection = sqlite3.connect(outcome.folder / "mlflow.db")
    rows = connection.execute("SELECT name, status, run_uuid, artifact_uri FROM runs ORDER BY start_time").fetchall()
    assert [row[:2] for row in rows] == [("fedavg-1", "FINISHED"), ("fedavg (none)-1", "FINISHED")]
    for (name, _, run_id, place), (key, values) in zip(rows, outcome.accuracy.items(), strict=True):
        measured = "SELECT step, value FROM metrics WHERE run_uuid = ? AND key = 'accuracy' ORDER BY step"
        assert connection.execute(measured, (run_id,)).fetchall() == list(enumerate(values, start=1))
        asked = "SELECT value FROM params WHERE run_uuid = ? AND key = 'training.batch'"
        assert connection.execute(asked, (run_id,)).fetchall() == [(str(small().training.batch),)]
        artefacts = Path(place.removeprefix("file://"))
        assert artefacts.is_relative_to(outcome.folder)
        clients = json.loads((artefacts / "clients.json").read_text())["clients"]
        spent = {row["client"]: row["spent"] for row in clients if row["spent"] is not None}
        assert spent == outcome.spent[key]
        # A model without a guarantee is not handed on.
        assert (artefacts / f"{name}.safetensors").exists() == (name == "fedavg-1")
    connection.close()


def test_weights_and_biases_stays_offline(outcome: Outcome) -> None:
    runs = sorted((outcome.folder / "wandb").glob("offline-run-*"))
    names = json.loads((outcome.folder / "wandb.json").read_text())
    assert len(runs) == len(names) == 2
    assert {one.name.rpartition("-")[2] for one in runs} == set(names.values())
    for one in runs:
        (log,) = one.glob("*.wandb")
        content = log.read_bytes()
        assert b"accuracy" in content
        assert b"training.clip" in content
        left = {path.name for path in (one / "files").rglob("*") if path.is_file()}
        # Neither what was printed, nor the machine, nor what is installed.
        assert not left & {"output.log", "wandb-metadata.json", "requirements.txt", "diff.patch"}


def test_statistics_of_use_and_crash_reports_are_off(outcome: Outcome) -> None:
    assert outcome
    assert os.environ["MLFLOW_DISABLE_TELEMETRY"] == "true"
    assert os.environ["WANDB_ERROR_REPORTING"] == "false"
    from mlflow.telemetry import get_telemetry_client

    assert get_telemetry_client() is None


def test_undisclosed_budgets_and_figures_of_clients_are_not_told(
    tmp_path: Path, nowhere: pytest.MonkeyPatch, outcome: Outcome
) -> None:
    found = run(small(disclosed=False), tmp_path / "run", trackers=["tensorboard", "wandb"])
    scalars, texts = events(tmp_path / "run" / "tensorboard" / "fedavg-1")
    assert set(scalars) == {"accuracy", "loss"}  # and no "own accuracy"
    assert "budgets.disclosed | false" in texts
    logged = b"".join(path.read_bytes() for path in (tmp_path / "run" / "wandb").rglob("*") if path.is_file())
    assert b"accuracy" in logged
    spent = [str(value) for value in found.spent["fedavg", 1].values()]
    for figure in (*spent, "budgets.epsilon", "budgets.delta", "own accuracy", str(EPSILONS[1])):
        assert figure not in texts
    for figure in (*spent, "budgets.epsilon", "budgets.delta", "own accuracy"):
        assert figure.encode() not in logged


def test_settings_name_files_and_not_folders() -> None:
    one = trackers.TensorBoard(Path("run"))
    one.started(small().as_dict() | {"data": {"file": "/home/ada/secret/h.csv"}, "budgets": {"disclosed": True}})
    assert one.settings["data.file"] == "h.csv"
    assert "ada" not in json.dumps(one.settings)


def test_a_resumed_run_goes_on_in_the_same_runs(tmp_path: Path, nowhere: pytest.MonkeyPatch, outcome: Outcome) -> None:
    def stop(job: str, round: Any, *_: Any) -> None:
        if (job, round.number) == ("fedavg-1", 1):
            raise KeyboardInterrupt

    wanted = small().model_copy(update={"rounds": 3})
    with pytest.raises(KeyboardInterrupt):
        run(wanted, tmp_path / "run", trackers=["tensorboard", "wandb"], watch=Watch(round_done=stop))
    begun = json.loads((tmp_path / "run" / "wandb.json").read_text())
    assert list(begun) == ["fedavg-1"]
    done = resume(tmp_path / "run")
    names = json.loads((tmp_path / "run" / "wandb.json").read_text())
    assert begun.items() < names.items()
    scalars, _ = events(tmp_path / "run" / "tensorboard" / "fedavg-1")
    accuracy = done.accuracy["fedavg", 1]
    # The round in which it was stopped was written down, but nobody was told.
    assert [step for step, _ in scalars["accuracy"]] == [1, 3]
    assert [value for _, value in scalars["accuracy"]] == pytest.approx([accuracy[0], accuracy[2]])


@pytest.mark.parametrize("name", ALL)
def test_a_package_that_is_missing_is_named_before_anything_is_made(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trackers, "find_spec", lambda _: None)
    with pytest.raises(InputError, match=rf"trackers: {name} needs .*pip install 'polyeps\[{name}\]'"):
        run(small(trackers=[name]), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_name_that_is_not_known_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no tracker 'mlfow'; did you mean 'mlflow'"):
        run(small(), tmp_path / "run", trackers=["mlfow"])
    assert not (tmp_path / "run").exists()


def test_a_tracker_that_fails_loses_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise OSError("no room")

    monkeypatch.setattr(trackers.TensorBoard, "round", broken)
    with pytest.warns(RuntimeWarning, match=r"tracker TensorBoard failed \(OSError: no room\); the run goes on"):
        run(small(), tmp_path / "run", trackers=["tensorboard"])
    assert len(read(tmp_path / "run").models) == 2


def test_trackers_are_loaded_only_where_they_are_used() -> None:
    script = (
        "import sys, polyeps; polyeps.run\nassert not {'mlflow', 'wandb', 'tensorboard', 'pandas'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
