"""Time rounds of one gradient over all records: 50 clients of 1100 records with 3969 features, logistic regression.

    python benchmarks/full_batches.py [--json] [--device cuda] [--rounds 10]

Prints the seconds of a round of all clients, noise included (the fastest, the median, and processor time, for
busy machines), and how long reading all features once takes, which bounds it from below.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch

from polyeps.core import Records
from polyeps.engine.noise import SeededStreams
from polyeps.models import logistic
from polyeps.training import whole_gradient

CLIENTS, RECORDS, FEATURES, CLASSES = 50, 1100, 3969, 10


def timed(run: Callable[[], object], device: torch.device) -> float:
    """Return the seconds that a function takes."""
    began = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def measure(device: torch.device, rounds: int) -> dict[str, float]:
    """Return the figures of the benchmark."""
    generator = torch.Generator().manual_seed(0)
    rows = CLIENTS * RECORDS
    features = torch.rand(rows, FEATURES, generator=generator).to(device)
    labels = torch.randint(0, CLASSES, (rows,), generator=generator).to(device)
    records = Records(features, labels, torch.arange(0, rows + 1, RECORDS).to(device))
    model = logistic(FEATURES, CLASSES)
    training, start = whole_gradient(model, clip=1.0), torch.zeros(model.size, device=device)

    def one_round() -> object:
        return training.run(start, records, SeededStreams(1, range(CLIENTS), 0), 1.0)

    one_round()
    busy = time.process_time()
    seconds = [timed(one_round, device) for _ in range(rounds)]
    busy = (time.process_time() - busy) / rounds
    reading = min(timed(features.sum, device) for _ in range(3))
    return {
        "round": min(seconds),
        "median_round": statistics.median(seconds),
        "processor_seconds": busy,
        "reading_features": reading,
        "gigabytes": features.nbytes / 1e9,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()
    found = measure(torch.device(options.device), options.rounds)
    if options.json:
        print(json.dumps(found))
    else:
        print(f"a round: {found['round']:.4f} s, median {found['median_round']:.4f} s", end=", ")
        print(f"{found['processor_seconds']:.4f} s of processors", end="; ")
        print(f"reading {found['gigabytes']:.2f} GB of features once: {found['reading_features']:.4f} s")
