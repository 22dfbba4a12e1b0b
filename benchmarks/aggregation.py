"""Time subspace and projection at a PFA server, in milliseconds, beside table 5 of the paper.

Liu et al., "Projected Federated Averaging with Heterogeneous Differential Privacy", VLDB 2022,
https://doi.org/10.14778/3503585.3503592

    python benchmarks/aggregation.py
    python benchmarks/aggregation.py --json > benchmarks/results/aggregation.json

Five public clients, rank one per tensor, the mean of the private updates projected, one thread. Updates are random,
since the time does not depend on their values. The best of the repeats counts: other work on the machine can only make
a run slower.
"""

from __future__ import annotations

import argparse
import json
import platform
import time

import torch

from polyeps.aggregation.subspace import subspace
from polyeps.models import MODELS

PUBLIC = 5
# Table 5, server: seconds of 256 Lanczos steps on the authors' machine; and our own limits, in milliseconds.
PAPER_SECONDS = {"logistic": 1.76, "cnn": 25.5, "cifar_cnn": 214.0}
ALLOWED = {"logistic": 10, "cnn": 50, "cifar_cnn": 1000}


def measure(name: str, repeats: int) -> dict[str, str | float]:
    """Return the best time for one model."""
    model = MODELS[name]()
    generator = torch.Generator().manual_seed(1)
    public = torch.randn(PUBLIC, model.size, generator=generator)
    private = torch.randn(1, model.size, generator=generator)
    weights = torch.ones(PUBLIC, dtype=torch.float64)
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        subspace(public, model.slices, rank=1, kind="set", weights=weights).project(private)
        times.append(time.perf_counter() - begin)
    best = 1000 * min(times)
    return {
        "model": name,
        "parameters": model.size,
        "paper_ms": 1000 * PAPER_SECONDS[name],
        "ours_ms": round(best, 2),
        "ratio": round(1000 * PAPER_SECONDS[name] / best),
        "allowed_ms": ALLOWED[name],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--repeats", type=int, default=10)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    rows = [measure(name, asked.repeats) for name in PAPER_SECONDS]
    if asked.json:
        setting = {"public_clients": PUBLIC, "threads": 1, "torch": torch.__version__, "machine": platform.machine()}
        print(json.dumps({**setting, "models": rows}, indent=1))
        return
    print(f"{'model':10} {'parameters':>10} {'paper, ms':>10} {'ours, ms':>9} {'ratio':>7} {'allowed, ms':>11}")
    for name, size, paper, ours, ratio, allowed in (row.values() for row in rows):
        print(f"{name:10} {size:>10} {paper:>10} {ours:>9} {ratio:>7} {allowed:>11}")


if __name__ == "__main__":
    main()
