"""Measure the accuracy of rules for averaging under mixed budgets, with the recipe and as the papers train.

    python benchmarks/accuracy.py --json > benchmarks/results/accuracy.json
    python benchmarks/accuracy.py --cells mnist-shards-mixgauss3 --methods ours,weiavg --seeds 3
    python benchmarks/accuracy.py --quick

A cell is DATA-PARTITION-BUDGETS, such as mnist-dirichlet-mixgauss2 or, IID, adult-uniform. Data: mnist, fashion, adult,
or another data set by its name. Partitions: iid, shards (ten a client, sorted by label; shards2: two), two-labels (ten
clients with two labels each; also three-labels and the like), dirichlet (0.1; dirichlet0.5: another alpha). Budgets: a
distribution of ε, the same share of high-ε clients in every seed. All other cells have 50 clients; δ = 1e-5. Every seed
draws budgets and partition anew.

The recipe: fixed features (scattering of images; tables as they are), one clipped gradient over all records a client
and round, a server optimiser with momentum and averaging. METHOD/pixels trains as PFA's paper does: logistic
regression on plain records, 100 rounds of 100 DP-SGD steps on batches of 8. Each method has a learning rate of its own
in each cell, chosen on a tenth of the training records with a seed that is not measured. Rates that the results folder
has are not chosen again, except with --choose. Every run has a ledger, and fails if a client would exceed its budget;
`spent` is the largest share of a budget that was spent.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch

from polyeps.errors import InputError
from polyeps.experiment import config
from polyeps.experiment.journal import Journal
from polyeps.experiment.run import run

CELLS = (
    "mnist-iid-mixgauss1",
    "mnist-shards-mixgauss1",
    "mnist-shards-mixgauss3",
    "mnist-two-labels-mixgauss1",
    "fashion-iid-mixgauss1",
    "fashion-shards-mixgauss3",
    "adult-mixgauss1",
)
METHODS: dict[str, dict[str, Any]] = {
    "fedavg": {"name": "fedavg"},
    "weiavg": {"name": "weiavg"},
    "public-only": {"name": "public-only"},
    "pfa": {"name": "pfa"},
    "robust-hdp": {"name": "robust-hdp"},
    "ours": {"name": "balanced"},
    "maximum": {"name": "fedavg", "budgets": "maximum"},
    "non-private": {"name": "fedavg", "budgets": "none"},
}
PIXELS = "/pixels"
DATA = {"fashion": "fashion-mnist"}
IMAGES = ("mnist", "fashion-mnist", "digits")
WORDS = {"one": 1, "two": 2, "three": 3, "four": 4, "five": 5}
RATES: tuple[float, ...] = (0.05, 0.15, 0.5, 1.5, 3.0, 6.0, 12.0)  # of the recipe: how far a round can move the model
RESULTS = Path(__file__).parent / "results"
PIXEL_RATES: tuple[float, ...] = (0.003, 0.01, 0.03, 0.1, 0.3)
CHOICE_SEED = 1000


@dataclass(frozen=True)
class Recipe:
    """The settings of the recipe; an ablation changes one of them at a time."""

    features: bool = True  # fixed features; without them, plain records
    full_batch: bool = True  # one gradient over all records; without it, 100 steps on batches of 8
    optimiser: bool = True  # momentum and averaging; without it, plain steps
    planned: bool = False  # batches and steps planned by budget, where they are not full
    rounds: int = 150
    clip: float = 2.0
    size: int | None = None  # features are projected at random onto so many; None: all of them

    def experiment(self, cell: str, method: str, rate: float) -> dict[str, Any]:
        """Return the settings of an experiment in a cell, without its seeds."""
        data, partition, budgets = parts_of(cell)
        clients = 10 if partition_of(partition)["partition"] == "labels" else 50
        encoder: dict[str, Any] = {}
        if self.features and data in IMAGES:
            encoder = {"encoder": "scattering"} | ({"encoder_size": self.size} if self.size else {})
        server = {"learning_rate": 1.0}
        if self.full_batch:
            training: dict[str, Any] = {"kind": "gradient", "clip": self.clip}
            server = {"learning_rate": rate / self.clip}
        elif self.planned:
            training = {"batch": "auto", "local_steps": "auto", "learning_rate": rate, "clip": 1.0}
        else:
            training = {"batch": 8, "local_steps": 100, "learning_rate": rate, "clip": 1.0}
        if self.optimiser:
            server = {"learning_rate": server["learning_rate"] * (1 - 0.9), "momentum": 0.9, "averaging": 0.9}
        return {
            "rounds": self.rounds,
            "evaluate_every": self.rounds,
            "data": {"name": data, "clients": clients, **partition_of(partition)},
            "budgets": {"distribution": budgets, "stratified": True, "delta": 1e-5},
            "model": {"name": "logistic", **encoder},
            "training": training,
            "server": server,
            "algorithm": [METHODS[method]],
        }


TODAY = Recipe(features=False, full_batch=False, optimiser=False, rounds=100)

# Parts of the recipe, each added to WeiAvg as the papers train it, and each taken away from the whole.
ABLATION: dict[str, tuple[Recipe, tuple[float, ...]]] = {
    "weiavg/today": (TODAY, PIXEL_RATES),
    "ours/+weights": (TODAY, PIXEL_RATES),
    "weiavg/+features": (replace(TODAY, features=True), PIXEL_RATES),
    "weiavg/+full-batch": (replace(TODAY, full_batch=True, rounds=150), RATES),
    "weiavg/+optimiser": (replace(TODAY, optimiser=True), PIXEL_RATES),
    "weiavg/+work-plan": (replace(TODAY, planned=True), (0.3, 1.0, 3.0, 10.0)),  # one step on a large batch
    "ours/-features": (Recipe(features=False), RATES),
    "ours/-full-batch": (Recipe(full_batch=False, rounds=100), PIXEL_RATES),
    "ours/-optimiser": (Recipe(optimiser=False), RATES),
    "weiavg/-weights": (Recipe(), RATES),
    "ours/all": (Recipe(), RATES),
}


@dataclass(frozen=True)
class Entry:
    """One method in one cell: what is to be measured."""

    cell: str
    method: str  # with /pixels, as the papers train
    seeds: tuple[int, ...]
    rates: tuple[float, ...]
    recipe: Recipe
    device: str
    threads: int = 1

    @property
    def base(self) -> str:
        """The rule for averaging, whatever the training."""
        return self.method.partition("/")[0]


def parts_of(cell: str) -> tuple[str, str, str]:
    """Return the data, the partition and the budgets that a cell's name stands for."""
    data, _, rest = cell.partition("-")
    partition, _, budgets = rest.rpartition("-")
    if not budgets or not partition_of(partition or "iid"):
        raise InputError(
            f"cell {cell!r} is not DATA-PARTITION-BUDGETS; partitions are iid, shards, two-labels and dirichlet, as in "
            f"{CELLS[1]}, and with other numbers shards2, three-labels and dirichlet0.5"
        )
    return DATA.get(data, data), partition or "iid", budgets


