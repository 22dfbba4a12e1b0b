"""Makes test splits where none was published, and smaller data sets from large ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from polyeps.data.datasets import Dataset
from polyeps.errors import InputError


def take(dataset: Dataset, rows: NDArray[np.int64]) -> Dataset:
    """The training records with these row numbers; the test split stays."""
    groups = None if dataset.groups is None else dataset.groups[rows]
    return replace(dataset, features=dataset.features[rows], labels=dataset.labels[rows], groups=groups)


def subsample(dataset: Dataset, records: int, generator: np.random.Generator) -> Dataset:
    """A uniform sample of the training records, without repeats."""
    if not 1 <= records <= len(dataset.labels):
        raise InputError(
            f"{dataset.name} has {len(dataset.labels)} training records: take 1 to that many, not {records}"
        )
    return take(dataset, generator.choice(len(dataset.labels), records, replace=False))


def pooled(dataset: Dataset) -> Dataset:
    """Training and test records in one, as FedSel uses Adult's 48 842; a test split must then be made."""
    if dataset.groups is not None:
        raise InputError(f"{dataset.name} has groups for its training records only: it cannot be pooled")
    return replace(
        dataset,
        features=np.concatenate([dataset.features, dataset.test_features]),
        labels=np.concatenate([dataset.labels, dataset.test_labels]),
        test_features=dataset.test_features[:0],
        test_labels=dataset.test_labels[:0],
    )


def hold_out(dataset: Dataset, share: float, generator: np.random.Generator) -> Dataset:
    """A random share of the training records becomes the test split of a data set that has none."""
    if len(dataset.test_labels):
        raise InputError(f"{dataset.name} has a published test split: use it, or pool the records first")
    count = round(share * len(dataset.labels))
    if not 0 < count < len(dataset.labels):
        raise InputError(f"a share of {share} of {len(dataset.labels)} records leaves nothing to test or to train on")
    order = generator.permutation(len(dataset.labels))
    return _test_on(dataset, order[:count], order[count:])


def validation(dataset: Dataset, share: float, generator: np.random.Generator) -> Dataset:
    """A random share of the training records in place of the test split: to choose settings by."""
    untested = replace(dataset, test_features=dataset.test_features[:0], test_labels=dataset.test_labels[:0])
    return hold_out(untested, share, generator)


def folds(dataset: Dataset, count: int, generator: np.random.Generator) -> Iterator[Dataset]:
    """Cross-validation: `count` data sets, each record in the test split of exactly one of them."""
    if len(dataset.test_labels):
        raise InputError(f"{dataset.name} has a published test split: use it, or pool the records first")
    if not 2 <= count <= len(dataset.labels):
        raise InputError(f"{len(dataset.labels)} records make 2 to {len(dataset.labels)} folds, not {count}")
    pieces = np.array_split(generator.permutation(len(dataset.labels)), count)
    for i, piece in enumerate(pieces):
        yield _test_on(dataset, piece, np.concatenate(pieces[:i] + pieces[i + 1 :]))


def _test_on(dataset: Dataset, test: NDArray[np.int64], train: NDArray[np.int64]) -> Dataset:
    return replace(take(dataset, train), test_features=dataset.features[test], test_labels=dataset.labels[test])
