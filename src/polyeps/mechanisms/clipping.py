"""What bounds one client's part in a sum: its whole release, scaled to a norm no float rounding can exceed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from polyeps.errors import InputError

# Scaling rounds four times, each by 2⁻²⁴: aiming here ends below C(1 − 2⁻²⁰).
_AIM = 1 - 2**-19
SHORTEST_CLIP, LONGEST_CLIP = 1e-30, 1e30  # clip norms: beyond, float32 has not the digits the guarantee rests on
_AT_ONCE = 2**20  # numbers cast to float64 at a time


def clip_to_norm(rows: Tensor, clip: float) -> Tensor:
    """Rows (n, k) scaled to a norm of at most `clip`; rows that hold NaN or infinity become zero.

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
    # In two halves: of a row near float's largest number the factor itself may be below its smallest.
    halves = factors.sqrt().to(rows.dtype)[:, None]
    return torch.mul(rows, halves).mul_(halves).masked_fill_(~torch.isfinite(norms)[:, None], 0.0)


def check_clip(name: str, clip: float) -> None:
    """Refuse a norm that rows cannot be clipped to, by the name of the setting it comes from."""
    if not SHORTEST_CLIP <= clip <= LONGEST_CLIP:  # NaN fails every comparison
        raise InputError(f"{name} must be between {SHORTEST_CLIP:g} and {LONGEST_CLIP:g}, not {clip:g}")


def stable_norms(rows: Sequence[Tensor]) -> Tensor:
    """Return the norms (n,) of rows in float64, each with the same bits in whatever company its row is.

    Norms of a matrix are added up in an order that depends on the number of rows and on where they lie in memory. So
    every row must be in memory of its own, and is multiplied with itself there.
    """
    return torch.stack([torch.dot(row, row) for row in rows]).sqrt_()


def row_norms(rows: Tensor) -> Tensor:
    """The rows' norms (n,) in float64, in blocks: cast as a whole, rows of a large model would take twice as much."""
    width = max(1, _AT_ONCE // len(rows))
    blocks = [torch.linalg.vector_norm(block.double(), dim=1) for block in torch.split(rows, width, dim=1)]
    norms: Tensor = torch.linalg.vector_norm(torch.stack(blocks), dim=0)
    return norms
