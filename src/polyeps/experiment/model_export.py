"""Export a saved model: a `state_dict` for plain PyTorch, ONNX for other runtimes, or a model file of its own."""

from __future__ import annotations

import io
import json
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from polyeps.encoders.scattering import Scattering
from polyeps.errors import InputError
from polyeps.experiment.onnx_layers import graph_of
from polyeps.experiment.saved_model import SavedModel, probabilities
from polyeps.model_files import ModelMetadata, description, model_bytes

ExportFormat = Literal["torch", "onnx", "safetensors"]
SUFFIX: dict[ExportFormat, str] = {"torch": ".pt", "onnx": ".onnx", "safetensors": ".safetensors"}
_TOLERANCE = 1e-5  # of probabilities, between ours and those of an ONNX file
_TRIED = 3  # records on which they are compared


def as_safetensors(metadata: ModelMetadata, tensors: dict[str, Tensor], clients: bool = True) -> bytes:
    """Return a model file, with or without the clients' names, budgets and spending."""
    return model_bytes(metadata if clients else metadata.without_clients(), tensors)


def as_torch(tensors: dict[str, Tensor]) -> bytes:
    """Return a state_dict as `torch.save` writes it, for `torch.load(..., weights_only=True)`."""
    stream = io.BytesIO()
    torch.save(tensors, stream)
    return stream.getvalue()


class _Probabilities(nn.Module):
    """A module followed by softmax, or by the logistic function of a single output."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, features: Tensor) -> Tensor:
        return probabilities(self.module(features))


class _Encoded(nn.Module):
    """An encoder followed by the model that was trained on its features."""

    def __init__(self, encoder: nn.Module, module: nn.Module, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.encoder, self.module, self.shape = encoder, module, shape

    def forward(self, records: Tensor) -> Tensor:
        found: Tensor = self.module(self.encoder(records).float().reshape(-1, *self.shape))
        return found


def _with_encoder(model: SavedModel) -> nn.Module:
    """Return a model with its encoder, if both are modules that ONNX can express."""
    assert model.encoder is not None
    encoder = model.encoder.encoder
    if not isinstance(encoder, nn.Module):
        raise InputError(
            f"{model.path} has the encoder {model.metadata.encoder}, which is no nn.Module, and ONNX holds no other "
            "code; export it as safetensors"
        )
    if any(isinstance(one, Scattering) for one in encoder.modules()):
        raise InputError(
            f"{model.path} has the encoder {model.metadata.encoder}, whose Fourier transforms ONNX cannot express; "
            "export it as safetensors, or train on random-convolutions"
        )
    return _Encoded(encoder, model.module, model.metadata.input_shape)


def as_onnx(model: SavedModel, clients: bool = True) -> tuple[bytes, float]:
    """Return an ONNX file, and how far its probabilities are from ours on a few random records.

    It takes features, or the records that the model's encoder takes, any number at a time, and returns the
    probabilities of the classes. The classes and the rest of the model's description are in its metadata.
    """
    try:
        import onnx  # noqa: F401
        import onnxruntime
    except ImportError as missing:
        raise InputError(f"ONNX needs {missing.name}, which is not installed: pip install 'polyeps[onnx]'") from None
    if model.target not in ("class", "soft") or model.metadata.inputs is not None:
        raise InputError(
            f"{model.path}: ONNX files are for models of one input and of classes; export it as safetensors"
        )
    tried, about = _random_records(model.metadata), model.metadata
    wrapped = _Probabilities(model.module if model.encoder is None else _with_encoder(model)).eval()
    proto = None
    if model.encoder is None:
        proto = graph_of(model.module, about.input_shape, tried.dtype, len(about.classes))
    if proto is None:
        proto = _by_torch(model, wrapped, tried)
    _tidy(proto, about if clients else about.without_clients())
    content: bytes = proto.SerializeToString()
    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    error = 0.0
    for count in (1, _TRIED):
        try:
            (found,) = session.run(None, {"features": tried[:count].numpy()})
        except Exception:  # onnxruntime's own types; torch's exporter may fix the number of records
            raise InputError(
                f"{model.path}: the ONNX file takes no other number of records than the {_TRIED} it was made with; "
                "export it as safetensors"
            ) from None
        with torch.no_grad():
            error = max(error, float((torch.from_numpy(found) - wrapped(tried[:count])).abs().max()))
    if not error <= _TOLERANCE:
        raise InputError(
            f"{model.path}: the ONNX file's probabilities differ from ours by {error:.2g}; do not use ONNX"
        )
    return content, error


def _by_torch(model: SavedModel, wrapped: nn.Module, tried: Tensor) -> Any:
    """Return the ONNX model of any module, by torch's exporter."""
    try:
        import onnxscript  # noqa: F401
    except ImportError:
        raise InputError("ONNX of an own model needs onnxscript: pip install 'polyeps[onnx]'") from None
    torch.compiler.reset()  # what was traced before may fix the number of records
    with _quiet():
        try:
            program: Any = torch.onnx.export(
                wrapped,
                (tried,),
                dynamo=True,
                verbose=False,
                input_names=["features"],
                output_names=["probabilities"],
                dynamic_shapes=({0: torch.export.Dim("records")},),
            )
        except Exception as problem:
            reason = str(problem).strip().splitlines()[0][:200]
            raise InputError(f"{model.path} cannot be expressed in ONNX ({reason}); export it as safetensors") from None
    return program.model_proto


def _random_records(metadata: ModelMetadata) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    kind: torch.dtype = getattr(torch, metadata.record_type or metadata.input_type)
    shape = metadata.record_shape or metadata.input_shape
    if kind.is_floating_point:
        return 2 * torch.rand(_TRIED, *shape, generator=generator) - 1
    most = metadata.model.arguments.get("vocabulary", 2)
    assert isinstance(most, int)
    return torch.randint(0, most, (_TRIED, *shape), generator=generator).to(kind)


def _tidy(proto: Any, metadata: ModelMetadata) -> None:
    """Replace the exporter's notes, which name files of this machine, by the model's description."""
    for part in (proto, proto.graph, *proto.functions):
        part.doc_string = ""
        if hasattr(part, "metadata_props"):
            del part.metadata_props[:]
    inner = [proto.graph.node, proto.graph.value_info, proto.graph.input, proto.graph.output, proto.graph.initializer]
    for parts in (*inner, *(function.node for function in proto.functions)):
        for part in parts:
            part.doc_string = ""
            del part.metadata_props[:]
    proto.producer_name, proto.producer_version = "polyeps", metadata.polyeps
    schema = metadata.columns
    named = metadata.features or (() if schema is None else tuple(one for column in schema for one in column.outputs))
    for key, value in (
        ("classes", json.dumps(metadata.classes, ensure_ascii=False)),
        ("features", json.dumps(named, ensure_ascii=False)),
        ("polyeps", description(metadata)),
    ):
        entry = proto.metadata_props.add()
        entry.key, entry.value = key, value


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the exporter, whose remarks are not about the model."""
    noisy = logging.getLogger("torch.onnx")
    level = noisy.level
    noisy.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        noisy.setLevel(level)
