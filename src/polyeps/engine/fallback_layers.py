"""Layers for modules without a batched rule: one row at a time, by `vmap` or, where that fails, by a loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap
from torch.overrides import TorchFunctionMode

from polyeps.engine.contributions import Contribution, RowGradients
from polyeps.engine.layout import Layout
from polyeps.errors import InputError


@dataclass(frozen=True)
class VmapLayer:
    """Any module, one row at a time through `vmap`, which cannot mix rows; every row's gradient is formed."""

    module: nn.Module

    @property
    def size(self) -> int:
        return sum(p.numel() for p in self.module.parameters() if p.requires_grad)

    def forward(self, weights: Tensor, rows: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
        over_clients = vmap(vmap(self._one, in_dims=(None, 0)))
        with _SafeUnderVmap():
            outputs = [over_clients(weights[g.first : g.last], g.rows(rows)).flatten(0, 1) for g in layout.groups]
        return torch.cat(outputs), rows

    def backward(
        self, weights: Tensor, saved: Tensor, gradients: Tensor, layout: Layout, inputs: bool
    ) -> tuple[Tensor | None, Contribution | None]:
        wanted = inputs and saved.is_floating_point()

        def one(weights: Tensor, row: Tensor, gradient: Tensor) -> tuple[Tensor, ...]:
            if wanted:
                return cast(tuple[Tensor, ...], vjp(self._one, weights, row)[1](gradient))
            return cast(tuple[Tensor, ...], vjp(lambda w: self._one(w, row), weights)[1](gradient))

        over_clients = vmap(vmap(one, in_dims=(None, 0, 0)))
        with _SafeUnderVmap():
            found = [over_clients(weights[g.first : g.last], g.rows(saved), g.rows(gradients)) for g in layout.groups]
        onwards = torch.cat([of[1].flatten(0, 1) for of in found]) if wanted else None
        if not self.size:
            return onwards, None
        return onwards, RowGradients(layout, torch.cat([of[0].flatten(0, 1) for of in found]))

    def _one(self, weights: Tensor, row: Tensor) -> Tensor:
        named = {name: p for name, p in self.module.named_parameters() if p.requires_grad}
        parts = torch.split(weights, [p.numel() for p in named.values()])
        values = {name: part.view(p.shape) for (name, p), part in zip(named.items(), parts, strict=True)}
        # A copy of the row: a module may work in place on its input.
        return check_one_tensor(self.module, call_module(self.module, values, row[None].clone()), 1)[0]


@dataclass(frozen=True)
class LoopedLayer(VmapLayer):
    """A module that `vmap` cannot run, for instance because its branches depend on the data."""

    def forward(self, weights: Tensor, rows: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
        owners = layout.owner.tolist()
        with torch.no_grad():
            outputs = [self._one(weights[owner], row) for owner, row in zip(owners, rows, strict=True)]
        return torch.stack(outputs), rows

    def backward(
        self, weights: Tensor, saved: Tensor, gradients: Tensor, layout: Layout, inputs: bool
    ) -> tuple[Tensor | None, Contribution | None]:
        wanted = inputs and saved.is_floating_point()
        found = [
            self._gradients(weights[owner], row, gradient, wanted)
            for owner, row, gradient in zip(layout.owner.tolist(), saved, gradients, strict=True)
        ]
        onwards = torch.stack([of_row for _, of_row in found]) if wanted else None
        return onwards, RowGradients(layout, torch.stack([of for of, _ in found])) if self.size else None

    def _gradients(self, weights: Tensor, row: Tensor, gradient: Tensor, wanted: bool) -> tuple[Tensor, Tensor]:
        """Return the gradients of the weights and, if `wanted`, of the row."""
        with torch.enable_grad():
            leaf, start = weights.detach().clone().requires_grad_(), row.detach()
            if wanted:
                start = start.clone().requires_grad_()
            output = self._one(leaf, start)
        leaves = (leaf, start) if wanted else (leaf,)
        if not output.requires_grad:
            return torch.zeros_like(leaf), torch.zeros_like(start)
        found = torch.autograd.grad(output, leaves, gradient, allow_unused=True)
        filled = [torch.zeros_like(of) if by is None else by for of, by in zip(leaves, found, strict=True)]
        return filled[0], filled[-1]


class _SafeUnderVmap(TorchFunctionMode):
    """Replace `prelu`, whose gradient torch gets wrong under nested `vmap`.

    It pairs rows with clients: an error, or a wrong result if there are as many rows as clients.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.prelu:
            return _prelu(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _prelu(input: Tensor, weight: Tensor) -> Tensor:
    by_channel = weight.numel() > 1 and input.dim() > 1
    slope = weight.reshape(1, -1, *(1,) * (input.dim() - 2)) if by_channel else weight
    return torch.where(input > 0, input, slope * input)


def check_one_tensor(module: nn.Module, outputs: object, count: int) -> Tensor:
    """Return the outputs of a module for `count` rows; refuse anything but one tensor with a row for each."""
    name = type(module).__name__
    if not isinstance(outputs, Tensor):
        raise InputError(
            f"{name} returns a {type(outputs).__name__}; it must return one tensor with a row per example:"
            " wrap it in a module that picks one (polyeps.engine.recurrent.LastState does so for nn.LSTM)"
        )
    if not outputs.dim() or len(outputs) != count:
        raise InputError(
            f"{name} returns shape {tuple(outputs.shape)} for {count} examples; the first dimension must be that of the"
            " examples (batch_first=True for recurrent and attention modules)"
        )
    return outputs


def call_module(module: nn.Module, values: dict[str, Tensor], rows: Tensor) -> Tensor:
    """Return the outputs of a module whose parameters, by their names in `named_parameters`, have these values.

    Every place of a shared parameter is passed once: torch's own search passes a module that occurs twice two times,
    and does not restore it.
    """
    found = {parameter: values[name] for name, parameter in module.named_parameters() if name in values}
    places = {
        f"{path}.{name}" if path else name: found[parameter]
        for path, part in module.named_modules()
        for name, parameter in part.named_parameters(recurse=False, remove_duplicate=False)
        if parameter in found
    }
    return cast(Tensor, functional_call(module, places, (rows,), tie_weights=False))