def partition_of(name: str) -> dict[str, Any]:
    """Return the settings that a partition's name stands for; none for an unknown one."""
    if name == "iid":
        return {"partition": "iid"}
    if found := re.fullmatch(r"shards([1-9]\d*)?", name):
        return {"partition": "shards", "shards_per_client": int(found[1] or 10)}
    if (found := re.fullmatch(r"([a-z]+|[1-9]\d*)-labels?", name)) and (found[1].isdecimal() or found[1] in WORDS):
        return {"partition": "labels", "labels_per_client": WORDS.get(found[1]) or int(found[1])}
    if found := re.fullmatch(r"dirichlet(\d+(?:\.\d+)?)?", name):
        return {"partition": "dirichlet", "alpha": float(found[1] or 0.1)}
    return {}


def measured(entry: Entry, rate: float, seeds: Sequence[int], validation: float = 0.0) -> tuple[list[float], float]:
    """Return the accuracy of each seed, and the largest share of a budget that the ledgers say was spent."""
    values = entry.recipe.experiment(entry.cell, entry.base, rate)
    values["data"]["validation"] = validation
    values["seeds"] = list(seeds)
    with tempfile.TemporaryDirectory() as folder:
        found = run(config.experiment(values), Path(folder) / "run", device=entry.device, progress=False)
        journal = Journal(found.folder / "journal.db")
        rows = journal.query("SELECT spent, epsilon FROM clients WHERE epsilon IS NOT NULL")
        spent = max((row["spent"] / row["epsilon"] for row in rows), default=0.0)
        journal.close()
    return [accuracies[-1] for accuracies in found.accuracy.values()], spent


def best_of(rates: Sequence[float], accuracy: Callable[[float], float]) -> float:
    """Return the rate with the highest accuracy: from the middle of a grid uphill, until both neighbours are lower.

    >>> best_of([0.1, 0.3, 1, 3, 10], lambda rate: -abs(rate - 3))
    3
    """
    tried: dict[int, float] = {}

    def at(place: int) -> float:
        if place not in tried:
            tried[place] = accuracy(rates[place])
        return tried[place]

    here, before = len(rates) // 2, -1
    while here != before:
        before = here
        near = [place for place in (here, here - 1, here + 1) if 0 <= place < len(rates)]
        here = max(near, key=at)
    return rates[here]


