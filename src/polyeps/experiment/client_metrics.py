"""Figures at the end of a job, overall and per client: metrics, the majority class, the confusion matrix.

They are facts of the job in the journal. Test records are somebody's: in simulation these figures are free, and are
marked as such; a deployed federation does not compute them, since no ledger would be charged.

`contributions` holds a number per test record and job: two methods are compared record by record with it. `persons`
holds the number of its person, where these are known: records of one person are alike, and not so many observations.
"""

from __future__ import annotations

import base64
import csv
from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from polyeps.experiment.evaluation import (
    MOST_MEASURED,
    OwnTest,
    each_on_all,
    mean_hits,
    measured,
    outputs_of,
    own_outputs,
    own_test,
)
from polyeps.experiment.job import Job
from polyeps.experiment.journal import Journal
from polyeps.experiment.journal_entries import write_metrics
from polyeps.experiment.metrics import (
    CONFUSION,
    NAMED_METRICS,
    UndefinedMetricError,
    auc_contributions,
    confusion,
    reliability,
    scored,
)
from polyeps.experiment.population import Population
from polyeps.experiment.registry import Metric
from polyeps.experiment.target_metrics import ALWAYS_MEASURED, target_figures

MOST_COMPARED = 1 << 20  # numbers of one job that are kept to compare methods record by record
Compared = Literal["accuracy", "auc"]
_Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Wanted:
    """What to compute at the end of a job."""

    metrics: Mapping[str, Metric]  # numbers, beside accuracy
    names: tuple[str, ...]  # all that the experiment names, the confusion matrix included
    compared: bool  # whether methods are to be compared client by client

    @property
    def comparing(self) -> Compared:
        """The metric by which methods are compared: the AUC, if it is asked for."""
        return "auc" if {"auc", "roc_auc"} & {*self.names} else "accuracy"

    @property
    def calibrated(self) -> bool:
        return any(NAMED_METRICS.get(name) is NAMED_METRICS["calibration"] for name in self.names)


def majority(population: Population) -> tuple[float, _Floats | None]:
    """Return the accuracy of always guessing the majority class: on all test records, and on each client's own.

    It is the class with most training records: of all clients together or, on its own records, of the client.
    """
    dataset, partition = population.dataset, population.partition
    held = partition.counts(dataset.labels, len(dataset.classes))  # (n, classes)
    overall = float(np.mean(dataset.test_labels == held.sum(0).argmax()))
    if (test := own_test(population)) is None:
        return overall, None
    hits = test.labels.cpu().numpy() == held.argmax(1)[test.owners]
    return overall, mean_hits(hits, test)


def final_facts(job: Job, model: Tensor, personal: Tensor | None, wanted: Wanted) -> dict[str, Any]:
    """Return the figures of the models a job ended with, as plain values for the journal.

    Clients with a personal model are measured with that one; where there is no common model, so are all figures.
    """
    population, test = job.population, own_test(job.population)
    classes = population.dataset.classes
    if population.dataset.target != "class":
        return _facts_of_targets(job, model, personal, test, wanted)
    overall, own_majority = majority(population)
    found: dict[str, Any] = {"majority": overall, "classes": list(classes)}
    labels = population.test[1]
    alone = not job.entry.common
    everywhere = None if alone else outputs_of(population.model, model, population.test[0])
    own = None if test is None else own_outputs(population.model, model if personal is None else personal, test)
    pooled = (own, test.labels) if alone and own is not None and test is not None else (everywhere, labels)
    if pooled[0] is not None:
        found |= _pictures(pooled[0], pooled[1], wanted)
    if everywhere is not None:
        reasons = {name: measured(name, one, everywhere, labels)[1] for name, one in wanted.metrics.items()}
        found["undefined"] = {name: why.sentence(classes) for name, why in reasons.items() if why is not None}
    clients: dict[str, Any] = {"ids": list(population.ids), "personal": personal is not None}
    if test is not None and own is not None and own_majority is not None:
        clients |= {"test_records": test.counts.tolist(), "majority": _plain(own_majority)}
        clients["rarest"] = _rarest(test, len(classes))
        clients |= _own_figures(population, own, test, wanted)
        if wanted.compared:
            clients["contributions"] = _encoded(_contributions(own, test.labels, test.of_each(), wanted.comparing))
            if test.persons is not None:
                clients["persons"] = _encoded(test.persons.astype(np.float64))
    if alone and personal is not None:
        clients |= _on_all(population, personal, wanted, kept=test is None)
    elif test is None and wanted.compared and everywhere is not None:
        everybody = [slice(0, len(labels))]
        clients["contributions"] = _encoded(_contributions(everywhere, labels, everybody, wanted.comparing))
    if wanted.compared:
        clients["comparing"] = wanted.comparing
    return {**found, "clients": clients}


