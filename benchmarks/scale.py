"""Measure how times and memory grow with clients, rounds and shards.

    python benchmarks/scale.py                      # all but the million-client runs
    python benchmarks/scale.py --only million --json
    python benchmarks/scale.py --keep benchmarks/results/scale.json     # part by part, beside those kept before
    PYTHONPATH=OTHER/src python benchmarks/scale.py # another version, as far as it has the parts

Every part runs in a process of its own, so that its peak of memory is its own. Times are CPU seconds: other programs on
the machine hardly disturb them. What workers of shards take is read from the system, and `critical` is the time with a
core for each: that of this process and of the busiest worker.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

MILLION = 1_000_000
STEPS, BUDGETS = 10, 10  # local steps and different budgets of the runs that show growth
Found = dict[str, float | int | str]


def seconds(work: Callable[[], object]) -> float:
    """Return the CPU seconds of some work in this process."""
    began = time.process_time()
    work()
    return round(time.process_time() - began, 4)


def peak_memory() -> float:
    """Return the most memory that this process had at once, MB."""
    status = Path("/proc/self/status").read_text()  # ru_maxrss may be that of the process that started this one
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


def replies() -> Found:
    """Handling the replies of a cohort at the server, ms."""
    import torch

    from polyeps.core import Action, Algorithm, Replies, Task
    from polyeps.server import _Counted

    found: Found = {}
    for clients in (100, 1_000, 3_000, 10_000):
        ids, rows = tuple(f"client-{place}" for place in range(clients)), torch.zeros(clients, 100)
        algorithm = Algorithm({"train": Action(lambda _: ({}, {}), lambda *_: None)}, lambda state, _: state)

        def transport(task: Task, rows: torch.Tensor = rows) -> Replies:
            return Replies(task.to, {"update": rows}, (True,) * len(task.to), 100, 100)

        def once(ids: tuple[str, ...] = ids, transport: Any = transport, algorithm: Algorithm = algorithm) -> None:
            _Counted(transport, algorithm, "run", 0)(Task("train", ids, {}))

        found[f"{clients} clients, ms"] = round(1000 * min(seconds(once) for _ in range(3)), 2)
    return found


def epsilons(clients: int) -> list[float]:
    """Return budgets that all differ, from 0.1 to 10."""
    drawn: list[float] = np.exp(np.random.default_rng(1).uniform(np.log(0.1), np.log(10), clients)).tolist()
    return drawn


def budgets_file() -> Found:
    """Reading a CSV file of budgets, s."""
    from polyeps.data.budgets import read_budgets

    found: Found = {}
    with tempfile.TemporaryDirectory() as folder:
        for clients in (10_000, 100_000, MILLION):
            path = Path(folder) / "budgets.csv"
            path.write_text("client,epsilon\n" + "".join(f"{i},{one!r}\n" for i, one in enumerate(epsilons(clients))))
            found[f"{clients} clients, s"] = seconds(lambda path=path: read_budgets(path, 1e-6))  # type: ignore[misc]
    return found


def start() -> Found:
    """From the start of Python to the first round of `polyeps run`, all noise calibrated before, CPU s."""
    code = (
        "import gc, sys, time\nfrom polyeps.cli import main, run\nmarks = []\n"
        "def noting(of, name):\n"
        "    real = getattr(of, name)\n"
        "    def noted(*given, **named):\n"
        "        marks.append(time.process_time())\n"
        "        return real(*given, **named)\n"
        "    setattr(of, name, noted)\n"
        "def imported():\n"
        "    from polyeps.experiment.job import Job\n    from polyeps.experiment.journal import Journal\n"
        "    marks.append(time.process_time())\n    noting(Job, 'serve'); noting(Journal, 'write_round')\n"
        "gc.set_threshold(50_000)\n"  # as `main` does before it imports anything
        "load = getattr(run, '_import_all', None)\n"
        "if load: run._import_all = lambda: (load(), imported())\n"
        "else: imported()\n"
        "try:\n    main()\nfinally:\n    print(*marks[:3], file=sys.stderr)"
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "start.toml").write_text(
            'rounds = 50\nevaluate_every = 50\n[data]\nclients = 100\npartition = "iid"\n'
            '[budgets]\ndistribution = "uniform"\ndelta = 1e-4\n'
            "[training]\nbatch = 4\nlocal_steps = 10\nlearning_rate = 0.1\n"
            '[[algorithm]]\nname = "weiavg"\n'
        )
        times = []
        for attempt in range(4):  # the first one finds no calibrated noise
            command = [sys.executable, "-c", code, "run", str(folder / "start.toml"), "-o", str(folder / f"{attempt}")]
            said = subprocess.run([*command, "-q"], capture_output=True, text=True, check=True).stderr
            times.append([float(one) for one in said.strip().splitlines()[-1].split()])
    best = np.array(times[1:]).min(0).tolist()
    names = ("imports, s", "to the first round, s", "to the end of the first round, s")
    return {name: round(one, 2) for name, one in zip(names, best, strict=True)}


def draws() -> Found:
    """Drawing cohorts among a million clients, the second one, s."""
    from polyeps.participation import Participation

    everyone, found = tuple(map(str, range(MILLION))), Found()
    for kind in ("uniform", "poisson", "epoch"):
        draw = Participation(kind, 0.001)
        draw.draw(everyone, everyone, 1, 0)
        found[f"{kind}, s"] = seconds(lambda draw=draw: draw.draw(everyone, everyone, 1, 1))  # type: ignore[misc]
    return found


def calibration() -> Found:
    """Noise multipliers for a million different budgets of one price, s."""
    from polyeps.accounting.calibration import calibrate
    from polyeps.accounting.events import Gaussian, Poisson
    from polyeps.core import Budget

    found: Found = {}
    for clients in (1_000, 100_000, MILLION):
        budgets = [Budget(one, 1e-6) for one in epsilons(clients)]
        least = 1.0

        def once(budgets: list[Budget] = budgets) -> None:
            nonlocal least
            answer = calibrate(budgets, lambda sigma: Poisson(0.01, Gaussian(sigma)), 200)
            least = float(np.min(answer.certified / [budget.epsilon for budget in budgets]))

        found[f"{clients} budgets, s"] = seconds(once)
        found[f"{clients} budgets, least share spent"] = round(least, 4)
    return found


def ledger() -> Found:
    """A ledger of a million different budgets: written, opened, verified."""
    from polyeps.accounting.events import Gaussian
    from polyeps.core import Budget
    from polyeps.ledger import Ledger
    from polyeps.ledger.account import BudgetTerms

    plans = [Gaussian(20.0 + place) for place in range(650)]  # as many prices as the ladder has steps
    terms = {}
    for place, epsilon in enumerate(epsilons(MILLION)):
        plan = plans[place % len(plans)]
        terms[str(place)] = BudgetTerms(Budget(epsilon, 1e-6), schedule="fixed", plan=plan)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ledger.db"
        found: Found = {"create and open, s": seconds(lambda: Ledger.create(path, terms).close())}
        found["open, s"] = seconds(lambda: Ledger(path).close())
        found["file, MB"] = round(path.stat().st_size / 1e6)
        found |= verified(path)
    return found


def prepare_million(
    folder: Path,
    clients: int,
    rounds: int,
    method: str,
    share: float,
    kind: str,
    width: int = 20,
    steps: int = 2,
    budgets: int | None = None,
) -> Path:
    """Write records, budgets and an experiment, and return the latter; of budgets so many different ones, or all."""
    rng = np.random.default_rng(1)
    features = rng.random((4 * clients, width), dtype=np.float32)
    labels = ((features - 0.5) @ rng.standard_normal(width) > 0).astype(np.int64)
    np.savez(folder / "data.npz", features=features, labels=labels, clients=np.repeat(np.arange(clients), 4))
    lines = "".join(
        f"{place},{one!r}\n"
        for place, one in enumerate(epsilons(budgets or clients) * (clients // (budgets or clients)))
    )
    (folder / "budgets.csv").write_text("client,epsilon\n" + lines)
    (folder / "million.toml").write_text(
        f'rounds = {rounds}\nevaluate_every = {rounds}\nseeds = [1]\n[data]\nfile = "data.npz"\n'
        f'[budgets]\nfile = "budgets.csv"\ndelta = {"1e-7" if method == "weiavg" else "0.0"}\n'
        f"[training]\nbatch = 2\nlocal_steps = {steps}\nlearning_rate = 0.2\n"
        f'[participation]\nkind = "{kind}"\nshare = {share}\n[[algorithm]]\nname = "{method}"\n'
    )
    return folder / "million.toml"


def run_of(clients: int, rounds: int, method: str, share: float, kind: str) -> Found:
    """Return the times of a whole run of many clients, each with its own budget from a file."""
    gc.set_threshold(50_000)  # as `polyeps` does
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = prepare_million(folder, clients, rounds, method, share, kind)
        began, wall = time.process_time(), time.perf_counter()
        from polyeps.experiment import config
        from polyeps.experiment import run as runs
        from polyeps.experiment.progress import Watch
        from polyeps.report.page import write_page

        marks: list[tuple[float, float, float]] = []

        def done(*_: Any) -> None:
            marks.append((time.process_time() - began, time.perf_counter() - wall, peak_memory()))

        runs.run(config.read_experiment(path), folder / "run", watch=replace(Watch(), round_done=done))
        cpu, clock, _ = zip(*marks, strict=True)
        found: Found = {
            "clients": clients,
            "rounds": rounds,
            "to the end of the first round, s": round(cpu[0], 1),
            "a further round, s": round(float(np.median(np.diff(cpu))), 3),
            "to the end of the first round, wall s": round(clock[0], 1),
            "a further round, wall s": round(float(np.median(np.diff(clock))), 3),
            "peak MB after the first round": round(marks[0][2]),
            "all, s": round(time.process_time() - began, 1),
            "peak MB": round(peak_memory()),
        }
        found["report, s"] = seconds(lambda: write_page([folder / "run"], folder / "page.html"))
        found["report, MB"] = round((folder / "page.html").stat().st_size / 1e6, 2)
        for path in (folder / "run" / "ledgers").glob("*.db"):
            found["ledger, MB"] = round(path.stat().st_size / 1e6)
            found |= verified(path)
        return found


def verified(path: Path) -> Found:
    """Verify a ledger as `polyeps ledger verify` does, in a process of its own."""
    code = (
        "import sys, time; from polyeps.ledger import Ledger; began = time.process_time()\n"
        "check = getattr(Ledger, 'verify_file', lambda path: Ledger(path).verify())\n"
        "check(sys.argv[1]); print(time.process_time() - began)\n"
        "status = open('/proc/self/status').read()\n"  # ru_maxrss would be that of the process that started it
        "print(int(status.split('VmHWM:')[1].split()[0]) / 1024)"
    )
    said = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
    took, peak = (round(float(one), 2) for one in said.stdout.split())
    return {"verify, s": took, "verify, peak MB": peak}


def growth() -> Found:
    """Runs that differ in clients, cohort and parameters: CPU s of the start and of a round, ms; memory, MB."""
    found: Found = {}
    for clients, cohort, width in GRID:
        code = f"import json, scale; print(json.dumps(scale.one_of_growth({clients}, {cohort}, {width})))"
        said = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path(__file__).parent
        )
        for name, value in json.loads(said.stdout.splitlines()[-1]).items():
            found[f"{clients} clients, {cohort} a round, {2 * width + 2} parameters: {name}"] = value
    return found


GRID = (
    (100, 100, 20),
    (1_000, 100, 20),
    (10_000, 100, 20),
    (100_000, 100, 20),
    (10_000, 1_000, 20),
    (10_000, 1_000, 400),
)


def one_of_growth(clients: int, cohort: int, width: int) -> Found:
    """Return the times and the memory of one run of twelve rounds; with few prices, which all come up in the first."""
    from polyeps.experiment import config
    from polyeps.experiment import run as runs
    from polyeps.experiment.progress import Watch

    marks: list[float] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = prepare_million(folder, clients, 12, "weiavg", cohort / clients, "uniform", width, STEPS, BUDGETS)
        runs.run(
            config.read_experiment(path),
            folder / "run",
            watch=replace(Watch(), round_done=lambda *_: marks.append(time.process_time())),
        )
    each = float(np.median(np.diff(marks)[4:]))
    return {
        "start, s": round(marks[0], 2),
        "a round, ms": round(1000 * each, 2),
        "a client-step, µs": round(1e6 * each / (cohort * STEPS), 1),
        "peak MB": round(peak_memory()),
    }


def million() -> Found:
    """A million clients with budgets from a file, a thousand a round, 50 rounds."""
    return run_of(MILLION, 50, "weiavg", 0.001, "uniform")


def hundred_thousand() -> Found:
    """A hundred thousand clients with budgets from a file, a thousand a round."""
    return run_of(100_000, 20, "weiavg", 0.01, "uniform")


def fedsel() -> Found:
    """FedSel's epoch over a million clients, ten thousand a round."""
    return run_of(MILLION, 100, "fedsel", 0.01, "epoch")


