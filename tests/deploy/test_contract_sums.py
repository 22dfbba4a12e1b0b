"""Secure sums over contracts: the run that a simulation has, whoever is restarted, and nothing in the clear."""

from __future__ import annotations

import json
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Message, MessageType
from support.silos import NAMES, SiloGrid, Sites, being, over_the_wire, served, simulated, tasking, vector
from support.summing import METHODS, quick_polls, summing_sites, terms_of
from support.transports import AsBytes

from polyeps.core import ENTER, State
from polyeps.deploy import serving
from polyeps.deploy.agreement import accept_contract
from polyeps.deploy.contract import SignedContract
from polyeps.deploy.contract_job import server_job
from polyeps.deploy.keys import public_of
from polyeps.deploy.patient_grid import PatientGrid
from polyeps.deploy.silo import Silo
from polyeps.engine.noise import SeededStreams
from polyeps.errors import InputError
from polyeps.experiment.job import Job
from polyeps.experiment.journal import Journal
from polyeps.ledger import Ledger
from polyeps.ledger.head_file import replace_file
from polyeps.secagg import masks
from polyeps.secagg.client import SumState
from polyeps.secagg.messages import Step, unpack
from polyeps.transport.flower_sums import Seat


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    quick_polls(monkeypatch)


def flat(job: Job, model: torch.Tensor) -> torch.Tensor:
    parts = job.population.model.unflatten(model)
    return torch.cat([parts[name].flatten() for name in sorted(parts)])


def as_simulated(sites: Sites, signed: SignedContract) -> tuple[Job, State, Ledger]:
    """The same run with all silos in one process, one after the other: integers are rounded from equal digits."""
    job = simulated(sites, signed.contract)
    ledger = Ledger.create(sites.folder / "simulated.db", job.terms)
    transport = AsBytes(job.clients(ledger), job.algorithm, job.discloses or ("epsilon", "examples"))
    return job, job.serve(transport, signed.contract.rounds, "test"), ledger


def ask(silo: Silo, message: Message) -> Message:
    being(100)
    return over_the_wire(silo.answer(message, 100))


@pytest.mark.parametrize("method", METHODS)
def test_a_deployed_sum_is_the_simulated_one(method: str, tmp_path: Path) -> None:
    sites = summing_sites(tmp_path, rehearsal=7)
    signed = sites.signed(**terms_of(method))
    found = served(sites, SiloGrid(sites), signed)
    assert (found.rounds, found.reason) == (3, "all rounds were run")
    job, state, ledger = as_simulated(sites, signed)
    assert torch.allclose(vector(found.model), flat(job, state.model), atol=1e-5)
    assert float((state.model - job.state.model).abs().max()) > 0.01
    for client in NAMES:
        own = Ledger(tmp_path / client / "ledger.db")
        assert own.account(client).history == ledger.account(client).history
        assert own.account(client).charges == ledger.account(client).charges == 3


@pytest.mark.parametrize("method", ["dp-fedavg", "fedhdp"])
def test_levels_of_privacy_and_the_smallest_budget(method: str, tmp_path: Path) -> None:
    """FedHDP sums silos of equal ε; DP-FedAvg gives all the noise of the smallest."""
    sites = summing_sites(tmp_path, rehearsal=7, sums={"least_silos": 1})
    signed = sites.signed(**terms_of(method, (1.0, 2.0, 1.0)))
    found = served(sites, SiloGrid(sites), signed)
    job, state, ledger = as_simulated(sites, signed)
    assert torch.allclose(vector(found.model), flat(job, state.model), atol=1e-5)
    for client in NAMES:
        assert Ledger(tmp_path / client / "ledger.db").account(client).history == ledger.account(client).history


