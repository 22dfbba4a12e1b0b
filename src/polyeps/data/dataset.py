"""A data set as arrays, and ways to split or shrink it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyeps.core import check_person
from polyeps.data.named_inputs import Inputs
from polyeps.data.schema import Column, Schema
from polyeps.data.targets import Target, check_targets
from polyeps.errors import DataError, InputError

LabelArray = NDArray[np.int64]


@dataclass(frozen=True)
class RecordLayout:
    """The records of a data set before an encoder was applied to them."""

    shape: tuple[int, ...]  # of a record
    kind: str  # of its numbers: "float32", "int64"
    columns: tuple[str, ...]
    words: tuple[str, ...]
    digest: str  # of all of them


@dataclass(frozen=True, eq=False)
class Dataset:
    """Training records to be divided among clients, and test records."""

    name: str
    features: NDArray[Any]  # (R, ...) float32, or int64 word numbers
    labels: NDArray[Any]  # (R,) label i means classes[i]; or other targets (R, ...), as `target` says
    test_features: NDArray[Any]  # (T, ...)
    test_labels: NDArray[Any]  # (T, ...)
    classes: tuple[str, ...]  # or the names of what is predicted: numbers, or several labels
    groups: LabelArray | None = None  # (R,) the writer or client of each record: group_names[groups[i]]
    group_names: tuple[str, ...] = ()
    test_groups: LabelArray | None = None  # (T,) those of the test records, where they are known
    # (R,) the person of each record, where all records of a person are protected together; numbers are those of one
    # client: the same number in two groups is two persons.
    persons: LabelArray | None = None
    person: str = ""  # what such a person is called: "patient"
    test_persons: LabelArray | None = None  # (T,) those of the test records, where they are known
    schema: Schema | None = None  # how the columns of a table became features
    columns: tuple[str, ...] = ()  # names of the features, if they have any
    words: tuple[str, ...] = ()  # of a text: word number imdb.FIRST_WORD + i is words[i]
    encoded_from: RecordLayout | None = None  # what an encoder made the features from, if there is one
    own: bool = False  # whether it is a table of the user's own, and no public data set
    remarks: tuple[str, ...] = ()  # what a user should know about how it was read
    target: Target = "class"
    scale: Column | None = None  # of numbers: the range that was declared, and that they were scaled from
    inputs: Inputs | None = None  # what the features (R, W) hold, where a record has several inputs

    def __post_init__(self) -> None:
        for part, features, labels in (
            ("training", self.features, self.labels),
            ("test", self.test_features, self.test_labels),
        ):
            _check_records(f"{self.name}, {part} records", features, labels, self)
        for what, owners in (("group", self.groups), ("person", self.persons)):
            if owners is not None and len(owners) != len(self.labels):
                raise DataError(f"{self.name} has {len(self.labels)} records but {len(owners)} {what} numbers")
        if self.person:
            check_person(self.person)

    @cached_property
    def digest(self) -> str:
        """A checksum of the records, to see whether a run is resumed with the same."""
        found = hashlib.sha256(
            repr((self.classes, self.group_names, self.features.shape, self.test_features.shape)).encode()
        )
        if self.target != "class" or self.inputs is not None:
            found.update(repr((self.target, self.scale, self.inputs)).encode())
        parts = [self.labels, self.test_labels, self.groups, self.persons]
        if self.encoded_from is None:
            parts = [self.features, self.labels, self.test_features, self.test_labels, self.groups, self.persons]
        else:  # another device rounds features otherwise
            found.update(self.encoded_from.digest.encode())
        for part in parts:
            found.update(b"" if part is None else np.ascontiguousarray(part).tobytes())
        return found.hexdigest()


def _check_records(where: str, features: NDArray[Any], labels: NDArray[Any], dataset: Dataset) -> None:
    if len(features) != len(labels):
        raise DataError(f"{where}: {len(features)} rows of features but {len(labels)} labels; make them equal")
    if features.dtype.kind == "f" and not np.isfinite(features.sum(dtype=np.float64)):
        bad = np.argwhere(~np.isfinite(features))
        if len(bad):  # else the sum overflowed, and every value is finite
            at = tuple(int(i) for i in bad[0])
            feature = dataset.columns[at[1]] if dataset.columns else at[1:]
            raise DataError(f"{where}: feature {feature} of record {at[0]} is {features[at]}: fill it in or remove it")
    check_targets(where, labels, dataset.target, len(dataset.classes))


def without_test(
    name: str, features: NDArray[Any], labels: LabelArray, classes: tuple[str, ...], **others: Any
) -> Dataset:
    """Return a data set without test records; `hold_out` makes some."""
    return Dataset(name, features, labels, features[:0], labels[:0], classes, **others)


def take(dataset: Dataset, rows: NDArray[np.int64]) -> Dataset:
    """Return the training records with these row numbers; the test split stays."""
    parts: dict[str, Any] = {name: getattr(dataset, name) for name in ("features", "labels", "groups", "persons")}
    taken: dict[str, Any] = {name: None if part is None else part[rows] for name, part in parts.items()}
    return replace(dataset, **taken)


def subsample(dataset: Dataset, records: int, generator: np.random.Generator) -> Dataset:
    """Draw training records uniformly, without replacement."""
    held = len(dataset.labels)
    if not 1 <= records <= held:
        raise InputError(f"{dataset.name} has {held} training records: take 1 to that many, not {records}")
    return take(dataset, generator.choice(held, records, replace=False))


def pooled(dataset: Dataset) -> Dataset:
    """Return training and test records together as training records, as FedSel uses Adult's 48 842."""
    if dataset.groups is not None:
        raise InputError(f"{dataset.name} has groups for its training records only: it cannot be pooled")
    return replace(
        _untested(dataset),
        features=np.concatenate([dataset.features, dataset.test_features]),
        labels=np.concatenate([dataset.labels, dataset.test_labels]),
    )


