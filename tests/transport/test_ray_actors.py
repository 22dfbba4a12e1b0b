"""Shards as actors of a Ray cluster: two nodes on this machine do what one process does, also when an actor is lost."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from polyeps.errors import InputError
from polyeps.experiment import config
from polyeps.experiment.run import run
from polyeps.experiment.shards import Sharding
from polyeps.ledger import Ledger
from polyeps.transport.ray_actors import OnRay
from polyeps.transport.sharded import ShardWork

ray = pytest.importorskip("ray", reason="the extra ray is not installed")
pytestmark = pytest.mark.filterwarnings("ignore")  # Ray's own, of files and processes that it leaves to the collector


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a cluster of two nodes of one core."""
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    # Actors import what this process does, wherever it was imported from.
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(Path(__file__).parents[2] / "src"), os.environ.get("PYTHONPATH", "")])
    )
    node: dict[str, Any] = {"num_cpus": 1, "object_store_memory": 80 << 20}
    nodes = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
    nodes.add_node(**node)
    try:
        yield nodes.address
    finally:
        ray.shutdown()
        nodes.shutdown()


def test_two_nodes_do_what_one_process_does_and_a_lost_actor_changes_nothing(
    cluster: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes: set[str] = set()
    killed: list[int] = []
    send = OnRay.send

    def deadly(self: OnRay, piece: ShardWork) -> None:
        nodes.add(ray.get(self.actor.node.remote()))
        send(self, piece)
        if piece.round == 1 and not killed:
            killed.append(piece.round)
            ray.kill(self.actor)

    wanted: dict[str, Any] = {
        "rounds": 3,
        "budgets": {"epsilons": [0.5, 1.0, 4.0, 8.0], "delta": 1e-4},
        "training": {"batch": 8, "local_steps": 2, "learning_rate": 0.1},
        "algorithm": [{"name": "weiavg"}],
    }
    whole = run(config.Experiment(**wanted), tmp_path / "whole")
    monkeypatch.setattr(OnRay, "send", deadly)
    parts = run(config.Experiment(**wanted), tmp_path / "parts", sharding=Sharding(2, cluster))
    assert killed
    assert len(nodes) == 2
    for key, model in whole.models.items():
        assert torch.equal(parts.models[key], model)
    first, second = (Ledger(tmp_path / folder / "ledgers" / "weiavg-1.db") for folder in ("whole", "parts"))
    assert {client: first.spent(client) for client in first.clients} == {
        client: second.spent(client) for client in second.clients
    }
    assert {second.account(client).charges for client in second.clients} == {3}


def test_a_cluster_that_is_not_there_is_said() -> None:
    with pytest.raises(InputError, match="no such cluster can be joined"):
        OnRay(dict, "no-such-address", cuda=False)  # type: ignore[arg-type]
