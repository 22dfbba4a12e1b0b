"""Robust PCA with full singular value decompositions and a fixed penalty: slow and simple."""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray


def plain_admm(matrix: NDArray[Any], iterations: int = 1500) -> tuple[NDArray[Any], NDArray[Any]]:
    """Candès et al. (2011), algorithm 1, with their fixed penalty."""
    weight = 1 / math.sqrt(max(matrix.shape))
    penalty = matrix.size / (4 * np.abs(matrix).sum())
    sparse, dual = np.zeros_like(matrix), np.zeros_like(matrix)
    for _ in range(iterations):
        left, values, right = np.linalg.svd(matrix - sparse + dual / penalty, full_matrices=False)
        low = left @ np.diag(np.maximum(values - 1 / penalty, 0)) @ right
        rest = matrix - low + dual / penalty
        sparse = np.sign(rest) * np.maximum(np.abs(rest) - weight / penalty, 0)
        dual += penalty * (matrix - low - sparse)
    return low, sparse
