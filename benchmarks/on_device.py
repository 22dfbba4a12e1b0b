"""Test and measure everything that runs on a CUDA device, within eight minutes: python benchmarks/on_device.py FOLDER

CUDA tests, then `engine.py` for each model, then `own_models.py`. Each job is a process with a time limit of its own.
After each, FOLDER/device.json holds what it printed, and FOLDER/benchmarks.json the engine's results, ready to be
copied to benchmarks/results. Python and torch are those that run this file; what else is needed lies in
build/device-packages, if that exists (`make device-packages`).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
TESTS = [
    f"tests/{name}.py"
    for name in (
        "engine/test_patches", "engine/test_pooling", "engine/test_row_norms", "engine/test_deferred",
        "engine/test_full_batches", "aggregation/test_low_rank", "test_training", "test_training_fixed",
    )
]  # fmt: skip


class Job(NamedTuple):
    """A command and the seconds that it may take."""

    name: str
    command: list[str]
    limit: float


def jobs(folder: Path) -> list[Job]:
    """Return all jobs; their limits add up to eight minutes."""
    engine = [
        "benchmarks/engine.py",
        "--json",
        "--device",
        "cuda",
        "--no-peers",
        "--keep",
        str(folder / "benchmarks.json"),
    ]
    sizes = {
        "logistic": ("40,400,2000,4000", "100"),
        "cnn": ("40,400,2000", "50"),
        "mcmahan_cnn": ("40,200,400", "10"),
    }
    measured = [
        Job(model, [*engine, "--models", model, "--cohorts", cohorts, "--steps", steps], 80)
        for model, (cohorts, steps) in sizes.items()
    ]
    modules = [
        "benchmarks/own_models.py",
        "--json",
        "--device",
        "cuda",
        "--models",
        "vit,gpt,resnet18",
        "--repeats",
        "2",
    ]
    # without addopts: the machine may lack plugins
    tests = ["-m", "pytest", "-q", "-x", "-o", "addopts=--import-mode=importlib", *TESTS]
    return [Job("tests", tests, 150), *measured, Job("modules", modules, 90)]


def done(job: Job) -> dict[str, Any]:
    """Run a job; return its status (None: it ran out of time), its seconds and what it printed."""
    path = [
        str(ROOT / "src"),
        str(ROOT / "tests"),
        str(ROOT / "build" / "device-packages"),
        os.environ.get("PYTHONPATH"),
    ]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path))}
    begin, status = time.monotonic(), None
    with subprocess.Popen(
        [sys.executable, *job.command], cwd=ROOT, env=environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        try:
            printed, errors = process.communicate(timeout=job.limit)
            status = process.returncode
        except subprocess.TimeoutExpired:
            process.kill()
            printed, errors = process.communicate()
    found: dict[str, Any] = {"status": status, "seconds": round(time.monotonic() - begin, 1)}
    try:
        found["result"] = json.loads(printed)
    except ValueError:
        found["printed"] = printed[-4000:]
    return found if status == 0 else {**found, "errors": errors[-4000:]}


def main() -> None:
    folder = Path(sys.argv[1]).resolve() if len(sys.argv) == 2 else sys.exit("give the folder for the results")
    folder.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {}
    for job in jobs(folder):
        results[job.name] = done(job)
        (folder / "device.json").write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
        print(job.name, results[job.name]["status"], results[job.name]["seconds"], flush=True)
    sys.exit(0 if all(found["status"] == 0 for found in results.values()) else 1)


if __name__ == "__main__":
    main()
