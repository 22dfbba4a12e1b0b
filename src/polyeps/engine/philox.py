"""Normals on the device, one stream per client: Philox4x32-10, a function of (client's key, step, element).

Counter-based, so without state or order: any element can be computed anywhere, and a captured graph draws new noise on
every replay. One Triton kernel where Triton is installed (torch's CUDA builds include it); the same integers by torch
operations elsewhere, much slower. For simulation only: Philox gives no protection.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from polyeps.engine.triton_kernels import has_kernel, philox_normals, philox_uniforms

_WORD = 0xFFFFFFFF


def fill_normals(out: Tensor, keys: Tensor, step: Tensor) -> None:
    """Fill out (n, d) with a step's normals of the streams with the given keys (n,); step is an int64 (1,)."""
    if has_kernel(out):
        philox_normals(out, keys, step)
    else:
        out.copy_(normals(keys, step, out.shape[1]))


def normals(keys: Tensor, step: Tensor, size: int) -> Tensor:
    """Return the same normals by torch operations, (n, size)."""
    quads = -(-size // 4)
    element = torch.arange(quads, device=keys.device)[None, :]
    zero = torch.zeros_like(element)
    words = philox((element, zero + step, zero, zero), keys[:, None])
    pairs = [normal_pair(words[0], words[1]), normal_pair(words[2], words[3])]
    return torch.cat([normal for pair in pairs for normal in pair], dim=1)[:, :size]


def uniforms(keys: Tensor, first: int, count: int) -> Tensor:
    """Return uniforms number first to first + count (exclusive) of each stream, in (0, 1], (n, count) float64.

    Two from each block of four words; the third counter separates them from the normals.
    """
    begin, end = first // 2, -(-(first + count) // 2)
    if has_kernel(keys):
        drawn = torch.empty(len(keys), 2 * (end - begin), dtype=torch.float64, device=keys.device)
        philox_uniforms(drawn, keys, begin)
        return drawn[:, first % 2 : first % 2 + count]
    block = torch.arange(begin, end, device=keys.device)[None, :]
    zero = torch.zeros_like(block)
    words = philox((block, zero, zero + 1, zero), keys[:, None])
    # 53 bits: 32 of one word and the upper 21 of the next
    pair = [(a << 21 | b >> 11).add_(1).to(torch.float64).mul_(2.0**-53) for a, b in (words[:2], words[2:])]
    both = torch.stack(pair, dim=2).flatten(1)
    return both[:, first % 2 : first % 2 + count]


def philox(counter: tuple[Tensor, ...], key: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute Philox4x32-10 (Salmon et al. 2011) of four 32-bit counters and a 64-bit key, all stored in int64."""
    c0, c1, c2, c3 = counter
    k0, k1 = key & _WORD, (key >> 32) & _WORD
    for _ in range(10):
        # int64 products wrap modulo 2^64, which keeps both halves right
        a, b = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (((b >> 32) & _WORD) ^ c1 ^ k0, b & _WORD, ((a >> 32) & _WORD) ^ c3 ^ k1, a & _WORD)
        k0, k1 = (k0 + 0x9E3779B9) & _WORD, (k1 + 0xBB67AE85) & _WORD
    return c0, c1, c2, c3


def normal_pair(radial: Tensor, angular: Tensor) -> tuple[Tensor, Tensor]:
    signed = (radial - ((radial >> 31) << 32)).to(torch.float32)
    radius = signed.abs_().add_(0.5).mul_(2.0**-31).clamp_(max=1.0).log_().mul_(-2).sqrt_()
    angle = (angular - ((angular >> 31) << 32)).to(torch.float32).mul_(math.pi * 2.0**-31)
    return torch.cos(angle) * radius, torch.sin(angle) * radius