def test_a_real_run_leaves_no_secret_and_shows_no_update(tmp_path: Path) -> None:
    """Noise of the system's entropy; what each silo masked is known here, and is in no message, whole or in parts."""
    sites = summing_sites(tmp_path)
    signed, grid = sites.signed(**terms_of("dp-fedavg")), SiloGrid(sites)
    plainly: list[bytes] = []
    usual = Seat.prepare

    def noted(seat: Seat, algorithm: Any, task: Any, payload: Any, bits: int) -> Any:
        words = payload["train"].numpy().astype(np.uint64)
        plainly.extend([words.tobytes(), masks.to_bytes(words.astype(masks.word(bits)), bits)])
        return usual(seat, algorithm, task, payload, bits)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Seat, "prepare", noted)
        found = served(sites, grid, signed)
    assert (found.rounds, found.reason) == (3, "all rounds were run")
    assert len(plainly) == 18
    everything = b"".join(grid.replied)
    for content in plainly:
        assert len(content) > 60
        assert not any(content[place : place + 12] in everything for place in range(0, len(content) - 12, 12))
    for name in NAMES:
        ledger = Ledger(tmp_path / name / "ledger.db")
        assert ledger.account(name).charges == 3
        assert not any(ledger.account(name).reserved[signed.contract.run].values())
        folder = tmp_path / name / "state" / "sums" / signed.contract.digest
        (entered,) = folder.glob("*.sum")
        kept = SumState.decode(unpack(entered.read_bytes())[1])
        assert (kept.step, kept.letter_key, kept.mask_key, kept.seed, dict(kept.shares)) == (
            Step.UNMASK,
            *[b""] * 3,
            {},
        )
        held = b"".join(file.read_bytes() for file in (tmp_path / name / "state").rglob("*") if file.is_file())
        assert not any(content in held for content in plainly)
    # The server's secret is its own, and what follows from it is not in the contract.
    secret = tmp_path / "run" / "secret"
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    assert len(secret.read_bytes()) == 32


def test_seeded_noise_is_for_rehearsals_alone(tmp_path: Path) -> None:
    sites = summing_sites(tmp_path)
    signed = sites.signed(**terms_of("dp-fedavg"))
    part = accept_contract(signed.contract, sites.policy(), public_of(sites.keys["aspen"]), sites.silo().ledger)
    seeded = replace(part.clients, streams=lambda ids, round: SeededStreams(7, ids, round))
    for clients in (seeded, replace(part.clients, repeatable=True)):
        silo = sites.silo()
        silo._agreed[signed.contract.run] = replace(part, clients=clients)
        assert ask(silo, tasking(signed.contract.run, {}, action=ENTER, bits=20)).error.reason == "declined"
    poisson = sites.signed(**terms_of("dp-fedavg", participation={"kind": "poisson", "share": 0.5}))
    grid = SiloGrid(sites)
    for job, why in [
        (server_job(signed.contract), "the server's noise is seeded"),  # without a secret, it follows from the contract
        (server_job(poisson.contract, secret=bytes(32)), "makes cohorts predictable"),
    ]:
        transport = serving.EnrolledSilos(PatientGrid(grid), 5.0, signed=signed)
        with grid.connected(), pytest.raises(InputError, match=why):
            job.serve(transport, 3, signed.contract.run)
    assert Ledger(tmp_path / "aspen" / "ledger.db").account("aspen").charges == 0


# Restarts


def test_a_server_killed_after_any_message_finishes_the_round_without_a_second_charge(tmp_path: Path) -> None:
    sites = summing_sites(tmp_path)
    signed = sites.signed(**terms_of("cmp-fed"))
    killed = 0
    while True:
        grid, count = SiloGrid(sites), [0]

        def cut(node: int, message: Message, count: list[int] = count, most: int = 13 * (killed + 1)) -> None:
            if message.metadata.message_type != MessageType.QUERY:
                count[0] += 1
                if count[0] > most:  # in the middle of an exchange, or between two
                    raise KeyboardInterrupt

        grid.before = cut
        try:
            found = served(sites, grid, signed)
        except KeyboardInterrupt:
            killed += 1
            continue
        break
    assert killed > 3
    assert (found.rounds, found.reason) == (3, "all rounds were run")
    journal = Journal(tmp_path / "run" / "serving.db")
    assert [row["answered"] for row in journal.query("SELECT answered FROM rounds")] == [3, 3, 3]
    for name in NAMES:
        assert Ledger(tmp_path / name / "ledger.db").account(name).charges == 3


