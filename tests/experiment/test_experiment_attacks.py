"""What an enemy tried against experiments: noise, prices and certificates that do not fit each other."""

import json
import sqlite3
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.commands import refused, run, run_json
from support.federations import EPSILONS, experiment, finish, in_memory, job_of
from torch import Tensor

from polyeps.accounting.events import Gaussian, Poisson
from polyeps.algorithms import ALGORITHMS, ask_updates, mean, step, with_local_noise
from polyeps.core import Algorithm, Ask, Budget, State
from polyeps.errors import InputError
from polyeps.experiment import config
from polyeps.experiment import run as runs
from polyeps.experiment.job import Job, prepare
from polyeps.experiment.plan import certificates, plan
from polyeps.experiment.population import populate
from polyeps.experiment.progress import Watch
from polyeps.experiment.registry import Parts
from polyeps.ledger import Ledger
from polyeps.ledger.account import BudgetTerms
from polyeps.training import Training

EVERYONE = [str(place) for place in range(6)]
TOML = """
rounds = 3
[data]
name = "digits"
clients = 6
size = 60
[training]
batch = 6
local_steps = 4
[budgets]
file = "budgets.csv"
delta = 1e-3
[[algorithm]]
name = "fedavg"
budgets = "maximum"
label = "careful"
"""


def budgets_file(folder: Path, factor: float = 1.0, delta: str = "") -> Path:
    lines = [f"{place},{factor * epsilon},{delta}" for place, epsilon in enumerate(EPSILONS)]
    (folder / "budgets.csv").write_text("\n".join(["client,epsilon,delta", *lines]))
    return folder / "budgets.csv"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    budgets_file(tmp_path)
    (tmp_path / "small.toml").write_text(TOML)
    return tmp_path / "small.toml"


def own_job(build: Any, **changes: Any) -> Job:
    """A job of an algorithm of one's own."""
    wanted = experiment(**changes).model_copy(update={"algorithm": (config.Method(name="mine"),)})
    parts = Parts(algorithms={"mine": build})
    return prepare(wanted, wanted.algorithm[0], populate(wanted, 1, parts=parts), None, parts)


# Certificates


@pytest.mark.parametrize("name", ["fedhdp", "cmp-fed", "dp-randagg"])
def test_rounds_that_all_enrolled_clients_pay_for_are_all_certified(name: str, tmp_path: Path) -> None:
    """Also where a client is drawn for half of them."""
    job = job_of(experiment(name, rounds=4, participation={"kind": "poisson", "share": 0.5}))
    spent = finish(job, tmp_path / "a.db", rounds=4).spent()
    assert {client: one.certified for client, one in certificates(job).items()} == pytest.approx(spent, rel=1e-9)
    assert {row.client: row.spent for row in plan(job)} == pytest.approx(spent, rel=1e-9)


def half_drawn(training: Training) -> Algorithm:
    found = ALGORITHMS["fedavg"].build(training)
    train = replace(found.actions["train"], price=None)
    return replace(found, actions={"train": train}, round_price=lambda noise: Poisson(0.5, Gaussian(noise)))


def test_cohorts_that_a_round_price_does_not_cover_are_refused_before_anything_is_certified() -> None:
    with pytest.raises(InputError, match=r'use kind = "poisson" or "full"'):
        own_job(half_drawn, rounds=4, participation={"kind": "uniform", "share": 0.5})


def test_the_round_price_of_an_own_algorithm_is_calibrated_for_all_rounds(tmp_path: Path) -> None:
    job = own_job(half_drawn, rounds=4, participation={"kind": "poisson", "share": 0.5})
    done = finish(job, tmp_path / "a.db", rounds=4)
    assert len(done.rounds) == 4
    assert {client: one.certified for client, one in certificates(job).items()} == pytest.approx(done.spent())


@pytest.mark.parametrize("joined", [None, 6])
def test_no_certificate_is_for_rounds_that_a_budget_does_not_allow(joined: int | None, tmp_path: Path) -> None:
    job = job_of(experiment(rounds=6, budgets={"noise_multiplier": 1.5}))
    spent = finish(job, tmp_path / "a.db", rounds=6).spent()
    found = certificates(job, joined)
    assert {client: one.certified for client, one in found.items()} == pytest.approx(spent, rel=1e-9)
    assert {one.details["rounds"] for one in found.values()} == {row.rounds_affordable for row in plan(job)}


def test_more_rounds_than_there_are_cannot_be_joined(file: Path) -> None:
    refused("certify", str(file), "--joined", "4", naming=("--joined", "3 rounds"))


@pytest.mark.parametrize("seed", ["-1", "77", "9" * 30])
@pytest.mark.parametrize("command", ["certify", "plan", "calibrate"])
def test_only_seeds_of_the_file_are_asked_about(command: str, seed: str, file: Path) -> None:
    refused(command, str(file), "--seed", seed, naming=("--seed", "1"))


