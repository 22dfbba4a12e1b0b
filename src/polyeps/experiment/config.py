"""Experiment settings: read from TOML or written in Python, and checked before anything runs."""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Iterable, Mapping
from datetime import date
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator

from polyeps.errors import InputError
from polyeps.experiment.changes import parsed, split_change

Checked = TypeVar("Checked", bound=BaseModel)
_LONGEST = 100  # bytes of a name: a file system takes 255, and seeds and endings are added to it
_SEEDS = 2**63  # what a journal's column can hold
# Keys of earlier versions, and what to write instead.
_FORMER = {"budgets.scale": "budgets.noise_multiplier", "budgets.menu": "budgets.levels"}


def _fit_for_a_file_name(text: str) -> str:
    fits = text.isprintable() and not set(text) & set('/\\:*?"<>|') and text[:1] not in ("", ".", " ", "-")
    if not fits or len(text.encode()) > _LONGEST:
        raise ValueError(
            f'becomes part of file names: at most {_LONGEST} bytes, no / \\ : * ? " < > |, no control characters, '
            "and neither dot, dash nor blank at the beginning"
        )
    return text


# Names of runs and methods, which are also those of folders and files.
Title = Annotated[str, AfterValidator(_fit_for_a_file_name)]


class _Table(BaseModel):
    """A table of settings; numbers are finite, since a journal's JSON knows no others, and true is no number."""

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _true_is_no_number(cls, value: Any, field: ValidationInfo) -> Any:
        kinds = _kinds(cls.model_fields[str(field.field_name)].annotation)
        many = isinstance(value, list | tuple)
        if (
            any(isinstance(one, bool) for one in (value if many else [value]))
            and bool not in kinds
            and kinds & {int, float}
        ):
            raise ValueError("must be numbers" if many else "must be a number")
        return value


def _kinds(annotation: Any) -> set[Any]:
    """Return the types a setting may have, however they are put together."""
    return {annotation}.union(*(_kinds(part) for part in get_args(annotation) if get_origin(annotation) is not Literal))


class Section(_Table):
    """A table of the file that refuses unknown keys."""

    model_config = ConfigDict(extra="forbid")


class ColumnSettings(Section):
    """How one column of a table becomes numbers; `polyeps.data.schema.Column` checks it."""

    range: tuple[float, float] | None = None
    dates: tuple[date, date] | None = None
    categories: tuple[str, ...] | None = None
    missing: Literal["refuse", "mean-of-range"] | float = "refuse"


class DataSettings(Section):
    """The records, and how they are divided among clients."""

    name: str = "digits"
    file: Path | None = None  # your own table or folder of tables, instead of a data set by name
    label: str = "label"  # of your own table: the column to predict
    client: str = "client"  # of your own table: the column that names the client of each record
    # Of your own table: the column that names the person of each record; all records of a person are then protected
    # together. Without it, each record is protected by itself.
    unit: str | None = None
    classes: tuple[str, ...] | None = None  # of your own table: the labels there are, in order
    columns: dict[str, ColumnSettings] = Field(default_factory=dict)  # of your own table: how columns become numbers
    partition: str | None = None  # None: as in the file for your own table, else iid
    clients: int | None = Field(default=None, ge=1)
    size: int | None = Field(default=None, ge=1)
    shards_per_client: int = Field(default=2, ge=1)
    labels_per_client: int = Field(default=2, ge=1)
    alpha: float = Field(default=0.5, gt=0)
    test_share: float = Field(default=0.2, gt=0, lt=1)  # held out where no test split was published
    encoder: str | None = None  # a fixed, data-independent function of a record, applied before training
    # Of each client's records, the share that it does not train on: models are tested on it client by client.
    own_test: float = Field(default=0.0, ge=0, lt=1)
    # Test on this share of the training records instead of the test split: to choose settings by.
    validation: float = Field(default=0.0, ge=0, lt=1)


class LevelSettings(Section):
    """One privacy level that clients choose from; a client that chooses none has the strictest."""

    name: Title
    epsilon: float | None = Field(default=None, gt=0)  # None: no guarantee for clients of this level
    share: float | None = Field(default=None, ge=0, le=1)  # of clients, drawn by the seed, that choose it
    labels: tuple[int, ...] | None = None  # they are drawn among clients that hold records of one of these classes


