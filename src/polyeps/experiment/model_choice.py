"""The model that an experiment names, for the records it is to read."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import torch
from torch import nn

from polyeps.data.dataset import Dataset
from polyeps.data.imdb import FIRST_WORD
from polyeps.errors import InputError
from polyeps.experiment import config
from polyeps.experiment.registry import ModelFactory, Parts
from polyeps.models import MODELS, Model, cross_entropy


def model_for(wanted: config.ModelSettings, dataset: Dataset, seed: int, parts: Parts) -> Model:
    shape = dataset.features.shape[1:]
    if wanted.name not in MODELS:
        make = parts.find("model.name", wanted.name, {**MODELS, **parts.models}, "models")
        model = _own_model(wanted.name, make, dataset, seed)
    else:
        model = _built_in_model(wanted, dataset)
    if prod(model.input_shape) != prod(shape):
        raise InputError(
            f"model.name: {wanted.name} takes records of shape {model.input_shape}, but {dataset.name} has {shape}; "
            "choose logistic or mlp, which take any"
        )
    return model


def _own_model(name: str, make: ModelFactory, dataset: Dataset, seed: int) -> Model:
    """Return a user's model, checked against autograd, with first weights drawn from the seed."""
    shape, classes = dataset.features.shape[1:], len(dataset.classes)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            made = make(shape, classes)
    except Exception as problem:
        raise InputError(f"model.name = {name} failed: {type(problem).__name__}: {problem}") from problem
    if isinstance(made, nn.Module):
        made = Model(made, cross_entropy, shape, torch.from_numpy(dataset.features[:1]).dtype)
    elif isinstance(made, Model):
        made = replace(made)  # which checks it, also where the factory did not
    else:
        raise InputError(f"model.name = {name} returned a {type(made).__name__}, not a Model or an nn.Module")
    outputs = made.outputs(torch.zeros(made.size), torch.zeros(1, *made.input_shape, dtype=made.input_type)).shape[-1]
    if outputs != classes and (outputs, classes) != (1, 2):
        raise InputError(f"model.name = {name} has {outputs} outputs for {classes} classes; give each class one")
    return made


def _built_in_model(wanted: config.ModelSettings, dataset: Dataset) -> Model:
    shape, classes = dataset.features.shape[1:], len(dataset.classes)
    if (wanted.name == "lstm") != bool(dataset.words):
        raise InputError(
            f"model.name: {wanted.name} takes numbers, but the records of {dataset.name} are words; choose lstm"
            if dataset.words
            else f"model.name: lstm reads words, but {dataset.name} has none; choose logistic or mlp, or imdb for data"
        )
    match wanted.name:
        case "logistic" | "linear_svm":
            return MODELS[wanted.name](features=prod(shape), classes=classes)
        case "binary_logistic" | "binary_svm":
            if classes != 2:
                raise InputError(f"model.name: {wanted.name} is for two classes, but {dataset.name} has {classes}")
            return MODELS[wanted.name](features=prod(shape))
        case "mlp":
            return MODELS["mlp"](features=prod(shape), hidden=wanted.hidden or (50,), classes=classes)
        case "lstm":
            return MODELS["lstm"](vocabulary=FIRST_WORD + len(dataset.words), length=prod(shape), classes=classes)
    return MODELS[wanted.name](classes=classes)
