"""Apply the encoder of an experiment to its records, once, and check that it is a fixed function of one record.

Features must be a function of their own record alone: if other records had a part in them, clipping the gradient of one
record would not bound its influence, and nobody would have been charged for it. Built-in encoders are such by
construction (`polyeps.encoders`). An own one may be a function, a module or a scikit-learn transformer; what trying it
can show is checked. Parameters that were fitted to private records elsewhere cannot be noticed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cache, cached_property, lru_cache, partial
from importlib import resources
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from polyeps.accounting.cache import default_directory
from polyeps.accounting.calibration import ProgressCallback, going_on
from polyeps.data.dataset import Dataset, RecordLayout
from polyeps.encoders import EncoderChoice
from polyeps.encoders.built_in import ENCODERS
from polyeps.encoders.feature_files import load_features, save_features
from polyeps.engine.threads import side_by_side
from polyeps.errors import InputError
from polyeps.experiment.encoder_checks import (
    Sample,
    alike,
    check_one_by_one,
    check_unchanged,
    check_whole_batch,
    differs,
    state_of,
)
from polyeps.experiment.registry import BUILT_IN, Encoder, Parts

_FITTED = 16  # made-up records that a transformer is fitted to
_AT_A_TIME = 512  # records
_SEED = 1  # of the weights of own modules; a constant, so that a saved model finds the same encoder again
_ASSUMED = (
    "guarantees assume that the encoder {} was made without the clients' records; what it was fitted to cannot be "
    "checked"
)
# The encoded data set of the last use, for further seeds and methods: encoding does not depend on how it is split.
_MEMORY: dict[tuple[Any, ...], tuple[NDArray[np.float32], NDArray[np.float32]]] = {}


@dataclass(frozen=True, eq=False)
class FrozenEncoder:
    """An encoder, ready to be applied in batches: in eval mode, without gradients, on a device."""

    name: str
    make: Callable[[], Any]  # returns the encoder anew: a function, a module or a scikit-learn transformer
    shape: tuple[int, ...]  # of a record
    device: torch.device
    threaded: bool = False  # whether several threads may use it at once

    @cached_property
    def encoder(self) -> Encoder:
        """The encoder, made once."""
        return self.made()

    def made(self) -> Encoder:
        """Return the encoder, made anew; weights that it draws are the same every time."""
        with self._explained(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(_SEED)
            made = self.make()
        with self._explained():
            if isinstance(made, nn.Module):
                return made.to(self.device).eval().requires_grad_(False)
            if hasattr(made, "transform") and not callable(made):
                return _transformer(made, self.name, self.shape)
        if callable(made):
            encoder: Encoder = made
            return encoder
        raise InputError(
            f"model.encoder = {self.name} returned a {type(made).__name__}, not a function, a module or a scikit-learn "
            "transformer; return one of these"
        )

    def __call__(
        self, records: NDArray[Any], progress: ProgressCallback | None = None, encoder: Encoder | None = None
    ) -> NDArray[np.float32]:
        """Return the features of records, (n, ...)."""
        found: NDArray[np.float32] | None = None
        apply = partial(self._batch, encoder=encoder or self.encoder)
        places = range(0, len(records), _AT_A_TIME)
        threads = torch.get_num_threads() if self.threaded and self.device.type == "cpu" else 1
        with side_by_side(threads) as mapped:
            for first, some in zip(places, mapped(apply, (records[p : p + _AT_A_TIME] for p in places)), strict=True):
                if found is None:
                    found = np.empty((len(records), *some.shape[1:]), np.float32)
                if some.shape[1:] != found.shape[1:]:
                    raise InputError(
                        f"model.encoder = {self.name} returns features of different shapes; make them equal"
                    )
                found[first : first + len(some)] = some
                if progress:
                    progress(first + len(some), len(records))
        return found if found is not None else self(np.zeros((1, *self.shape), records.dtype), None, encoder)[:0]

    def _batch(self, records: NDArray[Any], encoder: Encoder) -> NDArray[np.float32]:
        with self._explained(), torch.no_grad():
            given = torch.from_numpy(records.copy())
            given = given.to(self.device) if isinstance(encoder, nn.Module) else given
            found = torch.as_tensor(encoder(given)).float().cpu().numpy()
        if found.ndim < 2 or len(found) != len(records) or not np.isfinite(found).all():
            raise InputError(f"model.encoder = {self.name} must return finite features, one row for each record")
        return found

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Say of an error in the encoder's code whose it is."""
        try:
            yield
        except InputError:
            raise
        except Exception as problem:
            raise InputError(
                f"model.encoder = {self.name} failed: {type(problem).__name__}: {problem}; an encoder is made by a "
                f"function without arguments and takes blocks of records, here of shape {self.shape}"
            ) from problem


