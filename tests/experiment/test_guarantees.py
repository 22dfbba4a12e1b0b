"""A certificate before a run is the ledger after it: for every algorithm, and for every number of rounds joined."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.commands import run_json
from support.federations import EPSILONS, METHODS, experiment, finish, job_of

from polyeps.experiment.plan import certificates, plan

# Everything that exists, and the variants in which a price is another one.
VARIANTS: list[dict[str, Any]] = [
    *METHODS.values(),
    {"name": "fedavg", "form": "published"},
    {"name": "fedsel", "form": "published", "select": "pe"},
    {"name": "fedhdp", "adaptive": False},
    {"name": "fedhdp", "trust": "secure-sum"},
    {"name": "fedhdp", "trust": "secure-sum", "noise": "skellam"},
    {"name": "cmp-fed", "noise": "discrete-gaussian", "split": 0.3},
    {"name": "cmp-fed", "directions": "model"},
    {"name": "dp-randagg", "rank": 0},
    {"name": "fedavg", "training": {"kind": "gradient"}},
    {"name": "pfa-plus", "training": {"kind": "gradient", "clip": 0.5}, "server": {"momentum": 0.9, "averaging": 0.9}},
    {"name": "fedavg", "training": {"kind": "gradient"}, "budgets": "none"},
    {"name": "weiavg", "training": {"batch": "auto"}},
    {"name": "fedavg", "training": {"local_steps": "auto"}},
    {"name": "pfa-plus", "training": {"batch": "auto", "local_steps": "auto"}, "server": {"averaging": 0.5}},
    {"name": "fedavg", "budgets": "none", "training": {"batch": "auto"}},
    {"name": "alone", "training": {"kind": "gradient"}, "server": {"learning_rate": 0.5}},
]


def written(values: dict[str, Any], path: Path) -> Path:
    """Write an experiment as a TOML file."""
    lines = [f"{key} = {json.dumps(value)}" for key, value in values.items() if not isinstance(value, dict | list)]
    lines.append(f"seeds = {values['seeds']}")
    for name, table in values.items():
        tables = [(f"[{name}]", table)] if isinstance(table, dict) else []
        if name == "algorithm":
            tables = [("[[algorithm]]", method) for method in table]
        for head, entries in tables:
            lines += [head, *(f"{key} = {_value(value)}" for key, value in entries.items())]
    path.write_text("\n".join(lines))
    return path


def _value(value: Any) -> str:
    """Return a value as TOML has it."""
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{key} = {_value(inner)}' for key, inner in value.items())} }}"
    return json.dumps(value)


@pytest.mark.parametrize("method", VARIANTS, ids=lambda method: "-".join(map(str, method.values())))
def test_certify_says_before_a_run_what_ledgers_say_after_it(method: dict[str, Any], tmp_path: Path) -> None:
    wanted = experiment(method, model={"name": "mlp", "hidden": [12]} if "directions" in method else {})
    job = job_of(wanted)
    file = written(wanted.as_dict(), tmp_path / "small.toml")
    spent = finish(job, tmp_path / "a.db").spent()
    if method["name"] == "public-only":  # asks these clients alone
        spent = {client: spent[client] for client in spent if spent[client]}
        assert len(spent) == 2
    (shown,) = run_json("certify", str(file))["methods"]
    stated = {row["client"]: row["certified"] for row in shown["clients"]}
    assert len(stated) == len(EPSILONS)
    if not spent:
        assert job.budgets is None
        assert set(stated.values()) == {float("inf")}
        return
    assert {client: stated[client] for client in spent} == pytest.approx(spent, rel=1e-9)
    (planned,) = run_json("plan", str(file))["methods"]
    planned = {row["client"]: row["spent"] for row in planned["clients"]}
    assert {client: planned[client] for client in spent} == pytest.approx(spent, rel=1e-9)
    (noise,) = run_json("calibrate", str(file))["methods"]
    assert [row["sigma"] for row in noise["clients"]] == job.noise_multiplier.tolist()


@pytest.mark.parametrize("name", ["weiavg", "pfa-plus"])
def test_clients_that_join_more_or_fewer_rounds_are_certified_for_those(name: str, tmp_path: Path) -> None:
    job = job_of(experiment(name, rounds=8, participation={"kind": "poisson", "share": 0.5}))
    done = finish(job, tmp_path / "a.db", rounds=8, participation=job.participation)
    assert done.ledger is not None
    joined = {client: done.ledger.account(client).charges for client in done.ledger.clients}
    assert len(set(joined.values())) > 1
    for client, rounds in joined.items():
        stated = certificates(job, rounds)[client].certified if rounds else 0.0
        assert stated == pytest.approx(done.ledger.spent(client), rel=1e-9)


@pytest.mark.parametrize("name", ["fedhdp", "cmp-fed", "dp-randagg"])
def test_clients_are_certified_for_every_round_where_every_round_is_charged(name: str, tmp_path: Path) -> None:
    job = job_of(experiment(name, rounds=8, participation={"kind": "poisson", "share": 0.5}))
    done = finish(job, tmp_path / "a.db", rounds=8, participation=job.participation)
    spent = done.spent()
    assert {client: found.certified for client, found in certificates(job).items()} == pytest.approx(spent, rel=1e-9)
    assert {row.client: row.spent for row in plan(job)} == pytest.approx(spent, rel=1e-9)


def test_a_plan_knows_how_long_budgets_last(tmp_path: Path) -> None:
    job = job_of(experiment("fedavg", rounds=6, budgets={"noise_multiplier": 1.5}))
    rows = {row.client: row for row in plan(job)}
    done = finish(job, tmp_path / "a.db", rounds=6)
    assert done.ledger is not None
    assert {row.limit for row in rows.values()} == {"budget", "rounds"}
    for client, row in rows.items():
        assert done.ledger.account(client).charges == row.rounds_affordable
        assert row.leaves_early == float(row.rounds_affordable < 6)
        assert row.spent == pytest.approx(done.ledger.spent(client), rel=1e-9)
