"""What reports cost: `python benchmarks/fedsel.py [--json]`.

First the choice of a coordinate for a whole cohort (figure 2(e) of paper 001: time of one client, d = 10 to 10 000),
then whole reports (choose, perturb). The time is the least of several repetitions, since others may use the machine.
"""

import argparse
import json
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from polyeps.engine.noise import SeededStreams
from polyeps.mechanisms.perturb import perturb
from polyeps.mechanisms.pick import pick
from polyeps.mechanisms.selection import SelectName

SELECTIONS: tuple[SelectName, ...] = ("uniform", "ps", "pe", "exp")
COHORTS = {10: 10_000, 100: 10_000, 300: 10_000, 1000: 3_000, 10_000: 1_000}


def least(work: Callable[[], object], repetitions: int) -> float:
    times = []
    for _ in range(repetitions):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


def report(select: SelectName, values: torch.Tensor, whole: bool) -> None:
    """One coordinate of each row, and its private value."""
    clients, dimension = values.shape
    streams = SeededStreams(1, range(clients), 0)
    index = pick(select, values, max(1, dimension // 10), np.full(clients, 0.2), streams)
    if whole:
        chosen = values.gather(1, torch.from_numpy(index.clip(min=0))[:, None])[:, 0]
        perturb("grid-pm", chosen.double().numpy(), np.full(clients, 1.8), streams)


def measure(repetitions: int) -> dict[str, dict[str, dict[str, float]]]:
    found: dict[str, dict[str, dict[str, float]]] = {"select": {}, "report": {}}
    for dimension, clients in COHORTS.items():
        values = torch.randn(clients, dimension, generator=torch.Generator().manual_seed(1))
        for kind, rows in found.items():
            rows[f"d={dimension}, {clients} clients"] = {
                select: least(partial(report, select, values, kind == "report"), repetitions) for select in SELECTIONS
            }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--repetitions", type=int, default=5)
    wanted = parser.parse_args()
    found = measure(wanted.repetitions)
    if wanted.json:
        print(json.dumps({"seconds": found, "threads": torch.get_num_threads()}, indent=2))
        return
    for kind, rows in found.items():
        print(f"{kind:<30}" + "".join(f"{select:>10}" for select in SELECTIONS) + "   milliseconds a cohort")
        for name, row in rows.items():
            print(f"{name:<30}" + "".join(f"{1e3 * row[select]:>10.1f}" for select in SELECTIONS))


if __name__ == "__main__":
    main()
