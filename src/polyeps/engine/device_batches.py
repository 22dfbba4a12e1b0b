"""Batches on the device: Poisson batches are drawn and laid out there, as by `sampling` and `layout` on the CPU.

For thousands of clients the host would need longer to draw Poisson batches than the device to train on them. Batches of
fixed size, used only by `published` forms, are drawn by the host and copied. All steps of a run have one shape, so that
one captured graph serves them all.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from polyeps.core import Streams
from polyeps.engine.layout import cuts_of, padding_is_cheaper
from polyeps.engine.loop import Settings, draw_batches
from polyeps.engine.noise import SeededStreams
from polyeps.engine.sampling import Batches, check_sampling_rates, draws_needed

_GROUPS = 8
_ROOM = 64  # of all rows, the share that is kept free


class BatchShape(NamedTuple):
    """The common shape of all steps of a run: where the frame is cut, and the width of each group."""

    ordered: bool  # by batch size; else the clients' own order
    cuts: tuple[int, ...]
    widths: tuple[int, ...]  # ragged: of all clients together
    ragged: bool = False


class PlacedBatches(NamedTuple):
    """The batches of all steps of a run."""

    shape: BatchShape
    sizes: Tensor  # (S, n)
    order: Tensor | None  # (S, n) frame position -> client
    records: Tensor  # (S, T): the record in the row; in padding, any of the same client
    valid: Tensor  # (S, T) float32: 0 where the row is padding
    owner: Tensor | None = None  # (S, T) whose row it is, and
    spans: Tensor | None = None  # (S, n + 1) where each client's rows begin, if they are ragged


class DrawnRecords(NamedTuple):
    """The records that were drawn, in any order."""

    client: Tensor
    step: Tensor
    record: Tensor
    within: Tensor  # the place of the record in its batch
    sizes: Tensor  # (S, n)


def place_batches(
    streams: Streams,
    spans: Tensor,
    settings: Settings,
    size: int,
    floats_per_row: int,
    last: BatchShape | None,
    device: torch.device,
    ragged: bool = False,
) -> PlacedBatches:
    """Draw all batches of a run of at least one step, in the last run's shape if they fit."""
    if settings.batch is None:
        drawn = _draw(streams, spans.to(device), settings, device)
    else:
        drawn = _upload(draw_batches(streams, spans.cpu().numpy(), settings), device)
    if ragged:
        return _ragged(drawn, spans.to(device), last)
    steps, clients = drawn.sizes.shape
    order = None
    if last is None:
        padding = float(steps * clients * drawn.sizes.max() - drawn.sizes.sum())
        ordered = not padding_is_cheaper(padding, steps, clients, size, floats_per_row)
    else:
        ordered = last.ordered
    if ordered:
        order = torch.argsort(drawn.sizes, dim=1, descending=True, stable=True)
        framed = torch.gather(drawn.sizes, 1, order)
        cuts = last.cuts if last else tuple(cuts_of(framed.double().mean(0).cpu().numpy(), _GROUPS))
        position = torch.argsort(order, dim=1)[drawn.step, drawn.client]
    else:
        framed, cuts, position = drawn.sizes, (0, clients), drawn.client
    widest = torch.stack([framed[:, a:b].amax() for a, b in pairwise(cuts)]).tolist()
    # A group that has outgrown the last shape gets extra room: every new shape costs a captured graph.
    widths = tuple(b if a <= b else a + 1 for a, b in zip(widest, last.widths if last else widest, strict=True))
    shape = BatchShape(ordered, cuts, widths)
    per_client = np.repeat(np.array(widths, np.int64), np.diff(cuts))  # rows of each frame position
    slot = torch.from_numpy(np.cumsum(per_client) - per_client).to(device)[position] + drawn.within
    first, rows = spans[:, 0].to(device), int(per_client.sum())
    own = first.expand(steps, -1) if order is None else first[order]
    records = own.repeat_interleave(torch.from_numpy(per_client).to(device), 1, output_size=rows)
    valid = torch.zeros(steps, rows, device=device)
    records[drawn.step, slot] = drawn.record
    valid[drawn.step, slot] = 1
    return PlacedBatches(shape, drawn.sizes, order, records, valid)


