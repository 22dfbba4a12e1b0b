"""Saved models: load one from its file or from a run's folder, and predict with it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from polyeps.accounting.certificate import Certificate
from polyeps.data.imdb import number_words, tokenise
from polyeps.data.named_inputs import Inputs, by_name
from polyeps.data.schema import Schema, Where
from polyeps.data.targets import Target
from polyeps.encoders import EncoderChoice
from polyeps.errors import DataError, InputError, suggest
from polyeps.experiment.encoders import FrozenEncoder, frozen
from polyeps.experiment.journal import Journal
from polyeps.experiment.model_choice import GivenToModel, own_model
from polyeps.experiment.outcome import model_path
from polyeps.experiment.predicted_tables import check_columns, columns_of, numbers_in
from polyeps.experiment.registry import Code, Encoder, ModelFactory, Parts
from polyeps.experiment.seeds import seed_for
from polyeps.experiment.target_predictions import predicted_as, predictions
from polyeps.model_files import ModelMetadata, read_model_file
from polyeps.models import MODELS, Model

_AT_A_TIME = 5000  # records, as in evaluation
TEXT = "text"  # the column of texts, for models of words


@dataclass(frozen=True, eq=False)
class SavedModel:
    """A trained model with all that is needed to use it.

    Tables (mappings of columns, pandas or polars frames) are encoded as the training records were. Arrays and tensors
    are features in the order of the training records, encoded already where there is a schema.
    """

    path: Path
    metadata: ModelMetadata
    module: nn.Module  # with its weights, ready to predict
    encoder: FrozenEncoder | None = None

    def __repr__(self) -> str:
        about = self.metadata
        return (
            f"SavedModel({str(self.path)!r}: {about.model.name} by {about.method}, seed {about.seed}, predicts "
            f"{about.label or 'label'} as {predicted_as(self.target, len(about.classes))})"
        )

    @property
    def classes(self) -> tuple[str, ...]:
        """The class labels, or the names of the numbers or labels that are predicted; probability i is classes[i]'s."""
        return self.metadata.classes

    @property
    def target(self) -> Target:
        """What is predicted: a class, a class for each position, numbers, or several labels."""
        return self.metadata.target or "class"

    @property
    def schema(self) -> Schema | None:
        """How the columns of a table become features; None for a model of plain numbers, images or texts."""
        return None if self.metadata.columns is None else Schema(self.metadata.columns)

    @property
    def certificates(self) -> dict[str, Certificate]:
        """Every client's certificate for what it spent on this model; empty where clients are withheld."""
        return {client: self.metadata.certificate(one) for client, one in (self.metadata.clients or {}).items()}

    def predict(self, records: Any) -> list[Any]:
        """Return the class of every record of a table or an array; of other targets a number, or a list.

        A model of several inputs takes them in a dictionary or a tuple.
        """
        outputs = self.outputs(self.encode(records))
        return predictions(self.target, outputs, self.classes, self.metadata.scale)

    def predict_proba(self, records: Any) -> NDArray[np.float64]:
        """Return the probability of every class, (n, classes), for the records of a table or an array."""
        if self.target == "number":
            raise InputError(f"{self.path} predicts numbers, which have no probabilities; use predict")
        outputs = self.outputs(self.encode(records))
        if self.target == "labels":
            return np.asarray(torch.sigmoid(outputs.double()))
        return probabilities_of(outputs)

    def encode(self, records: Any, where: Where | None = None, name: str = "the table") -> Tensor:
        """Return the features of records as the module takes them, (n, ...)."""
        place = where or (lambda row: f"record {row}")
        if self.metadata.inputs is not None and isinstance(records, Mapping | tuple):
            found = Inputs(self.metadata.inputs).pack(by_name(records), name)
            if not len(found) or not np.isfinite(found).all():
                raise DataError(f"{name} holds no records, or numbers that are not finite; correct it")
            return torch.from_numpy(found)
        if isinstance(records, Tensor):
            found = records.detach().cpu().numpy()
        elif isinstance(records, np.ndarray):
            found = records
        else:
            found = self._of_table(columns_of(records), place, name)
        if not len(found):
            raise DataError(f"{name} holds no records; add some")
        if found.dtype.kind not in "fiub":
            raise DataError(f"{name} holds {found.dtype}, not numbers; give numbers, or a table with named columns")
        if found.dtype.kind == "f" and not np.isfinite(found).all():
            bad = np.argwhere(~np.isfinite(found))[0]
            raise DataError(f"{place(int(bad[0]))}: a feature is {found[tuple(bad)]}; fill it in, or remove the record")
        return self._inputs(found, place, name)

    def outputs(self, features: Tensor, done: Callable[[int, int], None] = lambda *_: None) -> Tensor:
        """Return the outputs of the module, (n, outputs); refuse those that are not finite."""
        parts = []
        with torch.no_grad():
            for first in range(0, len(features), _AT_A_TIME):
                parts.append(self.module(features[first : first + _AT_A_TIME]))
                done(min(first + _AT_A_TIME, len(features)), len(features))
        found = torch.cat(parts)
        if not torch.isfinite(found).all():
            raise InputError(f"{self.path} predicts what is no number: its training diverged, or a feature is huge")
        return found

    def _of_table(self, table: Mapping[str, Sequence[Any]], where: Where, name: str) -> NDArray[Any]:
        schema, held = self.schema, self.metadata
        if held.words and TEXT in table:
            texts = [tokenise(str(text).encode()) for text in table[TEXT]]
            length = prod(held.record_shape or held.input_shape)
            return number_words(texts, [word.encode() for word in held.words], length)
        if schema is not None:
            check_columns([column.name for column in schema.columns], table, name)
            return schema.encode(table, where, name)
        if held.features:
            check_columns(held.features, table, name)
            wanted = {column: table[column] for column in held.features}
        else:
            wanted = dict(table)
        if not wanted:
            raise DataError(f"{name} has no columns; give one for each feature, in order")
        return np.stack([numbers_in(column, cells, where) for column, cells in wanted.items()], axis=1)

    def _inputs(self, found: NDArray[Any], where: Where, name: str) -> Tensor:
        """Return features as the module takes them, encoded where the model has an encoder."""
        about = self.metadata
        if self.encoder is not None:
            if about.record_shape is not None:
                takes = f"numbers a record, and the model's encoder {about.encoder} takes"
                found = _shaped(found, about.record_shape, name, takes)
            kind = about.record_type or ("float32" if found.dtype.kind == "f" else str(found.dtype))
            found = self.encoder(self._numbers(found, where, kind).numpy())
        found = _shaped(found, about.input_shape, name, "features a record, and the model takes")
        return self._numbers(found, where, about.input_type)

    def _numbers(self, found: NDArray[Any], where: Where, name: str) -> Tensor:
        """Return numbers of a type; whole ones, such as those of words, are none outside of the model's."""
        kind: torch.dtype = getattr(torch, name)
        if kind.is_floating_point:
            with np.errstate(over="ignore"):
                floats = torch.from_numpy(np.ascontiguousarray(found, dtype=np.float32))
            if not torch.isfinite(floats).all():
                row = int((~torch.isfinite(floats.flatten(1)).all(1)).nonzero()[0])
                raise DataError(f"{where(row)}: a feature is too large for 32 bits; correct it")
            return floats
        most = self.metadata.model.arguments.get("vocabulary")
        limit = most if isinstance(most, int) else torch.iinfo(kind).max + 1 if kind is not torch.bool else 2
        wrong = (found != np.floor(found)) | (found < 0) | (found >= limit)
        if wrong.any():
            at = tuple(int(i) for i in np.argwhere(wrong)[0])
            raise DataError(f"{where(at[0])}: {found[at]} is not a whole number from 0 to {limit - 1}; correct it")
        return torch.from_numpy(found.astype(np.int64)).to(kind)


