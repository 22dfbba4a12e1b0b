"""LSTM layers batched over clients: torch's equations step by step, with every row's gate gradients."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from polyeps.engine.contributions import Contribution, ContributionParts, PositionProducts, RowGradients
from polyeps.engine.layers import times
from polyeps.engine.layout import Layout
from polyeps.engine.stable_functions import steady


class LastState(nn.Module):
    """An LSTM (batch_first) that returns its top layer's last state: (T, L, in) -> (T, hidden)."""

    def __init__(self, lstm: nn.LSTM) -> None:
        super().__init__()
        self.lstm = lstm

    def forward(self, rows: Tensor) -> Tensor:
        states: Tensor = self.lstm(rows)[0]
        return states[:, -1]


@dataclass(frozen=True)
class _Trace:
    """What one layer saves of the forward pass; time is the first dimension."""

    inputs: Tensor  # (T, L, in)
    states: Tensor  # (L + 1, T, hidden), the first is zero
    cells: Tensor  # (L + 1, T, hidden)
    gates: Tensor  # (L, T, 4, hidden): input, forget, candidate, output, after their activations


@dataclass(frozen=True)
class Lstm:
    """The layers of a `LastState`."""

    fan_in: int
    hidden: int
    layers: int
    bias: bool

    @property
    def size(self) -> int:
        return sum(sum(sizes) for sizes in self._sizes())

    def forward(self, weights: Tensor, rows: Tensor, layout: Layout) -> tuple[Tensor, list[_Trace]]:
        traces: list[_Trace] = []
        for mine in self._split(weights):
            traces.append(self._forward(mine, rows, layout))
            rows = traces[-1].states[1:].transpose(0, 1).contiguous()
        return rows[:, -1], traces

    def backward(
        self, weights: Tensor, saved: list[_Trace], gradients: Tensor, layout: Layout, inputs: bool
    ) -> tuple[Tensor | None, Contribution]:
        length = saved[-1].inputs.shape[1]
        states = gradients.new_zeros(length, *gradients.shape)  # (L, T, hidden)
        states[-1] = gradients
        onwards: Tensor | None = None
        parts: list[tuple[int, Contribution]] = []
        for depth in reversed(range(self.layers)):
            mine, trace = self._split(weights)[depth], saved[depth]
            gates = self._backward(mine, trace, states, layout).transpose(0, 1).contiguous()  # (T, L, 4h)
            before = trace.states[:-1].transpose(0, 1).contiguous()
            sizes = self._sizes()[depth]
            of_layer: list[Contribution] = [
                PositionProducts(layout, trace.inputs, gates, bias=False),
                PositionProducts(layout, before, gates, bias=False),
            ]
            if self.bias:  # both biases see the same gradient
                of_layer += [RowGradients(layout, gates.sum(1))] * 2
            parts = [*zip(sizes, of_layer, strict=True), *parts]
            if depth or inputs:
                onwards = times(layout, self._matrix(mine[0]).transpose(1, 2), None, gates)  # (T, L, in)
                states = onwards.transpose(0, 1)
        return onwards if inputs else None, ContributionParts(parts)

    def _forward(self, mine: list[Tensor], rows: Tensor, layout: Layout) -> _Trace:
        count, length, _ = rows.shape
        shift = mine[2] + mine[3] if self.bias else None
        drive = times(layout, self._matrix(mine[0]), shift, rows).transpose(0, 1)  # (L, T, 4h)
        recur = self._matrix(mine[1])
        states = rows.new_zeros(length + 1, count, self.hidden)
        cells = torch.zeros_like(states)
        gates = rows.new_empty(length, count, 4, self.hidden)
        for t in range(length):
            total = torch.unflatten((drive[t] + times(layout, recur, None, states[t])), 1, (4, self.hidden))
            gates[t] = steady(torch.sigmoid, total)
            torch.tanh(total[:, 2], out=gates[t, :, 2])
            enter, forget, candidate, leave = gates[t].unbind(1)
            torch.addcmul(forget * cells[t], enter, candidate, out=cells[t + 1])
            torch.mul(leave, torch.tanh(cells[t + 1]), out=states[t + 1])
        return _Trace(rows, states, cells, gates)

    def _backward(self, mine: list[Tensor], trace: _Trace, gradients: Tensor, layout: Layout) -> Tensor:
        """Return the gradients of the gates before their activations, (L, T, 4 * hidden)."""
        recur = self._matrix(mine[1]).transpose(1, 2)
        found = torch.empty_like(trace.gates)
        of_state = torch.zeros_like(trace.states[0])
        of_cell = torch.zeros_like(of_state)
        for t in reversed(range(len(trace.gates))):
            enter, forget, candidate, leave = trace.gates[t].unbind(1)
            squashed = torch.tanh(trace.cells[t + 1])
            state = gradients[t] + of_state
            cell = of_cell + state * leave * (1 - squashed.square())
            found[t, :, 0] = cell * candidate * enter * (1 - enter)
            found[t, :, 1] = cell * trace.cells[t] * forget * (1 - forget)
            found[t, :, 2] = cell * enter * (1 - candidate.square())
            found[t, :, 3] = state * squashed * leave * (1 - leave)
            of_cell = cell * forget
            of_state = times(layout, recur, None, found[t].flatten(1))
        return found.flatten(2)

    def _sizes(self) -> list[list[int]]:
        """Return the sizes per layer: input weights, recurrent weights and, if any, the two biases."""
        wide = 4 * self.hidden
        return [
            [wide * (self.hidden if depth else self.fan_in), wide * self.hidden, *[wide] * (2 * self.bias)]
            for depth in range(self.layers)
        ]

    def _split(self, weights: Tensor) -> list[list[Tensor]]:
        sizes = self._sizes()
        by_layer = torch.split(weights, [sum(of) for of in sizes], dim=1)
        return [list(torch.split(mine, of, dim=1)) for mine, of in zip(by_layer, sizes, strict=True)]

    def _matrix(self, columns: Tensor) -> Tensor:
        return torch.unflatten(columns, 1, (4 * self.hidden, -1))
