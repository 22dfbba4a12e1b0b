"""What a journal is told about a job: its clients, the terms of its promises, and what its clients keep."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from polyeps.accounting.certificate import SECRET_COHORT
from polyeps.accounting.known_draws import epsilon_if_draws_known
from polyeps.algorithms import ALGORITHMS
from polyeps.clients import Clients
from polyeps.experiment import config
from polyeps.experiment.job import Job, checked_options
from polyeps.experiment.journal import ClientRow, spent_key
from polyeps.ledger import Ledger
from polyeps.transport import codec

_SMALL = 1 << 16  # numbers that are written whole after every round
# Options with which a method does something else than its own sentence says.
_OTHERWISE = {
    ("cmp-fed", "directions", "model"): (
        "updates along directions the public model tells, summed unseen with noise; whole clients protected"
    ),
    ("uv-fed", "directions", "model"): (
        "control: updates along directions the public model tells, without noise, clip or promise"
    ),
    ("dp-randagg", "rank", 0): "DP-FedAvg: all of every update, summed unseen with noise; whole clients protected",
    ("randagg", "rank", 0): "control: FedAvg of clients drawn in secret, without noise, clip or promise",
    ("pdp-fl", "delayed", True): ALGORITHMS["pdp-fl-plus"].summary,
    ("fedhdp", "personal", False): "whole clients protected, at the levels they chose",
}


def client_rows(job: Job) -> list[ClientRow]:
    """The clients of a job: budgets, records, noise."""
    people = job.population
    rows = []
    sizes = people.partition.sizes.tolist()
    for place, (client, own) in enumerate(zip(people.ids, people.budgets, strict=True)):
        budget = job.budgets[place] if job.budgets else None
        rows.append(
            ClientRow(
                client=client,
                epsilon=budget.epsilon if budget else None,
                delta=budget.delta if budget else None,
                own_epsilon=own.epsilon if own else None,
                records=sizes[place],
                noise_multiplier=float(job.scale[place]) if budget else None,
                level=people.groups[place] if people.groups else None,
            )
        )
    return rows


def facts(job: Job, experiment: config.Experiment) -> dict[str, Any]:
    """What is promised in a job, and on what terms."""
    return {
        "summary": _summary(job),
        "budgets": _whose_budgets(job),
        "form": job.method.form,
        "trust": job.algorithm.trust,
        "unit": job.algorithm.unit,
        "adjacency": job.algorithm.adjacency,
        "arithmetic": job.algorithm.arithmetic,
        "sampler": _sampler(job),
        "conditions": job.algorithm.conditions,
        "parameters": job.population.model.size,
        "data": job.population.dataset.name,
        "scale_strategy": "own" if experiment.budgets.scale is None else "common",
    }


def outcome(job: Job, ledger: Ledger | None, ended: Mapping[str, Any]) -> tuple[dict[str, float], dict[str, Any]]:
    """Return what every client with a budget has spent, and facts about the end of a job: those given, and more."""
    ended = dict(ended)
    if ledger is None:
        return {}, ended
    spent = {client: ledger.spent(client) for client in job.terms}
    if SECRET_COHORT in job.algorithm.conditions:
        # By what was spent at which δ; of clients alike in both but with other histories, the larger figure.
        known: dict[str, float] = {}
        for account in {ledger.account(client) for client in spent}:
            budget = account.terms.budget
            key = spent_key(account.spent(), budget.delta)
            found = epsilon_if_draws_known(account.history, budget.delta, account.terms.adjacency)
            known[key] = max(found, known.get(key, 0.0))
        ended["spent_if_draws_known"] = {key: value for key, value in known.items() if math.isfinite(value)}
    return spent, ended


def _summary(job: Job) -> str:
    """What a method does, with the options it was given."""
    options = checked_options(job.method, job.entry)
    told = (
        said
        for (name, option, value), said in _OTHERWISE.items()
        if name == job.method.name and options[option] == value
    )
    said = next(told, job.entry.summary)
    return said if job.method.epsilon is None else f"{said}; here ε = {job.method.epsilon:g}"


def _whose_budgets(job: Job) -> str:
    """Whose budgets are in force. Where all clients have the same one, the strictest of all is everybody's own."""
    if job.method.form != "sound":
        return "published"
    return "own" if job.budgets == job.population.budgets else job.entry.budgets


def _sampler(job: Job) -> str:
    """How what is protected is drawn: a client's batches or, where whole clients are, cohorts; "none": all of it."""
    if job.algorithm.dues is not None:
        return "poisson" if job.participation.kind == "poisson" else "none"
    return "none" if job.entry.local == "gradient" else "poisson" if job.method.form == "sound" else "fixed"


def changes(cohort: Clients) -> dict[str, bytes]:
    """What clients keep, as far as it changed since the last call: small things whole, large ones client by client."""
    pieces = {}
    for name, places in cohort.changed.items():
        kept = cohort.memory[name]
        if kept.numel() <= _SMALL:
            pieces[name] = codec.encode({"kept": kept})
        else:
            pieces |= {f"{name}/{cohort.ids[place]}": codec.encode({"kept": kept[place]}) for place in places}
    cohort.changed.clear()
    return pieces


def remind(cohort: Clients, pieces: Mapping[str, bytes]) -> None:
    """Give clients back what they kept."""
    for piece, content in pieces.items():
        name, _, client = piece.partition("/")
        kept = codec.decode(content)["kept"]
        cohort.memory[name][cohort.places([client])[0] if client else slice(None)] = kept.to(cohort.memory[name])