@contextmanager
def timed(parts: dict[str, list[tuple[Any, str]]]) -> Iterator[dict[str, float]]:
    """Add up the CPU seconds of functions, each named by its owner and its name there, for parts of a round."""
    spent = dict.fromkeys(parts, 0.0)
    real = {(owner, name): vars(owner)[name] for named in parts.values() for owner, name in named}

    def noting(part: str, work: Any) -> Any:
        def noted(*given: Any, **named: Any) -> Any:
            began = time.process_time()
            try:
                return work(*given, **named)
            finally:
                spent[part] += time.process_time() - began

        return noted

    for part, named in parts.items():
        for owner, name in named:
            setattr(owner, name, noting(part, real[owner, name]))
    try:
        yield spent
    finally:
        for (owner, name), work in real.items():
            setattr(owner, name, work)


def overhead() -> Found:
    """What ledger, journal and codec take of a round of 100 clients of logistic regression on digits; and memory."""
    from polyeps import client
    from polyeps.experiment import config
    from polyeps.experiment import run as runs
    from polyeps.experiment.journal import Journal
    from polyeps.experiment.progress import Watch
    from polyeps.ledger import Ledger
    from polyeps.transport import codec

    parts: dict[str, list[tuple[Any, str]]] = {
        "training": [(client, "_work")],
        "ledger": [(client, "_able"), (Ledger, "charge_all")],
        "journal and codec": [(Journal, "write_round"), (codec, "encode")],
    }
    marks: list[dict[str, float]] = []
    wanted = config.Experiment(
        rounds=400,
        evaluate_every=400,
        data={"clients": 100, "partition": "iid"},
        budgets={"distribution": "uniform", "delta": 1e-4},
        training={"batch": 4, "local_steps": 10, "learning_rate": 0.1},
        algorithm=[{"name": "weiavg"}],
    )
    with timed(parts) as spent, tempfile.TemporaryDirectory() as folder:

        def done(*_: Any) -> None:
            resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6
            marks.append({"a round": time.process_time(), "MB": resident, **spent})

        runs.run(wanted, Path(folder) / "run", watch=replace(Watch(), round_done=done))
    first, last = marks[19], marks[398]  # the last round also evaluates the model
    found: Found = {"20 rounds, MB": round(first["MB"], 1), "400 rounds, MB": round(last["MB"], 1)}
    each = {name: 1000 * (last[name] - first[name]) / 379 for name in ("a round", *parts)}
    found |= {f"{name}, ms": round(one, 2) for name, one in each.items()}
    kept = each["ledger"] + each["journal and codec"]
    found["ledger, journal and codec, share"] = round(kept / each["a round"], 3)
    found["all but training, share"] = round(1 - each["training"] / each["a round"], 3)
    return found


