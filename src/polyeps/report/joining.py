"""Is joining worth it for each client? The joint model beside the client alone, on the client's own test records.

Two models are compared record by record. Accuracies: the interval of Agresti and Min, "Simple improved confidence
intervals for comparing matched proportions", Statistics in Medicine 2005. AUC: the interval of DeLong et al.,
"Comparing the areas under two or more correlated receiver operating characteristic curves", Biometrics 1988. With
several seeds, the spread of the difference over seeds is added, with Student's quantile for so few of them. Records of
one person are alike: where persons are known, differences are added up by person before their variance is computed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from polyeps.experiment.client_metrics import decoded
from polyeps.report.client_figures import Spread, over_seeds
from polyeps.report.formatting import counted
from polyeps.report.tables import MethodRuns

ALONE = "alone"  # the algorithm
LEAST_RECORDS = 30  # test records of a client, to compare accuracies
LEAST_OF_A_CLASS = 10  # test records of its rarest class, to compare AUCs
LEAST_PERSONS = 10  # with test records of a client, where persons are known
TOLD_APART_AT = 0.95
_Floats = NDArray[np.float64]
_Outcome = Literal["gains", "loses", "same", "unknown"]


@dataclass(frozen=True)
class Verdict:
    """The joint model against another one: how much better it is, and whether that can be told from chance."""

    outcome: _Outcome
    difference: float | None  # of the metric; positive: the joint model is better
    margin: float | None  # half the width of the interval
    reason: str = ""  # where it is unknown

    @property
    def text(self) -> str:
        """The verdict in words."""
        if self.difference is None or self.margin is None:
            return self.reason
        margin = f"\u00a0±\u00a0{100 * self.margin:.1f}"
        if self.outcome == "same":
            more = round(100 * self.difference, 1) + 0.0  # never -0.0
            return f"cannot be told apart ({more:+.1f}{margin})".replace("-", "\u2212")
        return f"{self.outcome} {abs(100 * self.difference):.1f}{margin} points"


@dataclass(frozen=True)
class Joining:
    """What one client gets by joining, and what it has alone; None: not measured."""

    client: str
    joint: Spread | None  # on the client's own test records, or everybody's where it has none
    joint_on_all: Spread | None
    alone: Spread | None  # with its own budget
    at_home: Spread | None  # without noise; the model stays at home
    majority: Spread | None
    against_alone: Verdict | None
    against_home: Verdict | None


@dataclass(frozen=True)
class JoiningTable:
    """The clients of one joint method."""

    label: str
    metric: str
    own_records: bool  # whether clients are compared on test records of their own
    seeds: int
    control: bool
    rows: tuple[Joining, ...]

    def cells(self, row: Joining) -> tuple[str, ...]:
        """Return a row of a table: what a client reaches jointly and alone, and the verdicts."""
        own = (row.joint,) if self.own_records else ()
        figures = (*own, row.joint_on_all, row.alone, row.at_home, row.majority)
        verdicts = (row.against_alone, row.against_home)
        reached = ("–" if one is None else one.text(self.metric) for one in figures)
        return (row.client, *reached, *("–" if one is None else one.text for one in verdicts))


def joining_tables(methods: Sequence[MethodRuns]) -> list[JoiningTable]:
    """Return a table for each joint method of the runs in which clients also trained alone."""
    found = []
    for method in methods:
        beside = [one for one in methods if one.method == ALONE and one.run == method.run]
        if method.method != ALONE and beside:
            private = next((one for one in beside if one.budgets != "none"), None)
            at_home = next((one for one in beside if one.budgets == "none"), None)
            if table := _table(method, private, at_home):
                found.append(table)
    return found


def best_table(tables: Sequence[JoiningTable]) -> JoiningTable | None:
    """Return the table of the best method that keeps clients' own budgets, or of the best control without one."""
    sound = [table for table in tables if not table.control] or list(tables)
    return max(sound, key=_mean_on_all, default=None)


def _mean_on_all(table: JoiningTable) -> float:
    return next((row.joint_on_all.mean for row in table.rows if row.joint_on_all), -math.inf)


def _table(method: MethodRuns, private: MethodRuns | None, at_home: MethodRuns | None) -> JoiningTable | None:
    jobs = _jobs(method)
    if not jobs:
        return None
    first = next(iter(jobs.values()))
    metric, own = first["clients"].get("comparing"), "values" in first["clients"]
    if metric is None:
        return None
    others = [{} if one is None else _jobs(one) for one in (private, at_home)]
    name = _named(first, metric)
    rows = []
    for client in dict.fromkeys(client for job in jobs.values() for client in job["clients"]["ids"]):
        on_all = over_seeds([job["on_all"].get(name) for job in jobs.values()])
        joint = over_seeds([_figure(job, client, name, own) for job in jobs.values()]) if own else on_all
        alone, home = (over_seeds([_figure(job, client, name, own) for job in some.values()]) for some in others)
        verdicts = [_verdict(client, jobs, some, metric) if some else None for some in others]
        guessed = [_majority(job, client) for job in jobs.values()] if metric == "accuracy" else [0.5]
        rows.append(Joining(client, joint, on_all, alone, home, over_seeds(guessed), *verdicts))
    return JoiningTable(method.label, name, own, len(jobs), method.control, tuple(rows))


