"""Noise estimates from updates alone, without ε and without coordinates known to hold only noise.

An update's norm mixes signal and noise. But noise is independent, and much of the signal is not: it is shared between
clients, concentrated in few coordinates, or constant from round to round. Each of these gives an estimate that is too
large by the signal that is left in it, so the least of them is the best.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_MEDIAN = 0.4549364231195724  # of the square of a standard normal
_MOST = 100  # iterations of a factor analysis
_LEAST = 1e-3  # share of an update's energy that counts as noise at least


def estimate_noise_variances(rows: Tensor) -> Tensor:
    """Return each client's noise variance per coordinate (n,) from updates (n, rounds, d); NaN without any update.

    A row that is not finite stands for a round without an update.
    """
    present = torch.isfinite(rows).all(2)  # (n, rounds)
    updates = rows.double().masked_fill(~present[..., None], torch.nan)
    alone = _alone(updates, present.sum(1))
    lowest = alone.argsort(stable=True)[: min(3, int(present.any(1).sum()))]  # a NaN sorts last
    if len(lowest) < 3:
        return alone
    # For every client two of the three of the lowest noise level; for one of these the other two.
    everyone = torch.arange(len(rows), device=rows.device)
    first = torch.where(everyone == lowest[0], lowest[1], lowest[0])
    second = torch.where((everyone == lowest[0]) | (everyone == lowest[1]), lowest[2], lowest[1])
    # The product of a client's differences to two others holds its own noise once, theirs not at all, and only the
    # part of its signal that it shares with neither.
    product = ((updates - updates[first]) * (updates - updates[second])).flatten(1)
    mean = product.nanmean(1)
    count = product.isfinite().sum(1)
    chance = ((product - mean[:, None]).square().nanmean(1) / count).sqrt()
    return torch.where((3 * chance < mean) & (mean < alone), mean, alone)


def _alone(updates: Tensor, rounds: Tensor) -> Tensor:
    """Return the noise variance of each client (n,) from its own updates, NaN if it has none."""
    squares = updates.square().flatten(1)
    found = torch.minimum(squares.nanmean(1), squares.nanmedian(1).values / _MEDIAN)
    centred = updates - updates.nanmean(1, keepdim=True)
    spread = centred.square().nansum(1).div((rounds - 1).clamp(min=1)[:, None]).mean(1)
    return torch.where(rounds > 2, torch.minimum(found, spread), found)  # centring removes a constant signal


@torch.no_grad()  # type: ignore[untyped-decorator,unused-ignore]
def low_rank_noise_variances(rows: Tensor) -> Tensor:
    """Return each client's noise variance per coordinate (n,), in float64, from one round's updates (n, d).

    It is a factor analysis by principal axes: inner products of updates are those of a few shared directions plus the
    clients' noise on the diagonal. Directions count as shared where they exceed what noise alone shows (the edge of
    Marchenko and Pastur). What a client shares with no other one counts as its noise.
    """
    clients, size = rows.shape
    # Scaled rows: float32 products of updates that differ by orders of magnitude stay exact enough.
    norms = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64).clamp(min=torch.finfo(torch.float32).tiny)
    scaled = rows / norms[:, None].to(rows.dtype)
    products = (scaled @ scaled.T).double()
    if clients < 2 or size <= clients:
        return torch.square(norms).div(size)
    energy = products.diagonal().clamp(min=_LEAST)  # 1, or 0 for an update of zero
    edge = (1 + math.sqrt(clients / size)) ** 2
    noise = energy.clone()
    for _ in range(_MOST):
        scale = noise.rsqrt()
        values, vectors = torch.linalg.eigh(products * scale[:, None] * scale)
        shared = (vectors.square() * torch.where(values > edge, values - 1, 0.0)).sum(1) * noise
        found = torch.maximum(energy - shared, _LEAST * energy)
        settled = bool(((found - noise).abs() <= 1e-4 * noise).all())
        noise = found
        if settled:
            break
    return torch.square(norms).mul(noise).div(size)