def shards() -> Found:
    """A cnn for 16 clients: one process, and 1, 2 and 4 shards."""
    import torch

    from polyeps.experiment import config
    from polyeps.experiment import run as runs
    from polyeps.experiment import shards as making
    from polyeps.experiment.progress import Watch
    from polyeps.transport.sharded import InOtherProcess

    torch.set_num_threads(1)
    rng, found, models = np.random.default_rng(1), Found(), {}
    wanted = {
        "rounds": 5,
        "evaluate_every": 5,
        "data": {"clients": 16, "partition": "iid"},
        "budgets": {"epsilons": rng.uniform(1, 9, 16).tolist(), "delta": 1e-4},
        "model": {"name": "cnn"},
        "training": {"batch": 16, "local_steps": 20, "learning_rate": 0.1},
        "algorithm": [{"name": "weiavg"}],
    }
    wanted["data"] = {"name": "mnist", "clients": 16, "partition": "iid", "size": 1200}

    def cpu(process: int) -> float:
        fields = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    hosts: list[InOtherProcess] = []

    class Seen(InOtherProcess):
        def __init__(self, recipe: Any, _threads: int) -> None:
            super().__init__(recipe, 1)
            hosts.append(self)

    vars(making)["InOtherProcess"] = Seen
    for count in (0, 1, 2, 4):
        marks: list[list[float]] = []
        hosts.clear()

        def done(*_: Any, marks: list[list[float]] = marks) -> None:
            marks.append([time.perf_counter(), time.process_time(), *(cpu(host.process.pid) for host in hosts)])

        with tempfile.TemporaryDirectory() as folder:
            outcome = runs.run(
                config.Experiment(**wanted),
                Path(folder) / "run",
                watch=replace(Watch(), round_done=done),
                sharding=making.Sharding(count),
            )
        models[count] = outcome.models["weiavg", 1]
        took = np.diff(np.array(marks), axis=0)  # of all rounds but the first; the last one also evaluates the model
        wall, own, *workers = took[:-1].sum(0).tolist()
        found[f"{count} shards, wall s of 3 rounds"] = round(wall, 2)
        found[f"{count} shards, critical s of 3 rounds"] = round(own + max(workers, default=0.0), 2)
        found[f"{count} shards, s of evaluating the model once"] = round(float(took[-1, 1] - took[:-1, 1].mean()), 2)
        found[f"{count} shards, largest difference of the model"] = float((models[count] - models[0]).abs().max())
    for count in (2, 4):
        for kind in ("critical", "wall"):  # by the wall only where nothing else uses the cores
            once, several = (float(found[f"{n} shards, {kind} s of 3 rounds"]) for n in (1, count))
            found[f"{count} shards, speed-up over one, {kind}"] = round(once / several, 2)
    return found


