"""DP-SGD for deployed clients: integer sums with integer noise, so that no reply leaks in its low digits.

Each record's gradient is computed alone, by autograd through the module itself. In a batch, the last bits of a matrix
product or of an activation depend on the number of rows and their alignment; a malicious server's weights can magnify
such a bit until other records' gradients change sign, and then one record would move them all. Computed alone, a
record's gradient is independent of the others, whatever the module does. It is clipped by its own norm, rounded to the
grid of `mechanisms.grid_sums` and summed exactly; discrete Gaussian noise follows. All that a client sends is computed
from these noisy integers and from what the server sent.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import nullcontext
from math import prod
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn

from polyeps.core import Records, Streams
from polyeps.engine.fallback_layers import Lender, VmapLayer, check_one_tensor, leaf_gradients
from polyeps.engine.layers import Linear
from polyeps.engine.loop import Settings, draw_batches
from polyeps.engine.module_mode import ModuleMode
from polyeps.engine.network import output_gradients
from polyeps.engine.row_draws import RowDraws, client_keys
from polyeps.errors import InputError
from polyeps.mechanisms.grid_sums import GridSum
from polyeps.mechanisms.random_words import WordStreams, words_of
from polyeps.models import Model

_AT_ONCE = 1 << 23  # numbers of records' gradients held at a time
_NOISE_BLOCK = 1 << 20  # numbers of noise drawn at once: enough to hide the cost of calls


def train_deployed(
    model: Model,
    starts: Tensor,
    records: Records,
    streams: Streams,
    settings: Settings,
    drift: Tensor | None = None,
) -> Tensor:
    """Return the models (n, d) after local DP-SGD from starts (n, d); deployed, n is 1."""
    if settings.batch is not None:
        raise InputError("a deployed client draws Poisson batches; batches of fixed size are for simulations only")
    if records.of_persons and records.units is None:
        raise InputError("a deployed client's persons have no padding; give its records with units")
    assert settings.clip is not None
    assert settings.deviation is not None
    assert settings.divisor is not None
    keys = client_keys(streams) if model.network.random else None
    batches = draw_batches(streams, records.spans.cpu().numpy(), settings)
    words = words_of(streams, "steps")
    ends = np.cumsum(batches.sizes.ravel()).reshape(batches.sizes.shape)
    trained = []
    for client in range(len(starts)):
        multiplier = float(settings.deviation[client] / settings.clip[client])
        grid = GridSum(float(settings.clip[client]), model.size, multiplier)
        alone = RecordGradients(model, starts[client])
        alone.check(records)
        first = int(records.spans[client, 0])
        if keys is not None:
            alone.key = keys[client : client + 1]
        current = alone.weights
        velocity = torch.zeros_like(current)
        for step, noise in enumerate(_noise(grid, words, client, int(settings.steps[client]))):
            end = int(ends[step, client])
            chosen = batches.records[end - int(batches.sizes[step, client]) : end].tolist()
            alone.step, alone.first = step, first
            total = alone.total(records, chosen, grid)
            released = (total.to(torch.int64).cpu() + noise).double() * grid.step  # (d,)
            gradient = (released / float(settings.divisor[client])).to(current)
            if settings.decay is not None:
                gradient += float(settings.decay[client]) * current
            if settings.momentum is not None:
                gradient = velocity.mul_(float(settings.momentum[client])).add_(gradient)
            current.add_(gradient, alpha=-float(settings.learning_rate[client]))
            if drift is not None and settings.learning_rate[client]:
                current.add_(drift[client])
        trained.append(current)
    return torch.stack(trained)


def _noise(grid: GridSum, words: WordStreams, client: int, steps: int) -> Iterator[Tensor]:
    """Yield the noise of each of a client's steps, (d,) int64, drawn several steps at once."""
    block = max(1, _NOISE_BLOCK // grid.size)
    for first in range(0, steps, block):
        drawn = np.zeros((min(block, steps - first), grid.size), np.int64)
        grid.add_noise(drawn.reshape(1, -1), words, [client])
        yield from torch.from_numpy(drawn)


class RecordGradients:
    """Gradients of one record at a time: a model's module, lent parameters that are views of one vector.

    A person's records are computed together, without padding, so that nothing depends on how many others have.
    """

    def __init__(self, model: Model, start: Tensor) -> None:
        self.model, self.weights = model, start.detach().clone()
        layers = model.network.layers
        self._own = any(isinstance(layer, VmapLayer) for layer in layers)  # whether a user's module runs
        # What a module changes in place, such as `max_norm`, must not outlast the record, so it gets the weights anew.
        self._lent = self.weights.clone() if self._own else self.weights
        self._module, self._lender = model.module, Lender(model.module)
        trained = list(self._lender.trained.values())
        parts = torch.split(self._lent, [parameter.numel() for parameter in trained])
        self._parameters = tuple(nn.Parameter(part.view(of.shape)) for of, part in zip(trained, parts, strict=True))
        self.key = torch.zeros(1, dtype=torch.int64)  # of the draws inside the module, with the step and the record
        self.step = self.first = 0
        alone = layers[0] if len(layers) == 1 and isinstance(layers[0], Linear) else None
        # a record is one vector, and not one for each position
        shape = model.input_shape[1:] if model.person else model.input_shape
        self._linear = alone if alone is not None and prod(shape) == alone.fan_in else None

    def check(self, records: Records) -> None:
        """Refuse a module that fails on any data: otherwise all its records would silently count as empty."""
        sample = self.model.sample.to(self.weights.device)
        labels = (*((1, 1) if self.model.person else (1,)), *records.labels.shape[1:])
        try:
            self.gradient(sample, records.labels.new_zeros(labels))
        except Exception as error:  # any error of user code; it holds no record
            raise InputError(f"the model has no gradient even for a made-up record ({error}); correct it") from error

    def gradient(self, row: Tensor, label: Tensor, number: int = 0) -> Tensor:
        """Return the gradient (d,) of one record (1, ...), or of the records of one person (1, L, ...).

        It is the client's record or person of this number.
        """
        if self._linear is not None and self.model.person:
            return self._of_linear_person(self._linear, row, label)
        draws = RowDraws(self.key, torch.tensor([number]), torch.tensor([self.step]))
        if self._own:
            self._lent.copy_(self.weights)
        with self._lender.lend(self._parameters):
            with torch.enable_grad():
                outputs = self._outputs(row, draws)
            by_outputs = output_gradients(self.model.loss, outputs.detach(), label, None)
            found = leaf_gradients(outputs, self._parameters, by_outputs)
        whole = zip(self._parameters, found, strict=True)
        return torch.cat([(torch.zeros_like(of) if by is None else by.to_dense()).reshape(-1) for of, by in whole])

    def _outputs(self, row: Tensor, draws: RowDraws) -> Tensor:
        """Return the outputs (1, ...) of a record, or (1, L, ...) of a person's records.

        Only layers known to keep rows apart get all records of a person at once; a user's module gets one at a time, as
        in simulations.
        """
        mode = ModuleMode if self.model.network.random or self._own else nullcontext
        if not self.model.person or not self._own:
            with mode(draws):
                return check_one_tensor(self._module, self._module(row), 1)
        module = cast(nn.Module, self._module.module)
        draws = draws.widened(row.shape[1])
        outputs = []
        for place, record in enumerate(row[0]):
            with mode(draws.of_row(place)):
                outputs.append(check_one_tensor(module, module(record[None].clone()), 1))
        return torch.cat(outputs)[None]

    def _of_linear_person(self, layer: Linear, row: Tensor, label: Tensor) -> Tensor:
        """Return a person's gradient under a single linear layer by two products, several times as fast as autograd."""
        inputs = row.reshape(-1, layer.fan_in)  # (L, in)
        weight = self.weights[: layer.fan_in * layer.fan_out].view(layer.fan_out, -1)
        outputs = inputs @ weight.T
        if layer.bias:
            outputs = outputs + self.weights[-layer.fan_out :]
        by_outputs = output_gradients(self.model.loss, outputs[None], label, None)[0]  # (L, out)
        products = (by_outputs.T @ inputs).flatten()
        return torch.cat([products, by_outputs.sum(0)]) if layer.bias else products

    def total(self, records: Records, chosen: list[int], grid: GridSum) -> Tensor:
        """Return the sum of some records' clipped gradients, in whole steps of the grid, (d,) float64."""
        total = self.weights.new_zeros(self.model.size, dtype=torch.float64)
        together = max(1, _AT_ONCE // self.model.size)
        for first in range(0, len(chosen), together):
            some = chosen[first : first + together]
            if self._linear and not self.model.person:
                rows = self._of_linear(self._linear, records, some)
            else:
                rows = torch.stack([self._of(records, record) for record in some])
            total += grid.rounded(rows).sum(0)  # whole numbers below 2^53: exact in any order
        return total

    def _of_linear(self, layer: Linear, records: Records, some: list[int]) -> Tensor:
        """Return records' gradients under a single linear layer, several times as fast as autograd.

        Outputs and losses are computed one record at a time. The gradient is an outer product: one multiplication for
        each number, rounded independently of its place. A record without one changes nothing for the others.
        """
        weight, bias = self.weights[: layer.fan_in * layer.fan_out].view(layer.fan_out, -1), self._parameters[1:]
        inputs = [records.features[record].reshape(-1).to(torch.float32, copy=True) for record in some]
        found = []
        for row, record in zip(inputs, some, strict=True):
            outputs = torch.addmv(bias[0].detach(), weight, row) if layer.bias else torch.mv(weight, row)
            label = records.labels[record : record + 1].clone()
            try:
                found.append(output_gradients(self.model.loss, outputs[None], label, None))
            except Exception:  # any error of user code
                _without_gradient()
                found.append(torch.zeros_like(outputs[None]))
        left, right = torch.cat(found), torch.stack(inputs)
        products = (left[:, :, None] * right[:, None, :]).flatten(1)
        return torch.cat([products, left], dim=1) if layer.bias else products

    def _of(self, records: Records, record: int) -> Tensor:
        """Return one record's gradient; zeros if it has none, since an error would reveal something about the data."""
        alone = slice(record, record + 1)
        shape = self.model.input_shape
        labels = records.labels[alone]
        if records.units is not None:
            alone = slice(*records.units[record].tolist())
            labels = records.labels[None, alone]
            shape = (labels.shape[1], *shape[1:])
            if not labels.numel():
                return torch.zeros_like(self.weights)
        try:
            # Copies, so that alignment is always the same; an image is one row for a model of rows.
            row = records.features[alone].reshape(1, *shape)
            return self.gradient(row.to(self.model.input_type, copy=True), labels.clone(), record - self.first)
        except Exception:  # any error of user code
            _without_gradient()
            return torch.zeros_like(self.weights)


def _without_gradient() -> None:
    """Log that a record counts as empty; which one it is would reveal something about the data."""
    logging.getLogger(__name__).warning("a record has no gradient under the model received; it counts as empty")
