"""All records of one person as one example: sampled together, clipped together, charged once.

The loss of an example is the mean over the person's own records. Examples of a batch are padded to a common number of
records: features (T, L, ...), labels (T, L, ...), of which -1, or NaN where they are floats, marks padding. Layers run
on all records at once, and each layer's gradients are added up by person before norms are computed. Everything else in
the engine is as for single records.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from polyeps.core import Records
from polyeps.engine.contributions import Contribution
from polyeps.engine.layout import Layout
from polyeps.engine.losses import Loss
from polyeps.engine.network import Network, output_gradients
from polyeps.engine.sampling import Batches

NO_RECORD = -1  # the label of a row that is no record; NaN where labels are floats
_TIMES = 4  # examples whose numbers of records differ less than so many times are padded to the same number
_PASS = 1 << 20  # floats of padding in a step that cost about as much as another pass


@dataclass(frozen=True)
class UnitLoss:
    """The mean loss over the records of each example; padding counts for nothing."""

    loss: Loss  # of single records

    def __call__(self, outputs: Tensor, labels: Tensor) -> Tensor:
        real = is_record(labels)
        weights = self._weights(real)
        losses = self.loss(outputs.flatten(0, 1), self._filled(labels, real)).reshape(real.shape)
        return torch.where(real, losses * weights, 0.0).sum(1)

    def gradients(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Return each example's gradient by its outputs (T, L, ...)."""
        real = is_record(labels)
        weights = self._weights(real).flatten()
        rows = output_gradients(self.loss, outputs.flatten(0, 1), self._filled(labels, real), None)
        weights = weights.reshape(-1, *(1,) * (rows.dim() - 1))
        return torch.where(weights > 0, rows * weights, 0.0).reshape(outputs.shape)

    def example_labels(self, outputs: Tensor, generator: torch.Generator) -> Tensor:
        """Return labels to check a module with: some rows are padding."""
        own = getattr(self.loss, "example_labels", None)
        if own is not None:
            labels: Tensor = own(outputs.flatten(0, 1), generator).unflatten(0, outputs.shape[:2])
        else:
            labels = torch.randint(0, max(2, outputs.shape[-1]), outputs.shape[:2], generator=generator)
        padding = torch.rand(labels.shape[:2], generator=generator) < 0.3
        return marked(labels, padding.to(labels.device)).to(outputs.device)

    @staticmethod
    def _weights(real: Tensor) -> Tensor:
        """One over the number of the example's records, for each of them; 0 for padding."""
        counted = real.float()
        return counted / counted.sum(1, keepdim=True).clamp(min=1)

    @staticmethod
    def _filled(labels: Tensor, real: Tensor) -> Tensor:
        """Return the labels of all rows, (T · L, ...), with zeros for padding."""
        return torch.where(real.reshape(*real.shape, *(1,) * (labels.dim() - 2)), labels, 0).flatten(0, 1)


def is_record(labels: Tensor) -> Tensor:
    """Return which rows of examples with labels (T, L, ...) are records and no padding, (T, L)."""
    first = labels if labels.dim() == 2 else labels.flatten(2)[..., 0]
    return ~first.isnan() if labels.is_floating_point() else first != NO_RECORD


def marked(labels: Tensor, padding: Tensor) -> Tensor:
    """Mark rows of labels (T, L, ...) as padding (T, L), in place."""
    wide = padding.reshape(*padding.shape, *(1,) * (labels.dim() - 2))
    return labels.masked_fill_(wide, float("nan") if labels.is_floating_point() else NO_RECORD)


