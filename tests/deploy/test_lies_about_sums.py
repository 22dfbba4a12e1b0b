"""A hostile server and secure sums: nothing in plain, no second vector, no other terms, whatever it says of counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Message
from support.silos import NAMES, SiloGrid, Sites, being, tasking

from polyeps.algorithms._secure_sums import DRAWN
from polyeps.core import AGREED
from polyeps.deploy import serving
from polyeps.deploy.patient_grid import PatientGrid
from polyeps.deploy.serving import serve_contract
from polyeps.ledger import Ledger
from polyeps.transport.flower_client import tensors

NODE = 100


@pytest.fixture
def sites(tmp_path: Path) -> Sites:
    sites = Sites(tmp_path)
    for name in NAMES:
        values = {"budget": {"protects": "silo"}, "discloses": ["epsilon", "group"], "models": ["mlp"]}
        sites.write_policy(name, **values)
    return sites


def gives(reply: Message) -> bool:
    """Return whether a silo gave anything but the word that it does not; a vector is never in its reply."""
    if reply.has_error():
        assert reply.error.reason == "declined"
        return False
    assert "payload" not in reply.content or set(reply.content["payload"]) == {"entered"}
    return bool(reply.content["reply"]["answered"])


def test_one_vector_for_a_round_and_into_a_sum_alone(sites: Sites, monkeypatch: pytest.MonkeyPatch) -> None:
    """An honest run, and before every honest task of one silo the same task with lies in it."""
    monkeypatch.setattr(serving.EnrolledSilos, "poll", 0.01)
    monkeypatch.setattr(PatientGrid, "poll", 0.01)
    signed = sites.signed(
        rounds=2,
        algorithm={"name": "cmp-fed", "rank": 1, "noise": "discrete-gaussian"},
        epsilon=dict.fromkeys(NAMES, 1.0),
        model={"name": "mlp", "hidden": [4]},
    )
    grid, seen = SiloGrid(sites), list[tuple[dict[str, Any], dict[str, torch.Tensor]]]()
    second: list[str] = []

    def ask(task: dict[str, Any], payload: dict[str, torch.Tensor], **header: Any) -> bool:
        being(NODE)
        given = {**task, **header}
        found = gives(sites.silo("aspen").answer(tasking(payload=payload, **given), NODE))
        being(1)
        return found

    def attack(node: int, message: Message) -> None:
        if node != NODE or "task" not in message.content:
            return
        task, payload = dict(message.content["task"]), dict(tensors(message.content["payload"]))
        seen.append((task, payload))
        if "bits" not in task:
            return
        plain = {name: value for name, value in task.items() if name != "bits"}
        assert not ask(plain, payload)
        for bits in (1, 2, 62, task["bits"] - 1):
            assert not ask(task, payload, bits=bits)
        for name in payload:
            assert not ask(task, {one: value for one, value in payload.items() if one != name}), name
        for name in (DRAWN, AGREED):
            assert not ask(task, {**payload, name: payload[name] + 1}), name
        for name, value in [("honest", 1e18), ("clip", 1e9), ("least", 0.0), ("noise_multiplier", 0.0)]:
            assert not ask(task, {**payload, name: torch.tensor(value)})
        chosen = next(name for name in payload if name not in (DRAWN, AGREED))  # that the server may choose
        assert not ask(task, {**payload, chosen: payload[chosen] * torch.nan})
        assert not ask(task, payload, round=task["round"] + 1)  # a round that is not paid for
        for earlier, content in seen[:-1]:  # a second vector for an earlier sum of the round
            if "bits" in earlier and earlier["round"] == task["round"]:
                first = next(name for name in content if name not in (DRAWN, AGREED))
                assert not ask(earlier, {**content, first: content[first] + 1})
                second.append(earlier["action"])

    grid.before = attack
    found = serve_contract(signed, grid.connected, sites.folder / "run")
    assert found.rounds == 2
    assert {task["action"] for task, _ in seen} >= {"enter", "subspace", "embed"}
    assert set(second) == {"subspace"}
    ledger = Ledger(sites.folder / "aspen" / "ledger.db")
    assert ledger.account("aspen").charges == 2
    assert ledger.account("aspen").spent() <= ledger.account("aspen").terms.budget.epsilon
