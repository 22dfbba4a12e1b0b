"""Local training as a slow plain loop: one client, one step, one example at a time, by plain autograd."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call

from polyeps.core import Records
from polyeps.engine.noise import Streams
from polyeps.engine.sampling import poisson_batches
from polyeps.models import Model


def example_gradient(model: Model, vector: Tensor, features: Tensor, label: Tensor) -> Tensor:
    """The gradient (d,) of one example's loss."""
    leaf = vector.clone().requires_grad_()
    output = functional_call(model.module, model.unflatten(leaf), (features[None],))
    (gradient,) = torch.autograd.grad(model.loss(output, label[None]).sum(), leaf)
    return gradient


def clipped_sum(model: Model, vector: Tensor, features: Tensor, labels: Tensor, clip: float) -> Tensor:
    """The sum (d,) of the examples' gradients, each clipped."""
    total = torch.zeros_like(vector)
    for row, label in zip(features, labels, strict=True):
        gradient = example_gradient(model, vector, row, label)
        total += gradient * min(1.0, clip / max(float(gradient.norm()), 1e-30))
    return total


def dp_sgd_client(
    model: Model,
    start: Tensor,
    records: Records,
    streams: Streams,
    rate: float,
    steps: int,
    clip: float,
    scale: float,
    learning_rate: float,
) -> Tensor:
    """One client's update by DP-SGD, from the cohort of one that `records` and `streams` are."""
    batches = poisson_batches(streams, records.offsets.numpy(), np.array([rate]), np.array([steps]))
    vector, used = start.clone(), 0
    for size in batches.sizes[:, 0].tolist():
        batch = torch.from_numpy(batches.records[used : used + size])
        used += size
        noise = torch.zeros(1, 1, model.size)
        if scale:
            streams.normals(noise, [0])
        total = clipped_sum(model, vector, records.features[batch], records.labels[batch], clip)
        expected = rate * int(records.offsets[1] - records.offsets[0])
        vector = vector - learning_rate * (total + scale * clip * noise[0, 0]) / expected
    return vector - start
