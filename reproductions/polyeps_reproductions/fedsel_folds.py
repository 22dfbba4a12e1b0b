"""FedSel's federation: one record a client, one report an epoch, k-fold cross-validation; and its fast transport.

The library's rounds are run as they are, but the transport is an array: its clients are seats, and in every round the
next slice of the records sits on them. All clients have the same ε and report exactly once an epoch, so their accounts
are one account, charged for all of them before an epoch's first report.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from polyeps.algorithms._averaging import Course
from polyeps.core import Algorithm, Budget, Profile, Records, Replies, State, Streams, Task, Work
from polyeps.data.dataset import Dataset, pooled, subsample
from polyeps.data.public_loaders import load_dataset
from polyeps.data.synthetic import synthetic
from polyeps.experiment import config
from polyeps.experiment.registry import checked_options, entry_of
from polyeps.experiment.seeds import generator
from polyeps.ledger import Ledger
from polyeps.ledger.account import BudgetTerms
from polyeps.models import MODELS, Model
from polyeps.participation import Participation
from polyeps.server import Transport, serve
from polyeps.training import Trainer, Training
from polyeps_reproductions.federations import Observe

FOLDS = 5
ITERATIONS = 100  # rounds of an epoch, at most
KDD_RECORDS = 70_000


def fold_of(seed: int) -> tuple[int, int]:
    """Return which repetition and which fold a seed stands for, both from 1: every repetition has FOLDS seeds."""
    return (seed - 1) // FOLDS + 1, (seed - 1) % FOLDS + 1


class Split(NamedTuple):
    """Clients, one record each in the order in which they report, and the records of the fold left out."""

    features: Tensor  # (N, d)
    labels: Tensor
    test_features: Tensor
    test_labels: Tensor


class Folds(Transport):
    """A federation in an array with the interface of `Simulated`, and the transport to it."""

    def __init__(
        self, experiment: config.Experiment, seed: int, folder: Path, validation: bool, records: int | None
    ) -> None:
        repeat, fold = fold_of(seed)
        self.split = split(experiment.data.name, records, repeat, fold, validation)
        clients, size = self.split.features.shape
        self.asked = max(1, round(experiment.participation.share * clients))
        self.batches = min(ITERATIONS, clients // self.asked)  # with small batches an epoch ends before all reported
        epochs = experiment.rounds // ITERATIONS
        self.rounds = epochs * self.batches
        self.algorithm = built(experiment, size, self.asked, self.batches)
        (self.action,) = self.algorithm.actions.values()
        self.draws = generator(repeat * 1000 + fold, "reports")
        epsilon = experiment.budgets.epsilon
        assert isinstance(epsilon, float)
        self.noise = np.full(self.asked, epochs / epsilon)
        self.reported = np.zeros(clients, dtype=np.int64)  # the last epoch of each
        self.memory = {name: torch.zeros(clients, *shape) for name, shape in self.algorithm.memory.items()}
        self.ledger: Ledger | None = None
        if self.action.price is not None:
            self.event = self.action.price(self.noise[0], {})
            # The controls "-c" and the published PE cost more than ε, and their accounts must allow for it.
            budget = max(epsilon, epochs * float(self.event.epsilon))
            terms = BudgetTerms(Budget(budget * (1 + 1e-12), 0.0), "client", "replace-one")
            self.ledger = Ledger.create(folder / "ledger.db", {"all clients": terms})

    def profiles(self) -> tuple[Profile, ...]:
        return tuple(Profile(str(seat)) for seat in range(self.asked))

    def __call__(self, task: Task) -> Replies:
        if task.round % self.batches == 0 and self.ledger is not None:
            self.ledger.charge(self.event, unit="client")
        first = task.round % self.batches * self.asked
        rows = slice(first, first + self.asked)
        data = Records(self.split.features[rows], self.split.labels[rows], torch.arange(self.asked + 1))
        memory = {name: kept[rows] for name, kept in self.memory.items()}
        epoch = self.algorithm.period(task)
        assert epoch is not None
        assert bool((self.reported[rows] < epoch).all()), "a client is asked twice in an epoch"
        self.reported[rows] = epoch
        streams = _Uniforms(self.draws, self.asked)
        reply, kept = self.action.run(Work(task.payload, data, self.noise, streams, memory=memory))
        for name, value in kept.items():
            self.memory[name][rows] = value
        return Replies(task.to, reply, (True,) * self.asked)

    def serve(self, rounds: int, run: str, observe: Observe) -> State:
        start, full = State(torch.zeros(self.split.features.shape[1])), Participation("full")
        return serve(self.algorithm, self, start, rounds=rounds, participation=full, seed=1, run=run, observe=observe)

    def goes_on(self, active: Sequence[str]) -> bool:
        return bool(active)

    def accuracy(self, state: State) -> float:
        found = self.split.test_features @ state.model > 0
        return float((found == (self.split.test_labels > 0)).float().mean())

    def measured(self, state: State) -> dict[str, Any]:
        spent = None
        if self.ledger is not None:
            spent = self.ledger.spent("all clients")
            self.ledger.close()
        return {"spent": spent, "clients": len(self.split.labels), "parameters": len(state.model)}


def built(experiment: config.Experiment, size: int, asked: int, batches: int) -> Algorithm:
    """Return the experiment's algorithm for models of this size; no client is needed for it."""
    (method,) = experiment.algorithm
    entry, training = entry_of(method), experiment.training
    course = Course(training.learning_rate, training.clip, asked, batches, experiment.rounds // ITERATIONS, method.form)
    local = gradients(MODELS[experiment.model.name](size), training.decay)
    return entry.build(local, course, **checked_options(method, entry))


def gradients(model: Model, decay: float) -> Training:
    """A step of size one on each client's only record, in closed form."""

    def run(starts: Tensor, records: Records, *_: Any, **__: Any) -> Tensor:
        x = records.features
        by_output: Tensor = model.loss.gradients((x @ starts)[:, None], records.labels)  # type: ignore[attr-defined]
        return (x * by_output).add_(starts, alpha=decay).neg_()

    return Training(model, cast(Trainer, run), None)


class _Uniforms:
    """Streams of a whole cohort from one generator: reports need uniforms alone."""

    exact = False

    def __init__(self, draws: np.random.Generator, clients: int) -> None:
        self.draws, self.clients = draws, clients

    def uniforms(self, count: int) -> NDArray[np.float64]:
        return 1 - self.draws.random((self.clients, count))

    def normals(self, out: Tensor, rows: Sequence[int]) -> None:
        raise NotImplementedError

    def select(self, rows: Sequence[int]) -> Streams:
        raise NotImplementedError


@lru_cache(maxsize=2)
def _data(name: str, records: int | None) -> Dataset:
    """All records of a data set as the paper counts them, or a sample; no test split yet."""
    draws = generator(1, f"records of {name}")
    if name.startswith("syn-"):
        kind, shrink, threshold = name.rsplit("-", 2)
        return synthetic(kind, shrink=float(shrink), threshold=float(threshold), generator=draws, records=records)
    found = load_dataset(name, download=None)
    found = pooled(found) if len(found.test_labels) else found
    most = min(KDD_RECORDS if name == "kddcup99" else len(found.labels), records or len(found.labels))
    return subsample(found, most, draws) if most < len(found.labels) else found


@lru_cache(maxsize=2)
def split(name: str, records: int | None, repeat: int, fold: int, validation: bool) -> Split:
    """Return a fold; for validation a fifth of its training records takes the place of the records left out."""
    data = _data(name, records)
    pieces = np.array_split(generator(repeat, f"folds of {name}").permutation(len(data.labels)), FOLDS)
    test = pieces[fold - 1]
    train = np.concatenate(pieces[: fold - 1] + pieces[fold:])
    if validation:
        test, train = np.split(train, [len(train) // FOLDS])
    train = generator(repeat * 1000 + fold, "order of clients").permutation(train)
    arrays = (data.features[train], data.labels[train], data.features[test], data.labels[test])
    return Split(*(torch.from_numpy(np.ascontiguousarray(array)) for array in arrays))
