"""Run folders: run an experiment, resume one that was interrupted, read the results.

    FOLDER/journal.db        the settings, as resolved, and what happened (see `journal`)
    FOLDER/ledgers/JOB.db    what each simulated client has spent
    FOLDER/models/JOB.safetensors
    FOLDER/metrics.csv       every round
    FOLDER/clients.csv       what models reach on each client's own test records, where it has some

A job is one method with one seed. Its clients draw seeded numbers, so a round that was cut off is repeated with
the same result, and its charges, already on disk, are not made twice.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from polyeps import __version__
from polyeps.algorithms import Entry
from polyeps.algorithms._personal_models import personal_models
from polyeps.core import Algorithm, Profile, State
from polyeps.errors import InputError
from polyeps.experiment import config
from polyeps.experiment.client_metrics import Wanted, final_facts, write_tables
from polyeps.experiment.evaluation import by_group, measure, measure_models
from polyeps.experiment.job import Job, prepare
from polyeps.experiment.journal import Journal
from polyeps.experiment.journal_entries import changes, client_rows, facts, outcome, remind, state_after, write_round
from polyeps.experiment.model_metadata import check_description, write_model
from polyeps.experiment.outcome import Outcome, model_path, read
from polyeps.experiment.population import Population, own_dataset, populate, same_dataset
from polyeps.experiment.progress import Watch, seen, watching
from polyeps.experiment.registry import Code, Encoder, Metric, ModelFactory, Parts, Tracker, entry_of
from polyeps.experiment.shards import Sharding, job_digest, workers
from polyeps.experiment.target_metrics import ALWAYS_MEASURED, headline
from polyeps.ledger import Ledger
from polyeps.server import ALL_ROUNDS, Round, check_disclosure
from polyeps.transport.client_files import alone_with
from polyeps.transport.memory import InMemory

_HERE = Sharding()
_KEPT = 1 << 31  # bytes of records that prepared jobs may hold together; jobs beyond that are prepared again


@dataclass
class _Work:
    """What the jobs of one run share."""

    experiment: config.Experiment
    folder: Path
    device: str
    watch: Watch
    parts: Parts
    sharding: Sharding = _HERE
    jobs: dict[str, Job] = field(default_factory=dict)  # prepared ones, each until it is done
    population: Population | None = None  # of the last job that was prepared
    terms: dict[str, str] = field(default_factory=dict)  # the digest of each job's budgets and noise, as it began

    def __post_init__(self) -> None:
        self.metrics = self.parts.measuring(self.experiment)
        alone = any(not entry_of(method, self.parts).common for method in self.experiment.algorithm)
        self.wanted = Wanted(self.metrics, self.experiment.metrics, compared=alone)
        self.trackers = list(self.parts.trackers)
        for name, make in self.parts.tracking(self.experiment, self.folder).items():
            with _warning(name.rpartition(":")[2]):
                self.trackers.append(make())

    def job(self, method: config.Method, seed: int) -> Job:
        """Return a job, prepared now or before."""
        if prepared := self.jobs.pop(f"{method.title}-{seed}", None):
            self.population = prepared.population
            return prepared
        if self.population is None or self.population.seed != seed:
            self.population = populate(self.experiment, seed, self.device, self.parts, self.watch.encoding)
        return prepare(self.experiment, method, self.population, self.watch.calibrating, self.parts)

    def tell(self, event: str, *arguments: Any) -> None:
        """Call a method of every tracker; a tracker that fails is left out afterwards."""
        kept, self.trackers = self.trackers, []
        for tracker in kept:
            with _warning(type(tracker).__name__):
                getattr(tracker, event)(*arguments)
                self.trackers.append(tracker)

    @contextmanager
    def interruptions(self) -> Iterator[None]:
        """Tell trackers that have a method `interrupted` when a run stops before its end."""
        try:
            yield
        except BaseException:
            self.trackers = [tracker for tracker in self.trackers if hasattr(tracker, "interrupted")]
            self.tell("interrupted")
            raise


@contextmanager
def _warning(tracker: str) -> Iterator[None]:
    """Turn an error of a tracker into a warning."""
    try:
        yield
    except Exception as problem:
        reason = f"{type(problem).__name__}: {problem}"
        warnings.warn(f"tracker {tracker} failed ({reason}); the run goes on without it", RuntimeWarning, stacklevel=4)


def run(
    experiment: config.Experiment,
    folder: Path | str,
    *,
    device: str = "cpu",
    command: str = "",
    watch: Watch | None = None,
    progress: bool | None = None,
    algorithms: Mapping[str, Entry | Callable[..., Algorithm]] | None = None,
    models: Mapping[str, ModelFactory] | None = None,
    encoders: Mapping[str, Callable[[], Encoder]] | None = None,
    metrics: Mapping[str, Metric] | None = None,
    trackers: Sequence[Tracker | str] = (),
    data: Any = None,
    code_folder: Path | str | None = None,
    sharding: Sharding = _HERE,
) -> Outcome:
    """Run an experiment into a new folder.

    Own algorithms, models and encoders are given by the names that the experiment has for them; all metrics and
    trackers that are given are used. `data` is a `Dataset`, a frame or a dictionary of columns, which is read as the
    experiment's [data] declares. With a `code_folder` the experiment may name code of that folder, or of installed
    packages, as "module:name": give it only if you trust that code. Trackers are objects, or names of built-in ones:
    "mlflow", "tensorboard", "wandb". Progress is shown in terminals and notebooks, unless `progress` says otherwise.
    """
    folder = Path(folder)
    if (folder / "journal.db").exists():
        raise InputError(f"{folder} holds a run already; resume it, or choose another folder")
    code = None if code_folder is None else Code(Path(code_folder).absolute())
    named = tuple(tracker for tracker in trackers if isinstance(tracker, str))
    experiment = experiment.model_copy(update={"trackers": tuple(dict.fromkeys((*experiment.trackers, *named)))})
    given = [tracker for tracker in trackers if not isinstance(tracker, str)]
    held = own_dataset(data, experiment.data)
    parts = Parts(algorithms or {}, models or {}, encoders or {}, metrics or {}, given, code, data=held)
    with _shown(progress, watch) as shown:
        _begin(_Work(experiment, folder, device, shown, parts, sharding), command)
    return read(folder)


def _begin(work: _Work, command: str) -> None:
    """Prepare all jobs, make the folder with its journal, and do the jobs."""
    experiment, folder, code, held = work.experiment, work.folder, work.parts.code, work.parts.data
    _prepare_all(work)
    target = "class" if work.population is None else work.population.dataset.target
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise InputError(f"{folder} cannot be made: {problem.strerror}; choose another folder") from None
    about = {
        "name": experiment.name,
        "experiment": experiment.as_dict(),
        "version": __version__,
        "command": command,
        "metrics": [*ALWAYS_MEASURED[target][1:], *work.metrics],
        "headline": headline(target),
        "parts": work.parts.names,
        "terms": work.terms,
        "data": held and held.digest,
        "code": None if code is None else {"folder": str(code.folder), "digests": code.digests},
    }
    jobs = [
        (f"{method.title}-{seed}", method.name, method.title, seed, experiment.rounds)
        for seed in experiment.seeds
        for method in experiment.algorithm
    ]
    Journal.create(folder / "journal.db", about, jobs).close()
    _do_all(work)


def _shown(progress: bool | None, watch: Watch | None) -> AbstractContextManager[Watch]:
    """Return the callbacks that were given, or such that show progress where it is wanted."""
    wanted = seen() if progress is None else progress
    return watching() if wanted and watch is None else nullcontext(watch or Watch())


def resume(
    folder: Path | str,
    *,
    device: str = "cpu",
    watch: Watch | None = None,
    progress: bool | None = None,
    algorithms: Mapping[str, Entry | Callable[..., Algorithm]] | None = None,
    models: Mapping[str, ModelFactory] | None = None,
    encoders: Mapping[str, Callable[[], Encoder]] | None = None,
    metrics: Mapping[str, Metric] | None = None,
    trackers: Sequence[Tracker] = (),
    data: Any = None,
    trust_code: bool = False,
    sharding: Sharding = _HERE,
) -> Outcome:
    """Do the jobs of a run that are not done yet, with the own parts and the data that it was started with."""
    folder = Path(folder)
    with closing(Journal(folder / "journal.db")) as journal:
        about = journal.about()
        if all(row["status"] == "done" for row in journal.jobs()):
            with _alone_in(folder):
                write_tables(journal, folder)
            return read(folder)
    code, known = about.get("code"), about.get("parts") or {}
    trusted = Code(Path(code["folder"]), code["digests"], resumed=True) if trust_code and code else None
    where = code["folder"] if code else ""
    experiment = config.experiment(about["experiment"])
    held = same_dataset(data, experiment.data, about.get("data"))
    parts = Parts(algorithms or {}, models or {}, encoders or {}, metrics or {}, trackers, trusted, where, held)
    for kind, names in known.items():
        if missing := [name for name in names if name not in parts.names.get(kind, ())]:
            raise InputError(f"the run was started with {kind} = {{{missing[0]!r}: ...}}; resume it with the same")
    with _shown(progress, watch) as shown:
        _do_all(_Work(experiment, folder, device, shown, parts, sharding, terms=about.get("terms") or {}))
    return read(folder)


def _prepare_all(work: _Work) -> None:
    """Prepare every job, so that whatever can be wrong with one is found before the first begins."""
    experiment, held = work.experiment, dict[int, int]()
    for seed in experiment.seeds:
        for method in experiment.algorithm:
            job = work.job(method, seed)
            known: Any = dict.fromkeys(job.discloses, 1)
            # Clients differ in their groups alone: one of each group will do.
            group_of = dict(zip(job.groups or (None,), job.population.ids, strict=job.groups is not None))
            profiles = [Profile(client, **{**known, "group": group}) for group, client in group_of.items()]
            check_disclosure(job.algorithm, profiles)
            check_description(job, experiment, work.parts.code)
            work.terms[job.name] = job_digest(job)
            if sum(held.values()) <= _KEPT:
                work.jobs[job.name] = job
        if work.metrics and seed == experiment.seeds[0]:
            measure(job.population, job.population.start, work.metrics)
        features = job.population.dataset.features
        held[id(features)] = features.nbytes  # seeds may share them


def _do_all(work: _Work) -> None:
    """Do the jobs of a run that are not done yet."""
    journal = Journal(work.folder / "journal.db")
    methods = {method.title: method for method in work.experiment.algorithm}
    with _alone_in(work.folder), work.interruptions():
        work.tell("started", work.experiment.as_dict())
        for row in journal.jobs():
            if row["status"] != "done":
                _do(work.job(methods[row["label"]], row["seed"]), work, journal)
                work.watch.job_done(row["job"])
        write_tables(journal, work.folder)
        work.tell("finished", work.folder)
    journal.close()


def _do(job: Job, work: _Work, journal: Journal) -> None:
    """Run one job from its last checkpoint."""
    experiment, folder = work.experiment, work.folder
    if work.terms.get(job.name) not in (None, job_digest(job)):
        raise InputError(f"{job.name} has other budgets, records or noise since the run began; restore its files")
    checkpoint = journal.checkpoint(job.name)
    ledger = _open_ledger(job, folder, begun=checkpoint is not None)
    cohort = job.clients(ledger)
    state, active = job.state, None
    if checkpoint is None:
        journal.begin(job.name, client_rows(job), facts(job, experiment))
    else:
        state, active = state_after(checkpoint), checkpoint.active
        remind(cohort, checkpoint.memory)
    first = checkpoint is None

    def observe(round: Round, now: State) -> None:
        nonlocal first
        goes_on = job.participation.goes_on(round.active) and not now.stopped
        last = round.number + 1 == experiment.rounds or not goes_on
        due = (round.number + 1) % experiment.evaluate_every == 0 or last
        model = now.model if job.entry.common else None
        personal = personal_models(cohort.memory, now.model) if due else None
        metrics = measure_models(job.population, model, personal, work.metrics) if due else {}
        if round.discarded:
            metrics["discarded replies"] = len(round.discarded)
        if last and job.population.own_tests is not None:
            metrics |= by_group(job.population, model, personal)
        # Clients that could not even afford a first round count as leaving with it.
        left = set(job.population.ids).difference(round.active) if first else round.left
        first = False
        write_round(journal, job.name, round, now, left, metrics, memory=changes(cohort))
        work.watch.round_done(job.name, round, experiment.rounds, metrics)
        work.tell("round", job.name, round.number, metrics)

    transport = InMemory(cohort, job.algorithm, job.discloses)
    with workers(cohort, job, experiment, work.sharding, work.device, work.parts):
        state = job.serve(transport, experiment.rounds, job.name, state, active=active, observe=observe)
    stopped = "rounds" if state.stopped == ALL_ROUNDS else "early"
    found = final_facts(job, state.model, personal_models(cohort.memory, state.model), work.wanted)
    ended = outcome(job, ledger, {"stopped": stopped, "reason": state.stopped, **found})
    if job.entry.common:
        path = model_path(folder, job.name)
        write_model(path, job, experiment, state.model, state.round, ledger, ended, work.parts.code)
    journal.finish(job.name, *ended)
    if ledger:
        ledger.close()


def _open_ledger(job: Job, folder: Path, begun: bool) -> Ledger | None:
    if job.budgets is None:
        return None
    path = folder / "ledgers" / f"{job.name}.db"
    if begun and not path.exists():
        raise InputError(f"{path} is missing; put it back, for a new one would forget what clients have spent")
    path.parent.mkdir(exist_ok=True)
    ledger = Ledger.open_or_create(path, job.terms)
    if any(not ledger.account(client).under(terms) for client, terms in job.terms.items()):
        raise InputError(f"{path} was opened under other terms than this run's; run it in a new folder")
    return ledger


def _alone_in(folder: Path) -> AbstractContextManager[None]:
    """Refuse to work in a folder in which another process does; the lock ends with the process that holds it."""
    said = f"another process is running {folder}; wait for it, or stop it first"
    return alone_with(os.open(folder, os.O_RDONLY), said)
