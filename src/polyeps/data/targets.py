"""Targets of records: a class, a class for each position, chances of classes, numbers, or several labels at once."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from polyeps.errors import DataError

# What a record's target is: its class; a class for each position, of which IGNORED ones do not count; a probability for
# each class; one or several numbers; or 0 or 1 for each of several labels.
Target = Literal["class", "sequence", "soft", "number", "labels"]
IGNORED = -100  # the label of a position that does not count, as in torch
# The targets that each loss takes; the first loss of a target is its default.
LOSS_TARGETS: Mapping[str, tuple[Target, ...]] = MappingProxyType(
    {
        "cross-entropy": ("class", "sequence"),
        "soft-cross-entropy": ("soft",),
        "hinge": ("class",),
        "binary-logistic": ("class",),
        "binary-hinge": ("class",),
        "squared": ("number",),
        "absolute": ("number",),
        "huber": ("number",),
        "multi-label": ("labels",),
    }
)
# In words, for sentences.
NAMES: Mapping[Target, str] = MappingProxyType(
    {
        "class": "classes",
        "sequence": "sequences of classes",
        "soft": "probabilities of classes",
        "number": "numbers",
        "labels": "several labels",
    }
)
_SUM = 1e-3  # by which the probabilities of a record may miss one


def default_loss(target: Target) -> str:
    """Return the loss of a target where none is named."""
    return next(loss for loss, takes in LOSS_TARGETS.items() if target in takes)


def stored(labels: Any, target: Target) -> NDArray[Any]:
    """Return targets as they are kept: whole numbers as int64, all others as float32."""
    found = np.asarray(labels.detach().cpu() if hasattr(labels, "detach") else labels)
    whole = target in ("class", "sequence")
    if found.dtype.kind not in ("iub" if whole else "fiub"):
        raise DataError(f"targets are {found.dtype}; {NAMES[target]} must be {'whole ' if whole else ''}numbers")
    with np.errstate(over="ignore"):
        return found.astype(np.int64 if whole else np.float32)


def check_targets(where: str, labels: NDArray[Any], target: Target, classes: int) -> None:
    """Refuse targets that are not what they are said to be; there are so many classes, numbers or labels."""
    wide = labels.ndim - 1
    shaped = {"class": wide == 0, "sequence": wide >= 1, "number": wide <= 1, "soft": wide == 1, "labels": wide == 1}
    width = 1 if not wide else labels.shape[1]
    if not shaped[target] or (target not in ("class", "sequence") and width != classes):
        wanted = {"class": "(records,)", "sequence": "(records, positions)"}.get(target, f"(records, {classes})")
        raise DataError(f"{where}: targets have shape {labels.shape}, and {NAMES[target]} have {wanted}; reshape them")
    if not labels.size:
        return
    flat = labels.reshape(len(labels), -1)
    wrong, remedy = _wrong(flat, target, classes)
    if wrong.any():
        record = int(wrong.any(1).argmax())
        value = flat[record][int(wrong[record].argmax())]
        raise DataError(f"{where}: label {value} of record {record} is {remedy}: correct it or remove the record")


def _wrong(flat: NDArray[Any], target: Target, classes: int) -> tuple[NDArray[np.bool_], str]:
    """Return which targets (R, k) are wrong, and what is wrong with them."""
    if target == "labels":
        return (flat != 0) & (flat != 1), "neither 0 nor 1"
    if target == "number":
        return ~np.isfinite(flat), "no finite number"
    if target == "soft":
        sums = np.abs(flat.sum(1, keepdims=True) - 1) > _SUM
        return ~np.isfinite(flat) | (flat < 0) | sums, "negative, or the record's do not add up to 1"
    outside = (flat < 0) | (flat >= classes)
    if target == "sequence":
        return outside & (flat != IGNORED), f"outside 0 to {classes - 1} and not {IGNORED}, which is ignored"
    return outside, f"outside 0 to {classes - 1}"


def example_targets(target: Target, shape: tuple[int, ...], classes: int, count: int = 5) -> NDArray[Any]:
    """Return made-up targets like those of records, to check a loss with."""
    chance = np.random.default_rng(0)
    if target in ("class", "sequence"):
        found = chance.integers(0, classes, (count, *shape))
        if target == "sequence":
            found[chance.random(found.shape) < 0.3] = IGNORED
        return found
    if target == "soft":
        return chance.dirichlet(np.ones(classes), count).astype(np.float32)
    drawn = chance.standard_normal((count, *shape))
    return (drawn > 0 if target == "labels" else drawn).astype(np.float32)
