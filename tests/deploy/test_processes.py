"""A federation of real processes: SuperLink, SuperNodes and silos, with TLS and authenticated nodes, on loopback."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="needs Flower: pip install 'polyeps[flower]'")

import httpx
from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.proto.control_pb2 import ListNodesRequest
from support.real_federation import left_running, wait

from polyeps.deploy.demo import BUDGETS, DemoFederation
from polyeps.deploy.doctor import check_server, check_silo
from polyeps.deploy.flower_runtime import Endpoint, register_node, started_run
from polyeps.deploy.keys import new_node_key
from polyeps.deploy.kits import ServerTerms, server_kit
from polyeps.deploy.patient_grid import PatientGrid
from polyeps.deploy.processes import free_ports, polyeps_command, supernode_command
from polyeps.deploy.refusing_bundle import REFUSING
from polyeps.errors import InputError

pytestmark = [
    pytest.mark.processes,
    pytest.mark.filterwarnings("ignore:GitWildMatchPattern"),  # of Flower, when it builds a bundle
]
ROUNDS = 4
# A bundle that sends home every file it is asked for.
THIEVING = {
    "pyproject.toml": REFUSING["pyproject.toml"].replace(b"refusing:", b"thieving:"),
    "thieving.py": b"""
from pathlib import Path
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

server, client = ServerApp(), ClientApp()

@client.query()
def steal(message, context):
    found = {name: Path(name).read_bytes() for name in message.content["wanted"]["files"]}
    return Message(RecordDict({"loot": ConfigRecord(found)}), reply_to=message)
