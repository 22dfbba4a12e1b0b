"""Rules for torch's recurrent layers and cells: their equations step by step, on the rows of all clients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from polyeps.engine.client_parameters import ClientParameter, ForwardPass, NoRuleError, outside_vmap
from polyeps.engine.stable_functions import steady

_State = tuple[Tensor, ...]  # the hidden state, and the cell of an LSTM
_Pair = tuple[Tensor, Tensor | None]  # weights and bias
_Cell = Callable[[Tensor, Tensor, _State], _State]  # of gates by input, gates by state, and the state before


def _sigmoid(values: Tensor) -> Tensor:
    return steady(torch.sigmoid, values)


def _lstm(drive: Tensor, recur: Tensor, before: _State) -> _State:
    enter, forget, candidate, leave = (drive + recur).chunk(4, -1)
    cell = _sigmoid(forget) * before[1] + _sigmoid(enter) * torch.tanh(candidate)
    return _sigmoid(leave) * torch.tanh(cell), cell


def _gru(drive: Tensor, recur: Tensor, before: _State) -> _State:
    (reset, update, new), (again, more, old) = drive.chunk(3, -1), recur.chunk(3, -1)
    candidate = torch.tanh(new + _sigmoid(reset + again) * old)
    share = _sigmoid(update + more)
    return ((1 - share) * candidate + share * before[0],)


def _tanh(drive: Tensor, recur: Tensor, _before: _State) -> _State:
    return (torch.tanh(drive + recur),)


def _relu(drive: Tensor, recur: Tensor, _before: _State) -> _State:
    return (torch.relu(drive + recur),)


def _cell_rule(cell: _Cell) -> Callable[..., Any]:
    def rule(
        of: ForwardPass,
        input: Tensor,
        hx: Tensor | Sequence[Tensor],
        w_ih: Tensor,
        w_hh: Tensor,
        b_ih: Tensor | None = None,
        b_hh: Tensor | None = None,
    ) -> Any:
        states = [hx] if isinstance(hx, Tensor) else list(hx)
        rows, *before = (of.physical(each) for each in (input, *states))
        weights = _pairs(of, [w_ih, w_hh, *([] if b_ih is None or b_hh is None else [b_ih, b_hh])])
        with outside_vmap():
            drive, recur = (_linear(of, each, *pair) for each, pair in zip((rows, before[0]), weights, strict=True))
            after = cell(drive, recur, tuple(before))
        seen = tuple(of.seen(each) for each in after)
        return seen[0] if isinstance(hx, Tensor) else seen

    return rule


def _layers_rule(cell: _Cell) -> Callable[..., Any]:
    def rule(
        of: ForwardPass,
        input: Tensor,
        hx: Tensor | Sequence[Tensor],
        params: Any,
        has_biases: Any,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool = False,
    ) -> Any:
        if not isinstance(params, list | tuple) or not isinstance(has_biases, bool):  # a packed sequence
            raise NoRuleError
        states = [hx] if isinstance(hx, Tensor) else list(hx)
        rows, *starts = (of.physical(each) for each in (input, *states))
        ways = 1 + bidirectional
        each = len(params) // (num_layers * ways)
        pairs = [_pairs(of, params[first : first + each]) for first in range(0, len(params), each)]
        with outside_vmap():
            time = 2 if batch_first else 1  # rows are (T, examples, length, in) or (T, length, examples, in)
            ends: list[_State] = []
            for depth in range(num_layers):
                if depth and dropout and train:
                    rows = rows * of.draws.kept(tuple(rows.shape[1:]), 1 - dropout) / (1 - dropout)
                found = []
                for way in range(ways):
                    place = depth * ways + way
                    mine = pairs[place]
                    before = tuple(start[:, place] for start in starts)
                    outputs, last = _run(of, cell, rows, before, mine, time, backwards=bool(way))
                    found.append(outputs)
                    ends.append(last)
                rows = torch.cat(found, dim=-1) if bidirectional else found[0]
            finals = [torch.stack([end[i] for end in ends], dim=1) for i in range(len(starts))]
        return (of.seen(rows), *(of.seen(final) for final in finals))

    return rule


def _run(
    of: ForwardPass, cell: _Cell, rows: Tensor, state: _State, pairs: list[_Pair], time: int, backwards: bool
) -> tuple[Tensor, _State]:
    """Return the states of one layer in one direction, and the last one."""
    drives = _linear(of, rows, *pairs[0]).unbind(time)
    outputs: list[Tensor] = []
    for drive in reversed(drives) if backwards else drives:
        state = cell(drive, _linear(of, state[0], *pairs[1]), state)
        for projection in pairs[2:]:
            state = (_linear(of, state[0], *projection), *state[1:])
        outputs.append(state[0])
    return torch.stack(outputs[::-1] if backwards else outputs, dim=time), state


def _pairs(of: ForwardPass, params: Sequence[Tensor]) -> list[_Pair]:
    """Return a layer's weights with their biases: of the input, of the state and, if any, of the projection."""

    def rows(each: Tensor, plain: bool) -> Tensor:
        return each if plain and isinstance(each, ClientParameter) else of.physical(each)

    matrices = [each for each in params if each.dim() == 2]
    vectors: list[Tensor | None] = [each for each in params if each.dim() == 1]
    found: list[_Pair] = []
    for weight, bias in zip_longest(matrices, vectors):
        plain = isinstance(weight, ClientParameter)
        found.append((rows(weight, plain), None if bias is None else rows(bias, plain)))
    return found


def _linear(of: ForwardPass, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    from polyeps.engine.function_rules import linear_of_rows

    return linear_of_rows(of, rows, weight, bias)


RECURRENT: dict[Any, Callable[..., Any]] = {
    torch.lstm: _layers_rule(_lstm),
    torch.gru: _layers_rule(_gru),
    torch.rnn_tanh: _layers_rule(_tanh),
    torch.rnn_relu: _layers_rule(_relu),
    torch.lstm_cell: _cell_rule(_lstm),
    torch.gru_cell: _cell_rule(_gru),
    torch.rnn_tanh_cell: _cell_rule(_tanh),
    torch.rnn_relu_cell: _cell_rule(_relu),
}
