"""Experiment settings: read from TOML or written in Python, and checked before anything runs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    field_validator,
    model_serializer,
    model_validator,
)

from polyeps.data.schema_files import read_toml
from polyeps.data.targets import LOSS_TARGETS, NAMES
from polyeps.encoders import EncoderChoice
from polyeps.errors import InputError, suggest
from polyeps.experiment.changes import parsed, split_change
from polyeps.experiment.data_settings import BudgetSettings as BudgetSettings
from polyeps.experiment.data_settings import DataSettings as DataSettings
from polyeps.experiment.data_settings import LevelSettings as LevelSettings
from polyeps.experiment.sections import Section as Section
from polyeps.experiment.sections import SettingsTable, Title

Checked = TypeVar("Checked", bound=BaseModel)
_SEEDS = 2**63  # what a journal's column can hold
_OF_STEPS = ("batch", "local_steps", "learning_rate", "momentum")  # settings of training.kind = "sgd" alone
# Keys of earlier versions, and what to write instead.
_FORMER = {
    "budgets.scale": "budgets.noise_multiplier",
    "budgets.menu": "budgets.levels",
    "data.encoder": "model.encoder",
}


class ModelSettings(Section):
    """The model to train."""

    name: str = "logistic"
    hidden: tuple[int, ...] | None = None  # widths of the mlp's layers
    loss: str | None = None  # by name, or "module:name"; None: the usual one for what is predicted
    output: str | int | None = None  # of an own model with several outputs: the key or place of the one to train
    # A fixed, data-independent function of a record, applied before training: built in, given to `run`, or
    # "module:name".
    encoder: str | None = None
    encoder_size: int | None = Field(default=None, ge=1)  # number of features, of built-in encoders
    encoder_bandwidth: float | None = Field(default=None, gt=0)  # of random-fourier: where its kernel falls to 0.61

    @model_validator(mode="after")
    def _parameters_have_an_encoder(self) -> Self:
        if self.encoder_choice is None and (
            given := [key for key in ("encoder_size", "encoder_bandwidth") if getattr(self, key) is not None]
        ):
            raise InputError(f"model.{given[0]} has no effect without model.encoder; leave it out, or name an encoder")
        return self

    @property
    def encoder_choice(self) -> EncoderChoice | None:
        """The encoder with its parameters, if there is one."""
        if self.encoder is None:
            return None
        return EncoderChoice(self.encoder, self.encoder_size, self.encoder_bandwidth)


class TrainingSettings(Section):
    """How clients train locally."""

    # sgd: local steps on batches. gradient: one clipped gradient a round, over all records of the client; the server
    # takes the step.
    kind: Literal["sgd", "gradient"] = "sgd"
    # auto: by each client's budget, such that what it sends has least noise
    batch: Annotated[int, Field(ge=1)] | Literal["auto"] = 8
    # The rate at which every client samples its records, so that their number stays hidden; without it, every client's
    # rate is batch over its number of records, which is then public.
    rate: float | None = Field(default=None, gt=0, le=1)
    local_steps: Annotated[int, Field(ge=1)] | Literal["auto"] = 20
    learning_rate: float = Field(default=0.1, gt=0)
    clip: float = Field(default=1.0, gt=0)
    momentum: float = Field(default=0.0, ge=0, lt=1)
    decay: float = Field(default=0.0, ge=0)

    @model_validator(mode="after")
    def _only_what_has_an_effect(self) -> TrainingSettings:
        if self.kind == "gradient":
            if self.rate is not None:
                raise ValueError(
                    'rate hides how many records a client has, and kind = "gradient" divides by that number; leave '
                    "out one of them"
                )
            if idle := [name for name in _OF_STEPS if name in self.model_fields_set]:
                instead = "; set server." + idle[0] if idle[0] in ServerSettings.model_fields else ""
                raise ValueError(
                    f'{idle[0]} has no effect with kind = "gradient", one gradient over all records a round{instead}; '
                    "leave it out"
                )
        return self

    @model_serializer(mode="wrap")
    def _written(self, usual: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out what has no effect, so that settings can be read back."""
        return {name: value for name, value in usual(self).items() if self.kind == "sgd" or name not in _OF_STEPS}


class ServerSettings(Section):
    """The server's optimiser: what it does with the update that an algorithm has aggregated."""

    learning_rate: float = Field(default=1.0, gt=0)
    momentum: float = Field(default=0.0, ge=0, lt=1)
    averaging: float = Field(default=0.0, ge=0, lt=1)  # of iterates: the decay of an exponential average


class ParticipationSettings(Section):
    """The clients of a round."""

    kind: Literal["uniform", "poisson", "full", "epoch"] = "full"
    share: float = Field(default=1.0, gt=0, le=1)
    quorum: int | None = Field(default=None, ge=1)
    with_public: bool = False  # at least one high-ε client in every round, for every method alike


