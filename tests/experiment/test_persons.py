"""Patients as the unit of an experiment: every method, sizes and prices, words, and what stays single records."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.clinics import NAMES, PATIENTS, at_clinics, clinical, clinics
from support.commands import run as command
from support.commands import run_json
from support.deployed import DeployedGrid, on_its_own
from support.federations import METHODS, finish, job_of, ledger_of
from torch import nn

from polyeps.algorithms import ALGORITHMS, Entry
from polyeps.client import answer
from polyeps.core import Algorithm, Records, Task
from polyeps.data.dataset import Dataset
from polyeps.errors import InputError, TaskRefused
from polyeps.experiment.evaluation import by_group, measure, own_test
from polyeps.experiment.job import prepare
from polyeps.experiment.plan import certificates, plan
from polyeps.experiment.population import populate
from polyeps.experiment.registry import Parts
from polyeps.experiment.run import resume, run
from polyeps.ledger import Ledger
from polyeps.models import logistic, of_units
from polyeps.participation import Participation
from polyeps.report.page import write_page
from polyeps.server import serve
from polyeps.training import Training, dp_sgd
from polyeps.transport.flower import OnFlower

CHANGE = "adding or blanking all records of any one patient of this client"


@pytest.fixture(autouse=True)
def clinics_records(monkeypatch: pytest.MonkeyPatch) -> Dataset:
    return at_clinics(monkeypatch)


VARIANTS: list[dict[str, Any]] = [
    *METHODS.values(),
    {"name": "fedavg", "form": "published"},
    {"name": "fedavg", "weights": "examples"},
    {"name": "fedhdp", "trust": "secure-sum"},
]


@pytest.mark.parametrize("method", VARIANTS, ids=lambda method: "-".join(map(str, method.values())))
def test_every_method_trains_on_patients_and_pays_for_them(method: dict[str, Any], tmp_path: Path) -> None:
    job = job_of(clinical(method))
    done = finish(job, tmp_path / "a.db")
    assert len(done.rounds) == 3
    assert bool(torch.isfinite(done.learned).all())
    assert float(done.learned.abs().max()) > 0
    assert done.learned.shape[-1] == job.population.model.size
    if done.ledger is None:
        return
    protects_clients = ALGORITHMS[method["name"]].local != "training"
    terms = done.ledger.account("elm").terms
    assert (terms.unit, terms.person) == (("client", "") if protects_clients else ("person", "patient"))
    said = certificates(job)["elm"].sentence
    assert ("patient" in said) != protects_clients


def test_prices_are_those_of_as_many_records_as_there_are_patients() -> None:
    """The oracle: the same experiment on single records, one for each patient."""
    whole = clinics()
    job = job_of(clinical())
    assert job.population.sizes.tolist() == list(PATIENTS) == job.settings["records"].tolist()
    assert job.population.partition.sizes.tolist() == np.bincount(whole.groups).tolist()  # type: ignore[arg-type]
    groups = np.repeat(np.arange(6), PATIENTS)
    first = np.arange(len(groups))
    one_each = replace(
        whole, features=whole.features[first], labels=whole.labels[first], groups=groups, persons=None, person=""
    )
    with pytest.MonkeyPatch.context() as patch:
        at_clinics(patch, one_each)
        single = job_of(clinical())
    assert single.noise_multiplier.tolist() == job.noise_multiplier.tolist()
    assert [(row.sigma, row.spent, row.records) for row in plan(single)] == [
        (row.sigma, row.spent, row.records) for row in plan(job)
    ]
    ours, theirs = certificates(job)["fir"], certificates(single)["fir"]
    assert ours.certified == theirs.certified
    assert CHANGE in ours.sentence
    assert "any one record" in theirs.sentence
    assert "A patient with records at several clients is protected by each separately" in ours.sentence


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"training": {"rate": 0.1}}, "adding or removing all records of any one patient of this client"),
        ({}, CHANGE),
    ],
)
def test_certificates_say_what_they_protect(changes: dict[str, Any], words: str) -> None:
    assert words in certificates(job_of(clinical(**changes)))["oak"].sentence
    published = certificates(job_of(clinical({"name": "fedavg", "form": "published"})))["oak"].sentence
    assert "replacing all records of any one patient of this client by others" in published


def test_a_run_says_patients_everywhere_and_can_be_resumed(tmp_path: Path) -> None:
    wanted = clinical([{"name": "weiavg"}, {"name": "fedhdp"}], data={"own_test": 0.2})
    found = run(wanted, tmp_path / "run")
    assert set(found.spent) == {("weiavg", 1), ("fedhdp", 1)} or len(found.spent) == 2
    shown = run_json("ledger", "show", "--file", str(next((tmp_path / "run" / "ledgers").glob("weiavg*.db"))))
    assert {row["unit"] for row in shown["clients"]} == {"person (patient)"}
    write_page([tmp_path / "run"], tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text().replace("\u00a0", " ")
    assert CHANGE in page
    assert "others all records of one patient" in page
    assert '<th scope="col">patients</th>' in page
    assert resume(tmp_path / "run").spent == found.spent


def test_the_commands_say_patients(tmp_path: Path) -> None:
    file = tmp_path / "clinics.toml"
    file.write_text(
        'rounds = 2\n[data]\npartition = "as-in-file"\n[budgets]\nepsilon = 2.0\n[training]\nbatch = 6\n'
        'local_steps = 2\nlearning_rate = 0.1\n[[algorithm]]\nname = "fedavg"\n[[algorithm]]\nname = "fedhdp"\n'
    )
    planned = command("plan", str(file)).stdout
    assert "Budgets protect all records of any one patient together; sizes and batches count patients." in planned
    assert "Budgets protect whole clients, and so every patient" in planned
    shown = run_json("plan", str(file))["methods"]
    assert [(one["unit"], one["person"]) for one in shown] == [("person", "patient"), ("client", "patient")]
    assert [row["records"] for row in shown[0]["clients"]] == list(PATIENTS)
    assert CHANGE in command("certify", str(file)).stdout.replace("\n", " ")
    assert "patients" in command("calibrate", str(file)).stdout


def test_a_batch_is_of_patients() -> None:
    with pytest.raises(InputError, match="client 'alder' has 24 patients to train on, fewer than"):
        job_of(clinical(training={"batch": 25}))


def test_tests_are_of_single_records() -> None:
    population = populate(clinical(data={"own_test": 0.25}), 1)
    own = own_test(population)
    assert own is not None
    assert own.labels.ndim == 1
    dataset = population.dataset
    assert dataset.persons is not None
    assert population.own_tests is not None
    for place in range(len(NAMES)):  # no patient is on both sides
        rows = [
            set(dataset.persons[part.rows[part.offsets[place] : part.offsets[place + 1]]].tolist())
            for part in (population.partition, population.own_tests)
        ]
        assert not rows[0] & rows[1]
        assert len(rows[0] | rows[1]) == PATIENTS[place]
        assert len(rows[1]) == round(0.25 * PATIENTS[place])
    assert 0 <= by_group(population, population.start)["own accuracy"] <= 1
    measured = measure(population, population.start + 0.1)
    assert 0 < measured["accuracy"] < 1
    assert population.trained.size == population.model.size
    assert population.model.person == ""


def test_models_learn_from_patients(tmp_path: Path) -> None:
    wanted = clinical({"name": "fedavg", "budgets": "none"}, rounds=20, training={"learning_rate": 1.0})
    found = run(wanted, tmp_path / "run")
    (accuracy,) = found.accuracy.values()
    assert accuracy[-1] > 0.9


def test_records_are_those_of_each_patient_in_the_order_of_the_file() -> None:
    population = populate(clinical(), 1)
    records, dataset = population.records, population.dataset
    assert records.units is not None
    assert dataset.groups is not None
    assert dataset.persons is not None
    place = 0
    for clinic in range(len(NAMES)):
        for patient in range(PATIENTS[clinic]):
            rows = np.flatnonzero((dataset.groups == clinic) & (dataset.persons == patient))
            first, end = records.units[place].tolist()
            assert np.array_equal(records.features[first:end].numpy(), dataset.features[rows])
            assert np.array_equal(records.labels[first:end].numpy(), dataset.labels[rows])
            place += 1
    assert records.counts.tolist() == list(PATIENTS)


@pytest.mark.parametrize("kind", ["iid", "shards", "labels", "dirichlet", "one-label"])
def test_a_patient_is_not_divided_among_clients(kind: str) -> None:
    with pytest.raises(InputError, match=f"{kind} would divide the records of a patient among clients: use as-in-file"):
        populate(clinical(data={"partition": kind, "clients": 6}), 1)


# Own algorithms, and clients that are asked for another unit


def forgetful(training: Training) -> Algorithm:
    """An algorithm that does not say what it protects."""
    built = ALGORITHMS["fedavg"].build(training)
    return Algorithm(built.actions, built.round)


def test_an_algorithm_of_another_unit_is_refused_before_it_begins() -> None:
    wanted = clinical("forgetful")
    parts = Parts(algorithms={"forgetful": Entry(forgetful, "an own algorithm")})
    with pytest.raises(InputError, match=r"protects each record, but data.unit is patient; give it unit=training.unit"):
        prepare(wanted, wanted.algorithm[0], populate(wanted, 1, parts=parts), parts=parts)


@pytest.mark.parametrize("by_person", [True, False])
def test_clients_refuse_another_unit_before_they_pay(by_person: bool, tmp_path: Path) -> None:
    job = job_of(clinical())
    ledger = ledger_of(job, tmp_path / "a.db")
    assert ledger is not None
    before = ledger.head
    cohort = job.clients(ledger)
    model = logistic(5, 2)
    records = job.population.records
    if by_person:
        cohort = replace(cohort, data=Records(records.features, records.labels, torch.from_numpy(np.arange(7))))
    other = dp_sgd(of_units(model, "patient") if by_person else model, batch=6, steps=1, clip=1.0, learning_rate=0.1)
    task = Task("train", ("elm",), {"model": torch.zeros(model.size)}, "test")
    with pytest.raises(TaskRefused, match=r"protects each (patient|record), but these clients hold"):
        answer(cohort, ALGORITHMS["fedavg"].build(other), task)
    assert ledger.head == before


def test_a_ledger_of_records_cannot_pay_for_patients(tmp_path: Path) -> None:
    job = job_of(clinical())
    terms = {client: replace(one, unit="record", person="") for client, one in job.terms.items()}
    with pytest.raises(Exception, match=r"a person-level event \(patient\) cannot be charged .* protects a record"):
        answer(
            job.clients(Ledger.create(tmp_path / "a.db", terms)),
            job.algorithm,
            Task("train", ("elm",), {"model": torch.zeros(job.population.model.size)}, "test"),
        )


# Deployed


def test_a_deployed_federation_of_clinics(tmp_path: Path) -> None:
    job = job_of(clinical("weiavg"))
    grid = DeployedGrid(job, tmp_path)
    state = serve(job.algorithm, OnFlower(grid), job.state, rounds=2, participation=Participation(), run="test", seed=1)
    assert float(state.model.abs().max()) > 0
    assert grid.ledger is not None
    ledger = Ledger(tmp_path / "ledger.db")
    for client in NAMES:
        account = ledger.account(client)
        assert account.charges == 2
        assert (account.terms.unit, account.terms.person) == ("person", "patient")


class OverVisit(nn.Module):
    """The numbers of a visit one after the other, with dropout: a user's own module."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.drop = nn.LSTM(1, 4, 2, batch_first=True, dropout=0.2), nn.Dropout(0.3)
        self.head = nn.Linear(4, 2)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.drop(self.layers(rows[:, :, None])[0].mean(1)))
        return found


