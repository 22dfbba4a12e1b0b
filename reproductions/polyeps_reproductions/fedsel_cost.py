"""Computing time of FedSel's reports (its paper's figure 2(e)): the selection of a coordinate, and the whole report.

Times are of a cohort at once, the least of several repetitions, since other programs may use the machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from polyeps.engine.noise import SeededStreams
from polyeps.mechanisms.selection import SelectName, pick
from polyeps.mechanisms.values import perturb

SELECTIONS: tuple[SelectName, ...] = ("uniform", "ps", "pe", "exp")
COHORTS = {10: 10_000, 100: 10_000, 300: 10_000, 1000: 3_000, 10_000: 1_000}


def least(work: Callable[[], object], repetitions: int) -> float:
    """Return the seconds of the fastest of several repetitions."""
    times = []
    for _ in range(repetitions):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


def report(select: SelectName, values: torch.Tensor, whole: bool) -> None:
    """Select one coordinate of each row, and perturb its value."""
    clients, dimension = values.shape
    streams = SeededStreams(1, range(clients), 0)
    index = pick(select, values, max(1, dimension // 10), np.full(clients, 0.2), streams)
    if whole:
        chosen = values.gather(1, torch.from_numpy(index.clip(min=0))[:, None])[:, 0]
        perturb("grid-pm", chosen.double().numpy(), np.full(clients, 1.8), streams)


def measure(repetitions: int) -> dict[str, dict[str, dict[str, float]]]:
    """Return the seconds of a cohort by part, by dimension and by selection."""
    found: dict[str, dict[str, dict[str, float]]] = {"select": {}, "report": {}}
    for dimension, clients in COHORTS.items():
        values = torch.randn(clients, dimension, generator=torch.Generator().manual_seed(1))
        for kind, rows in found.items():
            rows[f"d={dimension}, {clients} clients"] = {
                select: least(partial(report, select, values, kind == "report"), repetitions) for select in SELECTIONS
            }
    return found