def _ragged(drawn: DrawnRecords, spans: Tensor, last: BatchShape | None) -> PlacedBatches:
    """Place batches without padding but at the end of a step, where rows belong to no client's span."""
    steps, clients = drawn.sizes.shape
    ends = torch.cumsum(drawn.sizes, dim=1)
    starts = torch.cat([ends.new_zeros(steps, 1), ends], dim=1)
    wanted, held = int(ends[:, -1].max()), 0 if last is None else last.widths[0]
    # A little room, since every new shape costs a captured graph.
    rows = held if wanted <= held else wanted + wanted // _ROOM + 1
    records = spans[:1, 0].expand(steps, rows).clone()
    valid = torch.zeros(steps, rows, device=spans.device)
    owner = torch.zeros(steps, rows, dtype=torch.int64, device=spans.device)
    slot = starts[drawn.step, drawn.client] + drawn.within
    records[drawn.step, slot], owner[drawn.step, slot], valid[drawn.step, slot] = drawn.record, drawn.client, 1
    shape = BatchShape(False, (0, clients), (rows,), ragged=True)
    return PlacedBatches(shape, drawn.sizes, None, records, valid, owner, starts)


def _draw(streams: Streams, spans: Tensor, settings: Settings, device: torch.device) -> DrawnRecords:
    """Draw Poisson batches, as `sampling.poisson_batches` does."""
    check_sampling_rates(settings.rate)
    counts = spans.diff(dim=1)[:, 0]
    clients, longest = len(counts), int(settings.steps.max(initial=0))
    tosses = counts * torch.from_numpy(settings.steps).to(device)
    log_miss = torch.log1p(-torch.from_numpy(settings.rate).to(device))[:, None]
    draws = draws_needed(counts.cpu().numpy() * settings.steps, settings.rate)
    position = torch.full((clients, 1), -1.0, dtype=torch.float64, device=device)
    pieces = []
    while bool((position[:, -1] < tosses).any()):
        if isinstance(streams, SeededStreams):
            chance = streams.uniforms_on(draws, device)
        else:
            chance = torch.from_numpy(streams.uniforms(draws)).to(device)
        position = position[:, -1:] + torch.cumsum(torch.floor(torch.log(chance) / log_miss) + 1, dim=1)
        pieces.append(position)
    positions = torch.cat(pieces, dim=1) if pieces else position[:, :0]
    hit = positions < tosses[:, None]
    client = torch.repeat_interleave(torch.arange(clients, device=device), hit.sum(1))
    toss = positions[hit].long()
    own = counts.clamp(min=1)[client]
    step = toss // own
    record = toss - step * own + spans[client, 0]
    sizes = torch.bincount(step * clients + client, minlength=longest * clients).view(longest, clients)
    by_client = sizes.T.reshape(-1)
    starts = torch.cumsum(by_client, 0) - by_client
    within = torch.arange(len(client), device=device) - starts[client * longest + step]
    return DrawnRecords(client, step, record, within, sizes)


def _upload(batches: Batches, device: torch.device) -> DrawnRecords:
    """Copy batches that the host drew."""
    sizes = torch.from_numpy(batches.sizes).to(device)
    steps, clients = sizes.shape
    flat = sizes.view(-1)  # by step, then client, as the records lie
    total = len(batches.records)
    batch = torch.repeat_interleave(torch.arange(steps * clients, device=device), flat, output_size=total)
    within = torch.arange(total, device=device) - (torch.cumsum(flat, 0) - flat)[batch]
    record = torch.from_numpy(batches.records).to(device)
    return DrawnRecords(batch % clients, batch // clients, record, within, sizes)
