"""Run folders: start an experiment, go on with one that was stopped, read what came out.

    FOLDER/journal.db        the settings, as resolved, and what happened (see `journal`)
    FOLDER/ledgers/JOB.db    what each simulated client has spent
    FOLDER/models/JOB.safetensors
    FOLDER/metrics.csv

A job is one method with one seed. Its clients draw seeded numbers, so a round that was cut off is repeated with
the same result, and its charges, already on disk, are not made twice.
"""

from __future__ import annotations

import csv
import fcntl
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from polyeps import __version__
from polyeps.accounting.calibration import ProgressCallback
from polyeps.algorithms._personal_models import personal_models
from polyeps.core import Profile, State
from polyeps.errors import InputError
from polyeps.experiment import config
from polyeps.experiment.evaluation import by_group
from polyeps.experiment.job import Job, prepare
from polyeps.experiment.journal import Checkpoint, Journal
from polyeps.experiment.journal_entries import changes, client_rows, facts, outcome, remind
from polyeps.experiment.population import populate
from polyeps.ledger import Ledger
from polyeps.server import ALL_ROUNDS, Round, check_disclosure
from polyeps.transport import codec
from polyeps.transport.memory import InMemory


@dataclass(frozen=True)
class Watch:
    """How a run reports on itself while it goes on; every part is optional."""

    calibrating: ProgressCallback | None = None
    round_done: Callable[[str, Round, int, Mapping[str, float]], None] = lambda *_: None
    job_done: Callable[[str], None] = lambda *_: None


@dataclass(frozen=True)
class Outcome:
    """What came out of a run, by method and seed."""

    folder: Path
    accuracy: dict[tuple[str, int], list[float]]
    spent: dict[tuple[str, int], dict[str, float]]  # of every client that was promised something
    models: dict[tuple[str, int], Tensor]


def run(
    experiment: config.Experiment,
    folder: Path | str,
    *,
    device: str = "cpu",
    command: str = "",
    watch: Watch | None = None,
) -> Outcome:
    """Run an experiment into a new folder."""
    folder = Path(folder)
    watch = watch or Watch()
    if (folder / "journal.db").exists():
        raise InputError(f"{folder} holds a run already; resume it, or choose another folder")
    # Whatever can be wrong with any job is found before the first one begins.
    for seed in experiment.seeds:
        population = populate(experiment, seed, device)
        for method in experiment.algorithm:
            job = prepare(experiment, method, population, watch.calibrating)
            told: Any = dict.fromkeys(job.tells, 1)
            groups = job.groups or (None,) * len(population.ids)
            faces = zip(population.ids, groups, strict=True)
            check_disclosure(job.algorithm, [Profile(client, **{**told, "group": group}) for client, group in faces])
    _make_folder(folder)
    about = {
        "name": experiment.name,
        "experiment": experiment.as_dict(),
        "version": __version__,
        "command": command,
    }
    jobs = [
        (f"{method.title}-{seed}", method.name, method.title, seed, experiment.rounds)
        for seed in experiment.seeds
        for method in experiment.algorithm
    ]
    Journal.create(folder / "journal.db", about, jobs).close()
    return resume(folder, device=device, watch=watch)


def resume(folder: Path | str, *, device: str = "cpu", watch: Watch | None = None) -> Outcome:
    """Do whatever of a run is not done yet."""
    folder = Path(folder)
    watch = watch or Watch()
    journal = Journal(folder / "journal.db")
    with _alone_in(folder):
        _do_all(journal, folder, device, watch)
    journal.close()
    return read(folder)


def _do_all(journal: Journal, folder: Path, device: str, watch: Watch) -> None:
    """Do the jobs of a run that are not done yet."""
    experiment = config.experiment(journal.about()["experiment"])
    methods = {method.title: method for method in experiment.algorithm}
    population = None
    for row in journal.jobs():
        if row["status"] == "done":
            continue
        if population is None or population.seed != row["seed"]:
            population = populate(experiment, row["seed"], device)
        job = prepare(experiment, methods[row["label"]], population, watch.calibrating)
        _do(job, experiment, journal, folder, watch)
        watch.job_done(job.name)
    _write_metrics(journal, folder / "metrics.csv")


def read(folder: Path | str) -> Outcome:
    """What a run has brought so far."""
    folder = Path(folder)
    journal = Journal(folder / "journal.db")
    accuracy: dict[tuple[str, int], list[float]] = {}
    spent: dict[tuple[str, int], dict[str, float]] = {}
    models: dict[tuple[str, int], Tensor] = {}
    for row in journal.jobs():
        key, job = (row["label"], row["seed"]), row["job"]
        metrics = journal.query("SELECT value FROM metrics WHERE job = ? AND name = 'accuracy' ORDER BY round", (job,))
        accuracy[key] = [metric["value"] for metric in metrics]
        clients = journal.query("SELECT client, spent FROM clients WHERE job = ? AND spent IS NOT NULL", (job,))
        spent[key] = {client["client"]: client["spent"] for client in clients}
        if row["status"] == "done":
            models[key] = codec.decode(_model_path(folder, job).read_bytes())["model"]
    journal.close()
    return Outcome(folder, accuracy, spent, models)