def frozen(wanted: EncoderChoice, shape: tuple[int, ...], parts: Parts, device: Any = "cpu") -> FrozenEncoder:
    """Return the encoder that a name stands for, for records of a shape."""
    make = parts.find("model.encoder", wanted.name, {**ENCODERS, **parts.encoders}, "encoders")
    built_in = wanted.name in ENCODERS
    made = (lambda: make(shape, wanted)) if built_in else make
    return FrozenEncoder(wanted.name, made, shape, torch.device(device), threaded=built_in)


def encoded(
    dataset: Dataset,
    wanted: EncoderChoice,
    parts: Parts,
    device: Any = "cpu",
    progress: ProgressCallback | None = None,
) -> Dataset:
    """Return a data set with encoded records: encoded now, by an earlier job of this process, or by an earlier run."""
    encoder = frozen(wanted, dataset.features.shape[1:], parts, device)
    digests, code = _digests(dataset), _code_digest(wanted, parts)
    # The same function may return another encoder by now: with weights trained further, or read from another file.
    own = wanted.name not in ENCODERS
    state = state_of(encoder.encoder) if own else ""
    key = (digests, wanted, code, parts.encoders.get(wanted.name), str(encoder.device), state)
    if key not in _MEMORY or (own and not _belong(_MEMORY[key][0], encoder, dataset.features)):
        _MEMORY.clear()
        _MEMORY[key] = _encoded(encoder, dataset, _subjects(encoder, wanted, digests, code), progress)
    features, test = _MEMORY[key]
    return _with_features(dataset, wanted, features, test, "".join(digests))


def encoded_here(dataset: Dataset, wanted: EncoderChoice) -> Dataset:
    """Return a data set encoded by a built-in encoder; no features are kept anywhere, as a silo's records demand."""
    encoder = frozen(wanted, dataset.features.shape[1:], BUILT_IN)
    return _with_features(dataset, wanted, encoder(dataset.features), encoder(dataset.test_features), "")


def planned(dataset: Dataset, wanted: EncoderChoice, parts: Parts) -> Dataset:
    """Return a data set with features of the right shape, all of them zero: for plans, which use no records."""
    shape = frozen(wanted, dataset.features.shape[1:], parts)(Sample.of(dataset.features).made_up).shape[1:]
    zeros = np.zeros((1, *shape), np.float32)
    rows, tests = len(dataset.features), len(dataset.test_features)
    features, test = (np.broadcast_to(zeros, (count, *shape)) for count in (rows, tests))
    return _with_features(dataset, wanted, features, test, "")


def _with_features(
    dataset: Dataset,
    wanted: EncoderChoice,
    features: NDArray[np.float32],
    test: NDArray[np.float32],
    digest: str,
) -> Dataset:
    kind = str(dataset.features.dtype)
    layout = RecordLayout(dataset.features.shape[1:], kind, dataset.columns, dataset.words, digest)
    said = () if wanted.name in ENCODERS else (_ASSUMED.format(wanted.name),)
    return replace(
        dataset,
        features=features,
        test_features=test,
        columns=(),
        words=(),
        encoded_from=layout,
        remarks=(*dataset.remarks, *said),
    )


