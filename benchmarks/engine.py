"""Measure client-steps per second of our engine and of other libraries, in one run on one machine.

    python benchmarks/engine.py --json --keep benchmarks/results/benchmarks.json
    python benchmarks/engine.py --json --device cuda --cohorts 40,400,2000 --steps 100 --no-peers
    python benchmarks/engine.py --json --models logistic --flower

Every client holds 1200 examples of MNIST's shape (random, since speed does not depend on their values) and takes DP-SGD
steps on Poisson batches of 8 on average. The libraries take turns, and the best of the repeats counts: other work on
the machine can only make a run slower.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import math
import os
import platform
import sys
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from polyeps.core import Records
from polyeps.engine.loop import NOISE_BLOCK
from polyeps.engine.noise import SeededStreams
from polyeps.engine.philox import fill_normals
from polyeps.models import MODELS, Model
from polyeps.training import dp_sgd, sgd

EXAMPLES, BATCH, CLIP, SCALE, LEARNING_RATE = 1200, 8, 1.0, 1.0, 0.05
# Steps per client in one timed run: about a second of Opacus' time for the loop, about as much for ours.
OUR_STEPS = {"logistic": 100, "cnn": 20, "mcmahan_cnn": 2}
LOOP_STEPS = {"logistic": 100, "cnn": 50, "mcmahan_cnn": 10}


def make_cohort(model: Model, clients: int, device: torch.device) -> Records:
    """Return random examples for every client."""
    generator = torch.Generator().manual_seed(1)
    rows = clients * EXAMPLES
    features = torch.rand(rows, *model.input_shape, generator=generator)
    labels = torch.randint(0, 10, (rows,), generator=generator)
    return Records(features.to(device), labels.to(device), torch.arange(clients + 1) * EXAMPLES)


def seconds(run: Callable[[], object], device: torch.device) -> float:
    """Return how long a run takes, including everything it started."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize()
    begin = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begin


