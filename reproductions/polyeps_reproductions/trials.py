"""A trial is one training run of a study, small enough to be done again: a cell, a method, a form and a seed.

Studies run thousands of them, so a trial leaves one JSON file and no run folder. Its clients pay into a ledger all
the same, which lies in a temporary folder as long as the trial runs.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from polyeps import __version__
from polyeps.accounting.certificate import Form
from polyeps.aggregation.client_groups import split_by_epsilon
from polyeps.core import Replies, State, Task
from polyeps.errors import InputError
from polyeps.experiment import config
from polyeps.experiment.job import Job, prepare
from polyeps.experiment.population import Population, populate
from polyeps.ledger import Ledger
from polyeps.server import Round
from polyeps.transport.memory import InMemory
from polyeps_reproductions.cells import Cell, Method, experiment_of

LAST = 10  # rounds whose mean accuracy is a trial's final one, as in the paper; a third of a short trial's
SPARSELY = 10  # of networks dear to evaluate, every tenth round until near the end
# Methods whose defaults changed after trials of them had been kept: those older trials no longer stand for them.
REVISED = {("pdp-fl", "sound"): 2}
Result = dict[str, Any]


@dataclass(frozen=True)
class Trial:
    """What to run."""

    cell: Cell
    method: Method
    form: Form
    seed: int
    learning_rate: float
    validation: float = 0.0  # above 0: judged on this share of the training records, to choose a learning rate by
    norms: bool = False  # also keep the length of every client's update in every round

    @property
    def key(self) -> str:
        """The name of its file: readable, and different for whatever differs."""
        digest = hashlib.sha256(json.dumps(self.as_dict(), sort_keys=True).encode()).hexdigest()[:12]
        kind = "choice" if self.validation else self.form
        return f"{self.cell.data}-{self.cell.model}-{self.method.name}-{kind}-{self.seed}-{digest}"

    @property
    def people(self) -> tuple[Cell, int, float]:
        """Trials that agree in this train the same clients, so their records are loaded once."""
        return self.cell, self.seed, self.validation

    @property
    def rounds(self) -> int:
        """How many rounds to run; the noise is calibrated for all of the cell's."""
        choosing = self.validation and self.cell.choice_rounds
        return min(choosing, self.cell.rounds) if choosing else self.cell.rounds

    @property
    def last(self) -> int:
        """Over how many rounds at the end its final accuracy is the mean."""
        return max(1, min(LAST, self.rounds // 3))

    def experiment(self) -> config.Experiment:
        return experiment_of(self.cell, self.method, self.form, self.learning_rate, self.validation)

    def as_dict(self) -> dict[str, Any]:
        revision = REVISED.get((self.method.name, self.form))
        return asdict(self) | ({"revision": revision} if revision else {})


def perform(trial: Trial, device: str = "cpu") -> Result:
    """Train, and say what came out."""
    began = time.perf_counter()
    experiment = trial.experiment()
    population = _people(trial.cell, trial.seed, trial.validation, experiment.training.batch, device)
    job = prepare(experiment, experiment.algorithm[0], population)
    accuracy: dict[int, float] = {}
    traffic = {client: [0, 0] for client in population.ids}

    def observe(round: Round, state: State) -> None:
        for client, (received, sent) in round.traffic.items():
            traffic[client][0] += received
            traffic[client][1] += sent
        if _due(round, trial, job):
            accuracy[round.number + 1] = population.evaluate(state.model)["accuracy"]

    with TemporaryDirectory(prefix="polyeps-") as folder:
        ledger = None if job.budgets is None else Ledger.create(Path(folder) / "ledger.db", job.terms)
        transport = _Listening(trial.norms, job.clients(ledger), job.algorithm, job.discloses)
        state = job.serve(transport, trial.rounds, trial.key, observe=observe)
        spent = _spent_share(job, ledger)
        if ledger:
            ledger.close()
    last = [value for round, value in accuracy.items() if round > state.round - trial.last]
    return {
        "trial": trial.as_dict(),
        "final": fmean(last) if last else 0.0,
        "accuracy": accuracy,
        "rounds": state.round,
        **_totals(traffic, population, trial.form),
        "up_values": transport.up_values,
        "spent_share": spent,
        "seconds": round(time.perf_counter() - began, 3),
        "device": device,
        "parameters": population.model.size,
        "version": __version__,
        "settings": experiment.as_dict(),
        **({"norms": transport.norms, "epsilons": [b.epsilon for b in population.budgets if b]} if trial.norms else {}),
    }


class _Listening(InMemory):
    """A transport that counts the numbers in replies and, if wanted, keeps the lengths of updates."""

    def __init__(self, wants_norms: bool, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.wants_norms = wants_norms
        self.norms: dict[str, list[float]] = {}
        self.up_values = 0  # bytes of tensors alone, without what frames them: the paper's way to count

    def __call__(self, task: Task) -> Replies:
        replies = super().__call__(task)
        self.up_values += sum(tensor.numel() * tensor.element_size() for tensor in replies.payload.values())
        if self.wants_norms and "update" in replies.payload:
            lengths = replies.payload["update"].norm(dim=1).tolist()
            for client, length in zip(replies.ids, lengths, strict=True):
                self.norms.setdefault(client, []).append(round(float(length), 6))
        return replies


@lru_cache(maxsize=1)
def _people(cell: Cell, seed: int, validation: float, batch: int, device: str) -> Population:
    """Clients, kept until others are asked for: trials come ordered by them."""
    shown = experiment_of(cell, Method("fedavg"), "sound", 0.1, validation)
    return populate(shown.model_copy(update={"training": config.TrainingSettings(batch=batch)}), seed, device)


def _due(round: Round, trial: Trial, job: Job) -> bool:
    if trial.cell.model in ("logistic", "linear_svm", "mlp"):
        return True
    # Budgets may end a run some rounds early, so "the last ten" is not known until it is over.
    late = round.number + 1 > 0.92 * trial.rounds - trial.last
    return late or (round.number + 1) % SPARSELY == 0 or not job.participation.goes_on(round.active)


def _spent_share(job: Job, ledger: Ledger | None) -> float | None:
    """The largest part of its budget a client has spent; None where nothing is promised."""
    if ledger is None or job.budgets is None:
        return None
    return max(
        ledger.spent(client) / budget.epsilon
        for client, budget in zip(job.population.ids, job.budgets, strict=True)
        if budget is not None
    )


def _totals(traffic: dict[str, list[int]], population: Population, form: Form) -> dict[str, int]:
    """Bytes up and down, in all and of the private clients alone."""
    liberal = population.high_epsilon
    if form == "published":
        liberal = split_by_epsilon(np.array([budget.epsilon for budget in population.budgets if budget]), "top")
    private = [client for client, yes in zip(population.ids, liberal, strict=True) if not yes]
    return {
        "down": sum(received for received, _ in traffic.values()),
        "up": sum(sent for _, sent in traffic.values()),
        "down_private": sum(traffic[client][0] for client in private),
        "up_private": sum(traffic[client][1] for client in private),
    }


@dataclass(frozen=True)
class Store:
    """Results in a folder, one file per finished trial; several processes and machines may write to it."""

    folder: Path

    def __post_init__(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as problem:
            raise InputError(f"{self.folder} cannot be made: {problem.strerror}; choose another --work") from None

    def path(self, trial: Trial) -> Path:
        return self.folder / f"{trial.key}.json"

    def has(self, trial: Trial) -> bool:
        return self.path(trial).exists()

    def read(self, trial: Trial) -> Result | None:
        """The result of a trial, if it is there."""
        return self.remember(self.path(trial).name)

    def remember(self, name: str, make: Callable[[], Result] | None = None) -> Result | None:
        """What a file holds; if it is not there, what `make` makes, which is then kept."""
        try:
            found: Result = json.loads((self.folder / name).read_text(encoding="utf-8"))
        except FileNotFoundError:
            if make is None:
                return None
            found = make()
            self.write(name, found)
        except ValueError:
            raise InputError(f"{self.folder / name} is damaged; remove it, and it will be made again") from None
        return found

    def write(self, name: str, result: Result) -> None:
        """Whole or not at all: a stopped study leaves no half of a file."""
        with TemporaryDirectory(prefix=".", dir=self.folder) as partial:
            path = Path(partial) / name
            path.write_text(json.dumps(result, ensure_ascii=False), encoding="utf-8")
            path.replace(self.folder / name)
