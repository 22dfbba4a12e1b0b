"""Figures of clients at the end of a run, against plain loops over clients and scikit-learn."""

from __future__ import annotations

import csv
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import confusion_matrix, roc_auc_score
from support.federations import experiment, job_of

from polyeps.core import Budget
from polyeps.data.dataset import Dataset
from polyeps.data.partition import by_owner
from polyeps.experiment import client_metrics
from polyeps.experiment import run as runs
from polyeps.experiment.client_metrics import Wanted, decoded, final_facts, majority
from polyeps.experiment.job import Job
from polyeps.experiment.journal import Journal
from polyeps.experiment.metrics import NAMED_METRICS
from polyeps.experiment.population import Population, populate
from polyeps.models import binary_logistic

NAMES = ("ash", "birch", "cedar")


def hospitals(seed: int = 0) -> Population:
    """Three clients with test records of their own and two classes; cedar has no test record of the second one."""
    generator = np.random.default_rng(seed)
    groups, of_test = np.repeat([2, 0, 1], [40, 30, 50]), generator.permutation(np.repeat([0, 1, 2], [30, 25, 12]))
    features = generator.normal(size=(120, 4)).astype(np.float32)
    tests = generator.normal(size=(67, 4)).astype(np.float32)
    labels = (features[:, 0] + generator.normal(size=120) > 0.5).astype(np.int64)
    truth = (tests[:, 0] + generator.normal(size=67) > 0).astype(np.int64) * (of_test != 2)
    classes = ("well", "ill")
    dataset = Dataset("wards", features, labels, tests, truth, classes, groups, NAMES, test_groups=of_test)
    model, budget = binary_logistic(4), Budget(1.0, 1e-5)
    return Population(
        dataset, by_owner(dataset), (budget,) * 3, model, torch.zeros(4), 1, torch.device("cpu"), None, None
    )


def job(population: Population, name: str = "fedavg") -> Job:
    return replace(job_of(experiment(name)), population=population)


def wanted(*names: str, compared: bool = False) -> Wanted:
    return Wanted({name: NAMED_METRICS[name] for name in names if name != "confusion"}, names, compared)


def test_each_client_is_measured_on_its_own_records_and_missing_classes_are_named() -> None:
    population, vector = hospitals(), torch.tensor([1.0, 0.2, -0.1, 0.3])
    found = final_facts(job(population), vector, None, wanted("auc", "f1", "calibration", "confusion"))
    dataset, clients = population.dataset, found["clients"]
    assert clients["ids"] == list(population.ids) == list(NAMES)
    assert dataset.test_groups is not None
    assert dataset.groups is not None
    for place, name in enumerate(clients["ids"]):
        mine = dataset.test_groups == NAMES.index(name)
        scores = dataset.test_features[mine] @ vector.numpy()
        truth = dataset.test_labels[mine]
        assert clients["test_records"][place] == mine.sum()
        assert clients["values"]["accuracy"][place] == pytest.approx(np.mean((scores > 0) == truth))
        (common, _), *_ = Counter(dataset.labels[dataset.groups == NAMES.index(name)].tolist()).most_common(1)
        assert clients["majority"][place] == pytest.approx(np.mean(truth == common))
        if name == "cedar":
            assert clients["values"]["auc"][place] is None
        else:
            assert clients["values"]["auc"][place] == pytest.approx(roc_auc_score(truth, scores))
    assert clients["undefined"]["auc"] == {"cedar": "no test record of class 'ill'"}
    predicted = (dataset.test_features @ vector.numpy() > 0).astype(int)
    assert found["confusion"] == confusion_matrix(dataset.test_labels, predicted).tolist()
    assert sum(count for count, *_ in found["reliability"]) == len(dataset.test_labels)
    assert found["undefined"] == {}
    assert found["majority"] == majority(population)[0] == pytest.approx(np.mean(dataset.test_labels == 0))