def _facts_of_targets(
    job: Job, model: Tensor, personal: Tensor | None, test: OwnTest | None, wanted: Wanted
) -> dict[str, Any]:
    """Return the figures of models that predict no classes: nothing is guessed, and methods are not compared."""
    population, dataset = job.population, job.population.dataset
    found: dict[str, Any] = {"classes": list(dataset.classes), "target": dataset.target}
    clients: dict[str, Any] = {"ids": list(population.ids), "personal": personal is not None}
    if test is not None:
        # One client after the other, unless all outputs are needed at once: those of sequences are many.
        together = personal is not None or bool(wanted.metrics)
        everything = own_outputs(population.model, model if personal is None else personal, test) if together else None
        clients |= {"test_records": test.counts.tolist(), "majority": [None] * len(population.ids)}
        values: dict[str, list[float | None]] = {name: [] for name in ALWAYS_MEASURED[dataset.target]}
        for rows in test.of_each():
            mine = outputs_of(population.model, model, test.features[rows]) if everything is None else everything[rows]
            for name, value in target_figures(dataset.target, mine, test.labels[rows], dataset.scale).items():
                values[name].append(value if isfinite(value) else None)
        clients |= {"values": values, "undefined": {}, "left_out": 0}
        if everything is not None:
            own, reasons, beyond = _further_figures(population, everything, test, wanted)
            clients |= {"values": values | own, "undefined": reasons, "left_out": beyond}
    return {**found, "clients": clients}


def _pictures(outputs: Tensor, labels: Tensor, wanted: Wanted) -> dict[str, Any]:
    """Return the confusion matrix and the reliability of confidences, where they are asked for."""
    try:
        scores = scored(outputs.cpu(), labels)
    except UndefinedMetricError:
        return {}
    found: dict[str, Any] = {}
    if CONFUSION in wanted.names:
        found["confusion"] = confusion(scores)
    if wanted.calibrated:
        found["reliability"] = reliability(scores)
    return found


def _own_figures(population: Population, outputs: Tensor, test: OwnTest, wanted: Wanted) -> dict[str, Any]:
    """Return every client's metrics on its own test records, and why some are undefined."""
    hits = (population.model.classes(outputs) == test.labels).cpu().numpy()
    values, reasons, beyond = _further_figures(population, outputs, test, wanted)
    values = {"accuracy": _plain(mean_hits(hits, test)), **values}
    return {"values": values, "undefined": reasons, "left_out": beyond}


def _further_figures(
    population: Population, outputs: Tensor, test: OwnTest, wanted: Wanted
) -> tuple[dict[str, list[float | None]], dict[str, dict[str, str]], int]:
    """Return every client's metrics that the experiment names, why some are undefined, and how many are left out."""
    values: dict[str, list[float | None]] = {}
    reasons: dict[str, dict[str, str]] = {}
    for name, metric in wanted.metrics.items():
        values[name] = [None] * len(population.ids)
        for place, rows in enumerate(test.of_each()[:MOST_MEASURED]):
            value, why = measured(name, metric, outputs[rows], test.labels[rows]) if rows.stop > rows.start else _EMPTY
            values[name][place] = value if why is None else None
            if why is not None:
                reasons.setdefault(name, {})[population.ids[place]] = why.sentence(population.dataset.classes)
    beyond = max(0, len(population.ids) - MOST_MEASURED) if wanted.metrics else 0
    return values, reasons, beyond