def _do(job: Job, experiment: config.Experiment, journal: Journal, folder: Path, watch: Watch) -> None:
    """Run one job from where it stands."""
    ledger = _open_ledger(job, folder)
    cohort = job.cohort(ledger)
    state, active = job.state, None
    checkpoint = journal.checkpoint(job.name)
    if checkpoint is None:
        journal.begin(job.name, client_rows(job), facts(job, experiment))
    else:
        state, active = _restored(checkpoint), checkpoint.active
        remind(cohort, checkpoint.memory)
    before = set(job.population.ids if active is None else active)

    def observe(round: Round, now: State) -> None:
        goes_on = job.participation.goes_on(round.active) and not now.stopped
        last = round.number + 1 == experiment.rounds or not goes_on
        due = (round.number + 1) % experiment.evaluate_every == 0 or last
        metrics = job.population.evaluate(now.model) if due else {}
        if round.discarded:
            metrics["discarded replies"] = len(round.discarded)
        if last and job.population.own_tests is not None:
            metrics |= by_group(job.population, now.model, personal_models(cohort.memory, now.model))
        counts = {
            "invited": len(round.invited),
            "answered": len(round.traffic),
            "declined": len(round.declined),
            "active": len(round.active),
            "seconds": round.seconds,
        }
        answers = [(client, True, *size) for client, size in round.traffic.items()]
        answers += [(client, False, 0, 0) for client in round.declined if client not in round.traffic]
        left = before - set(round.active)
        before.difference_update(left)
        point = Checkpoint(
            round.number + 1,
            round.active,
            codec.encode({"model": now.model, **{f"kept/{name}": kept for name, kept in now.kept.items()}}),
            changes(cohort),
        )
        journal.write_round(job.name, round.number, counts, answers, left, metrics, point)
        watch.round_done(job.name, round, experiment.rounds, metrics)

    transport = InMemory(cohort, job.algorithm, job.tells)
    state = job.serve(transport, experiment.rounds, job.name, state, active=active, observe=observe)
    path = _model_path(folder, job.name)
    path.parent.mkdir(exist_ok=True)
    partial = path.with_suffix(".part")
    partial.write_bytes(codec.encode({"model": state.model}))
    partial.replace(path)
    stopped = "rounds" if state.stopped == ALL_ROUNDS else "early"
    journal.finish(job.name, *outcome(job, ledger, {"stopped": stopped, "reason": state.stopped}))
    if ledger:
        ledger.close()


def _open_ledger(job: Job, folder: Path) -> Ledger | None:
    if job.budgets is None:
        return None
    path = folder / "ledgers" / f"{job.name}.db"
    path.parent.mkdir(exist_ok=True)
    return Ledger.open_or_create(path, job.terms)


def _restored(checkpoint: Checkpoint) -> State:
    held = dict(codec.decode(checkpoint.state))
    model = held.pop("model")
    return State(model, {name.removeprefix("kept/"): kept for name, kept in held.items()}, round=checkpoint.round)


def _model_path(folder: Path, job: str) -> Path:
    return folder / "models" / f"{job}.safetensors"


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Refuse to work in a folder in which another process does; the lock goes with the process that holds it."""
    held = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise InputError(f"another process is running {folder}; wait for it, or stop it first") from None
    else:
        yield
    finally:
        os.close(held)


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise InputError(f"{folder} cannot be made: {problem.strerror}; choose another folder") from None


def _write_metrics(journal: Journal, path: Path) -> None:
    """All metrics of all rounds as CSV, one line per job and round."""
    rows = journal.query("SELECT * FROM metrics")
    names = sorted({row["name"] for row in rows})
    values = {(row["job"], row["round"], row["name"]): row["value"] for row in rows}
    columns = ["invited", "answered", "declined", "active", "seconds"]
    partial = path.with_suffix(".part")
    with partial.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["method", "seed", "round", *columns, *names])
        statement = (
            "SELECT jobs.label, jobs.seed, rounds.* FROM rounds JOIN jobs USING (job) ORDER BY jobs.rowid, round"
        )
        for row in journal.query(statement):
            found = [values.get((row["job"], row["round"], name)) for name in names]
            writer.writerow([row["label"], row["seed"], row["round"], *(row[c] for c in columns), *found])
    partial.replace(path)
