"""Trials of paper 001: one record per client, one report an epoch, judged on a fold nobody trained on.

A trial goes through the algorithms themselves (`algorithm.round`), but its transport is an array: a batch of clients
is a slice of records. All clients of a trial have the same ε and report exactly once an epoch, so their accounts are
one account, charged for all of them at the beginning of every epoch, in a ledger in a temporary folder.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any, Literal, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from polyeps import __version__
from polyeps.accounting.certificate import Form
from polyeps.algorithms._averaging import Course
from polyeps.algorithms.fedsel import fedsel
from polyeps.algorithms.fedsel_baselines import compressed, exact, flat
from polyeps.core import Algorithm, Ask, Budget, Profile, Records, Replies, State, Streams, Task, Work
from polyeps.data import public_loaders
from polyeps.data.dataset import Dataset, pooled, subsample
from polyeps.data.synthetic import synthetic
from polyeps.errors import InputError
from polyeps.experiment.population import generator
from polyeps.ledger import Ledger
from polyeps.ledger.account import Terms
from polyeps.mechanisms.selection import SelectName
from polyeps.mechanisms.values import ValueMechanism
from polyeps.models import binary_logistic, binary_svm
from polyeps.training import Run, Training

FOLDS = 5
ITERATIONS = 100  # rounds of an epoch, at most
LAST = 10  # rounds whose mean accuracy decides a learning rate
DECAY = 1e-4  # λ
KDD_RECORDS = 70_000
Result = dict[str, Any]
Share = float | Literal["auto"]
Rate = Literal["own", "shared"]  # α chosen for the method itself, or for NP and then the same for all, as in the paper
MODELS = {"logistic": binary_logistic, "svm": binary_svm}
EXACT: dict[str, Any] = {
    "np": "all",
    "np-rs": "random",
    "np-k": "largest",
    "np-exp": "exp",
    "np-pe": "pe",
    "np-ps": "ps",
}


@dataclass(frozen=True)
class Trial:
    """What to run. Methods are called as in the paper; `random-pm` is the control it lacks."""

    data: str
    model: str
    method: str
    epsilon: float = 2.0
    form: Form = "sound"
    repeat: int = 1
    fold: int = 1
    learning_rate: float = 0.0  # zero: still to be chosen
    epochs: int = 1
    batch: float = 0.01  # share of the clients asked in a round
    mu: Share = 0.1
    records: int | None = None  # at most so many of the data set's
    validation: bool = False  # judged on a fifth of the fold's training records, to choose a learning rate by
    curve: bool = False  # judge every round
    rate: Rate = "own"

    @property
    def key(self) -> str:
        """The name of its file: readable, and different for whatever differs."""
        digest = hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:12]
        kind = "choice" if self.validation else self.form
        return f"{self.data}-{self.model}-{self.method}-{kind}-{self.repeat}.{self.fold}-{digest}"

    @property
    def row(self) -> Trial:
        """What its learning rate is chosen for: the same trial, whatever the fold and the form."""
        whose = replace(self, method="np", epsilon=2.0, mu=0.1) if self.rate == "shared" else self
        return replace(
            whose, form="sound", repeat=1, fold=1, learning_rate=0.0, validation=True, curve=False, rate="own"
        )

    def choices(self, grid: Sequence[float], folds: int) -> tuple[Trial, ...]:
        """The trials that decide its learning rate."""
        return tuple(replace(self.row, learning_rate=rate, fold=fold) for fold in range(1, folds + 1) for rate in grid)


def algorithm_of(trial: Trial, training: Training, course: Course) -> Algorithm:
    """The method of a trial by its name: [selection-]value[-rp | -c | -o], or np with what is sent."""
    if trial.method in EXACT:
        return exact(training, course, send=EXACT[trial.method], epsilon_select=trial.epsilon)
    parts = trial.method.split("-")
    if parts[0] in ("pm", "hm", "duchi"):
        value = _value(parts[0], trial.form)
        return compressed(training, course, value=value) if parts[1:] == ["rp"] else flat(training, course, value=value)
    select, name, ending = (*parts, "")[:3]
    if select not in ("exp", "pe", "ps", "random") or ending not in ("", "c", "o"):
        raise InputError(f"paper 001 has no method {trial.method!r}; choose such as ps-pm, pe-pm-c, pm, pm-rp, np-k")
    return fedsel(
        training,
        course,
        select="uniform" if select == "random" else cast(SelectName, select),
        value=_value(name, trial.form),
        share=trial.mu,
        accumulate="αg" if ending == "o" else "g",
        weights="count",
        on_top=ending == "c",
    )


def _value(name: str, form: Form) -> ValueMechanism:
    return "grid-pm" if name == "pm" and form == "sound" else cast(ValueMechanism, name)


def perform(trial: Trial) -> Result:
    """Train, and say what came out."""
    began = time.perf_counter()
    people = _people(trial.data, trial.records, trial.repeat, trial.fold, trial.validation)
    clients, size = people.features.shape
    asked = max(1, round(trial.batch * clients))
    batches = clients // asked
    course = Course(trial.learning_rate, 1.0, asked, batches, trial.epochs, trial.form)
    algorithm = algorithm_of(trial, gradients(MODELS[trial.model](size)), course)
    rounds = min(ITERATIONS, batches)
    accuracy: dict[int, float] = {}
    with TemporaryDirectory(prefix="polyeps-") as folder:
        federation = _Federation(trial, people, algorithm, asked, Path(folder))
        state = State(torch.zeros(size))
        for epoch in range(trial.epochs):
            federation.pay()
            for number in range(rounds):
                # With small batches an epoch ends before everybody was asked, so rounds are counted by epochs.
                opened = replace(federation.opens(state, number), round=epoch * batches + number)
                state = algorithm.round(opened, federation)
                done = epoch * rounds + number + 1
                left = trial.epochs * rounds - done
                if left == 0 or trial.curve or (trial.validation and left < LAST):
                    accuracy[done] = people.judge(state.model)
        spent = federation.spent()
    return {
        "trial": asdict(trial),
        "final": fmean(accuracy.values()) if trial.validation else accuracy[max(accuracy)],
        "accuracy": accuracy if trial.curve else {},
        "spent": spent,
        "clients": clients,
        "parameters": size,
        "seconds": round(time.perf_counter() - began, 3),
        "version": __version__,
    }


def gradients(model: Any) -> Training:
    """A step of size one on each client's only record, in closed form."""

    def run(starts: Tensor, records: Records, *_: Any, **__: Any) -> Tensor:
        x = records.features
        by_output: Tensor = model.loss.gradients((x @ starts)[:, None], records.labels)  # (n, 1)
        return (x * by_output).add_(starts, alpha=DECAY).neg_()

    return Training(model, cast(Run, run), None)


