"""Compare this engine with an earlier source tree and with Opacus, in turns, per CPU-second of one thread each.

    git worktree add ../before HEAD~1
    python benchmarks/turns.py ../before --models logistic,cnn --repeats 5

On a machine that others use too, elapsed time says little: every contestant is a process of its own with one thread,
they take turns, and the least CPU time of each counts. Freed memory is kept in all of them, in Opacus' too
(`engine/kept_memory.py`), unless --opacus-as-is. Cohorts and steps are those of `benchmarks/engine.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent.parent
CLIENTS = {"logistic": 40, "cnn": 40, "mcmahan_cnn": 10}
# Reads lines "MODEL WHAT CLIENTS" and answers each with the CPU milliseconds of a client-step.
WORKER = """
import sys, time, warnings
warnings.simplefilter("ignore")
root, kept = sys.argv[1:]
sys.path[:0] = [root + "/benchmarks", root + "/src"]
import engine, torch
if kept == "kept":
    try:
        from polyeps.engine.kept_memory import keep_freed_memory
    except ImportError:  # versions before 0.3
        from polyeps.engine.loop import keep_freed_memory
    keep_freed_memory()
device, known = torch.device("cpu"), {}
for line in sys.stdin:
    name, what, clients = line.split()
    if (name, what) not in known:
        if what == "opacus":
            steps = max(5, engine.LOOP_STEPS[name] // 2)
            known[name, what] = engine.opacus_loop(name, steps, device), steps
        else:
            ours = engine.Ours(name, int(clients), engine.OUR_STEPS[name], device)
            known[name, what] = getattr(ours, what), int(clients) * ours.steps
        known[name, what][0]()
    run, count = known[name, what]
    begin = time.process_time()
    run()
    print((time.process_time() - begin) / count * 1e3, flush=True)
"""


class Contestant:
    """A process that runs one source tree."""

    def __init__(self, root: Path, kept: bool) -> None:
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-c", WORKER, str(root), "kept" if kept else "as-is"]
        self.process = subprocess.Popen(
            command, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def milliseconds(self, name: str, what: str) -> float:
        """Return the CPU milliseconds of a client-step."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{name} {what} {CLIENTS[name]}\n")
        self.process.stdin.flush()
        return float(self.process.stdout.readline())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("before", type=Path, help="the source tree of the commit to compare with")
    parser.add_argument("--models", default="logistic,cnn,mcmahan_cnn")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--opacus-as-is", action="store_true", help="let Opacus' process return freed memory")
    options = parser.parse_args()
    now, before = Contestant(HERE, True), Contestant(options.before.resolve(), True)
    opacus = Contestant(HERE, not options.opacus_as_is)
    turns = [(f"{label} {what}", contestant, f"run_{what}" if what != "noise" else "draw_noise")
             for what in ("private", "plain", "noise")
             for label, contestant in (("now", now), ("before", before))]  # fmt: skip
    table = {}
    for name in options.models.split(","):
        best: dict[str, float] = {}
        for _ in range(options.repeats):
            for label, contestant, what in [*turns, ("opacus", opacus, "opacus")]:
                best[label] = min(best.get(label, float("inf")), contestant.milliseconds(name, what))
        best |= {"speed-up": best["before private"] / best["now private"]}
        best |= {f"ratio {label}": best["opacus"] / best[f"{label} private"] for label in ("now", "before")}
        table[name] = {label: float(f"{value:.4g}") for label, value in best.items()}
        print(name, table[name], file=sys.stderr)
    print(json.dumps(table, indent=2))
    for contestant in (now, before, opacus):
        contestant.process.terminate()


if __name__ == "__main__":
    main()
