"""Full batches: steps on all records of every client, read where they lie, without sampling, padding or copies.

Rows are computed in pieces: some whole clients or, where one client's rows exceed the memory, a part of them. A piece
is a view of the block of records. No coins are tossed for batches; noise, and draws inside a model, come from the same
streams as with other batches, in the same order.

The number of rows and the place of each are public here: one record that is replaced by an empty one moves no other.
Products can then have any shape and alignment, and their rounding still depends on a row's own record alone.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping, Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from polyeps.core import Records, Streams
from polyeps.engine.kept_memory import keep_freed_memory
from polyeps.engine.layout import KnownSquares, Layout, RowGroup
from polyeps.engine.loop import Learning, Pace, Settings, draw_noise, move, pace
from polyeps.engine.network import add_gradients
from polyeps.engine.noise import SeededStreams
from polyeps.engine.philox import fill_normals
from polyeps.engine.row_draws import RowDraws, client_keys
from polyeps.engine.row_norms import squared_row_norms
from polyeps.engine.units import records_held
from polyeps.errors import InputError
from polyeps.models import Model

_CACHED = 1 << 24  # floats of a piece on the CPU: about what the cache holds
# Of blocks of records: their version and shape, and the squared norms of their rows.
_SQUARES: MutableMapping[Tensor, tuple[tuple[int, ...], Tensor]] = WeakTensorKeyDictionary()
_MULTIPLE = 32  # rows of a part of a client, so that sums are formed from the same blocks of rows


class Piece(NamedTuple):
    """Neighbouring clients first to last (exclusive), and the records to compute; all of them, unless it is one client.

    Records are a slice of the block or, where clients do not lie side by side, their numbers.
    """

    first: int
    last: int
    records: slice | Tensor
    counts: tuple[int, ...]  # of each client


def train_on_all(
    model: Model,
    starts: Tensor,
    anchor: Tensor,
    records: Records,
    streams: Streams,
    settings: Settings,
    memory: int | None = None,
) -> Tensor:
    """Return the models (n, d) after local training from starts (n, d) with full batches, on the records' device."""
    device = starts.device
    if settings.deviation is not None and device.type != "cpu" and not isinstance(streams, SeededStreams):
        raise InputError("noise for deployment is drawn on the CPU; move the records there")
    keep_freed_memory()
    keys = client_keys(streams).to(device) if model.network.random else None
    counts, total = records.counts, int(settings.steps.max(initial=0))
    fixed = pace(settings, np.broadcast_to(counts, (total, len(counts))), device)
    models = starts.clone()
    velocity = None if fixed.momentum is None else torch.zeros_like(models)
    learning = Learning(model.network, model.loss, models, velocity, anchor, keys, records.spans[:, 0].to(device))
    most = _rows_of_a_piece(model, records, memory)
    for number, gradient in enumerate(_noise(streams, settings, fixed, models)):
        active = np.flatnonzero((settings.steps > number) & (counts > 0)).tolist()
        for piece in pieces(records.spans.cpu().numpy(), active, most):
            _add(learning, records, piece, fixed, number, gradient)
        move(learning, fixed, fixed.rate[number], fixed.divisor[number], gradient)
    return models


def pieces(
    spans: np.ndarray[tuple[int, int], np.dtype[np.int64]], clients: Sequence[int], most: int
) -> Iterator[Piece]:
    """Yield the records of some clients in pieces of at most about `most` rows, in the clients' order."""
    together: list[int] = []

    def whole() -> Iterator[Piece]:
        if together:
            first, ends = spans[together].T
            held = tuple((ends - first).tolist())
            if (first[1:] == ends[:-1]).all():
                rows: slice | Tensor = slice(int(first[0]), int(ends[-1]))
            else:
                rows = torch.from_numpy(np.concatenate([np.arange(*spans[client]) for client in together]))
            yield Piece(together[0], together[-1] + 1, rows, held)
            together.clear()

    rows = 0
    for client in clients:
        first, end = spans[client].tolist()
        if together and (rows + end - first > most or client != together[-1] + 1):
            yield from whole()
        if not together:
            rows = 0
        if end - first > most:
            for part in range(first, end, most):
                until = min(part + most, end)
                yield Piece(client, client + 1, slice(part, until), (until - part,))
            continue
        together.append(client)
        rows += end - first
    yield from whole()