class BudgetSettings(Section):
    """The clients' privacy budgets, and whether they disclose them."""

    distribution: str | None = None
    file: Path | None = None
    epsilons: tuple[float, ...] | None = None
    epsilon: float | None = Field(default=None, gt=0)  # the same for every client
    levels: tuple[LevelSettings, ...] | None = None  # privacy levels to choose from
    # As many clients from each part of a mixture as its weight says, instead of by chance.
    stratified: bool = False
    delta: float = Field(default=1e-5, ge=0, lt=1)
    disclosed: bool = True
    # One for all, so that strict clients leave early; without it every client has its own.
    noise_multiplier: float | None = Field(default=None, gt=0)


class ModelSettings(Section):
    """The model to train."""

    name: str = "logistic"
    hidden: tuple[int, ...] | None = None  # widths of the mlp's layers


class TrainingSettings(Section):
    """How clients train locally."""

    batch: int = Field(default=8, ge=1)
    # The rate at which every client samples its records, so that their number stays hidden; without it, every client's
    # rate is batch over its number of records, which is then public.
    rate: float | None = Field(default=None, gt=0, le=1)
    local_steps: int = Field(default=20, ge=1)
    learning_rate: float = Field(default=0.1, gt=0)
    clip: float = Field(default=1.0, gt=0)
    momentum: float = Field(default=0.0, ge=0, lt=1)
    decay: float = Field(default=0.0, ge=0)


class ParticipationSettings(Section):
    """The clients of a round."""

    kind: Literal["uniform", "poisson", "full", "epoch"] = "full"
    share: float = Field(default=1.0, gt=0, le=1)
    quorum: int | None = Field(default=None, ge=1)
    with_public: bool = False  # at least one high-ε client in every round, for every method alike


