"""Declares tables: columns, label, client, unit and classes, from settings or from a schema file that clients share."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import date, datetime
from pathlib import Path
from typing import Any

from polyeps.data.cells import as_text
from polyeps.data.schema import Column, Schema, toml_key, toml_of, toml_text
from polyeps.data.targets import NAMES, Target
from polyeps.errors import InputError, suggest

_KEYS = ("range", "dates", "categories", "missing")
SCHEMA_KEYS = ("label", "client", "unit", "classes", "target", "columns")  # of a schema file, as in the table [data]


@dataclass(frozen=True)
class TableDeclaration:
    """The roles of a table's columns, and how they become numbers.

    Without a schema numbers are used as they stand; without classes they are read off the table.
    """

    label: str = "label"
    client: str | None = "client"  # None: the table does not name its clients
    unit: str | None = None  # the column that names the person of each record
    schema: Schema | None = None
    classes: tuple[str, ...] | None = None
    target: Target = "class"
    scale: Column | None = None  # the label's range, where it is a number; it may be declared among the columns

    def __post_init__(self) -> None:
        self._set_scale_apart()
        roles = [("data.label", self.label), ("data.client", self.client), ("data.unit", self.unit)]
        named = [(key, name) for key, name in roles if name is not None]
        for place, (key, name) in enumerate(named):
            if not name.strip():
                raise InputError(f"{key} is empty; name a column")
            for other, same in named[:place]:
                if same == name:
                    raise InputError(f"{other} and {key} both name the column {name!r}; name a column for each")
            if self.schema is not None and name in {column.name for column in self.schema.columns}:
                raise InputError(
                    f"data.columns declares {name!r}, which {key} names and which is no feature; remove it there"
                )
        if self.classes is not None and self.target == "class":
            texts = [as_text(text).casefold() for text in self.classes]
            if len(set(texts)) < max(2, len(texts)) or "" in texts:
                raise InputError("data.classes must be at least two different labels, none empty; correct the list")

    def _set_scale_apart(self) -> None:
        """Take the label's range out of the schema where the label is a number: it is no feature."""
        named = [] if self.schema is None else [each for each in self.schema.columns if each.name == self.label]
        if self.target != "number" or self.schema is None or not named:
            return
        (scale,) = named
        if scale.range is None or scale.missing != "refuse":
            raise InputError(f"{scale.place} is the label; declare it as {{ range = [low, high] }} alone")
        others = tuple(each for each in self.schema.columns if each.name != self.label)
        object.__setattr__(self, "scale", scale)
        object.__setattr__(self, "schema", Schema(others) if others else None)


def schema_of(declared: Mapping[str, Any], place: str = "data.columns") -> Schema:
    """Return the schema that plain values declare: for each column a range, dates or categories, and missing.

    >>> schema_of({"age": {"range": [0, 110]}}).outputs
    ('age',)
    """
    return Schema(tuple(_column(str(name), settings, place) for name, settings in declared.items()))


def _column(name: str, settings: Any, inside: str) -> Column:
    place = f"{inside}.{toml_key(name)}"
    if not isinstance(settings, Mapping):
        raise InputError(
            f"{place} is {settings!r}; declare it as {{ range = [0, 100] }}, {{ dates = [...] }} or "
            '{ categories = ["a", "b"] }'
        )
    for key, value in settings.items():
        if key not in _KEYS:
            dots = isinstance(value, Mapping)
            hint = f"put a name with dots in quotes, {toml_text(f'{name}.{key}')}" if dots else nearest(key, _KEYS)
            raise InputError(f"there is no setting '{place}.{key}'; {hint}")
    missing = settings.get("missing", "refuse")
    if missing not in ("refuse", "mean-of-range") and not _is_number(missing):
        raise InputError(f'{place}.missing is {missing!r}; it must be "mean-of-range", "refuse" or a number')
    found: dict[str, Any] = {"missing": missing if isinstance(missing, str) else float(missing)}
    if (pair := settings.get("range")) is not None:
        if not _is_list(pair) or len(pair) != 2 or not all(_is_number(end) for end in pair):
            raise InputError(f"{place}.range is {_shown(pair)}; it must be two numbers, like [0, 100]")
        found["range"] = (float(pair[0]), float(pair[1]))
    if (pair := settings.get("dates")) is not None:
        found["dates"] = _dates(f"{place}.dates", pair)
    if (listed := settings.get("categories")) is not None:
        if not _is_list(listed) or not all(isinstance(one, str | int | float) for one in listed):
            raise InputError(f'{place}.categories is {_shown(listed)}; it must be a list of texts, like ["m", "f"]')
        found["categories"] = tuple(as_text(one) for one in listed)
    return Column(name, **found)


