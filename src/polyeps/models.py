"""Models as flat vectors with named slices: the papers' networks, and any module of the user's.

A `Model` holds an architecture, never weights: weights are vectors (d,), or a matrix (n, d) with a row per
client. Logistic regression and the linear SVM start at zero, as in the papers; the others start as torch's
layers do, uniform within 1/√fan-in, from the generator the caller gives.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from functools import cached_property
from itertools import pairwise
from types import MappingProxyType
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from polyeps.core import check_person
from polyeps.data.named_inputs import Inputs, by_name, inputs_of
from polyeps.engine.adapters import Adapted, Choice, adapted, one_by_one, uncompiled, unsqueezed
from polyeps.engine.example_rows import candidate_rows
from polyeps.engine.fallback_layers import Lender, evaluating
from polyeps.engine.gradient_checks import CheckedModel
from polyeps.engine.losses import BinaryHinge, BinaryLogistic, Loss
from polyeps.engine.losses import cross_entropy as cross_entropy
from polyeps.engine.losses import hinge as hinge
from polyeps.engine.module_checks import OneAtATimeError, check_model
from polyeps.engine.module_parts import check_module, give_shapes, has_lazy_parts, in_float32
from polyeps.engine.network import Network, floats_per_row, lower, one_vector_a_row
from polyeps.engine.recurrent import LastState
from polyeps.engine.target_losses import loss_named
from polyeps.engine.units import EachRecord, UnitLoss, UnitNetwork
from polyeps.errors import InputError


class Slice(NamedTuple):
    """Where a named tensor lies in the vector, and its shape."""

    start: int
    stop: int
    shape: tuple[int, ...]


@dataclass(frozen=True, eq=False)  # a model is itself: modules do not compare
class Model:
    """An architecture and its loss; its parameters are one vector.

    >>> logistic().slices["0.bias"]
    Slice(start=7840, stop=7850, shape=(10,))
    """

    module: nn.Module
    loss: Loss
    input_shape: tuple[int, ...]
    input_type: torch.dtype = torch.float32
    start_at_zero: bool = False
    person: str = ""  # what a person is called, where an example is all records of one: "patient"
    network: Network = field(init=False, repr=False)
    slices: dict[str, Slice] = field(init=False, repr=False)
    _sample: Tensor = field(init=False, repr=False)  # (1, ...); of one number only where it is zero
    example: InitVar[Tensor | None] = None  # rows to check the module on; random ones by default
    check: InitVar[bool] = True
    # Examples (R, ...) of the targets of an own loss that takes other ones than a class or a number for each record.
    targets: Tensor | None = field(default=None, repr=False)

    def __post_init__(self, example: Tensor | None, check: bool) -> None:
        object.__setattr__(self, "module", uncompiled(self.module))
        if check and has_lazy_parts(self.module):
            give_shapes(self.module, candidate_rows(self.module, self.input_shape, self.input_type, example))
        check_module(self.module)
        object.__setattr__(self, "module", in_float32(self.module))
        if self.input_type.is_complex or self.input_type in (torch.float64, torch.float16, torch.bfloat16):
            raise InputError(f"rows are {self.input_type}; models take float32 or whole numbers: call float() on them")
        object.__setattr__(self, "loss", loss_named(self.loss))
        object.__setattr__(self, "_sample", torch.zeros(1, dtype=self.input_type).expand(1, *self.input_shape))
        self._lay_out()
        if check:
            self._check(example)

    def _lay_out(self) -> None:
        slices: dict[str, Slice] = {}
        end = 0
        for name, parameter in self.module.named_parameters():
            if parameter.requires_grad:
                slices[name] = Slice(end, end + parameter.numel(), tuple(parameter.shape))
                end += parameter.numel()
        if not end:
            raise InputError("the model has no trainable parameters; at least one must require a gradient")
        object.__setattr__(self, "slices", slices)
        object.__setattr__(self, "network", lower(self.module))

    def _check(self, example: Tensor | None) -> None:
        """Train with what was compared with autograd, one example at a time, on this module and loss."""
        rows = candidate_rows(self.module, self.input_shape, self.input_type, example)
        if not isinstance(self.module, Adapted) and not isinstance(self._tried(rows), Tensor | None):
            self._replace(Adapted(self.module))
        together, one = self._tried(rows), self._tried([each[:1] for each in rows])
        if isinstance(one, Tensor) and isinstance(together, Tensor) and together.shape == (len(rows[0]), *one.shape):
            self._replace(unsqueezed(self.module))
        device = next(self.module.parameters()).device
        device = torch.device("cpu") if device.type == "meta" else device
        rows = [part.to(device) for part in rows]
        start = self.start(torch.Generator().manual_seed(2)).to(device)
        try:
            checked = check_model(self.subject(), self.network, start, rows, self.targets)
        except OneAtATimeError:
            self._replace(one_by_one(self.module))
            checked = check_model(self.subject(), self.network, start, rows, self.targets)
        for name, found in zip(("network", "loss", "_sample"), checked, strict=True):
            object.__setattr__(self, name, found)

    def subject(self) -> CheckedModel:
        """Return what checks compare with autograd."""
        return CheckedModel(self.module, {name: part.shape for name, part in self.slices.items()}, self.loss)

    def _replace(self, module: nn.Module) -> None:
        object.__setattr__(self, "module", module)
        self._lay_out()

    def _tried(self, candidates: list[Tensor]) -> object:
        """Return what the module returns for the first rows it takes; None if it takes none, as the checks explain."""
        device = next(self.module.parameters()).device
        if device.type == "meta":
            return None
        lender = Lender(self.module)
        copies = [parameter.detach().clone() for parameter in lender.trained.values()]
        with torch.no_grad(), torch.random.fork_rng(devices=[]), lender.lend(copies), evaluating(self.module):
            for rows in candidates:
                with contextlib.suppress(Exception):
                    outputs: object = self.module(rows.clone().to(device))
                    return outputs
        return None

    @property
    def inputs(self) -> Inputs | None:
        """The named inputs that a row is cut into; None for a module of one tensor."""
        return self.module.inputs if isinstance(self.module, Adapted) else None

    @property
    def size(self) -> int:
        """d, the number of parameters."""
        return max(part.stop for part in self.slices.values())

    @property
    def sample(self) -> Tensor:
        """A made-up record (1, ...) that the module takes. A model file may ask for a huge one, so it is made late."""
        return self._sample.contiguous()

    @cached_property
    def floats_per_row(self) -> int:
        """About how many floats a record of a batch needs during a step, to choose chunks by."""
        return floats_per_row(self.network, self._first(), self.sample)

    @cached_property
    def one_vector_a_row(self) -> frozenset[int]:
        """Which layers are linear maps of one vector a row; none where a row is several records."""
        if self.person:
            return frozenset()
        return one_vector_a_row(self.network, self._first(), self.sample)

    def _first(self) -> Tensor:
        """Return weights (1, d) that the module takes."""
        return self.start(torch.Generator().manual_seed(2))[None]

    def flatten(self, tensors: dict[str, Tensor]) -> Tensor:
        """The vector (d,), or matrix (n, d), of named tensors."""
        parts = []
        for name, part in self.slices.items():
            lead = tensors[name].shape[: tensors[name].dim() - len(part.shape)]
            parts.append(tensors[name].reshape(*lead, part.stop - part.start))
        return torch.cat(parts, dim=-1)

    def unflatten(self, vector: Tensor) -> dict[str, Tensor]:
        """The named tensors of a vector (d,) or matrix (n, d), as views of it."""
        return {
            name: vector[..., part.start : part.stop].view((*vector.shape[:-1], *part.shape))
            for name, part in self.slices.items()
        }

    def start(self, generator: torch.Generator) -> Tensor:
        """A vector to begin training with, as torch initialises its layers."""
        vector = torch.zeros(self.size)
        if self.start_at_zero:
            return vector
        named = self.unflatten(vector)
        for path, module in self.module.named_modules():
            for name, parameter in module.named_parameters(recurse=False):
                target = named.get(f"{path}.{name}" if path else name)
                if target is not None:
                    _initialise(module, parameter, target, generator)
        return vector

    def outputs(self, vector: Tensor, features: Tensor) -> Tensor:
        """One model's outputs for a batch of features in eval mode, e.g. for evaluation."""
        with torch.no_grad(), Lender(self.module).lend_copies(vector), evaluating(self.module):
            outputs: Tensor = self.module(features.clone())  # a module may work in place
        return outputs.float() if outputs.dtype == torch.float64 else outputs

    @staticmethod
    def classes(outputs: Tensor) -> Tensor:
        """The class each row's outputs stand for; one output tells class 1 from class 0 by its sign."""
        return (outputs[..., 0] > 0).long() if outputs.shape[-1] == 1 else outputs.argmax(-1)


