"""How much of a cohort is trained at once: slices of clients, and parts of one client's batch, that fit into memory."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from polyeps.core import Records
from polyeps.engine.fallback_layers import VmapLayer
from polyeps.engine.loop import Settings
from polyeps.models import Model

# On the CPU a chunk larger than this gains nothing more: 1 GiB holds a thousand small models' step.
CPU_MEMORY = 1 << 30
SIDE_BY_SIDE = 20_000  # parameters from which on threads train clients side by side


def chunks(model: Model, records: Records, settings: Settings, memory: int | None, at_once: int = 1) -> list[slice]:
    """Return slices of clients, all about equally large; the steps of so many of them fit into memory (bytes)."""
    rows = float(np.max(settings.rate * _rows_held(records), initial=0.0))
    rows = min(rows, rows_at_once(model, records, memory))
    client = _bytes_per_client(model) + rows * _bytes_per_row(model)
    most = max(1, int(_memory(records, memory) / at_once / client))
    pieces = max(1, math.ceil(records.clients / most / at_once)) * at_once
    edges = np.linspace(0, records.clients, pieces + 1).round().astype(int).tolist()
    return [slice(a, b) for a, b in pairwise(edges) if b > a]


def threads_of(model: Model, records: Records, settings: Settings, memory: int | None) -> int:
    """Return how many threads train clients side by side; 1: threads share each operation instead.

    Measured: operations of logistic regression are so short that Python's lock limits threads; those of a small
    network are not. Modules of users, and their losses, are not made for threads.
    """
    known = not any(isinstance(layer, VmapLayer) for layer in model.network.layers) and hasattr(model.loss, "gradients")
    if records.features.is_cuda or model.size < SIDE_BY_SIDE or not known:
        return 1
    rows = float(np.max(settings.rate * _rows_held(records), initial=0.0))
    client = _bytes_per_client(model) + rows * _bytes_per_row(model)
    return max(1, min(torch.get_num_threads(), records.clients, int(_memory(records, memory) / client)))


def rows_at_once(model: Model, records: Records, memory: int | None) -> int:
    """Return how many rows of one client's batch fit into memory (bytes); more take several passes."""
    return max(1, int((_memory(records, memory) - _bytes_per_client(model)) / _bytes_per_row(model)))


def _memory(records: Records, memory: int | None) -> int:
    if memory is not None:
        return memory
    # Of all the device's memory, not of what is free: chunks must stay the same from round to round.
    return torch.cuda.mem_get_info()[1] // 3 if records.features.is_cuda else CPU_MEMORY


def _bytes_per_client(model: Model) -> int:
    """Return what a client takes beside its rows: models, gradient, their framed copies and room for noise."""
    return 4 * 6 * model.size


def _bytes_per_row(model: Model) -> float:
    """Return what a row of a batch takes; the gradients of persons are formed."""
    return 4 * 1.2 * (model.floats_per_row + (model.size if model.person else 0))


def _rows_held(records: Records) -> NDArray[np.float64]:
    """Return about how many rows, padding included, all of a client's records take, (n,)."""
    counts = records.counts.astype(np.float64)
    if records.units is None:
        return counts * (records.labels.shape[1] if records.padded else 1)
    before = np.append(0.0, np.cumsum(records.units.diff(dim=1)[:, 0].cpu().numpy()))
    first, end = records.spans.cpu().numpy().T
    held: NDArray[np.float64] = before[end] - before[first]
    return 2 * held  # persons of one pass differ in length up to four times