@pytest.mark.parametrize("place", [0, 3, 8, 13, 18])
def test_a_silo_killed_in_any_write_finishes_the_sum(place: int, tmp_path: Path) -> None:
    """Killed at its n-th write to the disk, before or after it; asked again, it loses nothing and pays once."""
    sites = summing_sites(tmp_path)
    signed, grid = sites.signed(rounds=1, **terms_of("cmp-fed")), SiloGrid(sites)
    writes, left = [0], [place]

    def dying(target: Path, content: bytes) -> None:
        mine = f"{tmp_path}/birch/" in str(target) and "contracts" not in str(target)
        writes[0] += mine
        dies = mine and writes[0] > left[0]
        if dies and place % 2:
            left[0] = 10**9
            raise Killed
        replace_file(target, content)
        if dies:
            left[0] = 10**9
            raise Killed

    usual = grid.pull_messages

    def pulled(names: Any) -> Any:
        replies: list[Message] = []
        for name in names:
            try:
                replies += usual([name])
            except Killed:
                being(1)
                replies += usual([name])  # the executor excuses itself, and the server asks again
        return replies

    grid.pull_messages = pulled  # type: ignore[method-assign,assignment]
    with pytest.MonkeyPatch.context() as patched:
        for module in ("polyeps.transport.client_files", "polyeps.transport.flower_sums"):
            patched.setattr(f"{module}.replace_file", dying)
        found = served(sites, grid, signed)
    assert (found.rounds, found.reason) == (1, "all rounds were run")
    (row,) = Journal(tmp_path / "run" / "serving.db").query("SELECT answered, declined FROM rounds")
    assert (row["answered"], row["declined"]) == (3, 0)
    for name in NAMES:
        assert Ledger(tmp_path / name / "ledger.db").account(name).charges == 1


class Killed(BaseException):
    """The process ends here."""


@pytest.mark.parametrize("method", ["fedhdp", "fedavg"])
def test_a_silo_sees_its_own_figures_and_sends_none(method: str, tmp_path: Path) -> None:
    summed = method == "fedhdp"
    sites = summing_sites(tmp_path) if summed else Sites(tmp_path)
    data = {"data": {"test": "test.csv"}}
    (tmp_path / "aspen" / "test.csv").write_bytes((tmp_path / "cedar" / "records.csv").read_bytes())
    own = {"budget": {"protects": "silo"}, "discloses": ["epsilon", "group"], "models": ["mlp"]} if summed else {}
    sites.write_policy("aspen", **data, **own)
    signed = sites.signed(rounds=2, **(terms_of(method) if summed else {}))
    grid = SiloGrid(sites, anew=False)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("polyeps.deploy.silo.figures_of", lambda *_: pytest.fail("measured before the reply was sent"))
        found = served(sites, grid, signed, test=tmp_path / "cedar" / "records.csv")
    assert found.rounds == 2
    for silo in grid.open.values():
        silo.write_figures()
    path = tmp_path / "aspen" / "state" / "figures.jsonl"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert {(line["round"], line["model"]) for line in lines} >= {(0, "sent"), (1, "sent")}
    assert ("personal" in {line["model"] for line in lines}) == summed
    later = next(line for line in lines if (line["round"], line["model"]) == (1, "sent"))
    # The server's test records are the same here, so its figures of the model after the first round are, too.
    journal = Journal(tmp_path / "run" / "serving.db")
    held = {row["name"]: row["value"] for row in journal.query("SELECT name, value FROM metrics WHERE round = 0")}
    assert later["accuracy"] == pytest.approx(held["accuracy"])
    assert later["loss"] == pytest.approx(held["loss"], abs=1e-5)
    assert 0 <= later["auc"] <= 1
    assert later["larger class"] >= 0.5
    assert not (tmp_path / "birch" / "state" / "figures.jsonl").exists()
    everything = b"".join(grid.replied)
    assert not any(word in everything for word in (b"accuracy", b"auc", b"loss"))
