"""Encoders: fixed functions of a record, applied before training, and checked to be just that."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from polyeps.data.dataset import Dataset
from polyeps.errors import InputError
from polyeps.experiment.registry import Encoder, Parts

_COMPARED = 16  # records encoded apart from the others, to see that an encoder treats records one by one


def encoded(dataset: Dataset, name: str, parts: Parts) -> Dataset:
    """Return a data set with encoded records.

    Features must be a function of their own record alone: if other records had a part in them, clipping one record
    would not bound its influence. So some records are encoded again, beside fewer and beside other records.
    """
    make = parts.find("data.encoder", name, parts.encoders, "encoders")

    def encode(features: NDArray[Any]) -> NDArray[np.float32]:
        try:
            made = make()
            learns = hasattr(made, "transform") and not callable(made)
            encoder: Encoder = _transformer(made, name, features.shape[1:]) if learns else made
            with torch.no_grad():
                found = torch.as_tensor(encoder(torch.from_numpy(features.copy()))).float().cpu().numpy()
        except InputError:
            raise
        except Exception as problem:
            raise InputError(f"data.encoder = {name} failed: {type(problem).__name__}: {problem}") from problem
        if found.ndim < 2 or len(found) != len(features) or not np.isfinite(found).all():
            raise InputError(f"data.encoder = {name} must return finite features, one row for each record")
        return found

    places = np.linspace(0, len(dataset.features) - 1, _COMPARED).astype(int)
    some, real = dataset.features[places], np.issubdtype(dataset.features.dtype, np.floating)
    # First, none of the records: an encoder that fits itself to what it sees first would depend on them.
    encode(np.random.default_rng(0).random(some.shape).astype(some.dtype) if real else np.zeros_like(some))
    training, others = encode(dataset.features), 2 * some + 1 if real else some[::-1]
    again = [encode(some), encode(np.concatenate([others, some]))[len(some) :]]
    if not all(np.allclose(rows, training[places], rtol=1e-3, atol=1e-4) for rows in again):
        raise InputError(
            f"data.encoder = {name} encodes a record differently with other records beside it, so one record would "
            "change the features of others; compute each row from its own record, with fixed or seeded parameters"
        )
    return replace(dataset, features=training, test_features=encode(dataset.test_features), columns=(), words=())


def _transformer(made: Any, name: str, shape: tuple[int, ...]) -> Encoder:
    """Return a scikit-learn transformer as an encoder: one that was fitted to public data, or that learns nothing.

    What it learns is seen by fitting it to two blocks of made-up records: it must not differ.
    """
    from sklearn.base import clone
    from sklearn.exceptions import NotFittedError
    from sklearn.utils.validation import check_is_fitted

    def apply(fitted: Any, rows: NDArray[Any]) -> NDArray[np.float32]:
        found = fitted.transform(rows.reshape(len(rows), -1))
        return np.asarray(found.toarray() if hasattr(found, "toarray") else found, dtype=np.float32)

    try:
        check_is_fitted(made)
    except NotFittedError:
        chance = np.random.default_rng(0)
        blocks = [scale * chance.random((_COMPARED, *shape)) + shift for scale, shift in ((1.0, 0.0), (3.0, -2.0))]
        fitted = [clone(made).fit(block.reshape(_COMPARED, -1)) for block in blocks]
        if not all(np.array_equal(apply(fitted[0], block), apply(fitted[1], block)) for block in blocks):
            raise InputError(
                f"data.encoder = {name} returns a {type(made).__name__} that learns from records; fit it to public "
                "data in that function, or scale columns by declared ranges (data.columns)"
            ) from None
        made = fitted[0]

    def encoder(records: Tensor) -> Tensor:
        return torch.from_numpy(apply(made, records.numpy()))

    return encoder
