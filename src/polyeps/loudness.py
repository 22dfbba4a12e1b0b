"""How much of an update is noise, told from updates alone: no coordinate is known to be silent, no ε is known.

An update's norm mixes signal and noise. But noise is drawn apart, and much of the signal is not: it is shared
between clients, lives in few coordinates, or stays from round to round. Each of these gives an estimate that is off
upwards by whatever signal it leaves in, so the least of them is the best.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_MEDIAN = 0.4549364231195724  # of the square of a standard normal


def noise_apart(rows: Tensor) -> Tensor:
    """Each client's noise variance per coordinate (n,), from updates (n, rounds, d); NaN for one never heard.

    A row that is not finite was not heard in that round.
    """
    heard = torch.isfinite(rows).all(2)
    alone = torch.tensor(
        [_alone(own[said].double()) for own, said in zip(rows, heard, strict=True)], dtype=torch.float64
    )
    found = alone.clone()
    order = [place for place in alone.argsort(stable=True).tolist() if not math.isnan(alone[place])]
    for own in order:
        others = [place for place in order[:3] if place != own][:2]
        together = heard[[own, *others]].all(0)
        if len(others) < 2 or not bool(together.any()):
            continue
        # The product of its differences to two others has its own noise once, theirs not at all, and of the
        # signal only what it shares with neither.
        mine, first, second = (rows[place][together].double() for place in (own, *others))
        product = (mine - first) * (mine - second)
        chance = float(product.std(correction=0)) / math.sqrt(product.numel())
        if 3 * chance < float(product.mean()) < float(alone[own]):
            found[own] = product.mean()
    return found


def _alone(rows: Tensor) -> float:
    """The noise variance of one client from its own updates (rounds, d)."""
    if not len(rows):
        return math.nan
    squares = rows.square()
    found = [float(squares.mean()), float(squares.median()) / _MEDIAN]
    if len(rows) > 2:
        found.append(float(rows.var(0).mean()))  # a signal that stays is gone
    return min(found)
