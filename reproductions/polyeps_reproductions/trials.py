"""Trials: a trial is an experiment with one method and one seed, small enough to be run again.

Where settings are open, a trial names candidates; those that do best on a validation split are taken. Studies run
thousands of trials, so each leaves one JSON file and no run folder.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

from polyeps import __version__
from polyeps.core import State
from polyeps.errors import InputError
from polyeps.experiment import config
from polyeps.server import Round
from polyeps_reproductions.federations import Simulated
from polyeps_reproductions.fedsel_folds import Folds

VALIDATION = 1 / 6  # of the training records
Result = dict[str, Any]
Settings = Mapping[str, Any]  # of an experiment with one algorithm, as a TOML file has them


@dataclass(frozen=True)
class Choice:
    """Candidates for open settings, and the experiment on which they are compared."""

    candidates: tuple[str, ...]  # changes as JSON, such as {"training.learning_rate": 0.1}
    settings: str = ""  # of the experiment they are compared on; the trial's own, if empty
    seeds: tuple[int, ...] = (1,)
    rounds: int | None = None  # after which comparing stops: a rate that leads early may yet diverge


@dataclass(frozen=True)
class Trial:
    """One training. Its settings are text, so that trials can be compared and hashed."""

    settings: str
    seed: int = 1
    choice: Choice | None = None
    last: int = 10  # rounds at the end whose mean accuracy is the final one
    rounds: int | None = None  # after which to stop; noise is calibrated for all of the experiment's
    validation: bool = False  # evaluated on a part of the training records, to choose settings
    norms: bool = False  # keep the norm of every update
    folds: bool = False  # cross-validation with one record a client, by FedSel's transport
    records: int | None = None  # with folds: at most so many of the data set's

    @property
    def key(self) -> str:
        """The name of its file: readable, and different for all that differs."""
        digest = hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:16]
        values = json.loads(self.settings)
        names = [values[table].get("name", "file") for table in ("data", "model", "algorithm")]
        return "-".join([*names, *(["choice"] if self.validation else []), str(self.seed), digest])

    @property
    def row(self) -> str:
        """Trials of one row share their choice of settings, so one shard runs all of them."""
        return repr((self.choice, self.choice.settings or self.settings) if self.choice else replace(self, seed=0))

    @property
    def clients(self) -> str:
        """Trials that agree in this have the same clients, whose records are then loaded once."""
        values = json.loads(self.settings)
        return _text({name: values.get(name) for name in ("data", "budgets", "model")}) + f"/{self.seed}"

    def experiment(self) -> config.Experiment:
        values = json.loads(self.settings)
        if self.validation and not self.folds:
            values["data"]["validation"] = VALIDATION
        return config.experiment(values)

    def choices(self) -> tuple[Trial, ...]:
        """The trials that decide between the candidates, candidate by candidate."""
        if self.choice is None:
            return ()
        rounds, last = self.choice.rounds, 10 if self.folds else self.last
        last = max(1, min(last, rounds // 3)) if rounds else last
        base = replace(self, settings=self.choice.settings or self.settings, choice=None, validation=True)
        base = replace(base, rounds=rounds, last=last, norms=False)
        return tuple(
            replace(base, settings=changed(base.settings, changes), seed=seed)
            for changes in self.choice.candidates
            for seed in self.choice.seeds
        )

    def settled(self, store: Store) -> Trial | None:
        """The trial with the best of its candidates, ties to the first; None while some are not tried."""
        if self.choice is None:
            return self
        best = self.recorded or self.best(store)
        return None if best is None else replace(self, settings=changed(self.settings, best), choice=None)

    def best(self, store: Store) -> str | None:
        """The best of its candidates by the trials in the store; None while some are not tried."""
        if self.choice is None:
            return None
        results = [store.read(one) for one in self.choices()]
        finals = [result["final"] for result in results if result is not None]
        if len(finals) < len(results):
            return None
        count = len(self.choice.seeds)
        means = [fmean(finals[first : first + count]) for first in range(0, len(finals), count)]
        return self.choice.candidates[means.index(max(means))]

    @property
    def recorded(self) -> str | None:
        """The candidate that an earlier run chose, as kept in `chosen.json`; it is not chosen again."""
        return None if self.choice is None else chosen_earlier().get(self.choice_name)

    @property
    def choice_name(self) -> str:
        """The name of its choice in `chosen.json`: readable, and different for all that differs."""
        assert self.choice is not None
        values = json.loads(self.choice.settings or self.settings)
        names = [values["name"], values["algorithm"]["name"], values["algorithm"].get("form", "sound")]
        digest = hashlib.sha256("".join(one.key for one in self.choices()).encode()).hexdigest()[:16]
        return ", ".join([*names, digest])


@lru_cache(maxsize=1)
def chosen_earlier() -> dict[str, str]:
    """Return the candidates that earlier runs chose, by the name of the choice."""
    path = files("polyeps_reproductions") / "chosen.json"
    return {name: _text(changes) for name, changes in json.loads(path.read_text(encoding="utf-8")).items()}


def trial(settings: Settings, **others: Any) -> Trial:
    """Return a trial of plain values."""
    return Trial(_text(settings), **others)


def choice(candidates: Iterable[Settings], settings: Settings | None = None, **others: Any) -> Choice:
    """Return a choice of plain values."""
    return Choice(tuple(map(_text, candidates)), _text(settings) if settings else "", **others)


def perform(wanted: Trial, device: str = "cpu") -> Result:
    """Train, and return the measurements."""
    began = time.perf_counter()
    experiment = wanted.experiment()
    accuracy: dict[int, float] = {}
    with TemporaryDirectory(prefix="polyeps-") as name:
        federation: Simulated | Folds
        if wanted.folds:
            federation = Folds(experiment, wanted.seed, Path(name), wanted.validation, wanted.records)
        else:
            federation = Simulated(experiment, wanted.seed, Path(name), device, wanted.norms)
        rounds = min(wanted.rounds or experiment.rounds, federation.rounds)
        # Budgets may end uniformly drawn cohorts some rounds early, so the last rounds are not known until it is over.
        late = (0.92 if experiment.participation.kind == "uniform" else 1) * rounds - wanted.last

        def observe(round: Round, state: State) -> None:
            number = round.number + 1
            ends = not federation.goes_on(round.active)
            if number % experiment.evaluate_every == 0 or number > late or ends:
                accuracy[number] = federation.accuracy(state)

        state = federation.serve(rounds, wanted.key, observe)
        measured = federation.measured(state)
    last = [value for number, value in accuracy.items() if number > state.round - wanted.last]
    return {
        "seed": wanted.seed,
        "final": fmean(last) if last else 0.0,
        "accuracy": accuracy,
        "rounds": state.round,
        **measured,
        "seconds": round(time.perf_counter() - began, 3),
        "device": device,
        "version": __version__,
        "settings": experiment.as_dict(),
    }


def changed(settings: str, changes: str) -> str:
    """Return the same settings but for these, named as in "training.clip"."""
    new = json.loads(settings)
    for place, value in json.loads(changes).items():
        *path, last = place.split(".")
        table = new
        for key in path:
            table = table.setdefault(key, {})
        table[last] = value
    return _text(new)


def _text(values: Settings) -> str:
    return json.dumps(values, sort_keys=True, ensure_ascii=False)


@dataclass(frozen=True)
class Store:
    """Results in a folder, one file per finished trial; several processes and machines may write to it."""

    folder: Path

    def __post_init__(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as problem:
            raise InputError(f"{self.folder} cannot be made: {problem.strerror}; choose another --work") from None

    def path(self, wanted: Trial) -> Path:
        return self.folder / f"{wanted.key}.json"

    def has(self, wanted: Trial) -> bool:
        return self.path(wanted).exists()

    def read(self, wanted: Trial) -> Result | None:
        """Return the result of a trial, if it is finished."""
        try:
            found: Result = json.loads(self.path(wanted).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except ValueError:
            raise InputError(f"{self.path(wanted)} is damaged; remove it, and it will be made again") from None
        return found

    def write(self, wanted: Trial, result: Result) -> None:
        """Write a result whole or not at all: a stopped study leaves no half of a file."""
        with TemporaryDirectory(prefix=".", dir=self.folder) as partial:
            path = Path(partial) / self.path(wanted).name
            path.write_text(json.dumps(result, ensure_ascii=False), encoding="utf-8")
            path.replace(self.path(wanted))
