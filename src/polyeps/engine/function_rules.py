"""Rules for functions of clients' parameters: linear maps, convolutions, lookups and recurrent layers.

A rule gets a function's arguments as a module gave them, with stand-ins for parameters, computes the outputs of all
rows at once and, in the backward pass, records the parameter's uses. `NoRuleError` sends the call back: the function
then runs with a copy of the parameter for every row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from polyeps.engine.client_parameters import ClientParameter, ForwardPass, NoRuleError, outside_vmap
from polyeps.engine.layers import times
from polyeps.engine.uses import LookupUse, ProductUse, RowUse
from polyeps.errors import InputError

_Rule = Callable[..., Any]


def linear(of: ForwardPass, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`functional.linear`."""
    if not isinstance(weight, ClientParameter) or weight.dim() != 2:
        raise NoRuleError
    rows = of.physical(input)
    with outside_vmap():
        outputs = linear_of_rows(of, rows, weight, bias if isinstance(bias, ClientParameter) else None)
    seen = of.seen(outputs)
    return seen if bias is None or isinstance(bias, ClientParameter) else seen + bias


def linear_of_rows(of: ForwardPass, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return a linear map of rows (T, ..., in), outside `vmap`; weights that are not clients' own are (T, out, in)."""
    fan_in = weight.shape[-1]
    if rows.shape[-1] != fan_in:
        raise RuntimeError(f"a linear layer with {fan_in} inputs gets {rows.shape[-1]}")
    flat = rows.reshape(len(rows), -1, fan_in)
    apart = bias if isinstance(weight, ClientParameter) and not isinstance(bias, ClientParameter) else None
    if isinstance(weight, ClientParameter):
        outputs: Tensor = _Linear.apply(of.anchor, flat, weight, bias if apart is None else None)  # type: ignore[no-untyped-call]
    else:
        outputs, apart = torch.bmm(flat, weight.transpose(1, 2)), bias
    if apart is not None:
        outputs = outputs + apart[:, None]
    return outputs.reshape(*rows.shape[:-1], outputs.shape[-1])


class _Linear(torch.autograd.Function):
    """Rows (T, L, in) times the weights of each row's client."""

    @staticmethod
    def forward(
        ctx: Any, _anchor: Tensor, rows: Tensor, weight: ClientParameter, bias: ClientParameter | None
    ) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.weight, ctx.bias = weight, bias
        values = weight.of_clients()
        shifts = None if bias is None else bias.of_clients()
        return times(weight.of.layout, values.transpose(1, 2) if weight.turned else values, shifts, rows)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator,unused-ignore]
    def backward(ctx: Any, gradients: Tensor) -> tuple[Tensor | None, ...]:
        rows = ctx.saved_tensors[0].detach()  # a use must not hold the graph, which holds the use
        weight: ClientParameter = ctx.weight
        of = weight.of
        left, right = (rows, gradients) if weight.turned else (gradients, rows)
        of.record(weight.number, ProductUse(weight.range, right, left))
        if ctx.bias is not None:
            of.record(ctx.bias.number, RowUse(ctx.bias.range, gradients.sum(1)))
        if not ctx.needs_input_grad[1]:
            return None, None, None, None
        values = weight.of_clients()
        return None, times(of.layout, values if weight.turned else values.transpose(1, 2), None, gradients), None, None


def matmul(of: ForwardPass, input: Tensor, other: Tensor) -> Tensor:
    """`torch.matmul` with a matrix of parameters on the right."""
    if not isinstance(other, ClientParameter) or other.dim() != 2 or isinstance(input, ClientParameter):
        raise NoRuleError
    turned = ClientParameter.make(of, other.number, other.span, not other.turned)
    return linear(of, input, turned)


