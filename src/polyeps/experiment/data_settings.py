"""Settings of data and budgets: the tables [data] and [budgets] of an experiment."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator

from polyeps.data.cells import as_text
from polyeps.data.schema import toml_key
from polyeps.data.schema_files import read_schema_values, schema_of
from polyeps.data.targets import Target
from polyeps.errors import InputError
from polyeps.experiment.sections import Section, Title


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
    target: Target | None = None  # what the label is; None: a class, or what the model's loss takes
    # Of your own table: how columns become numbers (`polyeps.data.schema_files.schema_of`). `schema` may name a file of
    # columns, label, client, unit and classes instead; its content is then part of the settings.
    columns: dict[str, dict[str, Any]] = Field(default_factory=dict)
    partition: str | None = None  # None: as in the file for your own table, else iid
    clients: int | None = Field(default=None, ge=1)
    size: int | None = Field(default=None, ge=1)
    shards_per_client: int = Field(default=2, ge=1)
    labels_per_client: int = Field(default=2, ge=1)
    alpha: float = Field(default=0.5, gt=0)
    test_share: float = Field(default=0.2, gt=0, lt=1)  # held out where no test split was published
    # Of each client's records, the share that it does not train on: models are tested on it client by client.
    own_test: float = Field(default=0.0, ge=0, lt=1)
    # Test on this share of the training records instead of the test split: to choose settings by.
    validation: float = Field(default=0.0, ge=0, lt=1)

    @model_validator(mode="before")
    @classmethod
    def _from_schema_file(cls, values: Any) -> Any:
        if not isinstance(values, Mapping) or values.get("schema") is None:
            return values
        given = {key: value for key, value in values.items() if key != "schema"}
        if not isinstance(values["schema"], str | Path):
            raise InputError(f"data.schema is {values['schema']!r}; it must be the path of a schema file")
        read = read_schema_values(Path(values["schema"]))
        if twice := [key for key in read if key in given]:
            raise InputError(f"data.{twice[0]} is also in the schema {values['schema']}; keep one of them")
        return {**given, **read}

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if self.file is not None and self.name != "digits":  # the default, which a stored experiment has too
            raise InputError(
                f"data.name = {self.name} and data.file = {self.file} are both given; leave out one of them"
            )
        return self

    @field_validator("columns", mode="before")
    @classmethod
    def _known_columns(cls, value: Any) -> Any:
        if not isinstance(value, Mapping):
            raise InputError("data.columns must be a table of columns, like [data.columns] age = { range = [0, 110] }")
        if value:
            schema_of(value)  # which names what is wrong
        return {str(name): dict(settings) for name, settings in value.items()}

    @field_validator("classes", mode="before")
    @classmethod
    def _texts(cls, value: Any) -> Any:
        if not isinstance(value, list | tuple):
            return value
        return [as_text(one) if isinstance(one, int | float) else one for one in value]


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
    epsilon: float | dict[str, float] | None = None  # the same for every client, or by client
    levels: tuple[LevelSettings, ...] | None = None  # privacy levels to choose from
    # As many clients from each part of a mixture as its weight says, instead of by chance.
    stratified: bool = False
    # The same for every client, or by client. None: 1e-5 and, for a client of your own table, at most 1/(10 · units),
    # unless training.rate hides how many units it has.
    delta: float | dict[str, float] | None = None
    disclosed: bool = True
    # One for all, so that strict clients leave early; without it every client has its own.
    noise_multiplier: float | None = Field(default=None, gt=0)

    @field_validator("epsilon", "delta", mode="before")
    @classmethod
    def _for_all_or_by_client(cls, value: Any, field: ValidationInfo) -> Any:
        place = f"budgets.{field.field_name}"
        if not isinstance(value, Mapping):
            return None if value is None else _budget_number(place, value)
        if not value:
            raise InputError(f"{place} names no client; give one number for all, or one for each client")
        return {str(name): _budget_number(f"{place}.{toml_key(str(name))}", one) for name, one in value.items()}


def _budget_number(place: str, value: Any) -> float:
    """Return an ε or δ, refused by its key if it is none."""
    if isinstance(value, Mapping):
        raise InputError(f"{place} is a table; put a client's name that has dots in quotes")
    allowed = "above 0" if place.startswith("budgets.epsilon") else "at least 0 and below 1"
    try:
        number = math.nan if isinstance(value, bool | str) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not (0 < number < math.inf if allowed == "above 0" else 0 <= number < 1):
        raise InputError(f"{place} is {value!r}; it must be a number {allowed}")
    return number