class Method(SettingsTable):
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
    server: dict[str, Any] = Field(default_factory=dict)  # settings in which it differs from [server]

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
    server: ServerSettings = Field(default_factory=ServerSettings)
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
        return _named(value)

    @field_validator("algorithm")
    @classmethod
    def _distinct_titles(cls, value: tuple[Method, ...]) -> tuple[Method, ...]:
        titles = [method.title for method in value]
        twice = next((title for title in titles if titles.count(title) > 1), None)
        if not titles or twice:
            raise ValueError(f"two are called {twice!r}; give each its own label" if twice else "name at least one")
        return value

    @model_validator(mode="after")
    def _loss_and_target(self) -> Self:
        """Read labels as the loss takes them, unless data.target says more."""
        takes = LOSS_TARGETS.get(self.model.loss or "")
        if takes is None and self.model.loss is not None and ":" not in self.model.loss:
            raise InputError(f"model.loss: {unknown_key(self.model.loss, self.model.loss, LOSS_TARGETS, 'loss')}")
        if takes is None:
            return self
        if self.data.target is None and takes[0] != "class":
            # frozen, and part of the settings as resolved
            object.__setattr__(self, "data", self.data.model_copy(update={"target": takes[0]}))
        elif self.data.target not in (None, *takes):
            raise InputError(
                f'model.loss = "{self.model.loss}" is for {NAMES[takes[0]]}, but data.target is "{self.data.target}"; '
                "change one of them"
            )
        return self

    def training_of(self, method: Method) -> TrainingSettings:
        """Return the training settings a method runs with.

        A method with a kind of its own does not inherit settings that have no effect on it.
        """
        common = self.training.model_dump()
        if method.training.get("kind") == "gradient":
            common = {name: value for name, value in common.items() if name not in _OF_STEPS}
        return checked(TrainingSettings, {**common, **method.training}, "algorithm.training")

    def server_of(self, method: Method) -> ServerSettings:
        """Return the settings of the server's optimiser that a method runs with."""
        return checked(ServerSettings, {**self.server.model_dump(), **method.server}, "algorithm.server")

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, as JSON can hold them; `experiment` reads them back."""
        return dict(json.loads(self.model_dump_json(exclude_none=True)))


def experiment(values: Mapping[str, Any]) -> Experiment:
    """Return an experiment from plain values; errors name the key."""
    return Experiment(**values)


def read_experiment(path: Path, changes: Iterable[str] = ()) -> Experiment:
    """Return an experiment from a TOML file, with changes like "training.clip=0.5" applied to it."""
    values = read_toml(path, str(path), "give the path of a TOML file")
    values.setdefault("name", path.stem)
    for change in changes:
        _apply(values, change)
    data = values.get("data")
    if isinstance(data, dict) and isinstance(data.get("schema"), str):
        data["schema"] = path.parent.absolute() / data["schema"]
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
    if path[:1] == ["algorithm"] and "algorithm" in values:  # methods may be given by their names alone
        methods = values["algorithm"]
        values["algorithm"] = _named(methods if isinstance(methods, list) else [methods])
    tables: list[Any] = [values]
    for depth, key in enumerate(path, start=1):
        # A change to "algorithm" applies to every method of the file.
        found = [table.setdefault(key, {}) for table in tables]
        tables = [table for one in found for table in (one if isinstance(one, list) else [one])]
        if not all(isinstance(table, dict) for table in tables):
            raise InputError(f"--set {change}: {'.'.join(path[:depth])} is a value, not a table; leave out the rest")
    for table in tables:
        table[last] = value


def _named(methods: Iterable[Any]) -> list[Any]:
    """Return methods as tables, of which some were given by their names."""
    return [{"name": one} if isinstance(one, str) else one for one in methods]


def checked(kind: type[Checked], values: Mapping[str, Any], inside: str = "") -> Checked:
    """Return validated values, or raise the first thing wrong with them as a sentence."""
    try:
        return kind.model_validate(values)
    except ValidationError as problem:
        raise InputError(_sentence(kind, problem, inside)) from None


def _sentence(kind: type[BaseModel], problem: ValidationError, inside: str = "") -> str:
    """Return the first thing wrong, by its key."""
    error = problem.errors()[0]
    if isinstance(cause := error.get("ctx", {}).get("error"), InputError):
        return str(cause)  # which names its key
    place = ".".join(str(part) for part in ([inside] if inside else []) + list(error["loc"]))
    if error["type"] == "extra_forbidden":
        return unknown_key(place, str(error["loc"][-1]), _known_keys(kind, error["loc"][:-1]))
    # For a setting of several types, pydantic adds the type it tried.
    named = [str(part) for part in error["loc"] if isinstance(part, int) or part.isidentifier()]
    place = ".".join(([inside] if inside else []) + named)
    reason = error["msg"].removeprefix("Value error, ").replace("valid tuple", "list")
    for other in problem.errors()[1:]:
        if other["type"] == "literal_error" and other["loc"][:-1] == error["loc"][:-1]:  # a number or a word
            reason = f"{reason.partition(', unable')[0]} or {other['ctx']['expected']}"
    given = f", not {error['input']!r}" if not isinstance(error["input"], Mapping | list | tuple) else ""
    if error["type"] == "literal_error" and isinstance(error["input"], str):
        hint = suggest(error["input"], error["ctx"]["expected"].split("'")[1::2], "choose one of these")
        given += f"; {hint}"
    return f"{place}: {reason[0].lower()}{reason[1:]}{given}"


def unknown_key(place: str, key: str, known: Iterable[str], what: str = "setting") -> str:
    """Return the sentence for an unknown key."""
    if place in _FORMER:
        return f"{place} is now {_FORMER[place]}; rename it"
    names = sorted(known)
    listed = f"known are {', '.join(names)}" if names else "remove it"
    return f"there is no {what} {place!r}; {suggest(key, names, listed)}"


def _known_keys(kind: type[BaseModel], place: tuple[Any, ...]) -> list[str]:
    for key in place:
        annotation = kind.model_fields[key].annotation if key in kind.model_fields else None
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            kind = annotation
    return [*kind.model_fields, *(["schema"] if kind is DataSettings else [])]