def result_of(entry: Entry) -> dict[str, Any]:
    """Choose the learning rate of a method on validation records, and measure it on test records."""
    torch.set_num_threads(entry.threads)
    rate = entry.rates[0]
    if len(entry.rates) > 1:
        rate = best_of(entry.rates, lambda one: measured(entry, one, [CHOICE_SEED], validation=0.1)[0][0])
    began = time.perf_counter()
    accuracies, spent = measured(entry, rate, entry.seeds)
    if spent > 1:
        raise InputError(f"{entry.method} in {entry.cell}: a client has spent {spent:.2%} of its budget")
    return {
        "mean": fmean(accuracies),
        "sd": stdev(accuracies) if len(accuracies) > 1 else None,
        "seeds": {str(seed): value for seed, value in zip(entry.seeds, accuracies, strict=True)},
        "learning_rate": rate,
        "spent": spent,
        "seconds": (time.perf_counter() - began) / len(entry.seeds),
    }


def chosen_before(cell: str, method: str, file: str) -> tuple[float, ...]:
    """Return the learning rate that was chosen for a method in a cell of the results; none if it is not there."""
    found = json.loads((RESULTS / file).read_text()).get(cell, {}).get(method)
    return () if found is None else (float(found["learning_rate"]),)


def entries(wanted: argparse.Namespace) -> list[Entry]:
    """Return what is to be measured, cell by cell."""
    recipe, today, rates, pixel_rates = Recipe(), TODAY, RATES, PIXEL_RATES
    if wanted.quick:
        recipe = replace(recipe, rounds=60, size=300)
        today = replace(today, rounds=20)
        rates, pixel_rates = (0.5,), (0.1,)
    kinds = {**dict.fromkeys(METHODS, (recipe, rates)), **{one + PIXELS: (today, pixel_rates) for one in METHODS}}
    if wanted.ablation:
        kinds = ABLATION
    names = wanted.methods.split(",") if wanted.methods else list(kinds)
    for name in names:
        if name not in kinds:
            raise InputError(f"there is no method {name!r}; choose from {', '.join(kinds)}")
    seeds = tuple(range(1, wanted.seeds + 1))
    threads = max(1, (os.cpu_count() or 1) // wanted.processes)
    files = ("accuracy_ablation.json",) if wanted.ablation else ("accuracy.json", "accuracy_other_cells.json")

    def rates_of(cell: str, name: str) -> tuple[float, ...]:
        known = (chosen_before(cell, name, file) for file in files)
        fresh = wanted.choose or wanted.quick
        return kinds[name][1] if fresh else next(filter(None, known), kinds[name][1])

    return [
        Entry(cell, name, seeds, rates_of(cell, name), kinds[name][0], wanted.device, threads)
        for cell in wanted.cells.split(",")
        for name in names
    ]


def show(cell: str, found: dict[str, dict[str, Any]]) -> str:
    """Return a table of one cell: accuracy in per cent, with the standard deviation over seeds."""
    lines = [f"{cell}: test accuracy in %"]
    for method, result in found.items():
        spread = "" if result["sd"] is None else f" ± {100 * result['sd']:.1f}"
        lines.append(f"  {method:28} {100 * result['mean']:5.1f}{spread}   rate {result['learning_rate']:g}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cells", default=",".join(CELLS), help="DATA-PARTITION-BUDGETS, separated by commas")
    parser.add_argument("--methods", help="separated by commas; all by default")
    parser.add_argument("--seeds", type=int, help="how many; 5 by default, 1 with --quick")
    parser.add_argument("--quick", action="store_true", help="fewer rounds, features and seeds; rates are not chosen")
    parser.add_argument("--choose", action="store_true", help="choose learning rates again that the results have")
    parser.add_argument("--ablation", action="store_true", help="parts of the recipe, each alone and all but one")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--processes", type=int, default=1, help="how many methods to measure at once")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    wanted = parser.parse_args()
    wanted.seeds = wanted.seeds or (1 if wanted.quick else 5)
    found: dict[str, dict[str, Any]] = {}
    refused = False
    try:
        todo = entries(wanted)
        with ProcessPoolExecutor(wanted.processes, mp_context=get_context("spawn")) as pool:
            pending = [pool.submit(result_of, entry) for entry in todo]
            for number, (entry, result) in enumerate(zip(todo, pending, strict=True), start=1):
                try:
                    cell = found.setdefault(entry.cell, {})
                    cell[entry.method] = result.result()
                    said = f"{cell[entry.method]['mean']:.1%}"
                except InputError as problem:  # the others go on
                    said, refused = f"cannot be run: {problem}", True
                print(f"{number}/{len(todo)} {entry.cell} {entry.method} {said}", file=sys.stderr, flush=True)
    except InputError as problem:
        sys.exit(f"accuracy.py: {problem}")
    print(json.dumps(found, indent=2) if wanted.json else "\n\n".join(show(*cell) for cell in found.items()))
    sys.exit(refused)


if __name__ == "__main__":
    main()
