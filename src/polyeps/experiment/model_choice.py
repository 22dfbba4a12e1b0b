"""The model that an experiment names, for the records it is to read."""

from __future__ import annotations

from dataclasses import replace
from inspect import signature
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from polyeps.data.dataset import Dataset
from polyeps.data.imdb import FIRST_WORD
from polyeps.data.named_inputs import Inputs
from polyeps.data.targets import LOSS_TARGETS, NAMES, Target, default_loss, example_targets
from polyeps.engine.adapters import Choice, adapted
from polyeps.engine.example_rows import candidate_rows
from polyeps.engine.losses import Loss, is_row_wise_loss
from polyeps.engine.module_parts import give_shapes, has_lazy_parts
from polyeps.engine.target_losses import LOSSES
from polyeps.errors import InputError
from polyeps.experiment import config
from polyeps.experiment.registry import ModelFactory, Parts
from polyeps.model_files import Architecture
from polyeps.models import MODELS, Model


def model_for(wanted: config.ModelSettings, dataset: Dataset, seed: int, parts: Parts) -> Model:
    """Return the model of an experiment, with the loss that it names or that the targets of its records need."""
    shape = dataset.features.shape[1:]
    loss = _loss(wanted, dataset, parts)
    if wanted.name not in MODELS:
        make = parts.find("model.name", wanted.name, {**MODELS, **parts.models}, "models")
        kind = torch.from_numpy(dataset.features[:1]).dtype
        given = GivenToModel(dataset.inputs, wanted.output, loss, dataset.target, dataset.labels.shape[1:])
        model = own_model(wanted.name, make, shape, len(dataset.classes), kind, seed, given)
    else:
        if wanted.output is not None:
            raise InputError(f"model.output is for your own model, but {wanted.name} has one output; leave it out")
        model = MODELS[wanted.name](**_arguments(wanted, dataset))
        if loss is not None or dataset.target != "class":
            model = _with_loss(wanted, model, loss or LOSSES[default_loss(dataset.target)])
    if prod(model.input_shape) != prod(shape):
        raise InputError(
            f"model.name: {wanted.name} takes records of shape {model.input_shape}, but {dataset.name} has {shape}; "
            "choose logistic or mlp, which take any"
        )
    return model


def _loss(wanted: config.ModelSettings, dataset: Dataset, parts: Parts) -> Loss | None:
    """Return the loss that is named; None: the model's own, or the usual one of the targets."""
    named, target = wanted.loss, dataset.target
    if named is not None and ":" in named:
        found: Loss = parts.find("model.loss", named, {}, "models")
        return found
    if named is not None and target not in LOSS_TARGETS[named]:
        raise InputError(
            f'model.loss = "{named}" is for {NAMES[LOSS_TARGETS[named][0]]}, but the targets of {dataset.name} are '
            f'{NAMES[target]}; choose "{default_loss(target)}", or data.target = "{LOSS_TARGETS[named][0]}" '
            "(from_arrays: target=)"
        )
    return None if named is None else LOSSES[named]


def _with_loss(wanted: config.ModelSettings, model: Model, loss: Loss) -> Model:
    if wanted.name in ("linear_svm", "binary_svm", "binary_logistic"):
        raise InputError(
            f"model.loss: {wanted.name} has a loss of its own, for classes; leave it out, or choose logistic or mlp"
        )
    return replace(model, loss=loss, check=not is_row_wise_loss(loss))


def architecture(wanted: config.ModelSettings, dataset: Dataset) -> Architecture:
    """Return the name and the arguments that the model of an experiment is built with."""
    if wanted.name in MODELS:
        return Architecture(name=wanted.name, arguments=_arguments(wanted, dataset))
    arguments: dict[str, Any] = {"shape": dataset.features.shape[1:], "classes": len(dataset.classes)}
    return Architecture(name=wanted.name, arguments=arguments)


class GivenToModel(NamedTuple):
    """What an own model is to take and give, beside one tensor and classes."""

    inputs: Inputs | None = None
    output: Choice = None
    loss: Loss | None = None  # None: the usual one of the target, or the loss of a Model
    target: Target = "class"
    shape: tuple[int, ...] | None = None  # of a record's target, where it is known

    def examples(self, classes: int) -> Tensor | None:
        """Return made-up targets for a loss, if it does not take classes."""
        if self.target == "class" or self.shape is None:
            return None
        return torch.from_numpy(example_targets(self.target, self.shape, classes))