def _shaped(found: NDArray[Any], shape: tuple[int, ...], name: str, takes: str) -> NDArray[Any]:
    """Return records, given in their own shape or flat, in their own shape."""
    size = int(np.prod(found.shape[1:]))
    if found.ndim < 2 or size != prod(shape):
        held = size if found.ndim > 1 else "no"
        raise DataError(f"{name} has {held} {takes} {prod(shape)}; give as many, in the order of the training")
    return found.reshape(-1, *shape)


def load_model(
    path: Path | str,
    *,
    method: str | None = None,
    seed: int | None = None,
    models: Mapping[str, ModelFactory] | None = None,
    encoders: Mapping[str, Callable[[], Encoder]] | None = None,
    code_folder: Path | str | None = None,
) -> SavedModel:
    """Load a model from its file, or from a run's folder, where `method` and `seed` choose among several.

    An own model is built by its factory: give it under its name in `models`, or give the folder of its code if you
    trust that code. The same holds for encoders.
    """
    path = find_model(Path(path), method, seed)
    metadata, tensors = read_model_file(path)
    code = None if code_folder is None else Code(Path(code_folder).absolute(), dict(metadata.code), resumed=True)
    parts = Parts(models=models or {}, encoders=encoders or {}, code=code)
    model = _built(path, metadata, parts)
    encoder = None
    if metadata.encoder is not None:
        choice = EncoderChoice(metadata.encoder, metadata.encoder_size, metadata.encoder_bandwidth)
        encoder = frozen(choice, metadata.record_shape or (), parts)
    module = model.module
    _check_tensors(path, module.state_dict(), tensors)
    if tuple(model.slices) != metadata.parameters or model.input_shape != metadata.input_shape:
        raise InputError(f"{path} describes another model than {metadata.model.name}; export it again")
    if len(metadata.classes) != _class_count(metadata):
        raise InputError(f"{path} names {len(metadata.classes)} classes for {_class_count(metadata)}; export it again")
    if str(model.input_type) != f"torch.{metadata.input_type}":
        raise InputError(f"{path}: {metadata.model.name} takes {model.input_type}, not {metadata.input_type}")
    module.load_state_dict(tensors, assign=any(parameter.is_meta for parameter in module.parameters()))
    module.eval()
    return SavedModel(path, metadata, module, encoder)