@dataclass(frozen=True, eq=False)
class People:
    """Clients, one record each in the order in which they are asked, and the records they are judged by."""

    features: Tensor  # (N, d)
    labels: Tensor
    test_features: Tensor
    test_labels: Tensor

    def judge(self, model: Tensor) -> float:
        return float(((self.test_features @ model > 0) == (self.test_labels > 0)).float().mean())


class _Federation(Ask):
    """The transport: a round's batch is a slice of the records; who is asked has paid."""

    def __init__(self, trial: Trial, people: People, algorithm: Algorithm, asked: int, folder: Path) -> None:
        self.people, self.asked = people, asked
        self.action = algorithm.actions["report"]
        self.chance = generator(trial.repeat * 1000 + trial.fold, "reports")
        self.scale = np.full(asked, trial.epochs / trial.epsilon)
        clients = len(people.labels)
        self.memory = {name: torch.zeros(clients, *shape) for name, shape in algorithm.memory.items()}
        self.rows = slice(0, asked)
        self.event = None if self.action.price is None else self.action.price(self.scale[0], 0)
        self.ledger = None
        if self.event is not None:
            # What it costs: ε, but more for the controls "-c" and for published PE, whose owners must know.
            budget = max(trial.epsilon, trial.epochs * float(self.event.epsilon))
            terms = Terms(Budget(budget * (1 + 1e-12), 0.0), "client", "replace-one")
            self.ledger = Ledger.create(folder / "ledger.db", {"everybody": terms})

    def pay(self) -> None:
        """Everybody's report of the coming epoch, before any of them is drawn."""
        if self.ledger is not None:
            self.ledger.charge(self.event, unit="client")

    def opens(self, state: State, number: int) -> State:
        """The state with a round's clients."""
        self.rows = slice(number * self.asked, (number + 1) * self.asked)
        return replace(state, roster=_profiles(self.asked))

    def __call__(self, task: Task) -> Replies:
        people, rows = self.people, self.rows
        data = Records(people.features[rows], people.labels[rows], torch.arange(self.asked + 1))
        memory = {name: kept[rows] for name, kept in self.memory.items()}
        assert self.action.allows is None or bool(self.action.allows(task.payload, memory).all()), "asked twice"
        work = Work(np.arange(self.asked), task.payload, data, self.scale, _Chance(self.chance, self.asked), memory)
        reply, kept = self.action.run(work)
        for name, value in kept.items():
            self.memory[name][rows] = value
        return Replies(task.to, reply, (True,) * self.asked)

    def spent(self) -> float | None:
        """The ε of every client; None where nothing is promised."""
        if self.ledger is None:
            return None
        found = self.ledger.spent("everybody")
        self.ledger.close()
        return found


