"""Published forms weigh and split by the ε that is claimed, while ledgers hold what it really costs."""

from pathlib import Path
from typing import Any

import pytest
from support.federations import (
    EPSILONS,
    as_bytes,
    experiment,
    finish,
    in_memory,
    job_of,
    ledger_of,
    on_flower,
    promised,
)


@pytest.mark.parametrize("wrap", [in_memory, as_bytes, on_flower])
def test_clients_of_a_published_form_declare_what_they_claim(wrap: Any, tmp_path: Path) -> None:
    job = job_of(experiment({"name": "weiavg", "form": "published"}))
    ledger = ledger_of(job, tmp_path / "a.db")
    faces = wrap(job.clients(ledger), job).profiles()
    assert tuple(face.epsilon for face in faces) == EPSILONS
    assert job.budgets is not None
    costs = [budget.epsilon for budget in promised(job.budgets)]
    assert max(abs(cost / claim - 1) for cost, claim in zip(costs, EPSILONS, strict=True)) > 0.5


def test_a_sound_form_declares_its_budget_and_a_hidden_one_nothing(tmp_path: Path) -> None:
    job = job_of(experiment("weiavg"))
    assert tuple(
        face.epsilon for face in in_memory(job.clients(ledger_of(job, tmp_path / "a.db")), job).profiles()
    ) == (EPSILONS)
    hidden = job_of(experiment({"name": "pdp-fl", "form": "published"}, budgets={"disclosed": False}))
    faces = in_memory(hidden.clients(ledger_of(hidden, tmp_path / "b.db")), hidden).profiles()
    assert {face.epsilon for face in faces} == {None}
    assert len(finish(hidden, tmp_path / "c.db").rounds) == 3