class EachRecord(nn.Module):
    """A module applied to each record of an example."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, records: Tensor) -> Tensor:
        """Return the outputs (T, L, ...) for records (T, L, ...)."""
        outputs: Tensor = self.module(records.flatten(0, 1))
        return outputs.reshape(*records.shape[:2], *outputs.shape[1:])


@dataclass(frozen=True)
class UnitNetwork(Network):
    """The layers of a model of single records, for examples (T, L, ...) of several records each."""

    def forward(self, models: Tensor, rows: Tensor, layout: Layout) -> tuple[Tensor, list[Any]]:
        outputs, saved = super().forward(models, rows.flatten(0, 1), layout.widened(rows.shape[1]))
        return outputs.unflatten(0, rows.shape[:2]), saved  # type: ignore[no-untyped-call]

    def contributions(
        self, models: Tensor, saved: list[Any], gradients: Tensor, layout: Layout
    ) -> list[Contribution | None]:
        records = gradients.shape[1]
        found = super().contributions(models, saved, gradients.flatten(0, 1), layout.widened(records))
        return [None if one is None else one.grouped(layout, records) for one in found]


def examples_of(records: Records, chosen: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return features and labels of some records or persons; `valid` (T,) is 0 where an example is padding.

    Persons are padded to the longest of them, each with a record of its own: under hostile weights, another one might
    overflow where its own do not.
    """
    if records.units is None:
        # index_select, not [...]: six times faster on the CPU for rows like these
        return records.features.index_select(0, chosen), records.labels.index_select(0, chosen)
    first, end = records.units.index_select(0, chosen).unbind(1)
    held = end - first
    counted = held if valid is None else held * (valid > 0)
    places = torch.arange(max(1, int(counted.max())) if len(chosen) else 1)
    real = places < counted[:, None]  # (T, L)
    empty = held == 0
    rows = torch.where(real, first[:, None] + places, torch.where(empty, 0, first)[:, None]).flatten()
    if not len(records.features):
        features = records.features.new_zeros(len(rows), *records.features.shape[1:])
        labels = records.labels.new_zeros(len(rows), *records.labels.shape[1:])
    else:
        features, labels = records.features.index_select(0, rows), records.labels.index_select(0, rows)
    features = features.unflatten(0, real.shape)  # type: ignore[no-untyped-call]
    features[empty] = 0
    return features, marked(labels.unflatten(0, real.shape), ~real)  # type: ignore[no-untyped-call]


def records_held(records: Records, chosen: Tensor) -> Tensor | None:
    """Return how many records some persons hold, (T,); None where an example is one record."""
    if records.units is not None:
        return records.units.index_select(0, chosen).diff(dim=1)[:, 0]
    if records.padded:
        return is_record(records.labels.index_select(0, chosen)).sum(1)
    return None


def split_by_length(batches: Batches, records: Records, floats: int) -> list[tuple[Batches, int]]:
    """Return the parts of batches to compute one after the other, each with the most records of its examples.

    Persons with few records are computed apart from those with many where their padding, of so many floats a record,
    would cost more than another pass: one person of ten thousand visits must not make everybody's batch as long.
    """
    if records.units is None:
        return [(batches, records.labels.shape[1] if records.padded else 1)]
    lengths = records.units.diff(dim=1)[:, 0].numpy()[batches.records].clip(min=1)
    steps = max(1, len(batches.sizes))
    limits: list[int] = []  # of each part: the most records of an example
    kinds = np.ceil(np.log(lengths) / np.log(_TIMES) - 1e-9)
    for kind in np.unique(kinds)[::-1]:
        most = int(lengths[kinds == kind].max())
        below = int((lengths <= most).sum())
        if not limits or below * (limits[-1] - most) * floats > steps * _PASS:
            limits.append(most)
    if len(limits) < 2:
        return [(batches, limits[0] if limits else 1)]
    part = np.searchsorted(limits[::-1], lengths)
    batch = np.repeat(np.arange(batches.sizes.size), batches.sizes.ravel())
    found = []
    for number, most in enumerate(limits[::-1]):
        mine = part == number
        sizes = np.bincount(batch[mine], minlength=batches.sizes.size).reshape(batches.sizes.shape)
        found.append((Batches(sizes, batches.records[mine]), most))
    return found