class Method(_Table):
    """One algorithm of a comparison; keys this table does not know are the algorithm's own options."""

    model_config = ConfigDict(extra="allow")
    name: str  # of a built-in algorithm, of one given to `run`, or "module:name"
    budgets: Literal["own", "minimum", "maximum", "none"] | None = None  # None: the algorithm's default
    # published: batches, noise or probabilities as the paper has them; their real cost is then the effective budget
    form: Literal["sound", "published"] = "sound"
    # With budgets = "minimum" or "maximum": the effective ε, instead of the clients' smallest or largest.
    epsilon: float | None = Field(default=None, gt=0)
    label: Title | None = None
    training: dict[str, Any] = Field(default_factory=dict)  # settings in which it differs from [training]

    @property
    def title(self) -> str:
        unusual = [part for part in (self.budgets, self.form) if part not in (None, "own", "sound")]
        name = self.name.rpartition(":")[2]
        return self.label or (f"{name} ({', '.join(map(str, unusual))})" if unusual else name)

    @property
    def options(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


class Experiment(Section):
    """All settings that decide a result."""

    name: Title = "experiment"
    rounds: int = Field(default=20, ge=1)
    seeds: tuple[int, ...] = (1,)
    evaluate_every: int = Field(default=1, ge=1)
    metrics: tuple[str, ...] = ()  # beside accuracy and loss: "module:name", or names given to `run`
    # mlflow, tensorboard, wandb, or "module:name" of classes or functions that make trackers
    trackers: tuple[str, ...] = ()
    data: DataSettings = Field(default_factory=DataSettings)
    budgets: BudgetSettings = Field(default_factory=BudgetSettings)
    model: ModelSettings = Field(default_factory=ModelSettings)
    training: TrainingSettings = Field(default_factory=TrainingSettings)
    participation: ParticipationSettings = Field(default_factory=ParticipationSettings)
    algorithm: tuple[Method, ...] = (Method(name="fedavg"),)

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as problem:
            raise InputError(_sentence(type(self), problem)) from None

    @field_validator("seeds", mode="before")
    @classmethod
    def _count_of_seeds(cls, value: Any) -> Any:
        if type(value) is int and value > 10_000:
            raise ValueError("is a number of seeds, at most 10000; to choose seeds, list them: seeds = [7, 8]")
        return tuple(range(1, value + 1)) if type(value) is int else value

    @field_validator("seeds")
    @classmethod
    def _distinct_seeds(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        if not value or len(set(value)) < len(value) or min(value) < 0 or max(value) >= _SEEDS:
            raise ValueError("must be different whole numbers, at least one, none negative, all below 2^63")
        return value

    @field_validator("algorithm", mode="before")
    @classmethod
    def _one_or_many(cls, value: Any) -> Any:
        if isinstance(value, str | Mapping):
            value = [value]
        if not isinstance(value, list | tuple):
            raise ValueError("must be [[algorithm]] tables, or names of algorithms")
        return [{"name": one} if isinstance(one, str) else one for one in value]

    @field_validator("algorithm")
    @classmethod
    def _distinct_titles(cls, value: tuple[Method, ...]) -> tuple[Method, ...]:
        titles = [method.title for method in value]
        twice = next((title for title in titles if titles.count(title) > 1), None)
        if not titles or twice:
            raise ValueError(f"two are called {twice!r}; give each its own label" if twice else "name at least one")
        return value

    def training_of(self, method: Method) -> TrainingSettings:
        """Return the training settings a method runs with."""
        return checked(TrainingSettings, {**self.training.model_dump(), **method.training}, "algorithm.training")

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, as JSON can hold them; `experiment` reads them back."""
        return dict(json.loads(self.model_dump_json(exclude_none=True)))


def experiment(values: Mapping[str, Any]) -> Experiment:
    """Return an experiment from plain values; errors name the key."""
    return Experiment(**values)


def read_experiment(path: Path, changes: Iterable[str] = ()) -> Experiment:
    """Return an experiment from a TOML file, with changes like "training.clip=0.5" applied to it."""
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as problem:
        raise InputError(f"{path} cannot be read: {problem.strerror}; give the path of a TOML file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as problem:
        raise InputError(f"{path} is not TOML: {problem}") from None
    values.setdefault("name", path.stem)
    for change in changes:
        _apply(values, change)
    found = experiment(values)
    # Paths in a file are relative to the file, wherever the run is resumed from.
    beside = {
        section: part.model_copy(update={"file": path.parent.absolute() / part.file})
        for section in ("data", "budgets")
        if (part := getattr(found, section)).file is not None
    }
    return found.model_copy(update=beside)


def _apply(values: dict[str, Any], change: str) -> None:
    place, texts = split_change(change)
    if len(texts) > 1:
        raise InputError(f"--set {change}: several values are a sweep, for polyeps run alone; quote a text with commas")
    value = parsed(texts[0])
    *path, last = place.split(".")
    tables: list[Any] = [values]
    for depth, key in enumerate(path, start=1):
        # A change to "algorithm" applies to every method of the file.
        found = [table.setdefault(key, {}) for table in tables]
        tables = [table for one in found for table in (one if isinstance(one, list) else [one])]
        if not all(isinstance(table, dict) for table in tables):
            raise InputError(f"--set {change}: {'.'.join(path[:depth])} is a value, not a table; leave out the rest")
    for table in tables:
        table[last] = value


def checked(kind: type[Checked], values: Mapping[str, Any], inside: str = "") -> Checked:
    """Return validated values, or raise the first thing wrong with them as a sentence."""
    try:
        return kind.model_validate(values)
    except ValidationError as problem:
        raise InputError(_sentence(kind, problem, inside)) from None


def _sentence(kind: type[BaseModel], problem: ValidationError, inside: str = "") -> str:
    """Return the first thing wrong, by its key."""
    error = problem.errors()[0]
    place = ".".join(str(part) for part in ([inside] if inside else []) + list(error["loc"]))
    if error["type"] == "extra_forbidden":
        return unknown_key(place, str(error["loc"][-1]), _known_keys(kind, error["loc"][:-1]))
    # For a setting of several types, pydantic adds the type it tried.
    named = [str(part) for part in error["loc"] if isinstance(part, int) or part.isidentifier()]
    place = ".".join(([inside] if inside else []) + named)
    reason = error["msg"].removeprefix("Value error, ").replace("valid tuple", "list")
    given = f", not {error['input']!r}" if not isinstance(error["input"], Mapping | list | tuple) else ""
    return f"{place}: {reason[0].lower()}{reason[1:]}{given}"


def unknown_key(place: str, key: str, known: Iterable[str], what: str = "setting") -> str:
    """Return the sentence for an unknown key."""
    if place in _FORMER:
        return f"{place} is now {_FORMER[place]}; rename it"
    names = list(known)
    near = difflib.get_close_matches(key, names, n=1, cutoff=0.6)
    hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(sorted(names))}" if names else "remove it"
    return f"there is no {what} {place!r}; {hint}"


def _known_keys(kind: type[BaseModel], place: tuple[Any, ...]) -> list[str]:
    for key in place:
        annotation = kind.model_fields[key].annotation if key in kind.model_fields else None
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            kind = annotation
    return list(kind.model_fields)
