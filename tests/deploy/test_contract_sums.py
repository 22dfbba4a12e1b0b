"""Secure sums over contracts: the run that a simulation has, whoever is restarted, and nothing in the clear."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.silos import NAMES, SiloGrid, Sites, simulated
from support.transports import AsBytes

from polyeps.deploy import serving
from polyeps.deploy.contract import SignedContract
from polyeps.deploy.patient_grid import PatientGrid
from polyeps.deploy.serving import Served, serve_contract
from polyeps.ledger import Ledger
from polyeps.model_files import read_model_file

METHODS: dict[str, dict[str, Any]] = {
    "cmp-fed": {"name": "cmp-fed", "rank": 1},
    "cmp-fed, directions of the model": {"name": "cmp-fed", "rank": 1, "directions": "model"},
    "dp-fedavg": {"name": "dp-randagg", "rank": 0},
    "dp-randagg": {"name": "dp-randagg", "rank": 1},
    "fedhdp": {"name": "fedhdp", "trust": "secure-sum"},
}


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving.EnrolledSilos, "poll", 0.01)
    monkeypatch.setattr(PatientGrid, "poll", 0.01)


def summing_sites(folder: Path, rehearsal: int | None = None, **rules: Any) -> Sites:
    sites = Sites(folder, rehearsal=rehearsal)
    for name in NAMES:
        values = {"budget": {"protects": "silo"}, "discloses": ["epsilon", "group"], "models": ["mlp", "logistic"]}
        sites.write_policy(name, **{**values, **rules})
    return sites


def terms_of(method: str, epsilon: tuple[float, ...] = (1.0, 1.0, 1.0), **others: Any) -> dict[str, Any]:
    return {
        "algorithm": {"noise": "discrete-gaussian", **METHODS[method]},
        "epsilon": dict(zip(NAMES, epsilon, strict=True)),
        "model": {"name": "mlp", "hidden": [4]},
        **others,
    }


def served(sites: Sites, grid: SiloGrid, signed: SignedContract, **others: Any) -> Served:
    return serve_contract(signed, grid.connected, sites.folder / "run", **others)


def vector(path: Path | None) -> torch.Tensor:
    assert path is not None
    _, tensors = read_model_file(path)
    return torch.cat([tensors[name].flatten() for name in sorted(tensors)])


@pytest.mark.parametrize("method", METHODS)
def test_a_deployed_sum_is_the_simulated_one(method: str, tmp_path: Path) -> None:
    sites = summing_sites(tmp_path, rehearsal=7)
    signed = sites.signed(**terms_of(method))
    found = served(sites, SiloGrid(sites), signed)
    assert (found.rounds, found.reason) == (3, "all rounds were run")
    job = simulated(sites, signed.contract)
    ledger = Ledger.create(tmp_path / "simulated.db", job.terms)
    transport = AsBytes(job.clients(ledger), job.algorithm, job.discloses or ("epsilon", "examples"))
    state = job.serve(transport, 3, "test")
    expected = job.population.model.unflatten(state.model)
    together = torch.cat([expected[key].flatten() for key in sorted(expected)])
    assert torch.allclose(vector(found.model), together, atol=1e-5)
    assert float((state.model - job.state.model).abs().max()) > 0.01
    for client in NAMES:
        own = Ledger(tmp_path / client / "ledger.db")
        assert own.account(client).history == ledger.account(client).history
        assert own.account(client).charges == ledger.account(client).charges == 3
