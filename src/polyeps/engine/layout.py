"""Layouts: the batches of a cohort in one block of rows, so that ragged batches cost little padding.

The clients of a step are put in *frame order* and cut into groups of neighbours; within a group every client has the
same number of rows, so a group is one batched matrix product. Layers without parameters (activations, pooling) run on
all rows at once. There are four layouts:

- exact: the clients' own order, a group each: no padding, but a call per client; for large models;
- sorted: ordered by batch size, in a few groups: little padding, but the models are copied into frame order;
- padded: the clients' own order, one group: no copies, but all batches as wide as the widest; for models whose
  parameters outweigh their activations;
- ragged, on a device with Triton: the clients' own order without groups; kernels read where each client's rows begin.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from polyeps.engine.row_draws import RowDraws
from polyeps.engine.row_norms import squared_row_norms
from polyeps.engine.sampling import Batches


class RowGroup(NamedTuple):
    """Clients first to last (exclusive, in frame order), each with `width` rows, from row `start` on."""

    first: int
    last: int
    width: int
    start: int

    @property
    def clients(self) -> int:
        return self.last - self.first

    @property
    def stop(self) -> int:
        return self.start + self.clients * self.width

    def rows(self, block: Tensor) -> Tensor:
        """Return the group's part of a block of rows (T, ...), as (clients, width, ...)."""
        return torch.unflatten(block[self.start : self.stop], 0, (self.clients, self.width))


class KnownSquares(NamedTuple):
    """Squared norms (T,) of rows (T, p), as they were when the rows had been written to so many times."""

    rows: Tensor
    squares: Tensor
    version: int

    def of(self, rows: Tensor) -> bool:
        """Whether these are the same rows, unchanged."""
        same = rows.data_ptr() == self.rows.data_ptr() and rows.shape == self.rows.shape
        return same and rows.stride() == self.rows.stride() and self.rows._version == self.version


