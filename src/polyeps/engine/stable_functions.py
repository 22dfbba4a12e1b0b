"""Functions whose rounding of a record does not depend on where it lies: of single numbers, or with frozen weights.

torch's loops compute 32 numbers at a time by vector instructions, and what is left at the end of each thread's share by
others, which round some functions apart. A record that comes or goes moves all others by a place; under malicious
weights whose terms cancel, what is left of them would turn around.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from polyeps.engine.client_parameters import ClientParameter, ForwardPass, NoRuleError, outside_vmap
from polyeps.engine.stable_products import multiply

_BLOCK = 32  # numbers that a loop takes at a time, at most
_SHARE = 1 << 15  # fewest numbers of a thread
# Measured with torch 2.13: other functions round alike everywhere.
_NAMES = "sigmoid gelu silu mish softplus elu selu celu expit sinh cosh atanh arctanh exp2 pow __pow__ __rpow__"
_PLACES = (torch, Tensor, functional, torch.special)
UNEVEN = frozenset(
    getattr(place, f"{name}{end}")
    for place in _PLACES
    for name in _NAMES.split()
    for end in ("", "_")
    if hasattr(place, f"{name}{end}")
)
UNEVEN_MODULES = frozenset({nn.CELU, nn.ELU, nn.GELU, nn.Mish, nn.SELU, nn.SiLU, nn.Sigmoid, nn.Softplus})


def steady(function: Callable[..., Tensor], values: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Return an elementwise function of values, computed in whole blocks, as are its gradients."""
    if values.is_cuda or not values.numel():
        return function(values, *args, **kwargs)
    if values.dim() == 4 and not values.is_contiguous() and values.is_contiguous(memory_format=torch.channels_last):
        return steady(function, values.permute(0, 2, 3, 1), *args, **kwargs).permute(0, 3, 1, 2)
    flat = values.reshape(-1)
    missing = -len(flat) % (_BLOCK * min(torch.get_num_threads(), -(-len(flat) // _SHARE)))
    if not missing:  # a slice of everything would cost its gradients a copy
        return function(flat, *args, **kwargs).view(values.shape)
    return function(functional.pad(flat, (0, missing)), *args, **kwargs)[: len(flat)].view(values.shape)


def whole_rows(values: Tensor) -> Tensor:
    """Return values (T, ...) with copies of the last row, so that whatever a row holds, blocks are whole."""
    missing = 0 if values.is_cuda else -len(values) % (_BLOCK * torch.get_num_threads())
    return torch.cat([values, values[-1:].expand(missing, *values.shape[1:])]) if missing else values


def steady_function(of: ForwardPass, function: Callable[..., Tensor], input: Any, *args: Any, **kwargs: Any) -> Tensor:
    """Return one of the `UNEVEN` functions of a module's numbers, on the rows of all clients."""
    if not isinstance(input, Tensor) or any(isinstance(each, Tensor) for each in (*args, *kwargs.values())):
        raise NoRuleError
    in_place = function.__name__.rstrip("_") + "_" == function.__name__ or True in (*args, kwargs.get("inplace"))
    rows = of.physical(input)
    with outside_vmap():
        found = steady(function, rows.clone() if in_place else rows, *args, **kwargs)
    seen = of.seen(found)
    return input.copy_(seen) if in_place else seen


def run_steadily(module: nn.Module, rows: Tensor) -> Tensor:
    """Return a row-wise module's outputs for rows (T, ...), at least two of them."""
    if isinstance(module, nn.Linear) and not rows.is_cuda:
        return _linear(rows, module.weight, module.bias)
    return steady(module, rows) if type(module) in UNEVEN_MODULES else module(rows)


def frozen_linear(of: ForwardPass, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`functional.linear` with weights that are the same for all rows, as in LoRA."""
    alike = all(
        each is None or not (isinstance(each, ClientParameter) or torch._C._functorch.is_batchedtensor(each))
        for each in (weight, bias)
    )
    if not alike or weight.requires_grad or weight.dim() != 2 or input.is_cuda or input.dtype != weight.dtype:
        raise NoRuleError
    rows = of.physical(input)
    with outside_vmap():
        found = _linear(rows, weight, bias)
    return of.seen(found)


def along_the_last(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a softmax along any dimension as one along the last, which threads do not divide."""

    def moved(input: Tensor, dim: int | None = None, *args: Any, **kwargs: Any) -> Tensor:
        if dim is None or dim in (-1, input.dim() - 1):
            return function(input, dim, *args, **kwargs)
        return function(input.movedim(dim, -1), -1, *args, **kwargs).movedim(-1, dim)

    return moved


SOFTMAX = {
    function: along_the_last(function)
    for place in (torch, Tensor, functional)
    for name in ("softmax", "log_softmax", "softmin")
    for function in [getattr(place, name, None)]
    if function is not None
}


def _linear(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    found: Tensor = _Product.apply(rows, weight, bias)  # type: ignore[no-untyped-call]
    return found


class _Product(torch.autograd.Function):
    """Rows (T, ..., in) times weights (out, in), plus bias (out,)."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.weight = weight.detach()
        return _product(rows, weight, bias)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator,unused-ignore]
    def backward(ctx: Any, gradients: Tensor) -> tuple[Tensor | None, ...]:
        return _product(gradients, ctx.weight.T, None), None, None


def _product(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    outputs = rows.new_empty(*rows.shape[:-1], len(weight))
    flat, into = (each.reshape(1, -1, each.shape[-1]) for each in (rows, outputs))
    shift = None if bias is None else bias.detach()[None, None]
    multiply(flat, weight.detach().T[None], shift, into, rows.shape[1:-1].numel())
    return outputs
