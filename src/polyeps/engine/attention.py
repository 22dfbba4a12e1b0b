"""Attention of all rows at once; of short sequences by OpenBLAS, at twice the speed of torch's kernel.

The weights of all pairs of positions are kept for the backward pass, so long sequences are left to torch's kernel.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from polyeps.engine.client_parameters import ForwardPass, NoRuleError, outside_vmap
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
        keys = key.transpose(2, 3).contiguous()  # contiguous: half the time of the product
        shares = _product(query, keys, query.new_empty(*query.shape[:3], key.shape[2]), scale)
        if causal:
            shares += torch.full(shares.shape[2:], -torch.inf).triu_(1)
        torch.softmax(shares, -1, out=shares)
        ctx.save_for_backward(query, key, value, shares)
        ctx.scale = scale
        return _product(shares, value, _positions_first(query, value.shape[3]))

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator,unused-ignore]
    def backward(ctx: Any, gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, shares = ctx.saved_tensors
        by_shares = _product(gradients, value.transpose(2, 3).contiguous(), torch.empty_like(shares))
        by_scores = torch._softmax_backward_data(by_shares, shares, -1, torch.float32)
        found = (
            _product(by_scores, key, _positions_first(query, query.shape[3]), ctx.scale),
            _product(by_scores.transpose(2, 3), query, _positions_first(key, key.shape[3]), ctx.scale),
            _product(shares.transpose(2, 3), gradients, _positions_first(value, value.shape[3])),
        )
        return *found, None, None


def _positions_first(like: Tensor, width: int) -> Tensor:
    """Return room for (rows, heads, positions, width), laid out so that heads can be joined without a copy."""
    rows, heads, positions, _ = like.shape
    return like.new_empty(rows, positions, heads, width).transpose(1, 2)


def _product(left: Tensor, right: Tensor, into: Tensor, scale: float = 1.0) -> Tensor:
    multiply_records(left, right, into, add=False, scale=scale)
    return into


def attention_of_rows(
    of: ForwardPass,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Return the attention of all rows of a forward pass."""
    same = query.dim() == key.dim() == value.dim() == 4 and query.shape[:1] == key.shape[:1] == value.shape[:1]
    if dropout_p or enable_gqa or not same or (attn_mask is not None and attn_mask.dim() > 4):
        raise NoRuleError
    q, k, v = (of.physical(each).flatten(0, 1) for each in (query, key, value))
    mask = attn_mask
    if attn_mask is not None:
        wide = attn_mask.reshape(*(1,) * (4 - attn_mask.dim()), *attn_mask.shape)
        wide = wide.expand(query.shape[0], *wide.shape[1:])
        mask = of.physical(wide).flatten(0, 1)
    with outside_vmap():
        if mask is None and suits_products(q, k, v) and q.shape[1:2] == k.shape[1:2] == v.shape[1:2]:
            found = attention(q, k, v, q.shape[-1] ** -0.5 if scale is None else scale, is_causal)
            return of.seen(torch.unflatten(found, 0, (-1, query.shape[0])))
        found = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=is_causal, scale=scale)
        found = torch.unflatten(found, 0, (-1, query.shape[0]))
    return of.seen(found)


def plain_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Return attention by its definition, as in torch's documentation."""
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
        value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
    scores = query @ key.transpose(-2, -1) * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if attn_mask is not None:
        masked = attn_mask.dtype == torch.bool
        scores = scores.masked_fill(~attn_mask, -torch.inf) if masked else scores + attn_mask
    return functional.dropout(torch.softmax(scores, -1), dropout_p) @ value
