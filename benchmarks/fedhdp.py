"""Time a round of FedHDP, batched and as loops over clients.

    python benchmarks/fedhdp.py --steps 1,5,20 --repeats 8 --rounds 60
    python benchmarks/fedhdp.py --json > benchmarks/results/fedhdp-benchmark.json

Aldaghri et al., "Federated Learning with Heterogeneous Differential Privacy", 2021, https://arxiv.org/abs/2110.15252

2000 clients with 25 records of MNIST's shape (random, since speed does not depend on their values), Poisson-sampled,
100 expected in a round; every sampled client trains its update and its personal model on batches of 20. The plain loop
is the usual torch code: a copy of the module, an optimiser and a DataLoader for each client. The lean loop is as fast
as we could make it: clients share a module and receive batches as tensors. Both loops take the same steps on the same
batches and receive them for free; only ours draws them, clips by a noisy quantile and enters all 2000 clients. All
take turns, and the best of the repeats counts. With a ledger all private clients are also charged in every round,
which the loops do not do. Resident memory is read after rounds of the same federation.
"""

from __future__ import annotations

import argparse
import copy
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from polyeps.algorithms._averaging import Federation
from polyeps.algorithms.fedhdp import fedhdp
from polyeps.clients import Clients
from polyeps.core import Budget, Records, State
from polyeps.engine.noise import SeededStreams
from polyeps.engine.sampling import fixed_batches
from polyeps.ledger import Ledger
from polyeps.ledger.account import BudgetTerms
from polyeps.models import MODELS, Model
from polyeps.participation import Participation
from polyeps.server import Round, serve
from polyeps.training import sgd
from polyeps.transport.memory import InMemory

CLIENTS, DRAWN, RECORDS, BATCH, OPEN = 2000, 100, 25, 20, 100
LEARNING_RATE, PULL, CLIP, SCALE = 0.1, 0.005, 0.1, 1.5
GROUPS = ("private",) * (CLIENTS - OPEN) + ("open",) * OPEN
IDS = tuple(map(str, range(CLIENTS)))


class Batched:
    """The federation as polyeps runs it."""

    def __init__(self, model: Model, steps: int, records: Records, ledger: Ledger | None = None) -> None:
        federation = Federation(
            rate=DRAWN / CLIENTS,
            rounds=500,
            sizes={"open": OPEN, "private": CLIENTS - OPEN},
            noise_for=lambda _: {"open": 0.0, "private": SCALE},
            clip=CLIP,
            noise=partial(SeededStreams, 11, ["open", "private"]),
            training=sgd(model, sampler="fixed", batch=BATCH, steps=steps, learning_rate=LEARNING_RATE),
            learning_rate=LEARNING_RATE,
        )
        self.algorithm = fedhdp(federation, pull=PULL)
        self.cohort = Clients(
            ids=IDS,
            data=records,
            noise_multiplier=np.where(np.array(GROUPS) == "private", SCALE, 0.0),
            streams=partial(SeededStreams, 7),
            repeatable=True,
            ledger=ledger,
            groups=GROUPS,
            guaranteed=(np.array(GROUPS) == "private") & (ledger is not None),
        )
        self.state = State(model.start(torch.Generator().manual_seed(2)))

    def run(self, rounds: int, observe: Callable[[Round, State], None]) -> None:
        """Run rounds by the server's own loop, including the entry of all clients."""
        transport = InMemory(self.cohort, self.algorithm, ("group",))
        drawing = Participation("poisson", DRAWN / CLIENTS)
        serve(self.algorithm, transport, self.state, rounds=rounds, participation=drawing, seed=1, observe=observe)


class Looped:
    """The same steps, a client at a time, by torch's own modules and optimiser."""

    def __init__(self, model: Model, steps: int, records: Records, lean: bool) -> None:
        self.model, self.steps, self.records, self.lean = model, steps, records, lean
        self.module = type(model.module)(*model.module.children()).to_empty(device="cpu")
        self.features = records.features.reshape(-1, *model.input_shape)
        self.data = TensorDataset(self.features, records.labels)
        self.personal: dict[int, Tensor] = {}

    def batches(self, drawn: Sequence[int], number: int) -> Tensor:
        """Return the indices of records by (step, client, place)."""
        spans = self.records.spans[list(drawn)].numpy()
        streams = SeededStreams(7, [IDS[row] for row in drawn], number)
        many = np.full(len(drawn), BATCH), np.full(len(drawn), self.steps)
        rows = fixed_batches(streams, spans, *many).records
        return torch.from_numpy(rows).reshape(self.steps, len(drawn), BATCH)

    def _trained(self, start: Tensor, received: Tensor, batches: Tensor, pull: float) -> Tensor:
        module = self.module if self.lean else copy.deepcopy(self.module)
        torch.nn.utils.vector_to_parameters(start.clone(), module.parameters())
        optimiser = torch.optim.SGD(module.parameters(), lr=LEARNING_RATE)
        anchors = [part.clone() for part in self.model.unflatten(received).values()] if pull else []
        loader = ((self.features[rows], self.records.labels[rows]) for rows in batches)
        for features, labels in loader if self.lean else DataLoader(self.data, batch_sampler=batches.tolist()):
            optimiser.zero_grad()
            torch.nn.functional.cross_entropy(module(features), labels).backward()  # type: ignore[no-untyped-call,unused-ignore]
            for parameter, anchor in zip(module.parameters(), anchors, strict=False):
                assert parameter.grad is not None
                parameter.grad.add_(parameter.detach() - anchor, alpha=pull)
            optimiser.step()
        return torch.nn.utils.parameters_to_vector(module.parameters()).detach()

    def round(self, received: Tensor, drawn: Sequence[int], batches: Tensor) -> Tensor:
        """Return the clipped, noisy sum of updates, and train the personal models."""
        total = torch.zeros_like(received)
        for place, client in enumerate(drawn):
            update = self._trained(received, received, batches[:, place], 0.0) - received
            total += update * min(1.0, CLIP / float(update.norm()))
            own = self.personal.get(client, received)
            self.personal[client] = self._trained(own, received, batches[:, place], PULL)
        return total + SCALE * CLIP * torch.randn(len(total))