def find_model(path: Path, method: str | None = None, seed: int | None = None) -> Path:
    """Return the model file that a path names: itself, or the one of a run's folder."""
    if not path.is_dir():
        if method is not None or seed is not None:
            raise InputError(
                f"{path} is one model; method and seed choose among those of a run's folder; leave them out"
            )
        return path
    with closing(Journal(path / "journal.db")) as journal:
        jobs = [row for row in journal.jobs() if row["status"] == "done"]
    chosen = [row for row in jobs if method in (None, row["label"]) and seed in (None, row["seed"])]
    labels = [row["label"] for row in jobs]
    if method is not None and labels and method not in labels:
        raise InputError(f"no finished model in {path} is by {method!r}; {suggest(method, dict.fromkeys(labels))}")
    listed = ", ".join(f"{row['label']!r} with seed {row['seed']}" for row in jobs) or "none"
    if len(chosen) != 1:
        found = f"{len(chosen)} of the models in" if chosen else "no finished model in"
        raise InputError(
            f"{found} {path} fit; choose one with --method and --seed, in Python with method and seed: {listed}"
        )
    return model_path(path, chosen[0]["job"])


def code_folder_of(path: Path) -> Path | None:
    """Return the folder of the code that a run trusted, for a model file in its folder."""
    folder = path.absolute().parent.parent
    if not (folder / "journal.db").is_file():
        return None
    with closing(Journal(folder / "journal.db")) as journal:
        code = journal.about().get("code")
    return None if code is None else Path(code["folder"])


def probabilities_of(outputs: Tensor) -> NDArray[np.float64]:
    """Return probabilities, (n, classes): softmax, or the logistic function of a single output."""
    return np.asarray(probabilities(outputs.double()))


def probabilities(outputs: Tensor) -> Tensor:
    """Return the probabilities of outputs; one output is the log odds of class 1."""
    if outputs.shape[-1] == 1:
        return torch.cat([torch.sigmoid(-outputs), torch.sigmoid(outputs)], dim=-1)
    return torch.softmax(outputs, dim=-1)


def _built(path: Path, metadata: ModelMetadata, parts: Parts) -> Model:
    """Return the model that a file names, without its weights."""
    name, arguments = metadata.model.name, metadata.model.arguments
    if name not in MODELS:
        if ":" not in name and name not in parts.models:
            raise InputError(
                f"{path} holds your own model {name!r}, whose code is not in the file; load it in Python with "
                f"load_model(..., models={{{name!r}: FUNCTION}})"
            )
        make = parts.find("model.name", name, {**MODELS, **parts.models}, "models")
        shape, classes = arguments.get("shape"), arguments.get("classes")
        if set(arguments) != {"shape", "classes"} or not isinstance(shape, tuple) or not isinstance(classes, int):
            raise InputError(f"{path}: an own model takes a shape and a number of classes; export it again")
        target = metadata.target or "class"
        inputs = None if metadata.inputs is None else Inputs(metadata.inputs)
        given = GivenToModel(inputs, metadata.output, target=target)  # any loss of it will do: nothing is trained
        # The seed of its training: what a module draws beside parameters and buffers is not in the file.
        seed = seed_for(max(0, metadata.seed), "model")
        return own_model(name, make, shape, classes, getattr(torch, metadata.input_type), seed, given)
    if unknown := set(arguments) - set(inspect.signature(MODELS[name]).parameters):
        raise InputError(f"{path}: {name} has no argument {min(unknown)!r}; export the model again")
    try:
        return MODELS[name](**arguments)
    except (TypeError, ValueError, RuntimeError, OverflowError) as problem:
        reason = str(problem).splitlines()[0][:200]
        raise InputError(f"{path}: {name} cannot be built with {arguments} ({reason}); export it again") from None


def _class_count(metadata: ModelMetadata) -> Any:
    """Return the number of classes that a model tells apart; nothing runs, for a file may ask for too much."""
    built_in = MODELS.get(metadata.model.name)
    known = inspect.signature(built_in).parameters.get("classes") if built_in else None
    return metadata.model.arguments.get("classes", known.default if known else 2)


def _check_tensors(path: Path, wanted: Mapping[str, Tensor], held: Mapping[str, Tensor]) -> None:
    """Refuse tensors that are not those of the module, before anything of their size is made."""
    if odd := sorted(set(wanted) ^ set(held)):
        said = "holds no" if odd[0] in wanted else "holds a"
        raise InputError(f"{path} {said} tensor {odd[0]!r}, unlike the model it names; export it again")
    for name, tensor in wanted.items():
        if tensor.shape != held[name].shape or tensor.dtype != held[name].dtype:
            raise InputError(
                f"{path}: tensor {name!r} is {held[name].dtype} {tuple(held[name].shape)}, but the model it names has "
                f"{tensor.dtype} {tuple(tensor.shape)}; export it again"
            )