def logistic(features: int = 784, classes: int = 10) -> Model:
    """Multinomial logistic regression; 7 850 parameters on MNIST."""
    return _build([nn.Linear(features, classes, device="meta")], cross_entropy, (features,), zero=True)


def linear_svm(features: int = 784, classes: int = 10) -> Model:
    """A linear support vector machine with Crammer and Singer's multi-class hinge loss."""
    return _build([nn.Linear(features, classes, device="meta")], hinge, (features,), zero=True)


def binary_logistic(features: int = 123) -> Model:
    """Logistic regression of two classes: one weight per feature and no bias, so d is the number of features."""
    return _build([nn.Linear(features, 1, bias=False, device="meta")], BinaryLogistic(), (features,), zero=True)


def binary_svm(features: int = 123) -> Model:
    """A linear support vector machine of two classes: one weight per feature and no bias."""
    return _build([nn.Linear(features, 1, bias=False, device="meta")], BinaryHinge(), (features,), zero=True)


def mlp(features: int = 784, hidden: tuple[int, ...] = (50,), classes: int = 10) -> Model:
    """Dense layers with ReLU between them."""
    return _build(_dense((features, *hidden, classes)), cross_entropy, (features,))


def _dense(widths: tuple[int, ...]) -> Sequence[nn.Module]:
    return [layer for pair in pairwise(widths) for layer in (nn.Linear(*pair, device="meta"), nn.ReLU())][:-1]