def _dates(place: str, pair: Any) -> tuple[date, date]:
    try:
        first, last = (
            one if isinstance(one, date) and not isinstance(one, datetime) else datetime.fromisoformat(str(one)).date()
            for one in (pair if _is_list(pair) else ())
        )
    except ValueError:
        raise InputError(
            f'{place} is {_shown(pair)}; it must be two dates, like ["2020-01-01", "2024-12-31"]'
        ) from None
    return first, last


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _shown(value: Any) -> str:
    return str(list(value)) if _is_list(value) else repr(value)


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a hint at what was meant by an unknown name."""
    names = list(known)
    return suggest(name, names, f"known are {', '.join(names)}")


def read_toml(path: Path, named: str, remedy: str) -> dict[str, Any]:
    """Return the content of a TOML file, which messages call by a name."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as problem:
        raise InputError(f"{named} cannot be read: {problem.strerror}; {remedy}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as problem:
        raise InputError(f"{named} is not TOML: {problem}") from None


def read_schema_values(path: Path) -> dict[str, Any]:
    """Return the keys of a schema file, which are those of [data]: label, client, unit, classes, columns."""
    drafting = f"draft one with `polyeps data describe FILE --write {path.name}`"
    values = read_toml(path, f"the schema {path}", drafting)
    for key in values:
        if key not in SCHEMA_KEYS:
            raise InputError(f"the schema {path} has an unknown key {key!r}; {nearest(key, SCHEMA_KEYS)}")
    if not isinstance(values.get("columns"), dict):
        raise InputError(f"the schema {path} has no table [columns]; declare the columns there")
    return values


def read_schema(path: Path) -> TableDeclaration:
    """Return what a schema file declares."""
    values = read_schema_values(path)
    for key in ("label", "client", "unit"):
        if not isinstance(values.get(key, ""), str):
            raise InputError(f"{key} in {path} is {values[key]!r}; it must be the name of a column")
    target = values.get("target", "class")
    if target not in NAMES:
        raise InputError(f"target in {path} is {target!r}; it must be one of {', '.join(NAMES)}")
    classes = values.get("classes")
    if classes is not None and not _is_list(classes):
        raise InputError(f"classes in {path} is {classes!r}; it must be a list of labels")
    return TableDeclaration(
        label=values.get("label", "label"),
        client=values.get("client", "client"),
        unit=values.get("unit"),
        schema=schema_of(values["columns"], "columns"),
        classes=None if classes is None else tuple(as_text(one) for one in classes),
        target=target,
    )


def schema_text(declared: TableDeclaration, comment: str) -> str:
    """Return a schema file."""
    lines = [f"# {line}".rstrip() for line in comment.splitlines()]
    roles = {key: getattr(declared, key) for key in ("label", "client", "unit")}
    lines += [f"{key} = {toml_text(name)}" for key, name in roles.items() if name is not None]
    if declared.classes is not None:
        lines.append(f"classes = [{', '.join(toml_text(text) for text in declared.classes)}]")
    assert declared.schema is not None
    return "\n".join([*lines, "", toml_of(declared.schema.columns, "columns")])
