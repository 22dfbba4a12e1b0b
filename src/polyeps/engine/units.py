"""Several records of one person as one example: sampled together, clipped together, charged once.

An example holds the person's records, padded to a common number: features (L, ...), labels (L,), of which -1 marks
padding. Its loss is the mean over the person's own records. Everything else in the engine is as for single records.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from polyeps.engine.losses import Loss

NO_RECORD = -1  # the label of a row that is no record


@dataclass(frozen=True)
class UnitLoss:
    """The mean loss over the records of each example; padding counts for nothing."""

    loss: Loss  # of single records

    def __call__(self, outputs: Tensor, labels: Tensor) -> Tensor:
        weights = self._weights(labels)
        losses = self.loss(outputs.flatten(0, 1), labels.clamp(min=0).flatten()).reshape(labels.shape)
        return torch.where(weights > 0, losses * weights, 0.0).sum(1)

    def gradients(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Return each example's gradient by its outputs (T, L, ...)."""
        from polyeps.engine.network import output_gradients

        weights = self._weights(labels).flatten()
        rows = output_gradients(self.loss, outputs.flatten(0, 1), labels.clamp(min=0).flatten(), None)
        weights = weights.reshape(-1, *(1,) * (rows.dim() - 1))
        return torch.where(weights > 0, rows * weights, 0.0).reshape(outputs.shape)

    def example_labels(self, outputs: Tensor, generator: torch.Generator) -> Tensor:
        """Return labels to check a module with: some rows are padding."""
        classes = max(2, outputs.shape[-1])
        return torch.randint(NO_RECORD, classes, outputs.shape[:2], generator=generator).to(outputs.device)

    @staticmethod
    def _weights(labels: Tensor) -> Tensor:
        """One over the number of the example's records, for each of them; 0 for padding."""
        real = (labels != NO_RECORD).float()
        return real / real.sum(1, keepdim=True).clamp(min=1)


class EachRecord(nn.Module):
    """A module applied to each record of an example."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, records: Tensor) -> Tensor:
        """Return the outputs (T, L, ...) for records (T, L, ...)."""
        outputs: Tensor = self.module(records.flatten(0, 1))
        return outputs.reshape(*records.shape[:2], *outputs.shape[1:])
