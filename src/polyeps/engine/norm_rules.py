"""Rules for layer and group normalisation with clients' own scales and shifts, by torch's kernels on all rows at once.

Only a layer's inputs and their moments are kept for the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from polyeps.engine.client_parameters import ClientParameter, ForwardPass, NoRuleError, outside_vmap
from polyeps.engine.uses import RowUse

_Shape = list[int] | tuple[int, ...]


def group_norm(
    of: ForwardPass,
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """`functional.group_norm`."""
    scale, shift = _own(weight, 1), _own(bias, 1)
    # several images a row would share the row's scales
    if input.dim() < 2 or len(input) != 1 or isinstance(input, ClientParameter) or input.shape[1] % num_groups:
        raise NoRuleError
    rows = of.physical(input)
    with outside_vmap():
        outputs: Tensor = _GroupNorm.apply(of.anchor, rows.contiguous(), scale, shift, num_groups, eps)  # type: ignore[no-untyped-call]
    return of.seen(outputs)


class _GroupNorm(torch.autograd.Function):
    """Rows (T, 1, channels, ...): all rows' channels side by side are the channels of one image.

    So every row has scales of its own, and torch's kernel returns every row's own gradients.
    """

    @staticmethod
    def forward(
        ctx: Any, _anchor: Tensor, rows: Tensor, weight: ClientParameter, bias: ClientParameter, groups: int, eps: float
    ) -> Tensor:
        owner = weight.of.layout.owner
        scales = weight.of_clients().index_select(0, owner).flatten()  # (T · channels)
        shifts = bias.of_clients().index_select(0, owner).flatten()
        ctx.sizes = 1, len(scales), rows.numel() // len(scales), len(rows) * groups
        outputs, mean, deviation = torch.ops.aten.native_group_norm(rows, scales, shifts, *ctx.sizes, eps)
        ctx.save_for_backward(rows, mean, deviation, scales)
        ctx.weight, ctx.bias = weight, bias
        found: Tensor = outputs  # of the rows' shape; a view of it could not be changed in place by what follows
        return found

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator,unused-ignore]
    def backward(ctx: Any, gradients: Tensor) -> tuple[Tensor | None, ...]:
        rows, mean, deviation, scales = ctx.saved_tensors
        wanted = [ctx.needs_input_grad[1], True, True]
        by_rows, by_scales, by_shifts = torch.ops.aten.native_group_norm_backward(
            gradients.contiguous(), rows.detach(), mean, deviation, scales, *ctx.sizes, wanted
        )
        for parameter, found in ((ctx.weight, by_scales), (ctx.bias, by_shifts)):
            parameter.of.record(parameter.number, RowUse(parameter.range, found.view(len(rows), -1)))
        return None, by_rows.view(rows.shape) if wanted[0] else None, None, None, None, None


def layer_norm(
    of: ForwardPass,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """`functional.layer_norm`."""
    scale, shift = _own(weight, len(normalized_shape)), None if bias is None else _own(bias, len(normalized_shape))
    if isinstance(input, ClientParameter) or tuple(input.shape[-scale.dim() :]) != tuple(scale.shape):
        raise NoRuleError
    rows = of.physical(input)
    with outside_vmap():
        outputs: Tensor = _LayerNorm.apply(of.anchor, rows, scale, shift, tuple(normalized_shape), eps)  # type: ignore[no-untyped-call]
    return of.seen(outputs)


class _LayerNorm(torch.autograd.Function):
    """Rows (T, ..., *shape)."""

    @staticmethod
    def forward(
        ctx: Any,
        _anchor: Tensor,
        rows: Tensor,
        weight: ClientParameter,
        bias: ClientParameter | None,
        shape: _Shape,
        eps: float,
    ) -> Tensor:
        normal, _, deviation = torch.native_layer_norm(rows, shape, None, None, eps)
        ctx.save_for_backward(normal, deviation)
        ctx.weight, ctx.bias, ctx.shape = weight, bias, shape
        scales = _spread(weight, rows)
        if bias is None:
            return normal * scales
        return torch.addcmul(_spread(bias, rows), normal, scales)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator,unused-ignore]
    def backward(ctx: Any, gradients: Tensor) -> tuple[Tensor | None, ...]:
        normal, deviation = ctx.saved_tensors
        weight, bias = ctx.weight, ctx.bias
        size = weight.numel()
        by_scales = (gradients * normal).reshape(len(normal), -1, size).sum(1)
        weight.of.record(weight.number, RowUse(weight.range, by_scales))
        if bias is not None:
            by_shifts = gradients.reshape(len(normal), -1, size).sum(1)
            bias.of.record(bias.number, RowUse(bias.range, by_shifts))
        if not ctx.needs_input_grad[1]:
            return (None,) * 6
        # The normalised rows are their own normalisation, with mean 0 and deviation 1.
        scaled = gradients * _spread(weight, normal)
        zeros, ones = torch.zeros_like(deviation), torch.ones_like(deviation)
        by_rows, _, _ = torch.ops.aten.native_layer_norm_backward(
            scaled, normal, ctx.shape, zeros, ones, None, None, [True, False, False]
        )
        return None, by_rows.mul_(deviation), None, None, None, None


def _own(parameter: Tensor | None, dims: int) -> ClientParameter:
    if not isinstance(parameter, ClientParameter) or parameter.turned or parameter.dim() != dims:
        raise NoRuleError
    return parameter


def _spread(parameter: ClientParameter, rows: Tensor) -> Tensor:
    """Return a parameter's values for each row, shaped to multiply rows (T, ...) that end in its shape."""
    values = parameter.of_clients().index_select(0, parameter.of.layout.owner)
    return values.view(len(rows), *(1,) * (rows.dim() - values.dim()), *values.shape[1:])


NORMS: dict[Any, Callable[..., Tensor]] = {functional.group_norm: group_norm, functional.layer_norm: layer_norm}