@dataclass(frozen=True)
class Layout:
    """One step's rows: the client that owns each row, and the groups."""

    clients: int
    groups: tuple[RowGroup, ...]
    owner: Tensor  # (T,) int64: the frame position of the client that owns the row
    draws: RowDraws | None = None  # random numbers for the rows' models; None: nothing is trained
    settled: bool = False  # whether the number of rows and the place of each are public: in full batches alone
    known: KnownSquares | None = None
    spans: Tensor | None = None  # (n + 1,) on a device: where each client's rows begin; then there are no groups

    def squared_norms(self, rows: Tensor) -> Tensor:
        """Return the squared norm of each row (T, p) in float64, computed unless it is known."""
        return self.known.squares if self.known is not None and self.known.of(rows) else squared_row_norms(rows)

    @property
    def rows(self) -> int:
        return len(self.owner)

    def widened(self, times: int) -> Layout:
        """Return the layout in which every row is `times` neighbouring rows."""
        if times == 1:
            return self
        groups = tuple(RowGroup(g.first, g.last, g.width * times, g.start * times) for g in self.groups)
        draws = None if self.draws is None else self.draws.widened(times)
        owner = self.owner[:, None].expand(-1, times).flatten()
        return Layout(self.clients, groups, owner, draws, self.settled)

    def parts(self, most: int) -> Iterator[tuple[slice, Layout]]:
        """Yield whole clients' rows, at most `most` unless one client has more, and their layout."""
        cut: list[RowGroup] = []
        for group in self.groups:
            step = max(1, most // group.width)
            for first in range(group.first, group.last, step):
                start = group.start + (first - group.first) * group.width
                cut.append(RowGroup(first, min(group.last, first + step), group.width, start))
        while cut:
            start, count = cut[0].start, 1
            while count < len(cut) and cut[count].stop - start <= most:
                count += 1
            rows = slice(start, cut[count - 1].stop)
            groups = tuple(group._replace(start=group.start - start) for group in cut[:count])
            yield rows, Layout(self.clients, groups, self.owner[rows])
            cut = cut[count:]


class TrainingStep(NamedTuple):
    """The inputs of one step: its layout, the frame order, and the records in the rows."""

    layout: Layout
    order: Tensor | None  # (n,) frame position -> client; None when they are the same
    records: Tensor  # (T,) int64: the record in the row
    valid: Tensor | None  # (T,) float32: 0 where the row is padding; None when no row is


def lay_out(clients: int, cuts: list[int], widths: NDArray[np.int64], device: torch.device) -> Layout:
    """Return the layout with groups cut at the frame positions `cuts`, given each group's width."""
    groups: list[RowGroup] = []
    start = 0
    for first, last, width in zip(cuts, cuts[1:], widths.tolist(), strict=False):
        if width:
            groups.append(RowGroup(first, last, width, start))
            start = groups[-1].stop
    per_client = np.repeat(widths, np.diff(cuts))
    owner = torch.from_numpy(np.repeat(np.arange(clients), per_client)).to(device)
    return Layout(clients, tuple(groups), owner)


@dataclass(frozen=True)
class Plan:
    """All steps of a run: the width of each step's groups, and the row of each record."""

    cuts: list[int]
    widths: NDArray[np.int64]  # (S, groups)
    order: NDArray[np.int64] | None  # (S, n) frame position -> client; None: the clients' own order
    step: NDArray[np.int64]  # (events,)
    slots: NDArray[np.int64]  # (events,): the row of each record within its step
    records: NDArray[np.int64]  # (events,)


def plan_sorted(batches: Batches, groups: int) -> Plan:
    """Plan steps sorted by batch size, in a few groups."""
    order = np.argsort(-batches.sizes, axis=1, kind="stable")
    falling = np.take_along_axis(batches.sizes, order, axis=1).mean(0)
    return _plan(batches, cuts_of(falling, groups), order)


def cuts_of(sizes: NDArray[np.float64], groups: int) -> list[int]:
    """Cut clients with falling mean batch sizes (n,) into groups, each time where it saves most padding."""
    cuts = [0, len(sizes)]
    for _ in range(groups - 1):
        # Cut at k, group a to b narrows from sizes[a] to sizes[k] for its b - k last clients.
        saved = np.zeros(len(sizes))
        for a, b in pairwise(cuts):
            saved[a:b] = (b - np.arange(a, b)) * (sizes[a] - sizes[a:b])
        best = int(saved.argmax())
        if not saved[best] > 0:
            break
        cuts = sorted([*cuts, best])
    return cuts


def plan_padded(batches: Batches, multiple: int = 1) -> Plan:
    """Plan steps with all clients in one group, as wide as the largest batch, rounded up to a multiple."""
    return _plan(batches, [0, batches.sizes.shape[1]], None, multiple)


def plan_exact(batches: Batches, multiple: int = 1) -> Plan:
    """Plan steps with one group per client, without padding but to a multiple."""
    return _plan(batches, list(range(batches.sizes.shape[1] + 1)), None, multiple)


def usual_width(sizes: NDArray[np.int64], line: int) -> int:
    """Return the smallest multiple of `line`, at least one, that at most one batch in 50 exceeds."""
    return max(1, -(-int(np.quantile(sizes, 0.98, method="higher")) // line)) * line


def padding_is_cheaper(padding: float, steps: int, clients: int, size: int, floats_per_row: int) -> bool:
    """Return whether `padding` rows in all move fewer floats than sorting the models by batch size.

    Sorting costs about four passes over all models a step: two copies, zeros and an addition.
    """
    return padding * floats_per_row < 4 * steps * clients * size


def _plan(batches: Batches, cuts: list[int], order: NDArray[np.int64] | None, multiple: int = 1) -> Plan:
    steps, clients = batches.sizes.shape
    own = np.broadcast_to(np.arange(clients), (steps, clients))
    rank = own if order is None else np.argsort(order, axis=1)  # client -> frame position
    framed = batches.sizes if order is None else np.take_along_axis(batches.sizes, order, axis=1)
    widths = -(-np.maximum.reduceat(framed, cuts[:-1], axis=1) // multiple) * multiple
    widths[widths @ np.diff(cuts) == 1] *= 2  # some kernels round a single row of a step apart
    per_client = np.repeat(widths, np.diff(cuts), axis=1)  # (S, n) in frame order
    starts = np.cumsum(per_client, axis=1) - per_client
    sizes = batches.sizes.ravel()
    step = np.repeat(np.repeat(np.arange(steps), clients), sizes)
    client = np.repeat(np.tile(np.arange(clients), steps), sizes)
    within = np.arange(len(batches.records)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    slots = starts[step, rank[step, client]] + within
    return Plan(cuts, widths, order, step, slots, batches.records)


def steps_of(plan: Plan, spare: NDArray[np.int64]) -> Iterator[TrainingStep]:
    """Yield the steps of a plan, each as narrow as its batches allow; spare (n,) is one record of every client.

    Padding holds the client's own spare record: a NaN record of another client would corrupt it.
    """
    clients = plan.cuts[-1]
    cpu = torch.device("cpu")
    ends = np.searchsorted(plan.step, np.arange(len(plan.widths)), side="right")
    rows = plan.widths @ np.diff(plan.cuts)
    for step, (end, total) in enumerate(zip(ends.tolist(), rows.tolist(), strict=True)):
        events = slice(ends[step - 1] if step else 0, end)
        slots, found = plan.slots[events], plan.records[events]
        order = None if plan.order is None else torch.from_numpy(plan.order[step])
        layout = lay_out(clients, plan.cuts, plan.widths[step], cpu)
        if len(found) == total:  # no padding
            records = np.empty(total, np.int64)
            records[slots] = found
            yield TrainingStep(layout, order, torch.from_numpy(records), None)
            continue
        own = spare if plan.order is None else spare[plan.order[step]]
        records, valid = own[layout.owner.numpy()], np.zeros(total, np.float32)
        records[slots], valid[slots] = found, 1
        yield TrainingStep(layout, order, torch.from_numpy(records), torch.from_numpy(valid))
