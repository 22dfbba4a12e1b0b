"""Measure how much of the mean update CMP-Fed's left factors span, by their source, and the model's accuracy.

    python benchmarks/directions.py --ranks 1,4,16 --seeds 1,2 --json > benchmarks/results/directions.json
    python benchmarks/directions.py --model mcmahan_cnn --device cuda --rounds 180 --ranks 16

Guo et al., "Agent-Level Differentially Private Federated Learning via Compressed Model Perturbation", IEEE CNS 2022,
https://openreview.net/forum?id=IRG_AP-IHR: its setting on Fashion-MNIST, 5000 clients, evaluated on a validation split;
ε = 1 for all rounds. The loop is separate from the library, because it looks at un-noised updates.

    paid       half of the privacy for a release of left factors, from the last right ones (the paper)
    random     drawn anew every round, not paid for
    strongest  of those in which the next layer reads, not paid for
    model      mixtures of these, drawn anew every round, not paid for: `directions = "model"`
    own        of the mean update itself, without noise: an upper bound, not a method
    all        every coordinate is sent: DP-FedAvg
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import Any

import torch
from polyeps_reproductions.cmp_fed import MODEL, settings
from torch import Tensor

from polyeps.accounting.calibration import calibrate
from polyeps.accounting.events import Gaussian, Poisson
from polyeps.aggregation.low_rank import Compression, low_rank
from polyeps.algorithms._averaging import with_padding
from polyeps.algorithms.cmp_fed import SHORT
from polyeps.core import Budget, Records
from polyeps.engine.noise import SeededStreams
from polyeps.experiment import config
from polyeps.experiment.evaluation import measure as on_test_records
from polyeps.experiment.population import Population, populate
from polyeps.mechanisms.clipping import clip_to_norm
from polyeps.training import sgd

KINDS = ("paid", "random", "strongest", "model", "own", "all")
CLIENTS, COHORT, LAST = 5000, 100, 10
EVERY = 20  # rounds between measurements of the directions


@dataclass
class Outcome:
    kind: str
    rank: int
    seed: int
    accuracy: float = 0.0
    kept: list[list[float]] = field(
        default_factory=list
    )  # shares of the mean update's norm, by measurement and compressed layer
    sent: int = 0  # floats a client sends in a round
    seconds: float = 0.0


@dataclass
class Loop:
    """One training whose directions are measured."""

    population: Population
    factors: Compression
    kind: str
    scale: float
    clip: float
    dice: torch.Generator

    def __post_init__(self) -> None:
        self.right = self.factors.start(torch.Generator().manual_seed(3)).to(self.population.device)

    def normals(self, size: int) -> Tensor:
        return torch.randn(size, generator=self.dice).to(self.population.device)

    def summed(self, rows: Tensor, clip: float, share: float = 1.0) -> Tensor:
        """Return a release: clipped, summed, with noise, divided by the expected size of the cohort."""
        noise = self.scale / math.sqrt(share) * clip * self.normals(rows.shape[1])
        return (clip_to_norm(rows, clip).sum(0) + noise) / COHORT

    def step(self, model: Tensor, updates: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the step of a round and its left factors."""
        if self.kind == "all":
            return self.summed(updates, self.clip), None
        share = 0.5 if self.kind == "paid" else 1.0
        left = self.left(model, updates)
        embedding = self.summed(self.factors.embedding_of(updates, left), self.clip, share)
        self.right = self.factors.next_right(embedding)
        return self.factors.rebuild(left, embedding), left

    def left(self, model: Tensor, updates: Tensor) -> Tensor:
        factors = self.factors
        match self.kind:
            case "paid":
                return factors.orthonormal(
                    self.summed(factors.subspace_of(updates, self.right), SHORT * self.clip, 0.5)
                )
            case "random":
                return factors.orthonormal(self.normals(factors.subspace_size))
            case "model":
                return factors.left_of(model, self.dice)
            case "own":
                stacks = [stack[0] for stack in factors._stacks(updates.mean(0, keepdim=True))]
            case _:
                readers = [(m, m.reader) for m in factors.matrices if m.reader is not None]
                stacks = [
                    model[r.start : r.stop].view(r.rows, m.rows, -1).transpose(0, 1).flatten(1) for m, r in readers
                ]
        pieces = zip(stacks, [matrix.rank for matrix in factors.matrices], strict=True)
        found = [torch.linalg.eigh((s @ s.T).cpu().double()).eigenvectors.flip(1)[:, :rank] for s, rank in pieces]
        return torch.cat([piece.flatten() for piece in found]).to(model)

    def held(self, left: Tensor, mean: Tensor) -> list[float]:
        """Return the share of the norm of each compressed layer's mean update that the left factors span."""
        lefts, stacks = self.factors._lefts(left), self.factors._stacks(mean[None])
        return [round(float((u.T @ s[0]).norm() / s[0].norm()), 3) for u, s in zip(lefts, stacks, strict=True)]


