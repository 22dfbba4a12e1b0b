"""Federations of silos that take part in secure sums."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from polyeps.deploy.patient_grid import PatientGrid
from polyeps.deploy.serving import EnrolledSilos
from support.silos import NAMES, Sites

METHODS: dict[str, dict[str, Any]] = {
    "cmp-fed": {"name": "cmp-fed", "rank": 1},
    "cmp-fed, directions of the model": {"name": "cmp-fed", "rank": 1, "directions": "model"},
    "dp-fedavg": {"name": "dp-randagg", "rank": 0},
    "dp-randagg": {"name": "dp-randagg", "rank": 1},
    "fedhdp": {"name": "fedhdp", "trust": "secure-sum"},
}


def quick_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look for silos and replies without pauses."""
    monkeypatch.setattr(EnrolledSilos, "poll", 0.01)
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
        "patience": {"enrolment": 60.0, "reply": 60.0},  # a round of a busy machine is not to be lost
        **others,
    }
