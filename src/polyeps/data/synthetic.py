"""FedSel's synthetic data: two classes split by a random plane, with features of very unequal size.

Generator of Wangni et al., "Gradient Sparsification for Communication-Efficient Distributed Optimization", NeurIPS
2018, with the parameters of FedSel (Liu et al., DASFAA 2020, https://arxiv.org/abs/2003.10637): x = x̄ ⊙ B,
y = sign(x̄ᵀ w̄), x̄ and w̄ standard normal, B uniform on [0, 1] with every B_j ≤ C2 shrunk by C1. Symbols: C1 = shrink,
C2 = threshold.
"""

from __future__ import annotations

import numpy as np

from polyeps.data.dataset import Dataset, without_test
from polyeps.data.public_catalogue import PUBLIC_DATASETS
from polyeps.errors import InputError

SYNTHETIC = ("syn-l", "syn-h")


def synthetic(
    name: str,
    *,
    shrink: float = 0.01,
    threshold: float = 0.9,
    generator: np.random.Generator,
    records: int | None = None,
) -> Dataset:
    """Draw FedSel's syn-L (100 features, 60 000 records) or syn-H (300 features, 100 000 records)."""
    if name not in SYNTHETIC:
        raise InputError(f"synthetic data are syn-l or syn-h, not {name!r}")
    for symbol, value in (("C1 (shrink)", shrink), ("C2 (threshold)", threshold)):
        if not 0 <= value <= 1:
            raise InputError(f"{symbol} must lie between 0 and 1, not {value}")
    published = PUBLIC_DATASETS[name]
    count = published.records if records is None else records
    if count < 1:
        raise InputError(f"{name} needs at least one record, not {count}")
    (size,) = published.shape
    magnitude = generator.random(size)
    magnitude[magnitude <= threshold] *= shrink
    plane = generator.standard_normal(size)
    dense = generator.standard_normal((count, size), dtype=np.float32)
    labels = (dense @ plane.astype(np.float32) > 0).astype(np.int64)
    features = dense * magnitude.astype(np.float32)
    return without_test(name, features, labels, published.classes)