def test_contributions_average_to_the_compared_metric() -> None:
    population, vector = hospitals(), torch.tensor([1.0, 0.2, -0.1, 0.3])
    for names, metric in ((("auc",), "auc"), ((), "accuracy")):
        clients = final_facts(job(population), vector, None, wanted(*names, compared=True))["clients"]
        assert clients["comparing"] == metric
        parts = np.split(decoded(clients["contributions"]), np.cumsum(clients["test_records"])[:-1])
        for part, value in zip(parts, clients["values"][metric], strict=True):
            assert part.mean() == pytest.approx(value, abs=1e-6) if value is not None else np.isnan(part).all()
        assert clients["rarest"][2] == 0


def test_personal_models_are_measured_each_on_its_own_records() -> None:
    population = hospitals()
    personal = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
    found = final_facts(job(population, "alone"), population.start, personal, wanted("auc"))["clients"]
    assert found["personal"]
    for place in range(3):
        alone = final_facts(job(population), personal[place], None, wanted("auc"))
        assert found["values"]["accuracy"][place] == pytest.approx(alone["clients"]["values"]["accuracy"][place])
        scores = population.dataset.test_features @ personal[place].numpy()
        assert found["on_all"]["auc"][place] == pytest.approx(roc_auc_score(population.dataset.test_labels, scores))


def test_models_that_diverged_have_no_metrics_and_stop_nothing() -> None:
    population = hospitals()
    broken = torch.full((4,), float("nan"))
    found = final_facts(job(population), broken, None, wanted("auc", "confusion", "calibration", compared=True))
    assert found["undefined"]["auc"] == "the model's outputs are not finite"
    assert "confusion" not in found
    assert found["clients"]["values"]["auc"] == [None] * 3
    assert np.isnan(decoded(found["clients"]["contributions"])).all()


def test_clients_beyond_the_cap_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_metrics, "MOST_MEASURED", 1)
    found = final_facts(job(hospitals()), torch.ones(4), None, wanted("auc"))["clients"]
    assert found["left_out"] == 2
    assert found["values"]["auc"][1:] == [None, None]
    assert None not in found["values"]["accuracy"]


def test_a_run_keeps_figures_of_clients_in_its_journal_and_as_csv(tmp_path: Path) -> None:
    values: dict[str, Any] = {"data": {"own_test": 0.25}, "metrics": ["f1_macro", "confusion"], "seeds": [1, 2]}
    runs.run(experiment(["fedavg", "alone"], **values), tmp_path / "run")
    jobs = Journal(tmp_path / "run" / "journal.db").jobs()
    with (tmp_path / "run" / "clients.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert [line["method"] for line in lines] == ["fedavg"] * 6 + ["alone"] * 6 + ["fedavg"] * 6 + ["alone"] * 6
    for line in lines:
        (facts,) = [job["facts"] for job in jobs if job["job"] == f"{line['method']}-{line['seed']}"]
        place = facts["clients"]["ids"].index(line["client"])
        assert float(line["accuracy"]) == facts["clients"]["values"]["accuracy"][place]
        assert float(line["spent"]) <= float(line["epsilon"])
        assert int(line["test_records"]) == 15
    assert all(np.array(job["facts"]["confusion"]).sum() in (297, 6 * 15) for job in jobs)


def test_without_test_records_of_their_own_clients_have_no_table(tmp_path: Path) -> None:
    wanted = experiment(["fedavg", "alone"])
    runs.run(wanted, tmp_path / "run")
    assert not (tmp_path / "run" / "clients.csv").exists()
    facts = {job["label"]: job["facts"]["clients"] for job in Journal(tmp_path / "run" / "journal.db").jobs()}
    tests = len(populate(wanted, 1).dataset.test_labels)
    assert len(decoded(facts["fedavg"]["contributions"])) == tests
    assert len(decoded(facts["alone"]["contributions"])) == 6 * tests
