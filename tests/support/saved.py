"""Model files of untrained models, to load, export and predict with."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from polyeps.experiment.model_metadata import named_tensors
from polyeps.model_files import ModelMetadata, model_bytes
from polyeps.models import MODELS, Model

GUARANTEE = {
    "method": "weiavg",
    "form": "sound",
    "unit": "record",
    "adjacency": "zero-out",
    "trust": "nobody",
    "sampler": "poisson",
    "accountant": "pld",
    "conditions": ["It is an example."],
}
CLIENTS = {"elm": {"epsilon": 4.0, "delta": 1e-6, "spent": 3.5}, "oak": {}}


def described(model: Model, name: str, arguments: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Return the description of a model as plain values."""
    with torch.no_grad():
        zeros = torch.zeros(1, *model.input_shape, dtype=model.input_type)
        outputs = model.outputs(torch.zeros(model.size), zeros).shape[-1]
    return {
        "polyeps": "0.2.0",
        "torch": "2.0",
        "experiment": "hospitals",
        "data": "own:h.csv",
        "method": "weiavg",
        "algorithm": "weiavg",
        "budgets": "own",
        "seed": 1,
        "rounds": 5,
        "model": {"name": name, "arguments": arguments},
        "parameters": list(model.slices),
        "input_shape": model.input_shape,
        "input_type": str(model.input_type).removeprefix("torch."),
        "classes": [f"class {place}" for place in range(max(2, outputs))],
        "guarantee": GUARANTEE,
        "clients": CLIENTS,
        **changes,
    }


def save(path: Path, name: str, arguments: dict[str, Any] | None = None, **changes: Any) -> tuple[Model, Tensor]:
    """Write a model file with random weights; return the model and its vector."""
    model = MODELS[name](**(arguments or {}))
    vector = 0.1 * torch.randn(model.size, generator=torch.Generator().manual_seed(5))
    metadata = ModelMetadata.model_validate(described(model, name, arguments or {}, **changes))
    path.write_bytes(model_bytes(metadata, named_tensors(model, vector)))
    return model, vector


def records(model: Model, count: int = 4) -> Tensor:
    """Return random records for a model."""
    generator = torch.Generator().manual_seed(6)
    if model.input_type.is_floating_point:
        return torch.rand(count, *model.input_shape, generator=generator)
    return torch.randint(0, 100, (count, *model.input_shape), generator=generator)
