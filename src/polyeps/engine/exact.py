"""DP-SGD as a deployed client runs it: sums of integers, with integer noise, so that no reply leaks in its low digits.

Each record's gradient is computed as if the record were a client of its own, so that its bits do not depend on which
other records are in the batch. It is clipped by a norm taken of the gradient itself, rounded to the grid of
`mechanisms.grid_sums` and added up exactly; discrete Gaussian noise follows. All that a client sends is computed from
these noisy integers and from what the server sent.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from polyeps.core import Records
from polyeps.engine.loop import Settings, draw_batches
from polyeps.engine.network import record_gradients
from polyeps.engine.noise import Streams
from polyeps.errors import InputError
from polyeps.mechanisms.grid_sums import GridSum
from polyeps.mechanisms.words import Words, words_of
from polyeps.models import Model

_AT_ONCE = 1 << 23  # numbers of records' gradients held at a time
_NOISE_BLOCK = 1 << 20  # numbers of noise drawn at once: enough to hide the calls


def train_exactly(model: Model, starts: Tensor, records: Records, streams: Streams, settings: Settings) -> Tensor:
    """Return the models (n, d) after local DP-SGD from starts (n, d); deployed, n is 1."""
    if settings.batch is not None:
        raise InputError("a deployed client draws Poisson batches; fixed sizes are for published forms, in simulation")
    assert settings.clip is not None
    assert settings.deviation is not None
    assert settings.divisor is not None
    batches = draw_batches(streams, records.spans.cpu().numpy(), settings)
    words = words_of(streams, "steps")
    ends = np.cumsum(batches.sizes.ravel()).reshape(batches.sizes.shape)
    trained = []
    for client in range(len(starts)):
        scale = float(settings.deviation[client] / settings.clip[client])
        grid = GridSum(float(settings.clip[client]), model.size, scale)
        current = starts[client].clone()
        velocity = torch.zeros_like(current)
        for step, noise in enumerate(_noise(grid, words, client, int(settings.steps[client]))):
            end = int(ends[step, client])
            chosen = torch.from_numpy(batches.records[end - int(batches.sizes[step, client]) : end])
            total = _total(model, current, records, chosen.to(current.device), grid)
            released = (total.to(torch.int64).cpu() + noise).double() * grid.step  # (d,)
            gradient = (released / float(settings.divisor[client])).to(current)
            if settings.decay is not None:
                gradient += float(settings.decay[client]) * current
            if settings.momentum is not None:
                gradient = velocity.mul_(float(settings.momentum[client])).add_(gradient)
            current.add_(gradient, alpha=-float(settings.learning_rate[client]))
        trained.append(current)
    return torch.stack(trained)


def _noise(grid: GridSum, words: Words, client: int, steps: int) -> Iterator[Tensor]:
    """Yield the noise of each of a client's steps, (d,) int64, drawn several steps at once."""
    block = max(1, _NOISE_BLOCK // grid.size)
    for first in range(0, steps, block):
        drawn = np.zeros((min(block, steps - first), grid.size), np.int64)
        grid.add_noise(drawn.reshape(1, -1), words, [client])
        yield from torch.from_numpy(drawn)


def _total(model: Model, current: Tensor, records: Records, chosen: Tensor, grid: GridSum) -> Tensor:
    """Return the sum of the chosen records' clipped gradients, in whole steps of the grid, (d,) float64."""
    total = torch.zeros(model.size, dtype=torch.float64, device=current.device)
    for some in torch.split(chosen, max(1, _AT_ONCE // model.size)):
        gradients = record_gradients(
            model.network, model.loss, current, records.features.index_select(0, some), records.labels[some]
        )
        total += grid.rounded(gradients).sum(0)  # whole numbers below 2^53: exact in any order
    return total