def _jobs(method: MethodRuns) -> dict[int, dict[str, Any]]:
    """Return the facts of finished jobs by seed, with the last overall figures under "on_all"."""
    found = {}
    for job in method.counted:
        if "clients" in job.facts:
            last = {name: values[max(values)] for name, values in job.metrics.items() if values}
            if job.accuracy:
                last["accuracy"] = job.accuracy[max(job.accuracy)]
            clients = job.facts["clients"]
            places = {client: place for place, client in enumerate(clients["ids"])}
            compared = {name: _compared(clients, name) for name in ("contributions", "persons")}
            found[job.seed] = {**job.facts, "on_all": last, "places": places, **compared}
    return found


def _compared(clients: Mapping[str, Any], name: str) -> list[_Floats]:
    """Return, for each client, the contributions or persons of the records that it is compared on; [] if not kept."""
    if name not in clients:
        return []
    values = decoded(clients[name])
    if "test_records" in clients:
        return np.split(values, np.cumsum(clients["test_records"])[:-1])
    if "on_all" in clients:  # a model for each client, all on the same records
        return list(values.reshape(len(clients["ids"]), -1))
    return [values] * len(clients["ids"])


def _named(job: Mapping[str, Any], metric: str) -> str:
    """Return the compared metric as the experiment spells it."""
    if metric == "accuracy":
        return metric
    known = [*job["on_all"], *job["clients"].get("values", {})]
    return "auc" if "auc" in known else "roc_auc"


def _figure(job: Mapping[str, Any], client: str, name: str, own: bool) -> float | None:
    """Return a client's figure on its own test records or on all; None where there is none."""
    place, figures = job["places"].get(client), job["clients"].get("values" if own else "on_all", {})
    value = None if place is None else figures.get(name, {place: None})[place]
    return None if value is None else float(value)


def _majority(job: Mapping[str, Any], client: str) -> float | None:
    place, clients = job["places"].get(client), job["clients"]
    value = job["majority"] if "majority" not in clients or place is None else clients["majority"][place]
    return None if value is None else float(value)


def _kept(job: Mapping[str, Any], client: str, name: str) -> _Floats | None:
    place = job["places"].get(client)
    return None if place is None or not job[name] else job[name][place]


def _verdict(
    client: str, jobs: Mapping[int, Mapping[str, Any]], others: Mapping[int, Mapping[str, Any]], metric: str
) -> Verdict:
    """Compare a joint method with the client alone, over the seeds that both have."""
    means, variances = [], []
    for seed in jobs.keys() & others.keys():
        joint, alone = (_kept(job, client, "contributions") for job in (jobs[seed], others[seed]))
        persons = _kept(jobs[seed], client, "persons")
        if joint is None or alone is None or len(joint) != len(alone):
            return Verdict("unknown", None, None, "not compared: too many test records")
        if few := _too_few(jobs[seed], client, metric, len(joint), persons):
            return Verdict("unknown", None, None, few)
        apart = joint - alone
        if not np.isfinite(apart).all():
            return Verdict("unknown", None, None, f"no {metric.upper() if metric == 'auc' else metric} here")
        means.append(float(apart.mean()))
        variances.append(paired_variance(apart, metric, persons))
    if not means:
        return Verdict("unknown", None, None, "not measured")
    difference, margin = float(np.mean(means)), margin_of(means, variances)
    outcome: _Outcome = "same" if abs(difference) <= margin else "gains" if difference > 0 else "loses"
    return Verdict(outcome, difference, margin)


def _too_few(job: Mapping[str, Any], client: str, metric: str, records: int, persons: _Floats | None) -> str:
    place, clients = job["places"].get(client), job["clients"]
    if persons is not None and (held := len(np.unique(persons))) < LEAST_PERSONS:
        return f"too few test records (of {counted(held)} {job.get('person') or 'person'}s)"
    if metric == "accuracy" and records < LEAST_RECORDS:
        return f"too few test records ({counted(records)})"
    if metric == "auc" and place is not None and "rarest" in clients:
        rarest = clients["rarest"][place]
        if rarest < LEAST_OF_A_CLASS:
            return f"too few test records ({counted(rarest)} of a class)"
    return ""


def paired_variance(apart: _Floats, metric: str, persons: _Floats | None = None) -> float:
    """Return the variance of the mean of differences between two models on the same records, those of some persons."""
    many = len(apart)
    if metric == "accuracy":  # differences are -1, 0 or 1; half a record is added to each cell of the 2 × 2 table
        found = float((np.sum(apart**2) + 1 - np.sum(apart) ** 2 / (many + 2)) / (many + 2) ** 2)
    else:
        found = float(np.var(apart, ddof=1) / many)
    if persons is None:
        return found
    held, person = np.unique(persons, return_inverse=True)
    sums = np.bincount(person, apart - apart.mean())  # of each person
    return max(found, float(np.sum(sums**2) / many**2 * len(held) / (len(held) - 1)))


def margin_of(means: Sequence[float], variances: Sequence[float]) -> float:
    """Return half the width of the interval around a difference: chance in test records, and in training.

    Seeds may share their test records, so chance in these does not shrink with the number of seeds.
    """
    from scipy.stats import norm, t

    of_records = float(np.mean(variances))
    of_seeds = float(np.var(means, ddof=1)) / len(means) if len(means) > 1 else 0.0
    upper = (1 + TOLD_APART_AT) / 2
    if not of_seeds:
        return float(norm.ppf(upper) * math.sqrt(of_records))
    freedom = (of_records + of_seeds) ** 2 / (of_seeds**2 / (len(means) - 1))
    return float(t.ppf(upper, freedom) * math.sqrt(of_records + of_seeds))