def cnn(classes: int = 10) -> Model:
    """The small MNIST network of TensorFlow Privacy's tutorial: 26 010 parameters."""
    first = nn.Conv2d(1, 16, 8, stride=2, padding=3, device="meta")  # "same" for 28 × 28: 3 on every side
    second = nn.Conv2d(16, 32, 4, stride=2, device="meta")
    return _cnn((1, 28, 28), [first, second], (512, 32, classes), pooling_stride=1)


def mcmahan_cnn(classes: int = 10) -> Model:
    """McMahan et al.'s MNIST network (2017): 1 663 370 parameters."""
    convolutions = [nn.Conv2d(*channels, 5, padding=2, device="meta") for channels in ((1, 32), (32, 64))]
    return _cnn((1, 28, 28), convolutions, (3136, 512, classes))


def cifar_cnn(classes: int = 10) -> Model:
    """PFA's CIFAR-10 network: 2 201 674 parameters."""
    convolutions = [nn.Conv2d(*channels, 3, padding=1, device="meta") for channels in ((3, 32), (32, 64), (64, 128))]
    return _cnn((3, 32, 32), convolutions, (2048, 1024, classes))


def _cnn(
    shape: tuple[int, ...], convolutions: list[nn.Conv2d], widths: tuple[int, ...], pooling_stride: int = 2
) -> Model:
    """Convolutions, each followed by a ReLU and a 2 × 2 max pooling, then dense layers of these widths."""
    pooled = [layer for each in convolutions for layer in (each, nn.ReLU(), nn.MaxPool2d(2, pooling_stride))]
    return _build([*pooled, nn.Flatten(), *_dense(widths)], cross_entropy, shape)