class Ours:
    """Our engine on one cohort."""

    def __init__(self, name: str, clients: int, steps: int, device: torch.device) -> None:
        self.model, self.clients, self.steps, self.device = MODELS[name](), clients, steps, device
        self.records = make_cohort(self.model, clients, device)
        self.start = self.model.start(torch.Generator().manual_seed(2)).to(device)
        rate = BATCH / EXAMPLES
        self.private = dp_sgd(self.model, rate=rate, steps=steps, clip=CLIP, learning_rate=LEARNING_RATE)
        self.plain = sgd(self.model, rate=rate, steps=steps, learning_rate=LEARNING_RATE)
        self.round = 0

    def run_private(self) -> Tensor:
        self.round += 1
        streams = SeededStreams(3, range(self.clients), self.round)
        return self.private.run(self.start, self.records, streams, SCALE)

    def run_plain(self) -> Tensor:
        self.round += 1
        return self.plain.run(self.start, self.records, SeededStreams(3, range(self.clients), self.round))

    def draw_noise(self) -> None:
        """Draw as many normals as a private run, in blocks of the same size."""
        size = self.model.size
        if self.device.type == "cuda":
            out = torch.empty(self.clients, size, device=self.device)
            keys = torch.arange(self.clients, device=self.device)
            for step in torch.arange(self.steps, device=self.device)[:, None]:
                fill_normals(out, keys, step)
            return
        streams = SeededStreams(3, range(self.clients), 0)
        block = max(1, min(self.steps, NOISE_BLOCK // (self.clients * size)))
        normals = torch.zeros(block, self.clients, size)
        for step in range(0, self.steps, block):
            some = normals[: min(block, self.steps - step)]
            streams.normals(some.transpose(0, 1), range(self.clients))


def opacus_loop(name: str, steps: int, device: torch.device) -> Callable[[], None]:
    """Return a plain loop over one client's steps with an Opacus PrivacyEngine and Poisson batches."""
    from opacus import PrivacyEngine
    from torch.utils.data import DataLoader, TensorDataset

    model = MODELS[name]()
    records = make_cohort(model, 1, device)
    start = model.start(torch.Generator().manual_seed(2))
    data = TensorDataset(records.features, records.labels)

    def one_client() -> None:
        module = MODELS[name]().module.to_empty(device=device)
        module.load_state_dict(model.unflatten(start.to(device)))
        optimiser = torch.optim.SGD(module.parameters(), lr=LEARNING_RATE)
        private, dp_optimiser, loader = PrivacyEngine().make_private(
            module=module.train(),
            optimizer=optimiser,
            data_loader=DataLoader(data, batch_size=BATCH),
            noise_multiplier=SCALE,
            max_grad_norm=CLIP,
        )
        taken = 0
        while taken < steps:
            for features, labels in loader:
                if taken == steps:
                    break
                dp_optimiser.zero_grad()
                torch.nn.functional.cross_entropy(private(features), labels).backward()  # type: ignore[no-untyped-call,unused-ignore]
                dp_optimiser.step()
                taken += 1

    return one_client


@functools.cache
def _prepared_loop(name: str, device: str) -> Callable[[], None]:
    return opacus_loop(name, LOOP_STEPS[name], torch.device(device))


def opacus_seconds(name: str, device: str) -> float:
    """Time the loop in a process of its own, because our engine changes how its process allocates memory."""
    warnings.simplefilter("ignore")
    return seconds(_prepared_loop(name, device), torch.device(device))


def measure(name: str, clients: int, steps: int, device: torch.device, repeats: int, peers: bool) -> dict[str, float]:
    """Return client-steps per second of ours and of Opacus, taking turns, for one model and one cohort size."""
    ours = Ours(name, clients, steps, device)
    runs: dict[str, tuple[Callable[[], object], int]] = {
        "polyeps": (ours.run_private, clients * ours.steps),
        "nonprivate": (ours.run_plain, clients * ours.steps),
        "noise": (ours.draw_noise, clients * ours.steps),
    }
    if peers:
        # In our process the loop profits from the memory we keep (engine/kept_memory.py): reported apart.
        runs["opacus_loop_kept"] = (opacus_loop(name, LOOP_STEPS[name], device), LOOP_STEPS[name])
    best = dict.fromkeys(runs, math.inf)
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as apart:
        for repeat in range(repeats + 1):
            found = {label: seconds(run, device) for label, (run, _) in runs.items()}
            if peers:
                found["opacus_loop"] = apart.submit(opacus_seconds, name, str(device)).result()
            if repeat:  # the first round warms up
                best = {label: min(best.get(label, math.inf), taken) for label, taken in found.items()}
    counts = {label: count for label, (_, count) in runs.items()} | {"opacus_loop": LOOP_STEPS[name]}
    speed = {label: counts[label] / taken for label, taken in best.items()}
    result = {label: value for label, value in speed.items() if label != "noise"}
    result["noise_share"] = best["noise"] / best["polyeps"]
    result["dp_over_nonprivate"] = (best["polyeps"] - best["noise"]) / best["nonprivate"]
    if peers:
        result["ratio"] = speed["polyeps"] / speed["opacus_loop"]
    return {label: float(f"{value:.4g}") for label, value in result.items()}


def flower(name: str) -> dict[str, object]:
    """Time Flower's simulation with Ray and Opacus: 16 clients a round, 100 steps each, without the first round."""
    try:
        import flwr  # noqa: F401
        import ray  # type: ignore[import-not-found,unused-ignore]  # noqa: F401
    except ImportError:
        return {"missing": "pip install 'flwr[simulation]' opacus"}
    from flwr.client import ClientApp, NumPyClient
    from flwr.common import Context, ndarrays_to_parameters
    from flwr.server import ServerApp, ServerAppComponents, ServerConfig
    from flwr.server.strategy import FedAvg
    from flwr.simulation import run_simulation

    ended: list[float] = []
    start = MODELS[name]().start(torch.Generator().manual_seed(2)).numpy()

    class Client(NumPyClient):  # type: ignore[misc,unused-ignore]
        def fit(self, parameters: list[object], _config: dict[str, object]) -> tuple[object, int, dict[str, object]]:
            torch.set_num_threads(1)
            opacus_loop(name, LOOP_STEPS[name], torch.device("cpu"))()
            return parameters, EXAMPLES, {}

    def make_client(_context: Context) -> object:
        return Client().to_client()

    def note_time(*_: object) -> None:
        ended.append(time.perf_counter())

    def make_server(_context: Context) -> ServerAppComponents:
        strategy = FedAvg(
            fraction_fit=0.8,
            fraction_evaluate=0.0,
            evaluate_fn=note_time,
            initial_parameters=ndarrays_to_parameters([start]),
        )
        return ServerAppComponents(strategy=strategy, config=ServerConfig(num_rounds=4))

    run_simulation(
        ServerApp(server_fn=make_server),
        ClientApp(client_fn=make_client),
        num_supernodes=20,
        backend_config={"client_resources": {"num_cpus": 1, "num_gpus": 0.0}},
    )
    # ended: before round 1, then after each round; the first round starts Ray's actors
    return {"flower": float(f"{16 * LOOP_STEPS[name] * 3 / (ended[-1] - ended[1]):.4g}")}


def machine(device: torch.device) -> dict[str, object]:
    """Describe the machine."""
    chip = torch.cuda.get_device_name() if device.type == "cuda" else platform.processor() or platform.machine()
    return {
        "device": chip,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print JSON only")
    parser.add_argument("--models", default="logistic,cnn,mcmahan_cnn")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--cohorts", default="40", help="clients per cohort; the best is reported, all are written")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, help="steps per client in a run of ours; the default depends on the model")
    parser.add_argument("--no-peers", action="store_true", help="measure only polyeps")
    parser.add_argument("--keep", type=Path, help="also write the results to this JSON file, by machine and model")
    parser.add_argument("--flower", action="store_true", help="also measure Flower with Ray and Opacus")
    options = parser.parse_args()
    device = torch.device(options.device)
    warnings.simplefilter("ignore")  # Opacus warns about its generator and its hooks
    table: dict[str, object] = {"machine": machine(device)}
    for name in options.models.split(","):
        found: dict[str, object] = {}
        for number, clients in enumerate(int(text) for text in options.cohorts.split(",")):
            peers = not options.no_peers and number == 0
            row = measure(name, clients, options.steps or OUR_STEPS[name], device, options.repeats, peers)
            cohorts = found.setdefault("cohorts", {})
            assert isinstance(cohorts, dict)
            cohorts[clients] = row
            if not options.json:
                print(name, clients, row, file=sys.stderr)
        assert isinstance(cohorts, dict)
        fastest = max(cohorts.values(), key=lambda row: float(row["polyeps"]))
        loop = {key: row[key] for row in cohorts.values() for key in ("opacus_loop", "opacus_loop_kept") if key in row}
        found = {**fastest, **loop, **found}
        if "opacus_loop" in loop:
            found["ratio"] = float(f"{fastest['polyeps'] / loop['opacus_loop']:.4g}")
        if options.flower:
            found |= flower(name)
        table[name] = found
    print(json.dumps(table, indent=2))
    if options.keep:
        keep(options.keep, table)


def keep(file: Path, table: dict[str, object]) -> None:
    """Add the results to those of other machines and models, with the command that made them."""
    kept = json.loads(file.read_text()) if file.exists() else {}
    described = table["machine"]
    assert isinstance(described, dict)
    mine = kept.setdefault(str(described["device"]), {})
    place = sys.argv.index("--keep")
    command = " ".join(["python benchmarks/engine.py", *sys.argv[1:place], *sys.argv[place + 2 :]])
    for name, found in table.items():
        if isinstance(found, dict) and name != "machine":
            mine[name] = {"command": command, "machine": described, **found}
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(kept, indent=2, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