def _encoded(
    encoder: FrozenEncoder,
    dataset: Dataset,
    subjects: Sequence[Mapping[str, Any] | None],
    progress: ProgressCallback | None,
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return the features of training and test records, checked."""
    sample, state = Sample.of(dataset.features), state_of(encoder.encoder)
    # First, none of the records: an encoder that fits itself to what it sees first would depend on them.
    before = encoder(sample.made_up)
    expected = check_one_by_one(encoder.name, encoder, partial(encoder, encoder=encoder.made()), sample)
    total, done, found = len(dataset.features) + len(dataset.test_features), 0, list[NDArray[np.float32]]()
    fresh: dict[int, Mapping[str, Any] | None] = {}
    for records, subject in zip((dataset.features, dataset.test_features), subjects, strict=True):
        rows = None if subject is None else load_features(default_directory(), subject)
        if rows is not None and not _belong(rows, encoder, records):
            rows = None
        if rows is None:
            rows = encoder(records, progress and going_on(progress, done, total))
            fresh[len(found)] = subject
        found.append(rows)
        done += len(records)
    if not alike(found[0][sample.places], expected):
        raise differs(encoder.name)
    if 0 in fresh and not encoder.threaded:  # a built-in one treats records apart by construction
        check_whole_batch(encoder.name, encoder, sample, dataset.features, found[0], _AT_A_TIME)
    check_unchanged(encoder.name, before, encoder(sample.made_up))
    if state_of(encoder.encoder) != state:
        raise InputError(f"model.encoder = {encoder.name} changes its own buffers in eval mode; keep no state in it")
    for place, subject in fresh.items():  # only what has passed all checks
        if subject is not None and len(found[place]):
            save_features(default_directory(), subject, found[place])
    return found[0], found[1]


def _belong(features: NDArray[np.float32], encoder: FrozenEncoder, records: NDArray[Any]) -> bool:
    """Return whether stored features are those of some records, encoded now."""
    if len(features) != len(records) or not len(records):
        return False
    sample = Sample.of(records)
    return alike(features[sample.places], encoder(sample.records))


@lru_cache(maxsize=2)
def _digests(dataset: Dataset) -> tuple[str, str]:
    """Return checksums of training and test records; labels have no part in features."""
    return _digest(dataset.features), _digest(dataset.test_features)


def _digest(records: NDArray[Any]) -> str:
    found = hashlib.sha256(f"{records.dtype} {records.shape}".encode())
    found.update(np.ascontiguousarray(records).data)
    return found.hexdigest()


def _code_digest(wanted: EncoderChoice, parts: Parts) -> str | None:
    """Return the checksum of the code of an encoder; None where it has no file."""
    if wanted.name in ENCODERS:
        return _built_in_digest()
    return None if parts.code is None else parts.code.digests.get(wanted.name.partition(":")[0])


@cache
def _built_in_digest() -> str:
    files = sorted((one for one in resources.files("polyeps.encoders").iterdir()), key=lambda one: one.name)
    return hashlib.sha256(b"".join(one.read_bytes() for one in files if one.name.endswith(".py"))).hexdigest()


def _subjects(
    encoder: FrozenEncoder, wanted: EncoderChoice, digests: tuple[str, str], code: str | None
) -> tuple[Mapping[str, Any] | None, ...]:
    """Return what the files of training and test features must say; None where no file is kept."""
    if code is None:
        return (None, None)
    known = {
        **asdict(wanted),
        "code": code,
        "state": state_of(encoder.encoder),
        "device": encoder.device.type,
        "torch": str(torch.__version__),
    }
    return tuple({"records": one, **known} for one in digests)


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
        blocks = [scale * chance.random((_FITTED, *shape)) + shift for scale, shift in ((1.0, 0.0), (3.0, -2.0))]
        fitted = [clone(made).fit(block.reshape(_FITTED, -1)) for block in blocks]
        if not all(np.array_equal(apply(fitted[0], block), apply(fitted[1], block)) for block in blocks):
            raise InputError(
                f"model.encoder = {name} returns a {type(made).__name__} that learns from records; fit it to public "
                "data in that function, or scale columns by declared ranges (data.columns)"
            ) from None
        made = fitted[0]

    def encoder(records: Tensor) -> Tensor:
        return torch.from_numpy(apply(made, records.numpy()))

    return encoder
