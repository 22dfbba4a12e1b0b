"""How much of an update is noise, told from updates alone: no coordinate is known to be silent, no ε is known.

An update's norm mixes signal and noise. But noise is drawn apart, and much of the signal is not: it is shared
between clients, lives in few coordinates, or stays from round to round. Each of these gives an estimate that is off
upwards by whatever signal it leaves in, so the least of them is the best.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MEDIAN = 0.4549364231195724  # of the square of a standard normal


def estimate_noise_variances(rows: Tensor) -> Tensor:
    """Each client's noise variance per coordinate (n,), from updates (n, rounds, d); NaN for one never heard.

    A row that is not finite was not heard in that round.
    """
    heard = torch.isfinite(rows).all(2)  # (n, rounds)
    told = rows.double().masked_fill(~heard[..., None], torch.nan)
    alone = _alone(told, heard.sum(1))
    quietest = alone.argsort(stable=True)[: min(3, int(heard.any(1).sum()))]  # a NaN sorts last
    if len(quietest) < 3:
        return alone
    # Two of the three quietest for everybody, and for one of these the other two.
    everyone = torch.arange(len(rows), device=rows.device)
    first = torch.where(everyone == quietest[0], quietest[1], quietest[0])
    second = torch.where((everyone == quietest[0]) | (everyone == quietest[1]), quietest[2], quietest[1])
    # The product of its differences to two others has its own noise once, theirs not at all, and of the
    # signal only what it shares with neither.
    product = ((told - told[first]) * (told - told[second])).flatten(1)
    mean = product.nanmean(1)
    count = product.isfinite().sum(1)
    chance = ((product - mean[:, None]).square().nanmean(1) / count).sqrt()
    return torch.where((3 * chance < mean) & (mean < alone), mean, alone)


def _alone(told: Tensor, rounds: Tensor) -> Tensor:
    """The noise variance of each client (n,) from its own updates, NaN where it was not heard."""
    squares = told.square().flatten(1)
    found = torch.minimum(squares.nanmean(1), squares.nanmedian(1).values / _MEDIAN)
    centred = told - told.nanmean(1, keepdim=True)
    spread = centred.square().nansum(1).div((rounds - 1).clamp(min=1)[:, None]).mean(1)
    return torch.where(rounds > 2, torch.minimum(found, spread), found)  # a signal that stays is gone