def resident() -> float:
    """Return the resident memory of this process in GiB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 2**30


def compared(name: str, steps: int, repeats: int, rounds: int) -> dict[str, Any]:
    """Return the seconds of a round of each, taking turns; then memory over more rounds, with a ledger."""
    model = MODELS[name]()
    generator = torch.Generator().manual_seed(1)
    rows = CLIENTS * RECORDS
    features = torch.rand(rows, *model.input_shape, generator=generator)
    labels = torch.randint(0, 10, (rows,), generator=generator)
    records = Records(features, labels, torch.arange(CLIENTS + 1) * RECORDS)
    ours = Batched(model, steps, records)
    loops = {"plain": Looped(model, steps, records, False), "lean": Looped(model, steps, records, True)}
    received = ours.state.model
    seconds: dict[str, list[float]] = {"batched": [], **{name: [] for name in loops}}

    def take_turns(round: Round, state: State) -> None:
        nonlocal received
        drawn = [int(client) for client in round.invited]
        batches = loops["lean"].batches(drawn, round.number)
        for kind, loop in loops.items():
            began = time.perf_counter()
            loop.round(received, drawn, batches)
            seconds[kind].append((time.perf_counter() - began) / len(drawn) * DRAWN)
        seconds["batched"].append(round.seconds / len(drawn) * DRAWN)
        received = state.model

    ours.run(repeats + 1, take_turns)
    kept = ours.cohort.memory["personal"]
    apart = max(float((kept[row] - own).abs().max()) for loop in loops.values() for row, own in loop.personal.items())
    held, paying_too = _with_ledger(model, steps, records, rounds)
    fastest = {kind: min(taken[1:]) for kind, taken in seconds.items()}  # the first round warms up
    return {
        "model": name,
        "parameters": model.size,
        "steps": steps,
        **{f"{kind}_s": taken for kind, taken in fastest.items()},
        "plain_ratio": fastest["plain"] / fastest["batched"],
        "lean_ratio": fastest["lean"] / fastest["batched"],
        "with_ledger_s": min(paying_too[1:]),
        "personal_models_apart": apart,
        "gib_after_a_tenth": held[rounds // 10],
        "gib_at_the_end": held[-1],
    }


def _with_ledger(model: Model, steps: int, records: Records, rounds: int) -> tuple[list[float], list[float]]:
    """Return GiB held after each round in which all private clients are charged, and its seconds."""
    held, seconds = [], []

    def observe(round: Round, _: State) -> None:
        held.append(resident())
        seconds.append(round.seconds / len(round.invited) * DRAWN)

    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        price = Batched(model, steps, records).algorithm.round_price
        assert price is not None
        agreed = BudgetTerms(Budget(3.6, 1e-4), "client", "zero-out", "fixed", plan=price(SCALE))
        terms = dict.fromkeys(IDS[:-OPEN], agreed)
        ledger = Ledger.create(Path(folder) / "ledger.db", terms)
        Batched(model, steps, records, ledger).run(rounds, observe)
        ledger.close()
    return held, seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--models", default="logistic,mlp")
    parser.add_argument("--steps", default="1,5")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=100, help="after which memory is compared")
    wanted = parser.parse_args()
    found = [
        compared(name, int(steps), wanted.repeats, wanted.rounds)
        for name in wanted.models.split(",")
        for steps in wanted.steps.split(",")
    ]
    if wanted.json:
        print(json.dumps({"rounds": found, "threads": torch.get_num_threads()}, indent=2))
        return
    columns = ("batched ms", "plain ms", "ratio", "lean ms", "ratio", "with ledger", "GiB first", "GiB last")
    print(f"{'model':<10}{'steps':>6}" + "".join(f"{name:>13}" for name in columns))
    for one in found:
        times = [1e3 * one[f"{kind}_s"] for kind in ("batched", "plain", "lean", "with_ledger")]
        numbers = [times[0], times[1], one["plain_ratio"], times[2], one["lean_ratio"], times[3]]
        numbers += [one["gib_after_a_tenth"], one["gib_at_the_end"]]
        print(f"{one['model']:<10}{one['steps']:>6}" + "".join(f"{number:>13.4g}" for number in numbers))


if __name__ == "__main__":
    main()