@pytest.mark.parametrize("command", ["certify", "plan", "calibrate"])
def test_budgets_that_are_not_the_clients_own_are_named(command: str, file: Path) -> None:
    """Whatever the method is labelled: the title does not say so here."""
    assert "maximum" in run(command, str(file)).stdout
    (shown,) = run_json(command, str(file))["methods"]
    assert shown["budgets"] == "maximum"
    assert [row["own_epsilon"] for row in shown["clients"]] == list(EPSILONS)
    own = run(command, str(file), "--set", 'algorithm=["fedavg"]').stdout
    assert "own" not in own
    assert "maximum" not in own


# Budgets


@pytest.mark.parametrize("deltas", [(1e-9, 1e-2), (1e-2, 1e-9)])
@pytest.mark.parametrize("trust", ["server", "secure-sum"])
def test_clients_of_one_group_pay_for_the_noise_of_its_sum(trust: str, deltas: Any, tmp_path: Path) -> None:
    """Groups are named by ε; a client with a smaller δ needs more noise than another with the same ε."""
    lines = [f"{place},1.0,{deltas[place % 2]}" for place in range(6)]
    (tmp_path / "b.csv").write_text("\n".join(["client,epsilon,delta", *lines]))
    wanted = experiment({"name": "fedhdp", "trust": trust}, budgets={"file": tmp_path / "b.csv", "epsilons": None})
    job = job_of(wanted)
    assert job.groups is not None
    assert len(set(zip(job.groups, job.noise_multiplier.tolist(), strict=True))) == len(set(job.groups))
    assert all(spent <= 1.0 for spent in finish(job, tmp_path / "a.db").spent().values())


def test_the_largest_budget_exceeds_nobodys_delta(tmp_path: Path) -> None:
    """Tables, journal and report compare ε, so no δ may be exceeded in silence."""
    (tmp_path / "b.csv").write_text(
        "client,epsilon,delta\n" + "".join(f"{n},2.0,{10.0 ** -(n + 2)}\n" for n in range(6))
    )
    job = job_of(experiment("fedavg (maximum)", budgets={"file": tmp_path / "b.csv", "epsilons": None}))
    assert set(job.budgets or ()) == {Budget(2.0, 1e-7)}


@pytest.mark.parametrize("trust", ["server", "secure-sum"])
def test_no_client_pays_for_more_noise_than_its_group_has(trust: str, tmp_path: Path) -> None:
    job = job_of(experiment({"name": "fedhdp", "trust": trust, "personal": False}))
    ledger = Ledger.create(tmp_path / "a.db", {c: BudgetTerms(Budget(20.0, 1e-3), "client") for c in EVERYONE})
    cohort = replace(job.clients(None), ledger=ledger, guaranteed=np.full(6, True))
    cohort.noise_multiplier = job.noise_multiplier * np.array([1, 1, 1.01, 1, 1, 1])
    with pytest.raises(InputError, match=r"clients paid for the noise multiplier .*, and the sum is made for"):
        job.serve(in_memory(cohort, job), 1, "run")


# Own algorithms


def twice(training: Training) -> Algorithm:
    """Ask for two updates in a round, of two models."""

    def round(state: State, ask: Ask) -> State:
        first = ask_updates(state, ask, state.roster)
        second = ask_updates(replace(state, model=state.model + 1e-3), ask, state.roster)
        return step(state, mean(torch.cat([first.payload["update"], second.payload["update"]])))

    return with_local_noise(training, round)


def test_a_client_is_not_asked_twice_in_a_round_with_the_same_noise(tmp_path: Path) -> None:
    """Simulated noise belongs to a round: the difference of both updates would be without any."""
    with pytest.raises(InputError, match=r"client '0' is asked for 'train' after it has paid for this round"):
        finish(own_job(twice, rounds=4), tmp_path / "a.db")


def over_the_cohort(training: Training) -> Algorithm:
    """Ask all clients, whoever was drawn, at the price of being drawn with probability 1/2."""

    def round(state: State, ask: Ask) -> State:
        return step(state, mean(ask_updates(state, ask, state.enrolled).payload["update"]))

    return replace(half_drawn(training), round=round)


def test_clients_that_were_not_drawn_are_not_asked_at_the_price_of_a_secret_cohort(tmp_path: Path) -> None:
    job = own_job(over_the_cohort, rounds=4, participation={"kind": "poisson", "share": 0.5})
    with pytest.raises(InputError, match=r"client '\d' is asked for 'train' and was not drawn"):
        finish(job, tmp_path / "a.db", rounds=4)


def unpriced(training: Training) -> Algorithm:
    found = ALGORITHMS["fedavg"].build(training)
    return replace(found, actions={"train": replace(found.actions["train"], price=None)})


def test_an_own_algorithm_without_a_price_is_refused_in_a_sentence() -> None:
    with pytest.raises(InputError, match=r"\(mine\).* has no price"):
        own_job(unpriced)


# Own encoders

FITTED: list[Tensor] = []


