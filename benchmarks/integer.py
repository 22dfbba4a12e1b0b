"""Time encoding, adding and decoding integer releases of 100 clients, in seconds, beside our own limits.

    python benchmarks/integer.py
    python benchmarks/integer.py --json

One thread. Skellam noise of deviation 1.5 for a clip of 1 in steps of 0.001, complete with any 80 of the clients;
vectors are random. "seeded" words are those of a simulation, "system" words those of a deployment, where each client
does its hundredth of the work. The best of the repeats counts.
"""

from __future__ import annotations

import argparse
import json
import platform
import time

import torch

from polyeps.engine.noise import SeededStreams
from polyeps.mechanisms.integer import Grid
from polyeps.mechanisms.integer_encoding import decode_sum, encode_rows
from polyeps.mechanisms.integer_noise import NoiseName
from polyeps.mechanisms.random_words import SeededWords, SystemWords, WordStreams

AGENTS, HONEST = 100, 80
ALLOWED = {78_942: 5.0, 1_663_370: 60.0}  # coordinates, seconds on two cores
CASES: list[tuple[NoiseName, str]] = [("skellam", "seeded"), ("skellam", "system"), ("discrete-gaussian", "seeded")]


def measure(size: int, noise: NoiseName, source: str, repeats: int) -> dict[str, str | float]:
    """Return the best time for one size of vectors."""
    grid = Grid.fitting(1.0, 1e-3, size, AGENTS, HONEST, 1.5, rotation=1, noise=noise)
    vectors = torch.randn(AGENTS, size, generator=torch.Generator().manual_seed(1))
    times = []
    for _ in range(repeats):
        words: WordStreams = SystemWords(AGENTS)
        if source == "seeded":
            words = SeededWords(SeededStreams(1, range(AGENTS), 0), "benchmark")
        begin = time.perf_counter()
        decode_sum(grid, encode_rows(grid, vectors, words).sum(0))
        times.append(time.perf_counter() - begin)
    return {
        "noise": noise,
        "words": source,
        "coordinates": size,
        "bits": grid.bits,
        "seconds": round(min(times), 2),
        "nanoseconds_each": round(min(times) / (AGENTS * grid.dimension) * 1e9, 1),
        "allowed_seconds": ALLOWED[size],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--repeats", type=int, default=2)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    rows = [measure(size, noise, source, asked.repeats) for size in ALLOWED for noise, source in CASES]
    if asked.json:
        told = {"agents": AGENTS, "threads": 1, "torch": torch.__version__, "machine": platform.machine()}
        print(json.dumps({**told, "sums": rows}, indent=1))
        return
    print(f"{'noise':18}{'words':8}{'coordinates':>11}{'bits':>6}{'seconds':>9}{'ns each':>9}{'allowed':>9}")
    for noise, words, size, bits, seconds, each, allowed in (row.values() for row in rows):
        print(f"{noise:18}{words:8}{size:>11}{bits:>6}{seconds:>9}{each:>9}{allowed:>9}")


if __name__ == "__main__":
    main()
