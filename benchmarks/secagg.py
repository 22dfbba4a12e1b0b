"""Measure seconds and bytes of a secure sum, by clients and coordinates.

    python benchmarks/secagg.py
    python benchmarks/secagg.py --json

All clients and the server work in turn in this process, on one core, and exchange only bytes. `a client, ms` is the
time divided by the number of clients; a real client also checks two signatures of every other client (about 0.1 ms
each), which this process checks once for all. `overhead` counts the bytes that a client sends beside its vector. Where
clients drop out, a third of them does when vectors are due, which is the most expensive case for the server.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from support.secure_rounds import exchange, plain_sum, seat

from polyeps.secagg.messages import Step, lowest_threshold
from polyeps.secagg.neighbours import fewest

BITS = 32
SIZES = [(10, 1_000), (10, 100_000), (10, 1_000_000), (50, 100_000), (100, 1_000), (100, 100_000), (200, 1_000)]
# Our own limits, in seconds.
ALLOWED = {(100, 100_000): 15, (1_000, 1_000): 60}


def measure(
    clients: int, length: int, dropped: int, threshold: int | None = None, colluders: int = 0
) -> dict[str, int | float | None]:
    """Time one sum, checked against the plain one; with neighbours where there are many clients."""
    threshold = threshold or lowest_threshold(clients, colluders)
    near = fewest(clients, threshold, colluders)
    rows = np.random.default_rng(1).integers(0, 2**BITS, (clients, length), np.uint64)
    names = [f"{place:04}" for place in range(clients)]
    lost, sent = set(names[:dropped]), dict.fromkeys(names, 0)

    def weigh(step: Step, name: str, content: bytes) -> bytes | None:
        sent[name] += len(content)
        return None if step is Step.MASK and name in lost else content

    begin, busy = time.perf_counter(), time.process_time()
    setup, seated = seat(names, os.urandom, "benchmark", 0, BITS, length, threshold, 1, colluders, near)
    total, survivors = exchange(setup, seated, dict(zip(names, rows, strict=True)), weigh)
    seconds, busy = time.perf_counter() - begin, time.process_time() - busy
    if survivors != tuple(names[dropped:]) or not np.array_equal(total, plain_sum(rows[dropped:], BITS)):
        raise AssertionError("the secure sum is not the sum")
    vector = length * BITS // 8
    return {
        "clients": clients,
        "dropped": dropped,
        "neighbours": near or clients - 1,
        "coordinates": length,
        "seconds": round(seconds, 2),
        "cpu_seconds": round(busy, 2),
        "client_ms": round(1000 * seconds / clients, 1),
        "vector_bytes": vector,
        "overhead_bytes": max(sent.values()) - vector,
        "allowed_seconds": ALLOWED.get((clients, length)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    asked = parser.parse_args()
    rows = [measure(clients, length, dropped) for clients, length in SIZES for dropped in (0, clients // 3)]
    if asked.json:
        print(json.dumps({"bits": BITS, "processes": 1, "machine": platform.machine(), "sums": rows}, indent=1))
        return
    print("clients dropped neighbours coordinates  all, s  all, CPU s  a client, ms  vector, bytes  overhead, bytes")
    for row in rows:
        clients, dropped, near, length, seconds, busy, each, vector, overhead, _ = row.values()
        print(
            f"{clients:>7} {dropped:>7} {near:>10} {length:>11} {seconds:>7} {busy:>10} {each:>13} {vector:>14} "
            f"{overhead:>16}"
        )


if __name__ == "__main__":
    main()
