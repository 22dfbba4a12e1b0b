"""Tables of settings: what all sections of an experiment have in common."""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationInfo, field_validator

_LONGEST = 100  # bytes of a name: a file system takes 255, and seeds and endings are added to it


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


class SettingsTable(BaseModel):
    """A table of settings; numbers are finite, since a journal's JSON knows no others, and true is no number."""

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _true_is_no_number(cls, value: Any, field: ValidationInfo) -> Any:
        kinds = _kinds(cls.model_fields[str(field.field_name)].annotation)
        many = isinstance(value, list | tuple)
        truths = any(isinstance(one, bool) for one in (value if many else [value]))
        if truths and bool not in kinds and kinds & {int, float}:
            raise ValueError("must be numbers" if many else "must be a number")
        return value


def _kinds(annotation: Any) -> set[Any]:
    """Return the types a setting may have, however they are put together."""
    return {annotation}.union(*(_kinds(part) for part in get_args(annotation) if get_origin(annotation) is not Literal))


class Section(SettingsTable):
    """A table of the file that refuses unknown keys."""

    model_config = ConfigDict(extra="forbid")