def secure_sums() -> Found:
    """Secure sums of 1000 numbers, all clients and the server in turn, CPU s."""
    sys.path.insert(0, str(Path(__file__).parent))
    from secagg import measure

    found: Found = {}
    for clients, threshold, colluders in ((100, 90, 5), (200, 180, 10), (1_000, 950, 0), (1_000, 900, 50)):
        one = measure(clients, 1_000, 0, threshold, colluders)
        name = f"{clients} clients, {clients - threshold} may fail, {colluders} collude"
        found[f"{name}: neighbours"] = one["neighbours"] or 0
        found[f"{name}: s"] = one["cpu_seconds"] or 0
        found[f"{name}: overhead of a client, kB"] = round((one["overhead_bytes"] or 0) / 1000, 1)
    return found


PARTS: tuple[Callable[[], Found], ...] = (
    replies,
    budgets_file,
    draws,
    calibration,
    ledger,
    start,
    overhead,
    growth,
    secure_sums,
    shards,
    hundred_thousand,
)
LARGE = (million, fedsel)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    known = {part.__name__: part for part in (*PARTS, *LARGE)}
    parser.add_argument("--only", choices=known, action="append", help="a part; may be repeated")
    parser.add_argument("--json", action="store_true", help="print JSON instead of lines")
    parser.add_argument("--keep", type=Path, help="also write the results into this JSON file, part by part")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.here:
        print(json.dumps(known[asked.only[0]]()))
        return
    found: dict[str, Found] = {}
    for name in asked.only or [part.__name__ for part in PARTS]:
        command = [sys.executable, __file__, "--only", name, "--here"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        failed: Found = {"failed": (done.stderr.strip().splitlines() or [str(done.returncode)])[-1]}
        found[name] = failed if done.returncode else json.loads(done.stdout.splitlines()[-1])
        if asked.keep and not done.returncode:
            held = json.loads(asked.keep.read_text("utf-8")) if asked.keep.exists() else {}
            held[name] = found[name]
            asked.keep.write_text(json.dumps(held, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        if not asked.json:
            print(name, *(f"    {key}: {value}" for key, value in found[name].items()), sep="\n", flush=True)
    if asked.json:
        print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