_EMPTY = (float("nan"), UndefinedMetricError("no test records"))


def _on_all(population: Population, personal: Tensor, wanted: Wanted, kept: bool) -> dict[str, Any]:
    """Return what each client's own model reaches on everybody's test records; `kept`: it is compared on these."""
    labels = population.test[1]
    values: dict[str, list[float | None]] = {name: [] for name in ("accuracy", *wanted.metrics)}
    rows: list[_Floats] = []
    fits = len(population.ids) * len(labels) <= MOST_COMPARED
    for block in each_on_all(population, personal):
        values["accuracy"] += (population.model.classes(block) == labels).double().mean(1).tolist()
        for outputs in block:
            for name, metric in wanted.metrics.items():
                few = len(values[name]) < MOST_MEASURED
                value, why = measured(name, metric, outputs, labels) if few else _EMPTY
                values[name].append(value if why is None else None)
            if wanted.compared and kept and fits:
                rows.append(_contributions(outputs, labels, [slice(0, len(labels))], wanted.comparing))
    found: dict[str, Any] = {"on_all": values}
    if rows:
        found["contributions"] = _encoded(np.concatenate(rows))
    return found


def _contributions(outputs: Tensor, labels: Tensor, parts: list[slice], by: Compared) -> _Floats:
    """Return a value per test record whose mean over the records of a part is its accuracy or AUC; NaN: undefined."""
    found = np.full(len(labels), np.nan)
    for rows in parts:
        try:
            scores = scored(outputs[rows].cpu(), labels[rows])
        except UndefinedMetricError:
            continue
        if by == "accuracy":
            found[rows] = scores.predicted == scores.labels
        elif len(np.unique(scores.labels)) == scores.classes:
            found[rows] = auc_contributions(scores)
    return found


def _rarest(test: OwnTest, classes: int) -> list[int]:
    """Return how many test records of its rarest class each client has."""
    flat = np.bincount(test.owners * classes + test.labels.cpu().numpy(), minlength=len(test.counts) * classes)
    fewest: list[int] = flat.reshape(-1, classes).min(1).tolist()
    return fewest


def _plain(values: _Floats) -> list[float | None]:
    return [value if isfinite(value) else None for value in values.tolist()]


def _encoded(values: _Floats) -> str:
    return base64.b64encode(values.astype(np.float32).tobytes()).decode()


def decoded(text: str) -> _Floats:
    """Return the contributions that a journal holds."""
    return np.frombuffer(base64.b64decode(text), np.float32).astype(np.float64)


def write_tables(journal: Journal, folder: Path) -> None:
    """Write the tables of a run folder as CSV: metrics of all rounds, and figures of clients at the end."""
    write_metrics(journal, folder / "metrics.csv")
    _write_clients(journal, folder / "clients.csv")


def _write_clients(journal: Journal, path: Path) -> None:
    """Write the figures of clients at the end as CSV, one line per job and client; nothing where there are none."""
    jobs = [job for job in journal.jobs() if "values" in job["facts"].get("clients", {})]
    if not jobs:
        path.unlink(missing_ok=True)
        return
    names = list(dict.fromkeys(name for job in jobs for name in job["facts"]["clients"]["values"]))
    columns = ["records", "epsilon", "own_epsilon", "spent"]
    partial = path.with_suffix(".part")
    with partial.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["method", "seed", "client", *columns, "test_records", "majority", *names])
        for job in jobs:
            found = job["facts"]["clients"]
            rows = journal.query("SELECT * FROM clients WHERE job = ?", (job["job"],))
            known = {row["client"]: row for row in rows}
            for place, client in enumerate(found["ids"]):
                figures = [found[name][place] for name in ("test_records", "majority")]
                figures += [found["values"][name][place] if name in found["values"] else None for name in names]
                own = [known[client][name] for name in columns]
                writer.writerow([job["label"], job["seed"], client, *own, *figures])
    partial.replace(path)
