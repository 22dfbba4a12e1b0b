"""How the batches of a cohort lie in one block of rows, so that ragged batches cost little padding.

The clients of a step are put in *frame order* and cut into groups of neighbours; within a group every client
has the same number of rows, so a group is one batched matrix product. Everything that knows no parameters
(activations, pooling) runs on all rows at once. Two layouts matter:

- sorted: frame order is by batch size, a few groups; the widths differ little inside a group;
- exact: frame order is the client order, a group per client; no padding and no copy of the models at all,
  right for models so large that one client's product is work enough.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from polyeps.engine.sampling import Batches


class Group(NamedTuple):
    """Clients first up to last (in frame order), each with `width` rows, from row `start` on."""

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
        """The group's part of a block of rows (T, ...), as (clients, width, ...)."""
        return torch.unflatten(block[self.start : self.stop], 0, (self.clients, self.width))


@dataclass(frozen=True)
class Layout:
    """One step's rows: who owns each of them, and in which groups they lie."""

    clients: int
    groups: tuple[Group, ...]
    owner: Tensor  # (T,) int64: the frame position of the client that owns the row

    @property
    def rows(self) -> int:
        return len(self.owner)


class Step(NamedTuple):
    """What one step reads: its layout, the order of the frame, and the records in the rows."""

    layout: Layout
    order: Tensor | None  # (n,) frame position -> client; None when they are the same
    records: Tensor  # (T,) int64: which record is in the row
    valid: Tensor | None  # (T,) float32: 0 where the row is padding; None when no row is


def lay_out(clients: int, cuts: list[int], widths: NDArray[np.int64], device: torch.device) -> Layout:
    """The layout with groups cut at the frame positions `cuts`, given each group's width."""
    groups: list[Group] = []
    start = 0
    for first, last, width in zip(cuts[:-1], cuts[1:], widths.tolist(), strict=True):
        if width:
            groups.append(Group(first, last, width, start))
            start = groups[-1].stop
    per_client = np.repeat(widths, np.diff(cuts))
    owner = torch.from_numpy(np.repeat(np.arange(clients), per_client)).to(device)
    return Layout(clients, tuple(groups), owner)


def exact_steps(batches: Batches) -> list[Step]:
    """One group per client and no padding; clients stay in their own order."""
    clients = batches.sizes.shape[1]
    cpu = torch.device("cpu")
    cuts = list(range(clients + 1))
    records = torch.from_numpy(batches.records)
    ends = np.cumsum(batches.sizes.sum(1))
    return [
        Step(lay_out(clients, cuts, sizes, cpu), None, records[end - sizes.sum() : end], None)
        for sizes, end in zip(batches.sizes, ends, strict=True)
    ]


def sorted_cuts(clients: int, groups: int) -> list[int]:
    """Where to cut clients sorted by falling batch size; sizes fall fastest at the head: it is cut finer."""
    fractions = np.linspace(0, 1, groups + 1) ** 1.5
    return sorted({*np.round(fractions * clients).astype(int).tolist()})


@dataclass(frozen=True)
class SortedPlan:
    """All steps laid out sorted by batch size: widths per step and group, and where each record goes."""

    cuts: list[int]
    widths: NDArray[np.int64]  # (S, groups)
    order: NDArray[np.int64]  # (S, n)
    slots: NDArray[np.int64]  # (events,): the row of each record within its step
    step: NDArray[np.int64]  # (events,)
    records: NDArray[np.int64]  # (events,)


def sorted_plan(batches: Batches, cuts: list[int], common: NDArray[np.int64] | None) -> SortedPlan:
    """Lay out every step: as narrow as it can be, or all alike with at least the widths `common`."""
    sizes = batches.sizes
    steps, clients = sizes.shape
    order = np.argsort(-sizes, axis=1, kind="stable")
    rank = np.empty_like(order)
    np.put_along_axis(rank, order, np.broadcast_to(np.arange(clients), order.shape), axis=1)
    ranked = np.take_along_axis(sizes, order, axis=1)
    widths = ranked[:, cuts[:-1]]  # sorted downwards: the first of a group is its largest
    if common is not None:
        widths = np.broadcast_to(np.maximum(widths.max(0), common), widths.shape)
    per_client = np.repeat(widths, np.diff(cuts), axis=1)  # (S, n) in frame order
    starts = np.cumsum(per_client, axis=1) - per_client
    flat = sizes.ravel()
    step = np.repeat(np.repeat(np.arange(steps), clients), flat)
    client = np.repeat(np.tile(np.arange(clients), steps), flat)
    within = np.arange(len(batches.records)) - np.repeat(np.cumsum(flat) - flat, flat)
    slots = starts[step, rank[step, client]] + within
    return SortedPlan(cuts, widths, order, slots, step, batches.records)


def sorted_steps(batches: Batches, groups: int) -> list[Step]:
    """Every step in a few groups of like batch sizes; each step as narrow as its own batches allow."""
    clients = batches.sizes.shape[1]
    plan = sorted_plan(batches, sorted_cuts(clients, groups), common=None)
    ends = np.searchsorted(plan.step, np.arange(len(plan.widths)), side="right")
    rows = plan.widths @ np.diff(plan.cuts)
    cpu = torch.device("cpu")
    result = []
    for step, (end, total) in enumerate(zip(ends.tolist(), rows.tolist(), strict=True)):
        events = slice(ends[step - 1] if step else 0, end)
        records = np.zeros(total, np.int64)
        valid = np.zeros(total, np.float32)
        records[plan.slots[events]] = plan.records[events]
        valid[plan.slots[events]] = 1
        layout = lay_out(clients, plan.cuts, plan.widths[step], cpu)
        order = torch.from_numpy(plan.order[step])
        result.append(Step(layout, order, torch.from_numpy(records), torch.from_numpy(valid)))
    return result