def addmm(of: ForwardPass, input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """`torch.addmm`, as in GPT-2's Conv1D."""
    if not isinstance(mat2, ClientParameter) or beta != 1 or alpha != 1 or isinstance(mat1, ClientParameter):
        raise NoRuleError
    turned = ClientParameter.make(of, mat2.number, mat2.span, not mat2.turned)
    if isinstance(input, ClientParameter) and input.dim() == 1:
        return linear(of, mat1, turned, input)
    return linear(of, mat1, turned) + input


def embedding(
    of: ForwardPass,
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """`functional.embedding`."""
    plain = not scale_grad_by_freq and not sparse
    if not isinstance(weight, ClientParameter) or weight.turned or weight.dim() != 2 or not plain:
        raise NoRuleError
    if input.is_floating_point():
        raise InputError("an embedding gets numbers that are not whole; give the records as whole numbers")
    count = len(weight)
    padding = padding_idx + count if padding_idx is not None and padding_idx < 0 else padding_idx
    rows = of.physical(input)
    with outside_vmap():
        tokens = within_table(rows.long(), count)
        flat = tokens.reshape(len(tokens), -1)
        outputs: Tensor = _Embedding.apply(of.anchor, flat, weight, padding, max_norm, norm_type)  # type: ignore[no-untyped-call]
        outputs = outputs.reshape(*tokens.shape, outputs.shape[-1])
    return of.seen(outputs)


def within_table(rows: Tensor, count: int) -> Tensor:
    """Return rows of tokens; refuse a token that is not in a table of `count`, such as a negative one."""
    if rows.is_cuda:  # a captured graph cannot raise; reading past the table aborts the kernel
        return torch.where(rows < 0, count, rows)
    least, most = (int(extreme) for extreme in rows.aminmax()) if rows.numel() else (0, 0)
    if least < 0 or most >= count:
        wrong = least if least < 0 else most
        raise InputError(f"a record holds token {wrong}; the embedding has tokens 0 to {count - 1}")
    return rows


class _Embedding(torch.autograd.Function):
    """Tokens (T, L) looked up in the table of each row's client."""

    @staticmethod
    def forward(
        ctx: Any,
        _anchor: Tensor,
        tokens: Tensor,
        weight: ClientParameter,
        padding: int | None,
        longest: float | None,
        order: float,
    ) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.weight, ctx.padding = weight, padding
        found = weight.of_clients()[weight.of.layout.owner[:, None], tokens]
        if longest is None:
            return found
        # torch shortens the table's rows in place before the lookup, so gradients do not see it
        norms = torch.linalg.vector_norm(found, order, dim=-1, keepdim=True)
        return torch.where(norms > longest, found * (longest / (norms + 1e-7)), found)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator,unused-ignore]
    def backward(ctx: Any, gradients: Tensor) -> tuple[None, ...]:
        (tokens,) = ctx.saved_tensors
        weight: ClientParameter = ctx.weight
        if ctx.padding is not None:
            gradients = gradients * (tokens != ctx.padding).unsqueeze(-1)
        weight.of.record(weight.number, LookupUse(weight.range, tokens, gradients))
        return None, None, None, None, None, None


def embedding_bag(
    of: ForwardPass,
    input: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,  # noqa: ARG001
    padding_idx: int | None = None,
) -> Tensor:
    """`functional.embedding_bag` of bags of equal length: lookups, then their sum, mean or maximum."""
    if not isinstance(weight, ClientParameter) or offsets is not None or input.dim() != 2:
        raise NoRuleError
    if padding_idx is not None and padding_idx < 0:
        padding_idx += len(weight)
    found = embedding(of, input, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)
    counted = torch.ones_like(input) if padding_idx is None else (input != padding_idx)
    counted = counted.to(found.dtype).unsqueeze(-1)
    if mode == "max":
        least = found.masked_fill(counted == 0, -torch.inf).amax(1) if padding_idx is not None else found.amax(1)
        return torch.where(counted.sum(1) > 0, least, 0.0)
    if per_sample_weights is not None:
        found = found * per_sample_weights.unsqueeze(-1)
    total = (found * counted).sum(1)
    return total / counted.sum(1).clamp(min=1) if mode == "mean" else total


def _rules() -> dict[Any, _Rule]:
    from polyeps.engine.convolution_rules import CONVOLUTIONS
    from polyeps.engine.norm_rules import NORMS
    from polyeps.engine.recurrent_rules import RECURRENT

    return {
        functional.linear: linear,
        functional.embedding: embedding,
        functional.embedding_bag: embedding_bag,
        torch.matmul: matmul,
        Tensor.matmul: matmul,
        Tensor.__matmul__: matmul,
        torch.mm: matmul,
        Tensor.mm: matmul,
        torch.addmm: addmm,
        **CONVOLUTIONS,
        **NORMS,
        **RECURRENT,
    }


RULES = _rules()
