"""Paper 004's algorithm 1 as slow plain loops over agents, in numpy and float64, with the noise given.

An agent's update is a list of tensors: matrices [out, all else], compressed where `right` has a factor for them, and
tensors sent whole, where it has None. Noise arrays come per agent and tensor, in the shape of what they are added to.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Tensors = Sequence[Array]
Factors = Sequence[Array | None]  # None: this tensor is sent whole
Updates = Callable[[int, int, list[Array]], Tensors]  # of (agent, round, model)


def gram_schmidt(matrix: Array) -> Array:
    """Line 10; twice, for its rounding. What is explained by earlier columns stays zero: the paper does not say."""
    found = np.zeros_like(matrix)
    for column in range(matrix.shape[1]):
        rest = matrix[:, column].copy()
        for _ in range(2):
            for before in range(column):
                rest -= float(np.dot(found[:, before], rest)) * found[:, before]
        length = float(np.linalg.norm(rest))
        if length > 1e-12 * float(np.linalg.norm(matrix[:, column])):
            found[:, column] = rest / length
    return found


def clipped(pieces: Tensors, clip: float) -> list[Array]:
    """Lines 27 and 31: one norm over all tensors of a release."""
    square = 0.0
    for piece in pieces:
        for number in piece.ravel():
            square += float(number) ** 2
    factor = min(1.0, clip / math.sqrt(square)) if square else 1.0
    return [piece * factor for piece in pieces]


def subspace_iterate(update: Tensors, right: Factors, clip: float, noise: Tensors) -> list[Array]:
    """Lines 26 to 28: what one agent sends first, for the compressed tensors."""
    products = [tensor @ factor for tensor, factor in zip(update, right, strict=True) if factor is not None]
    return [piece + added for piece, added in zip(clipped(products, clip), noise, strict=True)]


def agent_update(update: Tensors, left: Factors, clip: float, noise: Tensors) -> list[Array]:
    """Lines 30 to 32: what one agent sends then, for every tensor."""
    products = [tensor if factor is None else tensor.T @ factor for tensor, factor in zip(update, left, strict=True)]
    return [piece + added for piece, added in zip(clipped(products, clip), noise, strict=True)]


def cmp_fed_round(
    updates: Sequence[Tensors],
    right: Factors,
    clips: tuple[float, float],
    subspace_noise: Sequence[Tensors],
    embedding_noise: Sequence[Tensors],
    divisor: float | None = None,
) -> tuple[list[Array], list[Array | None]]:
    """Lines 5 to 16: the step Δ_t, and V_{t+1} as it is; sums are divided by the number of agents unless told."""
    divisor = len(updates) if divisor is None else divisor
    firsts = [
        subspace_iterate(update, right, clips[0], noise) for update, noise in zip(updates, subspace_noise, strict=True)
    ]
    bases = iter([gram_schmidt(total / divisor) for total in _sum(firsts)])
    left = [None if factor is None else next(bases) for factor in right]
    seconds = [
        agent_update(update, left, clips[1], noise) for update, noise in zip(updates, embedding_noise, strict=True)
    ]
    embeddings = [total / divisor for total in _sum(seconds)]
    step, next_right = [], []
    for factor, embedding in zip(left, embeddings, strict=True):
        step.append(embedding if factor is None else factor @ embedding.T)
        next_right.append(None if factor is None else embedding)
    return step, next_right


def cmp_fed(
    start: Tensors,
    right: Factors,
    cohorts: Sequence[Sequence[int]],
    updates: Updates,
    clips: tuple[float, float],
    noise: Callable[[int, int], tuple[Tensors, Tensors]],
    server_rate: float = 1.0,
) -> list[Array]:
    """The whole algorithm: `noise` gives (agent, round) its arrays for both releases."""
    model = [tensor.copy() for tensor in start]
    for number, cohort in enumerate(cohorts):
        answers = [updates(agent, number, model) for agent in cohort]
        drawn = [noise(agent, number) for agent in cohort]
        step, right = cmp_fed_round(answers, right, clips, [u for u, _ in drawn], [v for _, v in drawn])
        model = [tensor + server_rate * change for tensor, change in zip(model, step, strict=True)]
    return model


def power_sgd_step(updates: Sequence[Tensors], right: Factors) -> tuple[list[Array], list[Array | None]]:
    """PowerSGD (Vogels et al. 2019, algorithm 1) without error feedback: one power iteration on the mean."""
    step: list[Array] = []
    next_right: list[Array | None] = []
    for place, factor in enumerate(right):
        mean = np.mean([update[place] for update in updates], axis=0)
        if factor is None:
            step.append(mean)
            next_right.append(None)
            continue
        left, _ = np.linalg.qr(mean @ factor)
        next_right.append(mean.T @ left)
        step.append(left @ left.T @ mean)
    return step, next_right


def tensors_of(compression: Any, vector: Array) -> list[Array]:
    """A vector's tensors in the order of the second release: matrices that are compressed, then those sent whole."""
    matrices = [vector[m.start : m.stop].reshape(m.rows, m.columns) for m in compression.matrices]
    return [*matrices, *(vector[start:stop] for start, stop in compression.whole)]


def vector_of(compression: Any, tensors: Tensors) -> Array:
    """The vector that `tensors_of` takes apart."""
    vector = np.empty(compression.size)
    spans = [*((m.start, m.stop) for m in compression.matrices), *compression.whole]
    for (start, stop), tensor in zip(spans, tensors, strict=True):
        vector[start:stop] = tensor.ravel()
    return vector


def lefts_of(compression: Any, flat: Array) -> list[Array]:
    """A first release, matrix by matrix, from the vector it travels as."""
    return _pieces(flat, [(m.rows, m.rank) for m in compression.matrices])


def embeddings_of(compression: Any, flat: Array) -> list[Array]:
    """A second release, tensor by tensor, from the vector it travels as."""
    whole = [(stop - start,) for start, stop in compression.whole]
    return _pieces(flat, [*((m.columns, m.rank) for m in compression.matrices), *whole])


def factors_of(compression: Any, flat: Array) -> list[Array | None]:
    """Right factors from the vector they travel as; None for every tensor sent whole."""
    factors = _pieces(flat, [(m.columns, m.rank) for m in compression.matrices])
    return [*factors, *(None for _ in compression.whole)]


def _pieces(flat: Array, shapes: Sequence[tuple[int, ...]]) -> list[Array]:
    pieces = []
    for shape in shapes:
        count = math.prod(shape)
        pieces.append(flat[:count].reshape(shape))
        flat = flat[count:]
    return pieces


def _sum(releases: Sequence[Tensors]) -> list[Array]:
    totals = [np.zeros_like(piece) for piece in releases[0]]
    for release in releases:
        for total, piece in zip(totals, release, strict=True):
            total += piece
    return totals
