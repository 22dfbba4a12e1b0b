"""Names on a grid of nodes: a name stays with the node that bore it first, and no liar ends a run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from flwr.app import Context
from support.federations import LocalGrid, experiment, job_of, ledger_of

from polyeps.participation import Participation
from polyeps.server import Round, serve
from polyeps.transport.flower import OnFlower
from polyeps.transport.flower_client import client_app

EVERYBODY = list("012345")


class Grid(LocalGrid):
    """Nodes that go away and come back; those in `keys` show a key of their own in place of their client's."""

    def __init__(self, folder: Path, seats: bool = False) -> None:
        job = job_of(experiment("fedavg"))
        self.job, self.away, self.keys = job, set[int](), dict[int, Ed25519PrivateKey]()
        super().__init__(job.clients(ledger_of(job, folder / "a.db")), job, folder / "seats" if seats else None)

        def seat(context: Context) -> Any:
            own = self.seats[self.nodes[context.node_id].ids[0]]
            return replace(own, identity=self.keys.get(context.node_id, own.identity))

        self.app = client_app(
            lambda context: (self.nodes[context.node_id], job.algorithm, job.discloses),
            seat if seats else None,
            rehearsal=True,
        )

    def get_node_ids(self) -> list[int]:
        return [node for node in self.nodes if node not in self.away]

    def claim(self, node: int, client: str, *, key: bool = True) -> None:
        """Connect a node that calls itself by a client's name, with that client's key or another."""
        self.nodes[node] = self.nodes[100 + int(client)]
        self.keys |= {} if key else {node: Ed25519PrivateKey.generate()}


def names(faces: Any) -> list[str]:
    return [face.id for face in faces]


@pytest.mark.parametrize("liars", [(900,), (1,), (1, 900, 901)])  # of lower and of higher numbers than the owner's
@pytest.mark.parametrize("seats", [False, True])
def test_a_name_that_two_nodes_claim_at_the_start_is_nobodys(
    seats: bool, liars: tuple[int, ...], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    grid = Grid(tmp_path, seats)
    for liar in liars:
        grid.claim(liar, "2")
    transport = OnFlower(grid, rehearsal=True)
    assert names(transport.profiles()) == list("01345")
    assert "claim the name of client '2', and are left out" in caplog.text
    assert names(transport.newcomers()) == []
    grid.away = set(liars)
    assert names(transport.newcomers()) == ["2"]
    assert transport._nodes["2"] == 102


def test_a_liar_does_not_end_a_run(tmp_path: Path) -> None:
    grid = Grid(tmp_path)
    grid.claim(900, "2")
    grid.claim(901, "4")
    job, seen = grid.job, list[Round]()
    serve(
        job.algorithm,
        OnFlower(grid, rehearsal=True),
        job.state,
        rounds=2,
        participation=Participation(),
        seed=5,
        observe=lambda round, _: seen.append(round),
    )
    assert [set(round.traffic) for round in seen] == [set("0135")] * 2


def test_who_had_the_name_before_keeps_it(tmp_path: Path) -> None:
    grid = Grid(tmp_path)
    transport = OnFlower(grid, rehearsal=True)
    assert names(transport.profiles()) == EVERYBODY
    grid.claim(1, "2")
    grid.claim(900, "2")
    assert names(transport.newcomers()) == []
    assert names(transport.profiles()) == EVERYBODY
    assert transport._nodes["2"] == 102


@pytest.mark.parametrize("seats", [False, True])
def test_the_first_node_has_its_name_back(seats: bool, tmp_path: Path) -> None:
    grid = Grid(tmp_path, seats)
    transport = OnFlower(grid, rehearsal=True)
    transport.profiles()
    grid.away = {102}
    grid.claim(900, "2")  # a SuperNode that was restarted, or a liar: without a key nobody can tell
    assert names(transport.newcomers()) == ["2"]
    assert transport._nodes["2"] == 900
    grid.claim(901, "2")
    assert names(transport.newcomers()) == []
    assert names(transport.profiles()) == EVERYBODY
    assert transport._nodes["2"] == 900
    grid.away = set()
    assert names(transport.newcomers()) == ["2"]
    assert transport._nodes["2"] == 102
    assert names(transport.newcomers()) == []
    assert transport._nodes["2"] == 102


@pytest.mark.parametrize("client", ["0", "5"])
def test_nobody_with_another_key_takes_a_name(client: str, tmp_path: Path) -> None:
    grid = Grid(tmp_path, seats=True)
    transport = OnFlower(grid, rehearsal=True)
    transport.profiles()
    owner = 100 + int(client)
    grid.away = {owner}
    grid.claim(900, client, key=False)
    assert names(transport.newcomers()) == []
    assert transport._nodes[client] == owner
    grid.claim(901, client)  # the owner, under another number
    assert names(transport.newcomers()) == [client]
    assert transport._nodes[client] == 901
    assert transport._identities[client] == grid.seats[client].public
