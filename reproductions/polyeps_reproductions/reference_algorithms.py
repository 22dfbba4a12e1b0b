"""Algorithms as PFA's code has them, where that differs from the text; named in studies as built-in ones are.

Code: https://github.com/Emory-AIMS/PFA. What is here is written anew from what that code does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from polyeps.aggregation.subspace import Basis, Part, basis_from_tensors
from polyeps.algorithms import Entry
from polyeps.algorithms._averaging import ask_updates, epsilons, public_clients, step, with_local_noise
from polyeps.algorithms._projection import combine, kept_basis
from polyeps.core import Algorithm, Ask, State
from polyeps.training import Training

LANCZOS = "pfa-plus-lanczos"
STEPS = 256  # of Lanczos, whatever the rank of the matrix


def pfa_plus_lanczos(
    training: Training, *, rank: int = 1, weights: Literal["epsilon", "count"] = "epsilon"
) -> Algorithm:
    """Return PFA+ with the directions that the code's Lanczos steps find.

    Private clients are asked for whole updates, which the server projects onto the last round's directions: the model
    is that of PFA+.
    """
    slices = training.model.slices

    def directions(public: Tensor, _: Sequence[float], round: int) -> Basis:
        centre = public.mean(0) if len(public) > 1 else torch.zeros_like(public[0])
        draws = torch.Generator().manual_seed(round)
        spans = [(part.start, part.stop) for part in slices.values()]
        found = [
            Part(a, b, lanczos((public - centre)[:, a:b].double(), rank, draws).to(public.dtype)) for a, b in spans
        ]
        return Basis(tuple(found), centre)

    def round(state: State, ask: Ask) -> State:
        replies, high = ask_updates(state, ask, state.roster), public_clients(state.enrolled, "top")
        rows, shares = replies.payload["update"], [1.0] * len(replies.ids)
        if weights == "epsilon":
            shares = epsilons(state, replies.ids)
        chosen = [place for place, client in enumerate(replies.ids) if client in high]
        kept = basis_from_tensors(state.kept, slices, training.model.size) if "basis" in state.kept else None
        update, used = combine(rows, shares, chosen, lambda *some: kept or directions(*some), state.round)
        new = directions(rows[chosen], shares, state.round) if kept and chosen else used
        return step(state, update, **kept_basis(new))

    return with_local_noise(training, round, needs=("epsilon",))


def lanczos(rows: Tensor, rank: int, draws: torch.Generator, steps: int = STEPS) -> Tensor:
    """Return the directions (rank, size) that `steps` of Lanczos find for the Gram matrix of rows (n, size).

    As in the code: steps go on beyond the rank of the rows, where what is left is rounding errors that are scaled up to
    length 1; new vectors are made orthogonal to all but the last two; the last vector stays zero.
    """
    gram, size = rows.numpy(), rows.shape[1]
    vectors, bands = np.zeros((steps, size)), np.zeros((steps, steps))
    vectors[0] = torch.rand(size, generator=draws, dtype=torch.float64).numpy()
    vectors[0] /= np.linalg.norm(vectors[0])
    rest = (gram @ vectors[0]) @ gram
    bands[0, 0] = rest @ vectors[0]
    rest = rest - bands[0, 0] * vectors[0]
    for at in range(1, steps - 1):
        length = np.linalg.norm(rest)
        own = rest / length
        for earlier in vectors[: at - 1]:  # one after the other: they may be nearly the same
            own -= (own @ earlier) * earlier
        own /= np.linalg.norm(own)
        vectors[at] = own
        rest = (gram @ own) @ gram
        bands[at, at] = rest @ own
        rest = rest - bands[at, at] * own - length * vectors[at - 1]
        bands[at - 1, at] = bands[at, at - 1] = length
    values, combined = np.linalg.eig(bands)
    best = values.real.argsort()[::-1][:rank]
    return torch.from_numpy(np.ascontiguousarray((combined[:, best].T @ vectors).real))


ALGORITHMS_OF_CODE: Mapping[str, Entry] = {LANCZOS: Entry(pfa_plus_lanczos, "PFA+ with 256 steps of Lanczos")}