def own_module(shape: tuple[int, ...], classes: int) -> nn.Module:
    return OverVisit()


@pytest.mark.parametrize("method", ["fedavg", "fedhdp", "fedsel"])
def test_clinics_train_an_own_recurrent_module_with_dropout(method: str, tmp_path: Path) -> None:
    wanted = clinical(method, model={"name": "own"})
    parts = Parts(models={"own": own_module})
    jobs = [prepare(wanted, wanted.algorithm[0], populate(wanted, 1, parts=parts), parts=parts) for _ in range(2)]
    found = [finish(job, tmp_path / f"{place}.db") for place, job in enumerate(jobs)]
    assert torch.equal(found[0].learned, found[1].learned)
    assert bool(torch.isfinite(found[0].learned).all())
    assert float(found[0].learned.abs().max()) > 0
    job = jobs[0]
    if method == "fedavg":
        grid = DeployedGrid(job, tmp_path)
        state = serve(
            job.algorithm, OnFlower(grid), job.state, rounds=1, participation=Participation(), run="test", seed=1
        )
        assert float((state.model - job.state.model).abs().max()) > 0


def test_what_a_deployed_clinic_sends_lies_on_the_grid_of_its_noise(tmp_path: Path) -> None:
    from polyeps.mechanisms.grid_sums import GridSum

    job = job_of(clinical(training={"local_steps": 1, "learning_rate": 1.0, "batch": 8}))
    clinic = on_its_own(job.clients(ledger_of(job, tmp_path / "a.db")), "fir", tmp_path)
    size = job.population.model.size
    reply = answer(clinic, job.algorithm, Task("train", ("fir",), {"model": torch.zeros(size)}, "test"))
    grid = GridSum(1.0, size, float(job.noise_multiplier[NAMES.index("fir")]))
    steps = reply.payload["update"][0].double() * 8 / grid.step
    assert float((steps - steps.round()).abs().max()) < 1e-3
    assert float(steps.abs().max()) > 1
