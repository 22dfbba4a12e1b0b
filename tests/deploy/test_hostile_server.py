"""A hostile server against a real silo, over Flower's protocol: all is declined and logged, and memory is bounded."""

from __future__ import annotations

import gzip
import json
import math
import signal
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("flwr", reason="needs Flower: pip install 'polyeps[flower]'")

from flwr.app import Array, ArrayRecord, Message, MessageType
from support.hostile_supernode import HostileSuperNode, Raw, endless
from support.real_federation import wait
from support.silos import Sites, enrolling, tasking

from polyeps.deploy.contract import SignedContract
from polyeps.deploy.keys import new_key, public_of
from polyeps.deploy.processes import Processes, polyeps_command
from polyeps.ledger import Ledger

pytestmark = pytest.mark.processes
ROUNDS, SIZE, BOUND = 3, 6, 1_000_000
GIB = 1 << 30


def model(value: float = 0.0) -> dict[str, torch.Tensor]:
    return {"model": torch.full((SIZE,), value)}


def released(reply: Message) -> bool:
    """Return whether a reply holds anything but the word that nothing is answered."""
    if reply.has_error():
        assert reply.error.reason == "declined"
        return False
    if "profile" in reply.content:
        return True
    if not reply.content["reply"]["answered"]:
        assert list(reply.content) == ["reply"]
        return False
    return True


def demands(run: str) -> Iterator[Message]:
    """Other clips, other noise, lying counts, sums in plain, values that are no numbers, other runs and actions."""
    flat = torch.zeros(SIZE)
    for name, value in [
        *(("clip", 100.0), ("noise_multiplier", 0.0), ("noise", 0.0), ("rate", 1.0), ("epsilon", 100.0)),
        *(("honest", 1e18), ("records", 1.0), ("drawn", 1.0), ("least", 0.0), ("learning_rate", 1e9)),
    ]:
        yield tasking(run, {"model": flat, name: torch.tensor(value)})
    for bad in (math.nan, math.inf, 1e30):
        yield tasking(run, {"model": torch.full((SIZE,), bad)})
    for shape in ((SIZE + 1,), (1, SIZE), (0,), (), (50_000,)):
        yield tasking(run, {"model": torch.zeros(shape)})
    for dtype in (torch.float64, torch.int32, torch.bool):
        yield tasking(run, {"model": flat.to(dtype)})
    for action in ("embed", "subspace", "enter", "report", "project", "evaluate", "", "__init__"):
        yield tasking(run, model(), action=action)
    forged = tasking(run, model())
    forged.content["payload"] = ArrayRecord(
        {"model": Array("float32", (SIZE,), "a\n2026-01-01 agreed\x1b[2J" + "x" * 500_000, b"")}
    )
    yield forged
    for bits in (1, 63, 2**40):
        yield tasking(run, model(), bits=bits)
    for round in (-1, 2**62, "0"):
        yield tasking(run, model(), round)
    for other in ("", "another", run[:-1], "../../silo.key"):
        yield tasking(other, model())


def contracts(sites: Sites) -> Iterator[bytes]:
    """Unsigned, altered, of somebody unknown, with other terms than the policy allows."""
    signed = sites.signed(name="other")
    stranger = new_key(sites.folder / "stranger.key")
    theirs = signed.contract.model_copy(update={"signer": public_of(stranger)})
    yield signed.contract.canonical
    yield SignedContract(signed.contract, b"\0" * 64).encode()
    yield signed.encode().replace(b'"clip":1.0', b'"clip":9.0')
    yield SignedContract.sign(theirs, stranger).encode()
    yield sites.signed(rounds=1000).encode()
    yield sites.signed(rehearsal=1).encode()
    yield sites.signed(training={"clip": 1e9}).encode()
    yield sites.signed(silos={"aspen": public_of(stranger)}).encode()
    yield b"\n" * 2_000_000  # more than a message may have


def packed(handler: Any) -> None:
    """A GiB of zeros that calls itself compressed."""
    one = gzip.compress(b"\0" * (1 << 24))
    endless(0, one * 64, Content_Encoding="gzip")(handler)


def elsewhere(handler: Any) -> None:
    handler.send_response(307)
    handler.send_header("Location", f"http://{handler.headers['Host']}/v1/runtime/stolen")
    handler.send_header("Content-Length", "0")
    handler.end_headers()