class _Chance:
    """Streams of a whole batch from one generator: enough for a simulation that is never asked who drew what.

    Reports need uniforms alone; who asks for anything else is told so.
    """

    exact = False

    def __init__(self, chance: np.random.Generator, clients: int) -> None:
        self.chance, self.clients = chance, clients

    def uniforms(self, count: int) -> NDArray[np.float64]:
        return 1 - self.chance.random((self.clients, count))

    def normals(self, out: Tensor, rows: Sequence[int]) -> None:
        raise NotImplementedError

    def select(self, rows: Sequence[int]) -> Streams:
        raise NotImplementedError


@lru_cache(maxsize=8)
def _profiles(count: int) -> tuple[Profile, ...]:
    return tuple(Profile(str(number)) for number in range(count))


@lru_cache(maxsize=2)
def _data(name: str, records: int | None) -> Dataset:
    """All records of a data set as paper 001 counts them, or a sample; no test split yet."""
    chance = generator(1, f"records of {name}")
    if name.startswith("syn-"):
        kind, shrink, threshold = name.rsplit("-", 2)
        return synthetic(kind, shrink=float(shrink), threshold=float(threshold), generator=chance, records=records)
    found = public_loaders.load_dataset(name, download=None)
    found = pooled(found) if len(found.test_labels) else found
    most = min(KDD_RECORDS if name == "kddcup99" else len(found.labels), records or len(found.labels))
    return subsample(found, most, chance) if most < len(found.labels) else found


@lru_cache(maxsize=2)
def _people(name: str, records: int | None, repeat: int, fold: int, validation: bool) -> People:
    data = _data(name, records)
    pieces = np.array_split(generator(repeat, f"folds of {name}").permutation(len(data.labels)), FOLDS)
    test = pieces[fold - 1]
    train = np.concatenate(pieces[: fold - 1] + pieces[fold:])
    if validation:  # the fold itself stays unseen
        test, train = np.split(train, [len(train) // FOLDS])
    train = generator(repeat * 1000 + fold, "order of clients").permutation(train)
    arrays = (data.features[train], data.labels[train], data.features[test], data.labels[test])
    return People(*(torch.from_numpy(np.ascontiguousarray(array)) for array in arrays))
