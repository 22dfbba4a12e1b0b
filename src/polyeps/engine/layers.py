"""Layers on the rows of a cohort: forward, backward and gradient contributions, batched over clients.

A network is a list of layers; `network.lower` makes it from a module. A layer with parameters reads its own columns of
the cohort's models, weights (n, p). Modules without trainable parameters that are known to be row-wise run on all rows
at once. Everything else runs one row at a time (`fallback_layers`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from polyeps.engine.contributions import Contribution, LookupGradients, OuterProducts, PositionProducts, RowGradients
from polyeps.engine.layout import Layout
from polyeps.engine.openblas import multiply_records, suits_openblas
from polyeps.engine.ragged_kernels import multiply_rows
from polyeps.engine.stable_functions import run_steadily
from polyeps.engine.stable_products import multiply
from polyeps.errors import InputError


class Layer(Protocol):
    """One layer of a network; `saved` is what its backward pass needs."""

    @property
    def size(self) -> int:
        """Return the number of parameters."""

    def forward(self, weights: Tensor, rows: Tensor, layout: Layout, /) -> tuple[Tensor, Any]:
        """Return the outputs (T, ...) of input rows (T, ...), and what to save."""

    def backward(
        self, weights: Tensor, saved: Any, gradients: Tensor, layout: Layout, inputs: bool, /
    ) -> tuple[Tensor | None, Contribution | None]:
        """Return the gradients of the input rows, if `inputs` asks for them, and of the parameters."""


@dataclass(frozen=True)
class Linear:
    """y = W x + b, on rows (T, in) or on rows of positions (T, ..., in)."""

    fan_in: int
    fan_out: int
    bias: bool

    @property
    def size(self) -> int:
        return self.fan_out * (self.fan_in + self.bias)

    def forward(self, weights: Tensor, rows: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
        return times(layout, *self._parts(weights), rows), rows

    def backward(
        self, weights: Tensor, saved: Tensor, gradients: Tensor, layout: Layout, inputs: bool
    ) -> tuple[Tensor | None, Contribution]:
        onwards = times(layout, self._parts(weights)[0].transpose(1, 2), None, gradients) if inputs else None
        return onwards, products(layout, saved, gradients, self.bias)

    def _parts(self, weights: Tensor) -> tuple[Tensor, Tensor | None]:
        return split_linear(weights, self.fan_out, self.bias)


@dataclass(frozen=True)
class Embedding:
    """Rows of tokens (T, L) looked up in each client's own table."""

    tokens: int
    width: int
    padding: int | None

    @property
    def size(self) -> int:
        return self.tokens * self.width

    def forward(self, weights: Tensor, rows: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
        rows = self._within(rows.long())
        tables = torch.unflatten(weights, 1, (self.tokens, self.width))
        flat = rows.flatten(1)
        return torch.unflatten(tables[layout.owner[:, None], flat], 1, rows.shape[1:]), rows

    def backward(
        self, _weights: Tensor, saved: Tensor, gradients: Tensor, layout: Layout, _inputs: bool
    ) -> tuple[None, Contribution]:
        if self.padding is not None:
            gradients = gradients * (saved != self.padding).unsqueeze(-1)
        return None, LookupGradients(layout, saved.flatten(1), gradients.flatten(1, -2), self.width)

    def _within(self, rows: Tensor) -> Tensor:
        """Return rows of tokens; refuse a token that is not in the table, such as a negative one."""
        if rows.is_cuda:  # a captured graph cannot raise; reading past the table aborts the kernel
            return torch.where(rows < 0, self.tokens, rows)
        least, most = (int(extreme) for extreme in rows.aminmax()) if rows.numel() else (0, 0)
        if least < 0 or most >= self.tokens:
            wrong = least if least < 0 else most
            raise InputError(f"a record holds token {wrong}; the embedding has tokens 0 to {self.tokens - 1}")
        return rows


@dataclass(frozen=True)
class Norm:
    """Layer or group normalisation: normalise each row, then scale and shift by channel.

    The rows of a group normalisation are (T, channels, ...); those of a layer normalisation end in its shape.
    """

    module: nn.LayerNorm | nn.GroupNorm
    channels: int  # number of scales, and of shifts if there are any
    bias: bool

    @property
    def size(self) -> int:
        return self.channels * (1 + self.bias)

    def forward(self, weights: Tensor, rows: Tensor, layout: Layout) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        with torch.enable_grad():
            leaf = rows.detach().requires_grad_()
            normal = self._normalise(leaf)
        plain = normal.detach()
        per_row = weights.index_select(0, layout.owner)
        scale = self._spread(per_row[:, : self.channels], plain)
        outputs = plain * scale
        if self.bias:
            outputs = outputs + self._spread(per_row[:, self.channels :], plain)
        return outputs, (leaf, normal, scale)

    def backward(
        self, _weights: Tensor, saved: tuple[Tensor, Tensor, Tensor], gradients: Tensor, layout: Layout, inputs: bool
    ) -> tuple[Tensor | None, Contribution]:
        leaf, normal, scale = saved
        each = [self._gather(gradients * normal.detach())]
        if self.bias:
            each.append(self._gather(gradients))
        onwards = torch.autograd.grad(normal, leaf, gradients * scale)[0] if inputs else None
        return onwards, RowGradients(layout, torch.cat(each, dim=1))

    def _normalise(self, rows: Tensor) -> Tensor:
        if isinstance(self.module, nn.GroupNorm):
            return nn.functional.group_norm(rows, self.module.num_groups, eps=self.module.eps)
        return nn.functional.layer_norm(rows, self.module.normalized_shape, eps=self.module.eps)

    def _spread(self, values: Tensor, rows: Tensor) -> Tensor:
        """Shape per-row values (T, channels) to multiply rows."""
        if isinstance(self.module, nn.GroupNorm):
            return values.reshape(values.shape + (1,) * (rows.dim() - 2))
        shape = self.module.normalized_shape
        return values.reshape(len(values), *(1,) * (rows.dim() - 1 - len(shape)), *shape)

    def _gather(self, rows: Tensor) -> Tensor:
        """Sum rows over all positions of a channel: (T, channels)."""
        if isinstance(self.module, nn.GroupNorm):
            return rows.flatten(2).sum(2) if rows.dim() > 2 else rows
        return rows.reshape(len(rows), -1, self.channels).sum(1)


@dataclass(frozen=True)
class Parameterless:
    """A module without trainable parameters, run as it is on all rows at once."""

    module: nn.Module

    @property
    def size(self) -> int:
        return 0

    def forward(self, _weights: Tensor, rows: Tensor, _layout: Layout) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        if not rows.is_floating_point():
            outputs = cast(Tensor, self.module(rows))
            return outputs, (rows, outputs)
        with torch.enable_grad():
            leaf = rows.detach().requires_grad_()
            # A module that works in place must not write to a leaf.
            start = leaf.clone() if getattr(self.module, "inplace", False) else leaf
            outputs = run_steadily(self.module, start)
        return outputs.detach(), (leaf, outputs)

    def backward(
        self, _weights: Tensor, saved: tuple[Tensor, Tensor], gradients: Tensor, _layout: Layout, inputs: bool
    ) -> tuple[Tensor | None, None]:
        leaf, outputs = saved
        if not inputs or not leaf.requires_grad:
            return None, None
        return torch.autograd.grad(outputs, leaf, gradients)[0], None


def times(layout: Layout, weights: Tensor, bias: Tensor | None, rows: Tensor) -> Tensor:
    """Multiply each client's weights (n, out, in) by its rows (T, ..., in) and add its bias (n, out)."""
    if layout.spans is not None:
        return multiply_rows(rows, weights, bias, layout.owner, layout.spans)
    outputs = rows.new_empty(*rows.shape[:-1], weights.shape[1])
    positions = rows.shape[1:-1].numel()
    if not rows.is_cuda and suits_openblas(positions, weights.shape[2], weights.shape[1]):
        into = outputs.flatten(1, -2)
        if bias is not None:
            into.copy_(bias.index_select(0, layout.owner)[:, None])
        multiply_records(rows.flatten(1, -2), weights.transpose(1, 2), into, layout.owner, add=bias is not None)
        return outputs
    for group in layout.groups:
        mine = weights[group.first : group.last].transpose(1, 2)
        block = group.rows(rows).flatten(1, -2)  # (c, w * positions, in)
        into = group.rows(outputs).flatten(1, -2)
        if layout.settled:  # each row always has the same place, so that no other row changes its rounding
            found = torch.bmm(mine.transpose(1, 2), block.transpose(1, 2)).transpose(1, 2)  # fastest for few outputs
            torch.add(found, 0.0 if bias is None else bias[group.first : group.last, None], out=into)
            continue
        multiply(block, mine, None if bias is None else bias[group.first : group.last, None], into, positions)
    return outputs


def products(layout: Layout, inputs: Tensor, gradients: Tensor, bias: bool) -> Contribution:
    """Return the contribution of a linear map, at one position or at several."""
    if inputs.dim() == 2:
        return OuterProducts(layout, inputs, gradients, bias)
    return PositionProducts(layout, inputs.flatten(1, -2), gradients.flatten(1, -2), bias)


def split_linear(weights: Tensor, fan_out: int, bias: bool) -> tuple[Tensor, Tensor | None]:
    """Split a linear layer's columns (n, p) into weights (n, out, in) and biases (n, out)."""
    if not bias:
        return torch.unflatten(weights, 1, (fan_out, -1)), None
    return torch.unflatten(weights[:, :-fan_out], 1, (fan_out, -1)), weights[:, -fan_out:]