def _rows_of_a_piece(model: Model, records: Records, memory: int | None) -> int:
    """Return how many rows fit into memory (bytes) and, on the CPU, about into the cache."""
    per_row = model.floats_per_row * (records.labels.shape[1] if records.padded else 1) * 1.2
    per_row += model.size if model.person else 0  # the gradients of persons are formed
    if memory is not None:
        floats = memory / 4
    else:
        floats = torch.cuda.mem_get_info()[1] / 12 if records.features.is_cuda else _CACHED
    rows = max(1, int(floats / per_row))
    return rows if rows < _MULTIPLE else rows // _MULTIPLE * _MULTIPLE


def _noise(streams: Streams, settings: Settings, fixed: Pace, models: Tensor) -> Iterator[Tensor]:
    """Yield the noise of each step, (n, d), to which gradients are added; zeros without noise."""
    if models.device.type != "cpu" and fixed.deviation is not None:
        assert isinstance(streams, SeededStreams)
        yield from _noise_on_device(streams, fixed, models)
        return
    for drawn in draw_noise(streams, settings, models.shape[1]):
        yield torch.zeros_like(models) if drawn is None else drawn


def _noise_on_device(streams: SeededStreams, fixed: Pace, models: Tensor) -> Iterator[Tensor]:
    """Yield the noise of each step as `train_on_device` draws it."""
    assert fixed.deviation is not None
    keys, gradient = streams.keys_on(models.device), torch.empty_like(models)
    for number in range(len(fixed.rate)):
        fill_normals(gradient, keys, torch.tensor([number], device=models.device))
        yield gradient.mul_(fixed.deviation)


def _add(learning: Learning, records: Records, piece: Piece, fixed: Pace, number: int, gradient: Tensor) -> None:
    """Add the piece's clipped row gradients to the sums of its clients."""
    mine = slice(piece.first, piece.last)
    device = learning.models.device
    held = torch.tensor(piece.counts, device=device)
    owner = torch.repeat_interleave(torch.arange(len(held), device=device), held, output_size=sum(piece.counts))
    chosen = piece.records if isinstance(piece.records, slice) else piece.records.to(device)
    draws = None
    if learning.keys is not None and learning.starts is not None:
        rows = torch.arange(chosen.start, chosen.stop, device=device) if isinstance(chosen, slice) else chosen
        keys, first = learning.keys[mine], learning.starts[mine]
        now = torch.tensor([number], device=device)
        draws = RowDraws(keys[owner], rows - first[owner], now, records_held(records, rows))
    features, labels = records.features[chosen], records.labels[chosen]
    clip = None if fixed.clip is None else fixed.clip[mine]
    known = None if clip is None else _known_squares(records.features, chosen)
    layout = Layout(len(held), tuple(_groups(piece.counts)), owner, draws, settled=True, known=known)
    network, loss, models = learning[:3]
    add_gradients(network, loss, models[mine], features, labels, layout, None, clip, gradient[mine])


def _known_squares(features: Tensor, chosen: slice | Tensor) -> KnownSquares | None:
    """Return some rows of a block (R, p) and their squared norms, which are computed once and kept with the block."""
    if features.is_cuda or features.dim() != 2 or features.is_inference() or not isinstance(chosen, slice):
        return None
    block = features if features._base is None else features._base
    state = features._version, features.data_ptr(), *features.shape, *features.stride()
    held, squares = _SQUARES.get(block, ((), features))
    if held != state:  # a new block, or one that was written to
        squares = torch.full((len(features),), torch.nan, dtype=torch.float64)
        _SQUARES[block] = state, squares
    rows, mine = features[chosen], squares[chosen]
    if bool(mine.isnan().any()):
        mine.copy_(squared_row_norms(rows))
    return KnownSquares(rows, mine, features._version)


def _groups(counts: Sequence[int]) -> Iterator[RowGroup]:
    """Yield neighbouring clients with the same number of rows as groups."""
    first = start = 0
    for width, alike in groupby(counts):
        last = first + len(list(alike))
        yield RowGroup(first, last, width, start)
        first, start = last, start + (last - first) * width