def hold_out(dataset: Dataset, share: float, generator: np.random.Generator) -> Dataset:
    """Make a random share of the training records the test split of a data set that has none.

    Of your own tables it is a share of every client's records, at least one where a client has two; all records of a
    person stay together.
    """
    if len(dataset.test_labels):
        raise InputError(f"{dataset.name} has a published test split: use it, or pool the records first")
    # A model tested on persons that it was trained on would look better than it is.
    if dataset.own or dataset.persons is not None:
        return _held_out_by_client(dataset, share, generator)
    count = round(share * len(dataset.labels))
    if not 0 < count < len(dataset.labels):
        raise InputError(f"a share of {share} of {len(dataset.labels)} records leaves nothing to test or to train on")
    order = generator.permutation(len(dataset.labels))
    return _moved(dataset, order[count:], order[:count])


def _held_out_by_client(dataset: Dataset, share: float, generator: np.random.Generator) -> Dataset:
    client, unit = units_of(dataset)
    held = np.bincount(client)  # units of each client
    counts = np.minimum(np.maximum(1, np.rint(share * held)), held - 1).astype(np.int64)
    if not counts.any():
        whose = f"{dataset.person}s" if dataset.person else "records"
        raise InputError(f"{dataset.name} has no client with two {whose}, so nothing can be held out; add records")
    taken = first_of_each(client, counts, generator)[unit]
    return _moved(dataset, np.flatnonzero(~taken), np.flatnonzero(taken))


def _moved(dataset: Dataset, kept: NDArray[np.int64], tested: NDArray[np.int64]) -> Dataset:
    """Return a data set whose test records are some of the training records."""
    test = take(dataset, tested)
    return replace(
        take(dataset, kept),
        test_features=test.features,
        test_labels=test.labels,
        test_groups=test.groups,
        test_persons=test.persons,
    )


def units_of(dataset: Dataset) -> tuple[LabelArray, LabelArray]:
    """Return the client of each unit, (U,), and the unit of each record, (R,): a person of a client, or a record."""
    client = np.zeros(len(dataset.labels), np.int64) if dataset.groups is None else dataset.groups
    if dataset.persons is None:
        return client, np.arange(len(client))
    width = int(dataset.persons.max(initial=0)) + 1
    pairs, unit = np.unique(client * width + dataset.persons, return_inverse=True)
    return pairs // width, unit.ravel()


def first_of_each(owner: LabelArray, counts: LabelArray, generator: np.random.Generator) -> NDArray[np.bool_]:
    """Choose so many of each owner's things, by chance: whether each is chosen."""
    order = np.lexsort((generator.random(len(owner)), owner))  # each owner's things in random order
    sizes = np.bincount(owner, minlength=len(counts))
    place = np.arange(len(owner)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    chosen = np.zeros(len(owner), bool)
    chosen[order[place < np.repeat(counts, sizes)]] = True
    return chosen


def validation(dataset: Dataset, share: float, generator: np.random.Generator) -> Dataset:
    """Replace the test split by a random share of the training records, to choose settings by."""
    return hold_out(_untested(dataset), share, generator)


def _untested(dataset: Dataset) -> Dataset:
    return replace(
        dataset,
        test_features=dataset.test_features[:0],
        test_labels=dataset.test_labels[:0],
        test_groups=None,
        test_persons=None,
    )
