"""Deferred linear layers: weights stored as their start plus a low-rank product.

A step without clips, noise or decay adds to the weights W of a linear layer a product Gᵀ X of a few rows: the gradients
of its outputs and its inputs. After all steps of a run these rows are often far fewer numbers than W. Then
W x = W₀ x + Σ wₛ Gₛᵀ (Xₛ x), over the steps s so far, is cheaper than reading and writing all clients' weights and
velocities in every step; and if all clients start from the same model, W₀ is one matrix for all.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional

from polyeps.engine.contributions import Contribution, OuterProducts, add_products
from polyeps.engine.layers import Linear, split_linear, times
from polyeps.engine.layout import Layout, RowGroup
from polyeps.engine.network import Network

# Fewest weights, over all clients, to defer: fewer fit into the cache, where writing them costs less than more calls.
FEWEST = 1 << 21


@dataclass(eq=False, repr=False)
class Deferral:
    """A network for one run of n clients, some of whose layers are deferred.

    The models (n, k) that steps write have the columns of the other layers only.
    """

    whole: Network
    layers: dict[int, Deferred] = field(default_factory=dict)  # by place in the network
    worths: Tensor | None = None  # (S + 1, n, S): weight of a row of step s before step t; last: after all steps

    @cached_property
    def network(self) -> Network:
        """Return the network that takes the steps."""
        if not self.layers:
            return self.whole
        layers = tuple(self.layers.get(i, layer) for i, layer in enumerate(self.whole.layers))
        return Network(layers, self.whole.random)

    def kept(self, starts: Tensor) -> Tensor:
        """Return a copy of the columns of models (n, d) that steps write."""
        if not self.layers:
            return starts.clone(memory_format=torch.contiguous_format)
        columns = [part for i, part in enumerate(self.whole.columns(starts)) if i not in self.layers]
        return torch.cat([starts[:, :0], *columns], dim=1)

    def begin(self, starts: Tensor, rate: Tensor, momentum: Tensor | None) -> None:
        """Begin a new run at models (n, d)."""
        if self.worths is not None:
            self.worths.copy_(worths_of(rate, momentum))
        for i, layer in self.layers.items():
            layer.base.copy_(self.whole.columns(starts)[i][: len(layer.base)])
            layer.inputs.zero_()
            layer.gradients.zero_()

    def enter(self, now: Tensor, steps: int) -> None:
        """Prepare for step `now` (1,), an index on the device: the first `steps` steps may hold rows by now."""
        if self.worths is None:
            return
        of_steps = self.worths.index_select(0, now)[0, :, :steps]
        for layer in self.layers.values():
            layer.now, layer.steps, layer.worth = now, steps, of_steps.repeat_interleave(layer.width, 1)

    def joined(self, models: Tensor) -> Tensor:
        """Return the models (n, d) after all steps, given the columns that steps have written."""
        if self.worths is None:
            return models
        learned = models.new_empty(len(models), self.whole.size)
        written = iter(torch.split(models, [layer.size for layer in self.network.layers if layer.size], dim=1))
        for i, columns in enumerate(self.whole.columns(learned)):
            if i in self.layers:
                columns.copy_(self.layers[i].base.expand_as(columns))
                self.layers[i].add_to(columns, self.worths[-1])
            elif columns.shape[1]:
                columns.copy_(next(written))
        return learned


def defer(network: Network, rows_apart: frozenset[int], starts: Tensor, steps: int, width: int) -> Deferral:
    """Defer the layers that profit in a run of `steps` steps of at most `width` rows each; `begin` before use.

    `rows_apart` are the linear layers whose input is one vector per row. If starts (n, d) are one expanded row, all
    clients start from the same model.
    """
    clients, alike = len(starts), starts.stride(0) == 0
    found = {
        i: Deferred(
            layer,
            starts.new_zeros(1 if alike else clients, layer.size),
            starts.new_zeros(clients, steps, width, layer.fan_in),
            starts.new_zeros(clients, steps, width, layer.fan_out),
        )
        for i, layer in enumerate(network.layers)
        if i in rows_apart and isinstance(layer, Linear) and clients * layer.size >= FEWEST
        # the rows are fewer numbers than the weights
        if 0 < steps * width * (layer.fan_in + layer.fan_out) <= layer.fan_in * layer.fan_out
    }
    return Deferral(network, found, starts.new_zeros(steps + 1, clients, steps) if found else None)


def worths_of(rate: Tensor, momentum: Tensor | None) -> Tensor:
    """Return what a row of step s adds to the weights before step t, (S + 1, n, S), given the rates (S, n, 1).

    Without momentum a row is scaled before it is stored. With it, a row joins the velocity, which decays in every later
    step.
    """
    steps, clients = rate.shape[:2]
    later = torch.arange(steps, device=rate.device)
    ago = later[:, None, None] - later  # (S, 1, S): steps from s to the one taken
    if momentum is None:
        added = (ago == 0).to(rate).expand(-1, clients, -1)
    else:
        added = -rate * torch.where(ago >= 0, momentum ** ago.clamp(min=0), 0.0)
    return torch.cat([added.new_zeros(1, clients, steps), added.cumsum(0)])


@dataclass(eq=False, repr=False)
class Deferred:
    """A linear layer with its weights at the start and the rows of all steps since."""

    layer: Linear
    base: Tensor  # (n, p), or (1, p) if all clients start from the same model
    inputs: Tensor  # (n, S, width, in)
    gradients: Tensor  # (n, S, width, out), scaled
    now: Tensor = field(init=False)  # (1,): the step being taken
    steps: int = field(init=False)  # how many may hold rows
    worth: Tensor = field(init=False)  # (n, steps * width)

    @property
    def size(self) -> int:
        """Return the number of parameters that steps write: none."""
        return 0

    @property
    def width(self) -> int:
        return self.inputs.shape[2]

    def forward(self, _weights: Tensor, rows: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
        weights, bias = split_linear(self.base, self.layer.fan_out, self.layer.bias)
        if len(self.base) == 1:
            outputs = functional.linear(rows, weights[0], None if bias is None else bias[0])
        else:
            outputs = times(layout, weights, bias, rows)
        self._add_learned(layout, rows, self.inputs, self.gradients, float(self.layer.bias), outputs)
        return outputs, rows

    def backward(
        self, _weights: Tensor, saved: Tensor, gradients: Tensor, layout: Layout, inputs: bool
    ) -> tuple[Tensor | None, Contribution]:
        contribution = _Kept(self, layout, saved, gradients)
        if not inputs:
            return None, contribution
        weights, _ = split_linear(self.base, self.layer.fan_out, self.layer.bias)
        if len(self.base) == 1:
            onwards = gradients @ weights[0]
        else:
            onwards = times(layout, weights.transpose(1, 2), None, gradients)
        self._add_learned(layout, gradients, self.gradients, self.inputs, 0.0, onwards)
        return onwards, contribution

    def _add_learned(
        self, layout: Layout, rows: Tensor, read: Tensor, written: Tensor, shift: float, into: Tensor
    ) -> None:
        """Add to `into` the products of rows with the stored rows, plus `shift`, weighted by worth."""
        if not self.steps:
            return
        for group in layout.groups:
            mine = slice(group.first, group.last)
            products = torch.bmm(group.rows(rows), read[mine, : self.steps].flatten(1, 2).transpose(1, 2))
            products.add_(shift).mul_(self.worth[mine, None])  # a bias is a weight of an input that is always one
            group.rows(into).baddbmm_(products, written[mine, : self.steps].flatten(1, 2))

    def keep(self, layout: Layout, inputs: Tensor, gradients: Tensor) -> None:
        """Store the rows of the current step."""
        for group in layout.groups:
            for kept, rows in ((self.inputs, inputs), (self.gradients, gradients)):
                kept[group.first : group.last, :, : group.width].index_copy_(1, self.now, group.rows(rows)[:, None])

    def add_to(self, columns: Tensor, worth: Tensor) -> None:
        """Add to parameters (n, p) what was learned, given the worth (n, S) of every step's rows."""
        clients, rows = len(columns), self.inputs.shape[1] * self.width
        layout = Layout(clients, (RowGroup(0, clients, rows, 0),), columns.new_empty(0))
        scaled = self.gradients * worth[:, :, None, None]
        add_products(layout, columns, scaled.flatten(0, 2), self.inputs.flatten(0, 2), self.layer.bias)


class _Kept(OuterProducts):
    """Rows that are stored instead of summed."""

    def __init__(self, deferred: Deferred, layout: Layout, inputs: Tensor, gradients: Tensor) -> None:
        super().__init__(layout, inputs, gradients, deferred.layer.bias)
        self.deferred = deferred

    def add_to(self, _gradient: Tensor, factors: Tensor | None) -> None:
        self.deferred.keep(self.layout, self.inputs, self.scaled(factors))
