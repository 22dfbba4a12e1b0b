"""A bidirectional LSTM that reads an image row by row."""

import torch
from torch import Tensor, nn


class BidirectionalLSTM(nn.Module):
    """The last states of both directions, and a classifier."""

    def __init__(self, inputs: int, hidden: int, classes: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(inputs, hidden, batch_first=True, bidirectional=True)
        self.classifier = nn.Linear(2 * hidden, classes)

    def forward(self, records: Tensor) -> Tensor:
        rows = records.flatten(1, -2)  # (n, rows, columns)
        _, (last, _) = self.lstm(rows)
        found: Tensor = self.classifier(torch.cat([last[0], last[1]], dim=1))
        return found


def bidirectional_lstm(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Return the module for records of a shape (..., rows, columns)."""
    return BidirectionalLSTM(shape[-1], 16, classes)