def most_memory(pid: int) -> int:
    """Return the most bytes of memory that a process has had."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) << 10


def test_a_hostile_server_gets_what_was_agreed_and_nothing_else(tmp_path: Path) -> None:
    sites = Sites(tmp_path)
    (tmp_path / "aspen" / "supernode.secret").write_bytes(b"x" * 32)
    with HostileSuperNode().listening() as node, Processes(tmp_path, {"OMP_NUM_THREADS": "1"}) as processes:
        limits = {"message_bytes": BOUND, "training": {"clip": [0.01, 10.0]}}
        sites.write_policy("aspen", supernode={"address": node.address}, limits=limits)
        process = processes.start("silo", polyeps_command("silo", "--policy", str(tmp_path / "aspen" / "policy.toml")))
        wait(lambda: "is ready" in processes.log("silo") or process.poll() is not None, "the silo is ready")

        signed = sites.signed(rounds=ROUNDS)
        run = signed.contract.run
        assert not released(node.ask(tasking(run, model())))  # nothing was agreed yet
        assert released(node.ask(enrolling(signed.encode())))
        bad = [*map(enrolling, contracts(sites)), *demands(run)]
        for message, reply in zip(bad, node.ask_all(bad), strict=True):
            assert not released(reply), message.content
        assert charges(sites) == 0

        first, again = node.ask_all([tasking(run, model())] * 2)
        assert released(first)
        assert first.content["payload"]["update"].data == again.content["payload"]["update"].data
        assert charges(sites) == 1  # a replay brings the same bytes, free of charge
        others = node.ask_all(tasking(run, model(value / 9)) for value in range(1, 6))
        assert sum(map(released, others)) == ROUNDS - 1  # each is paid for, as long as there is money
        assert not any(map(released, node.ask_all(tasking(run, model(), round) for round in range(1, 6))))
        assert charges(sites) == ROUNDS
        attack_the_memory(node, process, sites)

        node.hand_out(enrolling(sites.signed(name="second", rounds=1).encode()))  # it goes on as before
        while (reply := node.replies.get(timeout=60)).metadata.message_type != MessageType.QUERY:
            assert not released(reply)
        assert released(reply)
        assert processes.stop("silo", signal.SIGTERM) == 0
        said = processes.log("silo")
        assert "2026-01-01 agreed" in said  # in the sentence that refuses it, and in no line of its own
        assert "\n2026-01-01 agreed" not in said
        assert "\x1b" not in said
        assert len(said) < 400_000
    with closing(Ledger(tmp_path / "aspen" / "ledger.db")) as ledger:
        account = ledger.account("aspen")
        assert account.spent(account.committed) <= account.terms.budget.epsilon
    events = [json.loads(line) for line in (tmp_path / "aspen" / "state" / "events.jsonl").read_text().splitlines()]
    refused = [event["reason"] for event in events if event["event"] == "refused"]
    assert len(refused) >= len(bad)
    assert all(reason and reason.isprintable() for reason in refused)
    assert not any("stolen" in path for path in node.taken)


def attack_the_memory(node: HostileSuperNode, process: subprocess.Popen[bytes], sites: Sites) -> None:
    """Two GiB in one tensor, in many, without a length, in place of a header, and compressed: none is taken in."""
    before = most_memory(process.pid)
    small = tasking("a run", model())
    many = {f"t{place}": torch.full((1000,), float(place)) for place in range(500)}
    assert not released(node.ask(tasking("a run", many)))  # two MB in small pieces
    attacks: list[tuple[str, Raw]] = [
        ("pull_object", endless(2 * GIB)),
        ("pull_object", endless(2 * GIB, Content_Length=str(2 * GIB))),
        ("pull_object", packed),
    ]
    for method, attack in attacks:
        assert not released(node.ask(small, instead={method: attack}))
    for method, attack in [
        ("pull_messages", endless(2 * GIB)),
        ("pull_task_input", endless(2 * GIB)),
        ("acquire_task", packed),
        ("pull_object", elsewhere),
        ("pull_messages", endless(1 << 20, b"nonsense")),
    ]:
        node.hand_out(small, {method: attack})
        wait(node.waiting.empty, "the task is taken")
    assert process.poll() is None
    assert most_memory(process.pid) < before + (200 << 20)


def charges(sites: Sites) -> int:
    with closing(Ledger(sites.folder / "aspen" / "ledger.db")) as ledger:
        return ledger.account("aspen").charges
