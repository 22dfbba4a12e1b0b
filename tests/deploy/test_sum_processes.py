"""Secure sums between real processes: a silo killed in a sum, a rehearsal's model, what the SuperLink stores."""

from __future__ import annotations

import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("flwr", reason="needs Flower: pip install 'polyeps[flower]'")

from support.real_federation import wait
from support.silos import SiloGrid, being, vector
from support.summing import quick_polls

from polyeps.deploy.demo import BUDGETS, DemoFederation
from polyeps.deploy.kits import ServerTerms
from polyeps.deploy.policy import read_policy
from polyeps.deploy.serving import Served, serve_contract
from polyeps.deploy.silo import Silo
from polyeps.ledger import Ledger
from polyeps.secagg import masks
from polyeps.transport.flower_sums import Seat

pytestmark = [
    pytest.mark.processes,
    pytest.mark.filterwarnings("ignore:GitWildMatchPattern"),  # of Flower, when it builds a bundle
]
ROUNDS = 2


@pytest.fixture
def demo(tmp_path: Path) -> Iterator[DemoFederation]:
    found = DemoFederation(
        tmp_path / "demo", ServerTerms(rounds=ROUNDS, enrolment=120, reply=90), {"OMP_NUM_THREADS": "1"}
    )
    draft = found.server / "contract.toml"
    text = draft.read_text().replace('name = "fedavg"', 'name = "dp-randagg"\nrank = 0\nnoise = "discrete-gaussian"')
    draft.write_text("rehearsal = 3\n" + text + "\n[epsilon]\n" + "".join(f"{name} = 1.0\n" for name in BUDGETS))
    for name in BUDGETS:
        policy = found.silo(name) / "policy.toml"
        text = policy.read_text().replace('algorithms = ["fedavg"]', 'algorithms = ["dp-randagg"]')
        text = text.replace("discloses = []", 'discloses = ["epsilon"]')
        text = text.replace("[budget]", '[budget]\nprotects = "silo"')
        known = "".join(f'{one} = "{key}"\n' for one, key in found.signed.contract.silos.items() if one != name)
        policy.write_text(
            "rehearsal = true\n" + text + "\n[sums]\nleast_silos = 3\ncolluders = 0\n[sums.silos]\n" + known
        )
    found.sign()
    with found.processes:
        yield found


def in_one_process(demo: DemoFederation, folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Served, list[bytes]]:
    """The same rehearsal with copies of the silos in this process, and all that they masked."""
    plainly: list[bytes] = []
    usual = Seat.prepare

    def noted(seat: Seat, algorithm: Any, task: Any, payload: Any, bits: int) -> Any:
        words = payload["train"].numpy().astype(np.uint64)
        plainly.append(masks.to_bytes(words.astype(masks.word(bits)), bits))
        return usual(seat, algorithm, task, payload, bits)

    class Copies:
        def silo(self, name: str) -> Silo:
            return Silo(read_policy(folder / name / "policy.toml"))

    shutil.copytree(demo.folder, folder)
    grid = SiloGrid(Copies(), ())  # type: ignore[arg-type]
    grid.nodes = dict(zip((100, 101, 102), BUDGETS, strict=True))
    with monkeypatch.context() as patched:
        quick_polls(patched)
        patched.setattr(Seat, "prepare", noted)
        return serve_contract(demo.signed, grid.connected, folder / "run"), plainly


def test_real_processes_sum_in_secret(demo: DemoFederation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, plainly = in_one_process(demo, tmp_path / "copies", monkeypatch)
    being(0)
    demo.start()
    stored, result = set[bytes](), list[Served]()
    over = threading.Event()

    def look() -> None:
        """Note all that the SuperLink writes to its disk."""
        while not over.wait(0.2):
            for path in demo.server.glob("superlink.db*"):
                content = path.read_bytes()
                stored.update(content[place : place + 4096] for place in range(0, len(content), 4096))

    threads = [threading.Thread(target=look), threading.Thread(target=lambda: result.append(demo.serve()), daemon=True)]
    for thread in threads:
        thread.start()
    try:
        # Killed in the middle of a sum, when a step is answered, and started again.
        state = demo.silo("fir") / "state"
        wait(
            lambda: list(state.glob("sums/*/*.sum")) and not (state / "task").exists(),
            "fir has answered a step",
            pause=0.05,
        )
        demo.processes.stop("silo-fir", signal.SIGKILL)
        demo.start_silo("fir")
        threads[1].join(240)
    finally:
        over.set()
        threads[0].join()
    assert result, demo.processes.log("silo-fir")
    assert (result[0].rounds, result[0].reason) == (ROUNDS, "all rounds were run")
    assert torch.allclose(vector(result[0].model), vector(expected.model), atol=1e-5)
    for name in BUDGETS:
        assert Ledger(demo.silo(name) / "ledger.db").account(name).charges == ROUNDS
    everything = b"".join(stored)
    assert b"polyeps secure sum 1" in everything  # it does store the messages of sums
    assert len(plainly) == ROUNDS * len(BUDGETS)
    for content in plainly:
        pieces = [content[place : place + 8] for place in range(0, len(content) - 7, 8)]
        assert len(pieces) > 2
        assert not any(piece in everything for piece in pieces if len(set(piece)) > 3)
