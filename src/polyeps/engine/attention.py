"""Attention of short sequences by OpenBLAS' products of each record and head, at twice the speed of torch's kernel.

The weights of all pairs of positions are kept for the backward pass, so long sequences are left to torch's kernel.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from polyeps.engine.openblas import multiply_records, suits_openblas

_LONGEST = 256  # positions


def suits_products(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Return whether attention of (..., positions, width) is computed here."""
    kinds = {(each.dtype, each.is_cuda) for each in (query, key, value)}
    many, pairs, width = query.shape[-2], key.shape[-2], query.shape[-1]
    short = max(many, pairs) <= _LONGEST and kinds == {(torch.float32, False)}
    return short and suits_openblas(many, min(width, value.shape[-1]), pairs)


def attention(query: Tensor, key: Tensor, value: Tensor, scale: float, causal: bool) -> Tensor:
    """Return the attention of query, key and value (rows, heads, positions, width)."""
    found: Tensor = _Attention.apply(query, key, value, scale, causal)  # type: ignore[no-untyped-call]
    return found


class _Attention(torch.autograd.Function):
    """softmax(scale · query keyᵀ) value; the matrices of a record and head are multiplied on their own."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float, causal: bool) -> Tensor:
        scaled = (query * scale).flatten(0, 1)
        keys, values = key.flatten(0, 1), value.flatten(0, 1)
        shares = _product(scaled, keys.transpose(1, 2).contiguous())  # contiguous: half the time of the product
        if causal:
            shares += torch.full(shares.shape[1:], -torch.inf).triu_(1)
        torch.softmax(shares, -1, out=shares)
        ctx.save_for_backward(scaled, keys, values, shares)
        ctx.scale, ctx.shape = scale, query.shape[:2]
        return torch.unflatten(_product(shares, values), 0, query.shape[:2])

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator,unused-ignore]
    def backward(ctx: Any, gradients: Tensor) -> tuple[Tensor | None, ...]:
        scaled, keys, values, shares = ctx.saved_tensors
        given = gradients.flatten(0, 1)
        by_shares = _product(given, values.transpose(1, 2).contiguous())
        by_scores = torch._softmax_backward_data(by_shares, shares, -1, torch.float32)
        found = (
            _product(by_scores, keys).mul_(ctx.scale),
            _product(by_scores.transpose(1, 2), scaled),
            _product(shares.transpose(1, 2), given),
        )
        return *(torch.unflatten(each, 0, ctx.shape) for each in found), None, None


def _product(left: Tensor, right: Tensor) -> Tensor:
    into = left.new_empty(len(left), left.shape[1], right.shape[2])
    multiply_records(left, right, into, add=False)
    return into
