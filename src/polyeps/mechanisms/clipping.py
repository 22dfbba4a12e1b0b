"""Clipping: scaling a client's release so that its norm is below the clip whatever floats round."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from polyeps.errors import InputError

# Scaling rounds four times, each by 2⁻²⁴: aiming here ends below C(1 − 2⁻²⁰).
_AIM = 1 - 2**-19
SHORTEST_CLIP, LONGEST_CLIP = 1e-30, 1e30  # clip norms: beyond these, float32 has too few digits
_AT_ONCE = 2**20  # numbers cast to float64 at a time


def clip_to_norm(rows: Tensor, clip: float) -> Tensor:
    """Scale rows (n, k) to a norm of at most `clip`; rows with NaN or infinity become zero.

    Guarantee: whatever a row holds, its Euclidean norm, computed exactly from the floats returned, is at most
    clip · (1 − 2⁻²⁰). A row is one client's release, all matrices together: clipped matrix by matrix, L of them
    would have a sensitivity √L times as large.
    """
    check_clip("clip", clip)
    if rows.dtype not in (torch.float32, torch.float64):
        raise InputError(f"rows must be float32 or float64, not {rows.dtype}: coarser rounding would pass the clip")
    if not rows.numel():
        return rows
    norms = row_norms(rows)
    factors = torch.where(norms > clip * _AIM, clip * _AIM / norms, 1.0)
    # In two halves: for a row near float32's largest number the factor itself may underflow.
    halves = factors.sqrt().to(rows.dtype)[:, None]
    return torch.mul(rows, halves).mul_(halves).masked_fill_(~torch.isfinite(norms)[:, None], 0.0)


def check_clip(name: str, clip: float) -> None:
    """Refuse a clip norm that is out of range, naming the setting it comes from."""
    if not SHORTEST_CLIP <= clip <= LONGEST_CLIP:  # NaN fails every comparison
        raise InputError(f"{name} must be between {SHORTEST_CLIP:g} and {LONGEST_CLIP:g}, not {clip:g}")


def stable_norms(rows: Sequence[Tensor]) -> Tensor:
    """Return the norms (n,) of rows in float64, each bit for bit independent of the other rows.

    The norms of a matrix are summed in an order that depends on the number of rows and on their alignment. So every row
    must be an allocation of its own, and its norm is a dot product of that.
    """
    return torch.stack([torch.dot(row, row) for row in rows]).sqrt_()


def row_norms(rows: Tensor) -> Tensor:
    """Return the rows' norms (n,) in float64, computed in blocks to save memory."""
    width = max(1, _AT_ONCE // len(rows))
    blocks = [torch.linalg.vector_norm(block.double(), dim=1) for block in torch.split(rows, width, dim=1)]
    norms: Tensor = torch.linalg.vector_norm(torch.stack(blocks), dim=0)
    return norms
