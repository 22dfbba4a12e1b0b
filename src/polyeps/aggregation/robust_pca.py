"""Robust PCA: a matrix as a low-rank part plus the rest, by principal component pursuit.

Method: Candès et al., "Robust Principal Component Analysis?", Journal of the ACM 2011, solved by the inexact augmented
Lagrangian method of Lin et al., "The Augmented Lagrange Multiplier Method for Exact Recovery of Corrupted Low-Rank
Matrices", 2010.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_GROWTH = 1.1  # of the penalty in every iteration; the usual 1.5 ends before dense noise has left the low-rank part
_MOST = 300  # iterations; about 50 are needed
_CLOSE = 1e-3  # share of every row that may be in neither part


@torch.no_grad()  # type: ignore[untyped-decorator,unused-ignore]
def principal_component_pursuit(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return a low-rank matrix L and the rest S, (n, d) each in float64, with matrix = L + S.

    They minimise ‖L‖_* + λ·Σ|S_ij| with λ = 1/√max(n, d). Whatever only one row holds goes into S, since one row's
    Euclidean norm is at least λ times the sum of its absolute values; what many rows share goes into L.
    """
    rows = matrix.double()
    largest = float(rows.abs().max()) if rows.numel() else 0.0
    if not largest:
        return torch.zeros_like(rows), torch.zeros_like(rows)
    rows = rows / largest  # squares of tiny or huge numbers must not under- or overflow
    sparsity = 1 / math.sqrt(max(rows.shape))
    norms = torch.linalg.vector_norm(rows, dim=1)
    spectral = float(torch.linalg.eigvalsh(_gram(rows))[-1].clamp(min=0).sqrt())
    dual = rows / max(spectral, 1 / sparsity)
    penalty = 1.25 / spectral
    rest = torch.zeros_like(rows)
    for _ in range(_MOST):
        shared = _shrunk(rows - rest + dual / penalty, 1 / penalty)
        rest = torch.nn.functional.softshrink(rows - shared + dual / penalty, sparsity / penalty)
        missing = rows - shared - rest
        if bool((torch.linalg.vector_norm(missing, dim=1) <= _CLOSE * norms).all()):
            break
        dual += penalty * missing
        penalty *= _GROWTH
    return (rows - rest) * largest, rest * largest


def _gram(rows: Tensor) -> Tensor:
    """Return the smaller of the two Gram matrices."""
    return rows @ rows.T if len(rows) <= rows.shape[1] else rows.T @ rows


def _shrunk(rows: Tensor, threshold: float) -> Tensor:
    """Return a matrix with all singular values lowered by a threshold, at most to zero."""
    values, vectors = torch.linalg.eigh(_gram(rows))
    singular = values.clamp(min=0).sqrt()
    kept = singular > threshold
    factors = (singular[kept] - threshold) / singular[kept]
    some = vectors[:, kept]
    if len(rows) <= rows.shape[1]:
        return torch.matmul(some * factors, some.T @ rows)
    return torch.matmul(rows @ some, factors[:, None] * some.T)
