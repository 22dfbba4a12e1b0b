"""Local training as a slow plain loop: one client, one step, one example at a time, by plain autograd."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor
from torch.func import functional_call

from polyeps.core import Records, Streams
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
    drawn = poisson_batches(streams, records.spans.numpy(), np.array([rate]), np.array([steps]))
    batches = np.split(drawn.records, np.cumsum(drawn.sizes[:, 0])[:-1]) if steps else []
    expected = rate * int(records.counts[0])
    return dp_sgd_on(model, start, records, streams, batches, expected, clip, scale, learning_rate)


def dp_sgd_on(
    model: Model,
    start: Tensor,
    records: Records,
    streams: Streams,
    batches: Sequence[ArrayLike],
    divisor: float,
    clip: float,
    scale: float,
    learning_rate: float,
) -> Tensor:
    """One client's update by DP-SGD on these batches, a step each."""
    vector = start.clone()
    for batch in batches:
        rows = torch.from_numpy(np.asarray(batch, np.int64))
        noise = torch.zeros(1, 1, model.size)
        if scale:
            streams.normals(noise, [0])
        total = clipped_sum(model, vector, records.features[rows], records.labels[rows], clip)
        vector = vector - learning_rate * (total + scale * clip * noise[0, 0]) / divisor
    return vector - start


def sets_of(streams: Streams, records: int, batch: int, steps: int) -> list[list[int]]:
    """The batches of exactly `batch` of a lone client's records: for each step a set, grown by Floyd's rule."""
    uniforms = streams.uniforms(batch * steps)[0].tolist()
    found = []
    for _ in range(steps):
        taken: set[int] = set()
        for last in range(records - batch, records):
            pick = math.ceil(uniforms.pop(0) * (last + 1)) - 1
            taken.add(last if pick in taken else pick)
        found.append(sorted(taken))
    return found