def lstm(vocabulary: int = 4227, embedding: int = 32, hidden: int = 40, length: int = 100, classes: int = 2) -> Model:
    """A two-layer LSTM over a review's tokens: 160 306 parameters, as PFA reports for IMDb.

    The paper gives the number, not the configuration; this one was chosen to give exactly that number.
    """
    layers = [
        nn.Embedding(vocabulary, embedding, device="meta"),
        LastState(nn.LSTM(embedding, hidden, num_layers=2, batch_first=True, device="meta")),
        nn.Linear(hidden, classes, device="meta"),
    ]
    return _build(layers, cross_entropy, (length,), kind=torch.int64)


_BUILDERS = (binary_logistic, binary_svm, cifar_cnn, cnn, linear_svm, logistic, lstm, mcmahan_cnn, mlp)
MODELS: Mapping[str, Callable[..., Model]] = MappingProxyType({build.__name__: build for build in _BUILDERS})


def from_module(
    module: nn.Module,
    loss: Loss | str,
    example: Tensor | Mapping[str, Tensor] | tuple[Tensor, ...],
    *,
    targets: Tensor | None = None,
    output: Choice = None,
) -> Model:
    """A model of any module, checked against autograd on rows like the examples, of which there must be two.

    Examples are one tensor (R, ...), or several: by the names of the module's arguments in a dictionary, by their
    places in a tuple. `targets` (R, ...) are examples of what an own loss takes. Of several outputs, the one called
    logits is trained, or the one that `output` names, by key or by place.
    """
    inputs = None
    if not isinstance(example, Tensor):
        for name, part in by_name(example).items():
            if part.is_floating_point() and part.dtype != torch.float32:
                raise InputError(f"the input {name!r} is {part.dtype}; call float() on it, since models are float32")
        inputs = inputs_of(example)
        example = torch.from_numpy(inputs.pack(by_name(example), "the examples"))
    if len(example) < 2:
        raise InputError("the example must hold at least two rows, to see that the model treats them apart")
    made, shape = adapted(module, inputs, output), tuple(example.shape[1:])
    return Model(made, loss_named(loss), shape, example.dtype, example=example, targets=targets)


def of_units(model: Model, person: str) -> Model:
    """Return the same model for examples that are all records of one person, called "patient" for instance.

    Its parameters are those of the model of single records, in the same order. Its input shape is that of a person with
    one record.
    """
    check_person(person)
    if model.person:
        raise InputError(f"the model is one of {model.person}s already; give the model of single records")
    module, shape = EachRecord(model.module), (1, *model.input_shape)
    # Not checked again: the layers and the loss are those of the model of single records.
    loss, kind, zero = UnitLoss(model.loss), model.input_type, model.start_at_zero
    made = Model(module, loss, shape, kind, zero, person, check=False, targets=model.targets)
    object.__setattr__(made, "network", UnitNetwork(model.network.layers, model.network.random))
    object.__setattr__(made, "_sample", model._sample[None])
    return made


def _build(
    layers: Sequence[nn.Module], loss: Loss, shape: tuple[int, ...], zero: bool = False, kind: torch.dtype | None = None
) -> Model:
    # Built on the meta device: an architecture has no weights, and torch's global generator stays untouched.
    # Not checked each time: tests compare these with autograd and Opacus.
    return Model(nn.Sequential(*layers), loss, shape, kind or torch.float32, zero, check=False)


def _initialise(module: nn.Module, parameter: nn.Parameter, target: Tensor, generator: torch.Generator) -> None:
    if not parameter.is_meta:  # the user's module brings its own values
        target.copy_(parameter.detach())
    elif isinstance(module, nn.Embedding):
        target.normal_(generator=generator)
    else:
        fan_in = module.hidden_size if isinstance(module, nn.LSTM) else cast(Tensor, module.weight)[0].numel()
        bound = 1 / math.sqrt(fan_in)
        target.uniform_(-bound, bound, generator=generator)
