"""Model files: a trained model's tensors by their names, and all that is needed to use it, in the safetensors format.

A file holds no code and is read as hostile: its sizes are checked before anything is built from them. The description
lies in the safetensors header under the one key "polyeps", as JSON.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import safetensors
import safetensors.torch
import torch
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator
from pydantic_core import from_json
from torch import Tensor

from polyeps.accounting.certificate import SECRET_COHORT, Certificate
from polyeps.data.named_inputs import Inputs, NamedInput
from polyeps.data.schema import Column
from polyeps.data.targets import Target
from polyeps.errors import InputError

FORMAT = 1
MOST_CLIENTS = 20_000  # whose certificates a file holds
_KEY = "polyeps"
_LARGEST_HEADER = 1 << 25  # bytes
LARGEST_DESCRIPTION = 1 << 23  # bytes of JSON, which the header escapes and so makes longer
_LARGEST_RECORD = 1 << 26  # numbers
_ON_REQUEST = "left out on request"

_Count = Annotated[int, Field(ge=1, lt=1 << 40)]
_PartName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_.:-]{0,200}$")]  # as in an experiment
_NumberType = Literal["float32", "int64", "int32", "int16", "int8", "uint8", "bool"]
_CERTIFICATE: TypeAdapter[Certificate] = TypeAdapter(Certificate)


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Architecture(_Part):
    """A built-in model and its arguments, or an own one: the name of its factory, the record's shape, the classes."""

    name: _PartName
    arguments: dict[str, _Count | Annotated[tuple[_Count, ...], Field(max_length=64)]]


class ClientGuarantee(_Part):
    """What a client allowed and what it spent; without an ε nothing is guaranteed."""

    epsilon: float | None = Field(default=None, gt=0)
    delta: float = Field(default=0.0, ge=0, lt=1)
    spent: float | None = Field(default=None, ge=0)
    spent_if_draws_known: float | None = Field(default=None, ge=0)


class ModelMetadata(_Part):
    """The description of a trained model."""

    format: Literal[1] = 1
    polyeps: str  # versions that wrote it
    torch: str
    experiment: str
    data: str
    method: str
    algorithm: str
    budgets: str  # whose are effective: own, minimum, ...
    seed: int
    rounds: int = Field(ge=0)  # done
    model: Architecture
    parameters: tuple[str, ...] = Field(min_length=1)  # trained tensors in the order of the model's vector
    input_shape: tuple[_Count, ...] = Field(min_length=1, max_length=8)
    input_type: _NumberType
    classes: tuple[str, ...] = Field(min_length=1)  # or the names of the numbers or labels that are predicted
    target: Target | None = None  # what is predicted; None: a class
    scale: Column | None = None  # of numbers: the range they were scaled from
    inputs: tuple[NamedInput, ...] | None = Field(default=None, max_length=64)  # what a row of features holds
    output: str | int | None = None  # of several outputs of an own model: the one that was trained
    label: str | None = None  # column of the label in an own table
    columns: tuple[Column, ...] | None = None  # how the columns of a table become features
    features: tuple[str, ...] = ()  # names of the features, if they have any
    words: tuple[str, ...] = ()  # of texts
    encoder: _PartName | None = None  # applied to the features before the model
    encoder_size: _Count | None = None  # parameters of a built-in encoder
    encoder_bandwidth: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    record_shape: tuple[_Count, ...] | None = Field(default=None, max_length=8)  # before encoding
    record_type: _NumberType | None = None
    code: dict[str, str] = Field(default_factory=dict)  # SHA-256 of modules that the model and the encoder come from
    guarantee: dict[str, Any]  # fields of a certificate that all clients share
    clients: dict[str, ClientGuarantee] | None = Field(default=None, max_length=MOST_CLIENTS)
    withheld: str = ""  # why clients are left out

    @model_validator(mode="after")
    def _fits(self) -> ModelMetadata:
        for shape in (self.input_shape, self.record_shape or ()):
            if math.prod(shape) > _LARGEST_RECORD:
                raise ValueError(f"a record of shape {shape} is too large")
        if len(set(self.classes)) < len(self.classes) or len(set(self.parameters)) < len(self.parameters):
            raise ValueError("two classes or two parameters have the same name")
        if not all(name.isprintable() for name in (*self.classes, *self.features, *(self.clients or ()))):
            raise ValueError("a class, feature or client has a name that cannot be shown")
        if self.inputs is not None and (sum(Inputs(self.inputs).sizes),) != self.input_shape:
            raise ValueError("the inputs of a record are not those of its features")
        self.certificate(ClientGuarantee())
        return self

    def certificate(self, client: ClientGuarantee) -> Certificate:
        """Return the certificate of a client for what it has spent."""
        known = client.spent_if_draws_known
        secret = SECRET_COHORT in self.guarantee.get("conditions", ()) and client.spent is not None
        own = {
            "claimed": None,
            "certified": math.inf if client.spent is None else client.spent,
            "delta": client.delta,
            "details": {"rounds": self.rounds, "budget": client.epsilon},
            "certified_if_draws_known": math.inf if known is None and secret else known,
        }
        return _CERTIFICATE.validate_python({**self.guarantee, **own})

    def without_clients(self) -> ModelMetadata:
        """Return the description without clients' names, budgets and spending."""
        return self.model_copy(update={"clients": None, "withheld": self.withheld or _ON_REQUEST})