def measure(asked: argparse.Namespace, kind: str, rank: int, seed: int) -> Outcome:
    began = time.perf_counter()
    values = settings(MODEL, "iid", rank, clients=CLIENTS)
    values["data"]["validation"] = 1 / 6
    values["model"] = {"name": "mlp", "hidden": [256]} if asked.model == "mlp" else {"name": asked.model}
    population = populate(config.experiment(values), seed, asked.device)
    way = sgd(population.model, rate=1.0, steps=10, learning_rate=asked.rate, momentum=0.5)
    # Of the same layers, whether or not the model tells their directions; "paid" could compress the last one too.
    factors = low_rank(population.model.slices, max(rank, 1), directions="model")
    price = lambda scale: Poisson(COHORT / CLIENTS, Gaussian(scale))  # noqa: E731
    scale = float(calibrate([Budget(1.0, 1e-4)], price, asked.rounds).noise_multiplier[0])
    loop = Loop(population, factors, kind, scale, asked.clip, torch.Generator().manual_seed(1000 + seed))
    found, accuracies = Outcome(kind, rank, seed), []
    model, records = population.start.to(population.device), population.records
    paid = factors.subspace_size if kind == "paid" else 0
    found.sent = population.model.size if kind == "all" else factors.embedding_size + paid
    for number in range(asked.rounds):
        drawn = torch.nonzero(torch.rand(CLIENTS, generator=loop.dice) < COHORT / CLIENTS)[:, 0].tolist()
        places = [drawn[place] for place in with_padding(len(drawn), population.device)]
        mine = Records(records.features, records.labels, records.spans[places])
        streams = SeededStreams(seed, range(len(places)), number)
        updates = way.run(model, mine, streams, rate_factor=0.99**number)[: len(drawn)]
        step, left = loop.step(model, updates)
        if left is not None and number % EVERY == 0:
            found.kept.append(loop.held(left, updates.mean(0)))
        model = model + step
        if number >= asked.rounds - LAST:
            accuracies.append(on_test_records(population, model)["accuracy"])
    found.accuracy, found.seconds = round(100 * fmean(accuracies), 2), round(time.perf_counter() - began, 1)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", default="mlp", help="mlp, with 256 hidden units, or mcmahan_cnn")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=120)
    parser.add_argument("--ranks", default="4")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--seeds", default="1", help="one, or several such as 1,2,3")
    parser.add_argument("--rate", type=float, default=0.25, help="the clients' learning rate")
    parser.add_argument("--clip", type=float, default=0.5)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    asked = parser.parse_args()
    outcomes: list[dict[str, Any]] = []
    for seed in map(int, asked.seeds.split(",")):
        for kind in asked.kinds.split(","):
            for rank in [0] if kind == "all" else map(int, asked.ranks.split(",")):
                one = measure(asked, kind, rank, seed)
                outcomes.append(asdict(one))
                line = (
                    f"{kind:>10} rank {rank:>2} seed {seed}: {one.accuracy:.2f} %, sends {one.sent}, holds {one.kept}"
                )
                print(line, file=sys.stderr if asked.json else sys.stdout, flush=True)
    if asked.json:
        print(json.dumps({"asked": vars(asked), "outcomes": outcomes}, indent=1))


if __name__ == "__main__":
    main()
