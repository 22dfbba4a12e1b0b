"""Shards: results and ledgers do not depend on how many there are, on where they are, or on whether one is lost."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from polyeps.errors import InputError, ShardLost
from polyeps.experiment import config, shards
from polyeps.experiment.registry import BUILT_IN, Parts
from polyeps.experiment.run import run
from polyeps.experiment.shards import Recipe, Sharding
from polyeps.ledger import Ledger
from polyeps.transport import sharded
from polyeps.transport.sharded import Host, InOtherProcess, InProcess, ShardWork, WorkerLost, even_edges

BUDGETS = [0.5, 1.0, 2.0, 4.0, 8.0, 8.5, 9.0]
TRAINING = {"batch": 8, "local_steps": 2, "learning_rate": 0.1}
METHODS: dict[str, dict[str, Any]] = {
    "weiavg": {},
    "pfa-plus": {},  # two actions a round
    "dp-scaffold": {},  # memory between rounds
    "dp-randagg": {},  # a secure sum
    "fedsel": {},
}


def experiment(name: str = "weiavg", rounds: int = 3, **others: Any) -> config.Experiment:
    method = {"name": name, **METHODS.get(name, {})}
    given = {"rounds": rounds, "budgets": {"epsilons": BUDGETS, "delta": 1e-4}, "training": TRAINING, **others}
    return config.Experiment(**given, algorithm=[method])


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers live in this process."""
    monkeypatch.setattr(shards, "InOtherProcess", lambda recipe, _threads: InProcess(recipe))


PROJECTED = {"pfa-plus", "dp-randagg"}  # their clients' updates are projected together, and rounded


def accounts(folder: Path, *, digests: bool = True) -> dict[str, Any]:
    (path,) = (folder / "ledgers").glob("*.db")
    ledger = Ledger(path)
    rows = [(row.kind, row.content) for row in ledger.rows() if row.kind != "opened"]
    for _, content in () if digests else rows:  # a purpose is run/round/action/digest of the model
        content["purpose"] = content.get("purpose", "").rpartition("/")[0]
    return {"rows": rows, "spent": {client: ledger.spent(client) for client in ledger.clients}}


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("name", METHODS)
def test_any_number_of_shards_gives_the_same_model_and_ledger(name: str, tmp_path: Path) -> None:
    wanted = experiment(name)
    whole = run(wanted, tmp_path / "0")
    for count in (1, 2, 4, 7):
        parts = run(wanted, tmp_path / str(count), sharding=Sharding(count))
        exact = name not in PROJECTED
        for key, model in whole.models.items():
            assert torch.allclose(parts.models[key], model, rtol=0, atol=0 if exact else 1e-6)
        assert accounts(tmp_path / str(count), digests=exact) == accounts(tmp_path / "0", digests=exact)


def test_processes_do_the_same_and_a_lost_one_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    started: list[InOtherProcess] = []

    class Mortal(InOtherProcess):
        """Its process is killed right after it was given the work of round 1, once."""

        def __init__(self, recipe: Recipe, threads: int) -> None:
            super().__init__(recipe, threads)
            started.append(self)

        def send(self, piece: ShardWork) -> None:
            super().send(piece)
            if piece.round == 1 and len(started) == 2 and self is started[1]:
                os.kill(self.process.pid, signal.SIGKILL)

    monkeypatch.setattr(shards, "InOtherProcess", Mortal)
    whole = run(experiment(), tmp_path / "whole")
    parts = run(experiment(), tmp_path / "parts", sharding=Sharding(2))
    assert len(started) == 3
    assert "the worker of shard 1 is lost" in caplog.text
    assert all(host.process.poll() is not None for host in started)
    for key, model in whole.models.items():
        assert torch.equal(parts.models[key], model)
    assert accounts(tmp_path / "parts") == accounts(tmp_path / "whole")


class _Dying:
    """A worker that never answers."""

    def send(self, piece: ShardWork) -> None: ...

    def receive(self) -> Any:
        raise WorkerLost("killed for memory")

    def close(self) -> None: ...


def test_a_worker_that_dies_again_and_again_ends_the_run_which_can_be_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from polyeps.experiment.run import resume

    monkeypatch.setattr(shards, "InOtherProcess", lambda *_: _Dying())
    with pytest.raises(ShardLost, match="3 times in round 0"):
        run(experiment(), tmp_path / "a", sharding=Sharding(2))
    monkeypatch.setattr(shards, "InOtherProcess", lambda recipe, _: InProcess(recipe))
    resumed = resume(tmp_path / "a", sharding=Sharding(3))
    whole = run(experiment(), tmp_path / "b")
    assert resumed.models.keys() == whole.models.keys()
    for key, model in whole.models.items():
        assert torch.equal(resumed.models[key], model)
    assert accounts(tmp_path / "a") == accounts(tmp_path / "b")


def test_a_worker_with_other_records_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its clients would train on records that the ledger's prices do not describe."""
    table = tmp_path / "t.csv"

    def write(value: int) -> None:
        rows = (f"{client},{(place * 7 + value) % 10},{place % 2}" for client in "ab" for place in range(40))
        table.write_text("client,x,label\n" + "\n".join(rows) + "\n")

    def late(recipe: Recipe, _threads: int) -> Host:
        write(1)
        return InProcess(recipe)

    monkeypatch.setattr(shards, "InOtherProcess", late)
    write(0)
    data = {"file": table, "columns": {"x": {"range": [0, 10]}}}
    wanted = experiment(data=data, budgets={"epsilon": {"a": 1.0, "b": 2.0}, "delta": 1e-4})
    with pytest.raises(InputError, match="other records or clients"):
        run(wanted, tmp_path / "run", sharding=Sharding(2))


def test_a_workers_own_error_is_raised_here() -> None:
    host = InOtherProcess(partial(even_edges, 7, 8))  # type: ignore[arg-type]
    try:
        host.send(None)  # type: ignore[arg-type]
        with pytest.raises(InputError, match="--shards is 8"):
            host.receive()
    finally:
        host.close()


def test_numbers_of_shards_that_cannot_be() -> None:
    for count in (-1, 8):
        with pytest.raises(InputError, match="--shards is"):
            even_edges(7, count)
    with pytest.raises(InputError, match="--shards is 0"):
        Sharding(0, "local")
    assert even_edges(7, 3).tolist() == [0, 2, 4, 7]


def test_parts_given_as_objects_stay_where_they_are() -> None:
    parts = Parts(algorithms={"mine": lambda: None})  # type: ignore[dict-item, return-value]
    with pytest.raises(InputError, match="algorithms given as Python objects"):
        shards.start_shards(None, None, Sharding(2), "cpu", parts)  # type: ignore[arg-type]
    assert not BUILT_IN.names


def test_sums_cross_as_one_row_a_shard(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    sent: list[int] = []
    row_of_sums = sharded.row_of_sums

    def noted(payload: Any) -> Any:
        found = row_of_sums(payload)
        sent.extend(len(tensor) for tensor in found.values())
        return found

    monkeypatch.setattr(sharded, "row_of_sums", noted)
    monkeypatch.setattr(shards, "InOtherProcess", lambda recipe, _: InProcess(recipe))
    run(experiment("dp-randagg"), tmp_path / "run", sharding=Sharding(2))
    assert sent
    assert set(sent) == {1}