def model_bytes(metadata: ModelMetadata, tensors: Mapping[str, Tensor]) -> bytes:
    """Return the content of a model file: the same bytes for the same model, whenever it is written."""
    held = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    # One key alone: safetensors does not keep the order of several.
    return bytes(safetensors.torch.save(held, {_KEY: description(metadata)}))


def description(metadata: ModelMetadata) -> str:
    """Return the description as JSON."""
    return metadata.model_dump_json(exclude_none=True)


def read_model_file(path: Path) -> tuple[ModelMetadata, dict[str, Tensor]]:
    """Return the description and the tensors of a model file; refuse what is damaged or not from polyeps."""
    held, tensors = _read(path)
    if _KEY in held:
        return _checked(path, held[_KEY], tensors), tensors
    if set(tensors) == {"model"}:
        raise InputError(f"{path} was written by polyeps 0.2 or older, without names; run the experiment again")
    raise InputError(
        f"{path} is not a model that polyeps wrote: its header has no description; give a run's models/NAME.safetensors"
    )


def read_vector(path: Path) -> Tensor:
    """Return the trained parameters of a model file as one vector."""
    held, tensors = _read(path)
    if _KEY not in held and set(tensors) == {"model"}:  # of polyeps 0.2
        return tensors["model"]
    metadata = _checked(path, held.get(_KEY, ""), tensors)
    return torch.cat([tensors[name].reshape(-1) for name in metadata.parameters])


def _checked(path: Path, text: str, tensors: Mapping[str, Tensor]) -> ModelMetadata:
    metadata = _described(path, text)
    if missing := next((name for name in metadata.parameters if name not in tensors), None):
        raise InputError(f"{path} is damaged: it holds no tensor {missing!r}; restore it, or export it again")
    return metadata


def _read(path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    remedy = "restore it, or export it again"
    try:
        with path.open("rb") as stream:
            size = path.stat().st_size
            header = int.from_bytes(stream.read(8), "little")
    except OSError as problem:
        raise InputError(f"{path} cannot be read: {problem.strerror}; give a model file or a run's folder") from None
    if size < 8 or header > size - 8:
        raise InputError(f"{path} is not a safetensors file, or it is cut off ({size} bytes); {remedy}")
    if header > _LARGEST_HEADER:
        raise InputError(f"{path} has a header of {header} bytes, more than any model of ours; do not use it")
    try:
        with safetensors.safe_open(path, "pt") as stored:
            tensors = {name: stored.get_tensor(name).clone() for name in stored.keys()}  # noqa: SIM118
            return dict(stored.metadata() or {}), tensors
    except (safetensors.SafetensorError, ValueError, TypeError, RuntimeError, KeyError, OSError) as problem:
        reason = _shown(str(problem) or type(problem).__name__)
        raise InputError(f"{path} is not a safetensors file, or it is damaged ({reason}); {remedy}") from None


def _described(path: Path, text: str) -> ModelMetadata:
    try:
        found = from_json(text, allow_inf_nan=False)
    except ValueError as problem:
        raise InputError(
            f"{path}: its description is not JSON ({_shown(str(problem))}); restore it, or export it again"
        ) from None
    version = found.get("format") if isinstance(found, dict) else None
    if isinstance(version, int) and version > FORMAT:
        raise InputError(f"{path} has format {version}, and this polyeps reads {FORMAT}; install a newer polyeps")
    try:
        # As JSON: a list is a tuple there, a date a text.
        return ModelMetadata.model_validate_json(text)
    except ValidationError as problem:
        error = problem.errors(include_url=False, include_context=False)[0]
        place = ".".join(str(part) for part in error["loc"])
        reason = f"{place}: {error['msg'].removeprefix('Value error, ')}"
        raise InputError(f"{path} does not describe a model of ours: {_shown(reason)}; export it again") from None


def _shown(text: str) -> str:
    """Return a text of unknown origin as one line that a terminal can show."""
    return "".join(sign if sign.isprintable() else " " for sign in text)[:300]