def remembering() -> Any:
    """An encoder that fits itself to the first records it ever sees, and remembers that beyond one use."""

    def encode(records: Tensor) -> Tensor:
        if not FITTED:
            FITTED.append(records.mean(0))
        return records - FITTED[0]

    return encode


def test_an_encoder_does_not_see_records_first() -> None:
    found = populate(experiment(model={"encoder": "own"}), 1, parts=Parts(encoders={"own": remembering}))
    plain = populate(experiment(), 1)
    assert not torch.allclose(FITTED[0], torch.from_numpy(plain.dataset.features).mean(0), atol=1e-2)
    assert torch.allclose(found.records.features + FITTED[0], plain.records.features, atol=1e-5)


def late() -> Any:
    """An encoder that mixes all records but the first ones."""

    def encode(records: Tensor) -> Tensor:
        return torch.cat([records[:16], records[16:] - records[16:].mean(0)]) if len(records) > 100 else records

    return encode


def test_an_encoder_that_mixes_later_records_is_refused() -> None:
    with pytest.raises(InputError, match="differently with other records beside it"):
        populate(experiment(model={"encoder": "own"}), 1, parts=Parts(encoders={"own": late}))


# Run folders


class StoppedError(Exception):
    pass


def stop(*_: Any) -> None:
    raise StoppedError


@pytest.mark.parametrize("moment", ["round_done", "job_done"])
def test_a_run_is_not_resumed_with_other_budgets(moment: str, file: Path) -> None:
    """Neither the job that was under way nor one that had not begun: the first budgets are what clients agreed to."""
    wanted = config.read_experiment(file, ['algorithm=["fedavg", "weiavg"]'])
    with pytest.raises(StoppedError):
        runs.run(wanted, file.parent / "run", watch=Watch(**{moment: stop}))
    budgets_file(file.parent, 2.0)
    with pytest.raises(InputError, match=r"(fedavg|weiavg)-1 .*since the run began"):
        runs.resume(file.parent / "run")
    budgets_file(file.parent)
    assert len(runs.resume(file.parent / "run").models) == 2


def test_a_ledger_with_other_terms_is_not_charged(tmp_path: Path) -> None:
    """At δ = 1/2 everything looks cheap."""
    wanted = experiment()
    (tmp_path / "run" / "ledgers").mkdir(parents=True)
    terms = {client: BudgetTerms(Budget(1000.0, 0.5)) for client in populate(wanted, 1).ids}
    Ledger.create(tmp_path / "run" / "ledgers" / "fedavg-1.db", terms).close()
    with pytest.raises(InputError, match=r"fedavg-1.db .* other terms"):
        runs.run(wanted, tmp_path / "run")


def test_a_run_is_not_resumed_without_its_ledger(tmp_path: Path) -> None:
    """A new one would forget what was spent."""
    with pytest.raises(StoppedError):
        runs.run(experiment(), tmp_path / "run", watch=Watch(round_done=stop))
    for path in (tmp_path / "run" / "ledgers").iterdir():
        path.unlink()
    with pytest.raises(InputError, match=r"fedavg-1.db is missing; put it back"):
        runs.resume(tmp_path / "run")


@pytest.mark.parametrize("name", ["seed", "round", "seconds", "declined"])
def test_no_metric_is_called_like_a_column_of_metrics_csv(name: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=f"metrics: '{name}' is built in"):
        runs.run(experiment(), tmp_path / "run", metrics={name: lambda *_: 0.0})


def test_modules_of_the_folder_are_not_imported(file: Path) -> None:
    """`python -m` looks for modules in the present folder first, which may be that of an experiment from elsewhere."""
    for module in ("click", "torch", "numpy", "tomllib", "polyeps_reproductions"):
        (file.parent / f"{module}.py").write_text("raise SystemExit('surprise')")
    command = [sys.executable, "-m", "polyeps", "run", str(file), "--set", "rounds=1"]
    ran = subprocess.run(command, cwd=file.parent, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


def test_code_of_a_journal_is_named_with_its_folder(tmp_path: Path) -> None:
    """A journal may come from elsewhere, and its code lie where nobody looks."""
    with pytest.raises(StoppedError):
        runs.run(experiment(), tmp_path / "run", watch=Watch(round_done=stop))
    journal = sqlite3.connect(tmp_path / "run" / "journal.db")
    (text,) = journal.execute("SELECT value FROM about WHERE key = 'experiment'").fetchone()
    forged = json.dumps({**json.loads(text), "metrics": ["own:metric"]})
    journal.execute("UPDATE about SET value = ? WHERE key = 'experiment'", (forged,))
    place = json.dumps({"folder": "/elsewhere", "digests": {"own": "0"}})
    journal.execute("UPDATE about SET value = ? WHERE key = 'code'", (place,))
    journal.commit()
    journal.close()
    refused("run", "--resume", str(tmp_path / "run"), naming=("metrics", "--trust-code", "/elsewhere"))
