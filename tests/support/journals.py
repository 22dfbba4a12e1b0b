"""Writes journals of runs that never were, through the journal's own interface."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from polyeps.experiment.journal import _NEW_JOB, Checkpoint, ClientRow, Journal

FACTS = {
    "summary": "average of the clients' updates",
    "budgets": "own",
    "trust": "nobody",
    "unit": "record",
    "adjacency": "zero-out",
    "sampler": "poisson",
    "stopped": "rounds",
    "parameters": 26010,
    "data": "mnist",
    "scale_strategy": "spend",
}
ABOUT: dict[str, Any] = {
    "name": "small",
    "experiment": {"rounds": 3, "training": {"clip": 1.0, "batch": 8}},
    "version": "0.1",
    "command": "polyeps run small.toml",
}
CLIENTS = (
    ClientRow("ward-a", 0.5, 1e-5, 0.5, 100, 4.0),
    ClientRow("ward-b", 2.0, 1e-5, 2.0, 200, 1.5),
)
_NOWHERE = Checkpoint(0, (), b"", {})


def new_journal(folder: Path, about: Mapping[str, Any] | None = None) -> Journal:
    """An empty journal in a new run folder."""
    folder.mkdir(parents=True)
    return Journal.create(folder / "journal.db", ABOUT if about is None else about)


def add_job(journal: Journal, job: str, method: str, label: str, seed: int, rounds: int) -> None:
    """Add a job that has not begun."""
    with journal._writing() as db:
        db.execute(_NEW_JOB, (job, method, label, seed, rounds))


def write_job(
    journal: Journal,
    label: str = "fedavg",
    seed: int = 0,
    *,
    accuracies: Sequence[float | None] = (0.5, 0.6, 0.7),  # None: not evaluated
    planned: int | None = None,
    clients: Sequence[ClientRow] = CLIENTS,
    spent: Mapping[str, float] | None = None,  # by default half of each effective budget
    left: Mapping[str, int] | None = None,  # client ↦ the journal's number of its last round
    facts: Mapping[str, Any] | None = None,
    finished: bool = True,
    sent: int = 100,
    received: int = 300,
    joins: Callable[[int, int], bool] = lambda _round, _client: True,
) -> str:
    """One job in which every client is asked in every round until it has left."""
    job, left = f"{label}-{seed}", left or {}
    add_job(journal, job, "fedavg", label, seed, len(accuracies) if planned is None else planned)
    journal.begin(job, clients, {**FACTS, **(facts or {})})
    for number, accuracy in enumerate(accuracies):
        asked = [
            (place, row.client)
            for place, row in enumerate(clients)
            if number <= left.get(row.client, number) and joins(number, place)
        ]
        active = sum(left.get(row.client, number + 1) > number for row in clients)
        counts = {"invited": len(asked), "answered": len(asked), "declined": 0, "active": active, "seconds": 0.25}
        answers = [(client, True, received, sent) for _, client in asked]
        gone = [client for client, last in left.items() if last == number]
        metrics = {} if accuracy is None else {"accuracy": accuracy, "loss": 1 - accuracy}
        journal.write_round(job, number, counts, answers, gone, metrics, _NOWHERE)
    if finished:
        journal.finish(
            job, {row.client: row.epsilon / 2 for row in clients if row.epsilon} if spent is None else spent, {}
        )
    return job


def write_large(journal: Journal, labels: Sequence[str], clients: int, rounds: int, *, each_answer: bool) -> None:
    """Write finished jobs of many clients and rounds at once; without `each_answer`, a client has one row in all."""
    rows = [
        ClientRow(f"hospital-{number:03}", epsilon, 1e-5, epsilon, 100 + 7 * number % 91, 1.0 + number / 100)
        for number in range(clients)
        for epsilon in [0.05 * 1.012**number]
    ]
    for place, label in enumerate(labels):
        job = f"{label}-1"
        add_job(journal, job, "fedavg", label, 1, rounds)
        journal.begin(job, rows, {**FACTS, "summary": label})
        reached = [0.9 - 0.5 / (1 + number / 20) - place / 100 + number % 7 / 500 for number in range(rounds)]
        with journal._writing() as db:
            whole = [(job, number, clients, clients, 0, clients, 0.25) for number in range(rounds)]
            db.executemany("INSERT INTO rounds VALUES (?, ?, ?, ?, ?, ?, ?)", whole)
            db.executemany(
                "INSERT INTO metrics VALUES (?, ?, 'accuracy', ?)", [(job, *pair) for pair in enumerate(reached)]
            )
            answered = range(rounds) if each_answer else range(1)
            db.executemany(
                "INSERT INTO answers VALUES (?, ?, ?, 1, 300, 100)",
                ((job, number, row.client) for number in answered for row in rows),
            )
        spent = {
            row.client: (row.epsilon or 0.0) * (0.5 + (number * 7 + place) % 50 / 100)
            for number, row in enumerate(rows)
        }
        journal.finish(job, spent, {})
