"""Journal entries for a job: clients, guarantees, what clients keep; and all metrics as CSV."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from polyeps.accounting import epsilon_if_draws_known
from polyeps.accounting.certificate import SECRET_COHORT
from polyeps.algorithms import ALGORITHMS
from polyeps.clients import Clients
from polyeps.core import State
from polyeps.experiment import config
from polyeps.experiment.effective_budgets import described, whose_budgets
from polyeps.experiment.job import Job
from polyeps.experiment.journal import COUNTED, Checkpoint, ClientRow, Journal, spent_key
from polyeps.experiment.registry import checked_options
from polyeps.experiment.remarks import remarks
from polyeps.ledger import Ledger
from polyeps.server import Round
from polyeps.transport import codec

_SMALL = 1 << 16  # numbers that are written whole after every round
# Options that change what a method's own summary says.
_OTHERWISE = {
    ("cmp-fed", "directions", "model"): "updates along directions of the public model, in one secure sum",
    ("dp-randagg", "rank", 0): "DP-FedAvg: all of every update in one secure sum",
    ("pdp-fl", "delayed", True): ALGORITHMS["pdp-fl-plus"].summary,
    ("fedhdp", "personal", False): "sums per privacy level, weighted by their noise",
}


def client_rows(job: Job) -> Iterator[ClientRow]:
    """Yield the clients of a job: budgets, records, noise."""
    population = job.population
    sizes = population.sizes.tolist()
    for place, (client, own) in enumerate(zip(population.ids, population.budgets, strict=True)):
        budget = job.budgets[place] if job.budgets else None
        yield ClientRow(
            client=client,
            epsilon=budget.epsilon if budget else None,
            delta=budget.delta if budget else None,
            own_epsilon=own.epsilon if own else None,
            records=sizes[place],
            noise_multiplier=float(job.noise_multiplier[place]) if budget else None,
            level=population.groups[place] if population.groups else None,
        )


def facts(job: Job, experiment: config.Experiment) -> dict[str, Any]:
    """Return the guarantee of a job and its terms."""
    return {
        "summary": _summary(job),
        "budgets": job.whose_budgets,
        "form": job.method.form,
        "trust": job.algorithm.trust,
        "unit": job.algorithm.unit,
        "person": job.population.trained.person,
        "adjacency": job.algorithm.adjacency,
        "arithmetic": job.algorithm.arithmetic,
        "sampler": _sampler(job),
        "conditions": job.algorithm.conditions,
        "parameters": job.population.model.size,
        "data": job.population.dataset.name,
        "encoder": experiment.model.encoder,
        "remarks": remarks(job),
        "scale_strategy": "own" if experiment.budgets.noise_multiplier is None else "common",
    }


def said_of(journal: Journal) -> list[str]:
    """Return the remarks on the jobs of a run, each once."""
    return list(dict.fromkeys(said for job in journal.jobs() for said in job["facts"].get("remarks", ())))


def outcome(job: Job, ledger: Ledger | None, ended: Mapping[str, Any]) -> tuple[dict[str, float], dict[str, Any]]:
    """Return what every client with a budget has spent, and facts about the end of a job: those given, and more."""
    ended = dict(ended)
    if ledger is None:
        return {}, ended
    spent = {client: ledger.spent(client) for client in job.terms}
    if SECRET_COHORT in job.algorithm.conditions:
        # By what was spent at which δ; of clients alike in both but with other histories, the larger figure.
        known: dict[str, float] = {}
        for standing in {ledger.account(client).standing for client in spent}:
            delta = standing.terms.budget.delta
            key = spent_key(standing.spent, delta)
            found = epsilon_if_draws_known(standing.history, delta, standing.terms.adjacency)
            known[key] = max(found, known.get(key, 0.0))
        ended["spent_if_draws_known"] = {key: value for key, value in known.items() if math.isfinite(value)}
    return spent, ended


def _summary(job: Job) -> str:
    """Return what a method does, with the options it was given."""
    options = checked_options(job.method, job.entry)
    summary = job.entry.summary
    for (name, option, value), otherwise in _OTHERWISE.items():
        if name == job.method.name and options[option] == value:
            summary = otherwise
    said = described(summary, whose_budgets(job.method, job.entry))
    if job.algorithm.unit == "client" and job.budgets is not None:
        said += "; whole clients protected"
    return said if job.method.epsilon is None else f"{said}; here ε = {job.method.epsilon:g}"


def _sampler(job: Job) -> str:
    """Return how batches or, where whole clients are protected, cohorts are sampled; "none": all are taken."""
    if job.algorithm.round_price is not None:
        return "poisson" if job.participation.kind == "poisson" else "none"
    return "none" if job.entry.local == "gradient" else "poisson" if job.method.form == "sound" else "fixed"


def write_round(
    journal: Journal,
    job: str,
    round: Round,
    now: State,
    left: Iterable[str],
    metrics: Mapping[str, float],
    active: tuple[str, ...] | None = None,
    memory: Mapping[str, bytes] | None = None,
) -> None:
    """Write a round and the state after it, from which the job can go on."""
    counts = {
        "invited": len(round.invited),
        "answered": len(round.traffic),
        "declined": len(round.declined),
        "active": len(round.active),
        "seconds": round.seconds,
    }
    answers = [(client, True, *size) for client, size in round.traffic.items()]
    answers += [(client, False, 0, 0) for client in round.declined if client not in round.traffic]
    state = codec.encode({"model": now.model, **{f"kept/{name}": kept for name, kept in now.kept.items()}})
    point = Checkpoint(round.number + 1, active, state, memory or {})
    journal.write_round(job, round.number, counts, answers, left, metrics, point)


def state_after(checkpoint: Checkpoint) -> State:
    """Return the state that was written."""
    held = dict(codec.decode(checkpoint.state))
    model = held.pop("model")
    return State(model, {name.removeprefix("kept/"): kept for name, kept in held.items()}, round=checkpoint.round)


def changes(clients: Clients) -> dict[str, bytes]:
    """Return what clients keep and changed since the last call: small tensors whole, large ones client by client."""
    pieces = {}
    for name, places in clients.changed.items():
        kept = clients.memory[name]
        if kept.numel() <= _SMALL:
            pieces[name] = codec.encode({"kept": kept})
        else:
            chosen = sorted(places)
            rows = codec.encode_each("kept", kept[torch.tensor(chosen)])
            pieces |= {f"{name}/{clients.ids[place]}": row for place, row in zip(chosen, rows, strict=True)}
    clients.changed.clear()
    return pieces


def remind(clients: Clients, pieces: Mapping[str, bytes]) -> None:
    """Restore what clients kept."""
    for piece, content in pieces.items():
        name, _, client = piece.partition("/")
        kept = codec.decode(content)["kept"]
        clients.memory[name][clients.places([client])[0] if client else slice(None)] = kept.to(clients.memory[name])


def write_metrics(journal: Journal, path: Path) -> None:
    """Write all metrics of all rounds as CSV, one line per job and round."""
    rows, names = journal.rounds()
    partial = path.with_suffix(".part")
    with partial.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, ["method", "seed", "round", *COUNTED, *names], extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
    partial.replace(path)
