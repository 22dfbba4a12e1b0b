"""The model that an experiment names, for the records it is to read."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import nn

from polyeps.data.dataset import Dataset
from polyeps.data.imdb import FIRST_WORD
from polyeps.errors import InputError
from polyeps.experiment import config
from polyeps.experiment.registry import ModelFactory, Parts
from polyeps.model_files import Architecture
from polyeps.models import MODELS, Model, cross_entropy


def model_for(wanted: config.ModelSettings, dataset: Dataset, seed: int, parts: Parts) -> Model:
    shape = dataset.features.shape[1:]
    if wanted.name not in MODELS:
        make = parts.find("model.name", wanted.name, {**MODELS, **parts.models}, "models")
        kind = torch.from_numpy(dataset.features[:1]).dtype
        model = own_model(wanted.name, make, shape, len(dataset.classes), kind, seed)
    else:
        model = MODELS[wanted.name](**_arguments(wanted, dataset))
    if prod(model.input_shape) != prod(shape):
        raise InputError(
            f"model.name: {wanted.name} takes records of shape {model.input_shape}, but {dataset.name} has {shape}; "
            "choose logistic or mlp, which take any"
        )
    return model


def architecture(wanted: config.ModelSettings, dataset: Dataset) -> Architecture:
    """Return the name and the arguments that the model of an experiment is built with."""
    if wanted.name in MODELS:
        return Architecture(name=wanted.name, arguments=_arguments(wanted, dataset))
    arguments: dict[str, Any] = {"shape": dataset.features.shape[1:], "classes": len(dataset.classes)}
    return Architecture(name=wanted.name, arguments=arguments)


def own_model(
    name: str, make: ModelFactory, shape: tuple[int, ...], classes: int, kind: torch.dtype, seed: int
) -> Model:
    """Return a user's model, checked against autograd, with first weights drawn from the seed."""
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            made = make(shape, classes)
    except Exception as problem:
        raise InputError(f"model.name = {name} failed: {type(problem).__name__}: {problem}") from problem
    if isinstance(made, nn.Module):
        made = Model(made, cross_entropy, shape, kind)
    elif isinstance(made, Model):
        made = replace(made)  # which checks it, also where the factory did not
    else:
        raise InputError(f"model.name = {name} returned a {type(made).__name__}, not a Model or an nn.Module")
    outputs = made.outputs(torch.zeros(made.size), torch.zeros(1, *made.input_shape, dtype=made.input_type)).shape[-1]
    if outputs != classes and (outputs, classes) != (1, 2):
        raise InputError(f"model.name = {name} has {outputs} outputs for {classes} classes; give each class one")
    return made


def _arguments(wanted: config.ModelSettings, dataset: Dataset) -> dict[str, Any]:
    """Return the arguments of a built-in model for some records."""
    shape, classes = dataset.features.shape[1:], len(dataset.classes)
    if (wanted.name == "lstm") != bool(dataset.words):
        raise InputError(
            f"model.name: {wanted.name} takes numbers, but the records of {dataset.name} are words; choose lstm"
            if dataset.words
            else f"model.name: lstm reads words, but {dataset.name} has none; choose logistic or mlp, or imdb for data"
        )
    match wanted.name:
        case "logistic" | "linear_svm":
            return {"features": prod(shape), "classes": classes}
        case "binary_logistic" | "binary_svm":
            if classes != 2:
                raise InputError(f"model.name: {wanted.name} is for two classes, but {dataset.name} has {classes}")
            return {"features": prod(shape)}
        case "mlp":
            return {"features": prod(shape), "hidden": wanted.hidden or (50,), "classes": classes}
        case "lstm":
            return {"vocabulary": FIRST_WORD + len(dataset.words), "length": prod(shape), "classes": classes}
    return {"classes": classes}