def own_model(
    name: str,
    make: ModelFactory,
    shape: tuple[int, ...],
    classes: int,
    kind: torch.dtype,
    seed: int,
    given: GivenToModel | None = None,
) -> Model:
    """Return a user's model, checked against autograd, with first weights drawn from the seed."""
    given = given or GivenToModel()
    if isinstance(make, nn.Module):
        raise InputError(f"model.name = {name} is a module; give a function of (shape, classes) that returns one")
    shapes = shape if given.inputs is None else given.inputs.shapes
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            made = make(shapes, classes)
            if isinstance(made, nn.Module):
                made = adapted(made, given.inputs, given.output)
                if has_lazy_parts(made):  # whose first weights are drawn now
                    give_shapes(made, candidate_rows(made, shape, kind, None))
    except Exception as problem:
        raise InputError(
            f"model.name = {name} failed: {type(problem).__name__}: {problem}; a model is a function of the shape of a "
            f"record and the number of classes, here ({shapes}, {classes})"
        ) from problem
    if isinstance(made, nn.Module):
        loss = given.loss or LOSSES[default_loss(given.target)]
        made = Model(made, loss, shape, kind, targets=given.examples(classes))
    elif isinstance(made, Model):
        if given.output is not None:
            raise InputError(f"model.output: {name} returns a Model, which chooses its output itself; leave it out")
        if made.inputs != given.inputs:
            raise InputError(
                f"model.name = {name} returns a Model of other inputs than the records have; return a module"
            )
        # which checks it, also where the factory did not
        made = replace(made) if given.loss is None else replace(made, loss=given.loss, targets=given.examples(classes))
    else:
        raise InputError(f"model.name = {name} returned a {type(made).__name__}, not a Model or an nn.Module")
    _check_outputs(name, made, classes, given)
    return made


def _check_outputs(name: str, model: Model, classes: int, given: GivenToModel) -> None:
    """Refuse outputs that do not fit the targets, before any client is charged."""
    outputs = model.outputs(model.start(torch.Generator().manual_seed(2)), model.sample)
    width = outputs.shape[-1] if outputs.dim() > 1 else 1
    if given.target == "class" and outputs.dim() != 2:
        raise InputError(
            f"model.name = {name} has outputs of shape {tuple(outputs.shape[1:])} for a record; for one class each, "
            "return a number for each class"
        )
    if width != classes and (width, classes, given.target) != (1, 2, "class"):
        what = "classes" if given.target in ("class", "sequence", "soft") else NAMES[given.target]
        raise InputError(f"model.name = {name} has {width} outputs for {classes} {what}; give each one")
    examples = given.examples(classes)
    if examples is not None:
        try:
            model.loss(outputs.expand(len(examples), *outputs.shape[1:]), examples)
        except InputError:
            raise
        except Exception as problem:
            raise InputError(
                f"model.name = {name} has a loss that takes no targets of shape {tuple(examples.shape[1:])}: {problem}"
            ) from problem
    if given.target == "sequence" and given.shape is not None and outputs.shape[1:-1] != given.shape:
        raise InputError(
            f"model.name = {name} has outputs of shape {tuple(outputs.shape[1:])} for targets of shape {given.shape}; "
            "return a number for each position and class, classes last"
        )


def _arguments(wanted: config.ModelSettings, dataset: Dataset) -> dict[str, Any]:
    """Return the arguments of a built-in model for some records."""
    if dataset.inputs is not None or dataset.target == "sequence":
        several = "several inputs" if dataset.inputs is not None else "a class for each position"
        raise InputError(
            f"model.name: {wanted.name} takes one input and gives one output a record, but {dataset.name} "
            f"has {several}; name your own model"
        )
    shape, classes = dataset.features.shape[1:], len(dataset.classes)
    if (wanted.name == "lstm") != bool(dataset.words):
        raise InputError(
            f"model.name: {wanted.name} takes numbers, but the records of {dataset.name} are words; choose lstm"
            if dataset.words
            else f"model.name: lstm reads words, but {dataset.name} has none; choose logistic or mlp, or imdb for data"
        )
    if wanted.name in ("binary_logistic", "binary_svm") and classes != 2:
        raise InputError(f"model.name: {wanted.name} is for two classes, but {dataset.name} has {classes}")
    known: dict[str, Any] = {"features": prod(shape), "length": prod(shape), "classes": classes}
    known["vocabulary"] = FIRST_WORD + len(dataset.words)
    if wanted.name == "mlp":
        known["hidden"] = wanted.hidden or (50,)
    return {name: known[name] for name in signature(MODELS[wanted.name]).parameters if name in known}