""",
}


@pytest.fixture
def demo(tmp_path: Path) -> Iterator[DemoFederation]:
    found = DemoFederation(tmp_path, ServerTerms(rounds=ROUNDS, enrolment=90, reply=60), {"OMP_NUM_THREADS": "1"})
    draft = found.server / "contract.toml"
    draft.write_text(draft.read_text().replace("local_steps = 10", "local_steps = 100"))
    found.sign()
    with found.processes:
        yield found
        assert left_running(tmp_path) or not Path("/proc").exists()
    assert left_running(tmp_path) == []


def test_a_federation_with_a_thief_and_a_killed_silo(demo: DemoFederation, tmp_path: Path) -> None:
    demo.start()
    default, unknown = start_default_node(demo, tmp_path), start_unknown_node(demo, tmp_path)

    # Somebody without the server's secret registers no node, and stops no run.
    outside = Endpoint(f"127.0.0.1:{demo.port}", root_certificates=demo.server / "ca.crt")
    with pytest.raises(InputError, match="did not register"):
        register_node(outside, tmp_path / "unknown" / "node.pub")
    with closing(outside.control()) as control, pytest.raises(httpx.HTTPStatusError, match="403"):
        control.ListNodes(ListNodesRequest())

    # A hostile operator of the SuperLink sends a bundle of its own to all nodes.
    wanted = [str(demo.silo(name) / file) for name in BUDGETS for file in ("records.csv", "silo.key")]
    loot, declined = steal(demo, wanted, nodes=4)
    assert list(loot) == [default]  # the control: a default SuperNode imports the bundle
    assert loot[default][wanted[0]] == (demo.silo("elm") / "records.csv").read_bytes()
    assert b"PRIVATE KEY" in loot[default][wanted[1]]
    assert declined == ["declined"] * 3
    for name in BUDGETS:
        assert refusals(demo, name) == ["the server sends no contract; this silo takes part in nothing else"]
        assert not list(demo.silo(name).rglob("*.fab"))
    demo.processes.stop("supernode-default")

    # A server that is killed after a round, and served again, continues.
    contract, address = demo.server / "contract.toml", f"127.0.0.1:{demo.port}"
    test = demo.server / "test.csv"
    command = ["serve", str(contract), "--superlink", address, "-o", str(demo.folder / "run"), "--test", str(test)]
    serving = demo.processes.start("serve", polyeps_command(*command))
    wait(lambda: "round 1 of" in demo.processes.log("serve") or serving.poll() is not None, "round 1")
    assert serving.poll() is None, demo.processes.log("serve")
    demo.processes.stop("serve", signal.SIGKILL)

    # A silo that is killed in the middle of a task and started again pays once and misses nothing.
    result: list[Any] = []
    said: list[str] = []
    server = threading.Thread(target=lambda: result.append(demo.serve(said.append)))
    server.start()
    note = demo.silo("elm") / "state" / "task"
    wait(lambda: "3 of 3 silos have enrolled" in said, "all have enrolled")
    wait(note.exists, "a task", pause=0.001)
    demo.processes.stop("silo-elm", signal.SIGKILL)
    demo.start_silo("elm")
    server.join(120)
    assert result, "the server has not finished"
    assert any(line.startswith("continuing after round") for line in said)
    assert (result[0].rounds, result[0].reason) == (ROUNDS, "all rounds were run")
    assert 0.6 < result[0].metrics["accuracy"] < 1
    accounts = demo.accounts()
    assert {name: account["charges"] for name, account in accounts.items()} == dict.fromkeys(BUDGETS, ROUNDS)
    for name, account in accounts.items():
        assert 0.9 * account["limit of a run"] < account["this run"] <= account["limit of a run"], name
        assert account["this run"] < account["spent in all"] <= account["limit in all"], name
    answered = [event for event in events(demo, "elm") if event["event"] == "answered"]
    assert {event["round"] for event in answered} == set(range(ROUNDS))

    # A node whose key is not registered was turned away.
    assert unknown.wait(30) != 0

    # The set-up is right, and with another secret or another authority it is not.
    wrong = [one.check for one in check_silo(demo.silo("fir") / "policy.toml", contract) if not one.right]
    assert wrong == []
    assert all(one.right for one in check_server(demo.server, address, contract))
    (demo.silo("fir") / "supernode.secret").write_bytes(os.urandom(32))
    wrong = [one.check for one in check_silo(demo.silo("fir") / "policy.toml") if not one.right]
    assert wrong == ["supernode"]
    server_kit(tmp_path / "other", "other", ["127.0.0.1"], {})
    wrong = [one.said for one in check_server(tmp_path / "other", address) if not one.right]
    assert len(wrong) == 1
    assert "is not signed by this ca.crt" in wrong[0]

    # Told to stop, a silo ends by itself.
    for name in BUDGETS:
        assert demo.processes.stop(f"silo-{name}") == 0
        assert "has stopped" in demo.processes.log(f"silo-{name}")


def start_default_node(demo: DemoFederation, folder: Path) -> int:
    """Start a SuperNode as Flower would have it: it runs whatever bundle it is sent."""
    (folder / "default").mkdir()
    new_node_key(folder / "default" / "node.key")
    node = register_node(demo.endpoint, folder / "default" / "node.pub")
    command = supernode_command(folder / "default", demo.server / "ca.crt", f"127.0.0.1:{demo.port}", *free_ports(1))
    place = command.index("--isolation")
    demo.processes.start("supernode-default", command[:place] + command[place + 4 :])
    return node


def start_unknown_node(demo: DemoFederation, folder: Path) -> subprocess.Popen[bytes]:
    (folder / "unknown").mkdir()
    new_node_key(folder / "unknown" / "node.key")
    command = supernode_command(folder / "unknown", demo.server / "ca.crt", f"127.0.0.1:{demo.port}", *free_ports(1))
    (folder / "unknown" / "supernode.secret").write_bytes(os.urandom(32))
    return demo.processes.start("supernode-unknown", command)


def steal(demo: DemoFederation, files: list[str], nodes: int) -> tuple[dict[int, Any], list[str]]:
    """Send the thieving bundle to all nodes; return what came back, and the words of those that gave nothing."""
    loot, words = {}, []
    with started_run(demo.endpoint, bundle=THIEVING) as grid:
        wait(lambda: len(list(grid.get_node_ids())) == nodes, f"{nodes} nodes are there")
        content = RecordDict({"wanted": ConfigRecord({"files": files})})
        asked = [Message(content, dst_node_id=n, message_type=MessageType.QUERY) for n in grid.get_node_ids()]
        for reply in PatientGrid(grid).send_and_receive(asked, timeout=60):
            if reply.has_error():
                words.append(reply.error.reason)
            else:
                loot[reply.metadata.src_node_id] = dict(reply.content["loot"])
    return loot, words


def events(demo: DemoFederation, name: str) -> list[dict[str, Any]]:
    path = demo.silo(name) / "state" / "events.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def refusals(demo: DemoFederation, name: str) -> list[str]:
    return [event["reason"] for event in events(demo, name) if event["event"] == "refused"]
