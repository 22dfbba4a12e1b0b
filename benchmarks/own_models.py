"""Measure users' modules against a loop over clients with Opacus' GradSampleModule, per CPU-second, in one run.

    python benchmarks/own_models.py --json
    python benchmarks/own_models.py --models vit,gpt --device cuda

Eight clients with weights of their own take DP-SGD steps (clip, no noise) on eight examples each: small models with
random weights, one thread. `mlp_class` is the same network as `mlp`, an nn.Sequential. The contestants take turns, and
the best of the repeats counts. On a device our step is captured once as a CUDA graph and replayed, as training does
(`engine/cuda_graphs.py`); `--eager` launches its kernels one by one.

    python benchmarks/own_models.py --models vit,gpt,resnet18 --stages

prints the CPU milliseconds of our step by stage, and those of one product of each weight at the speed of a large one.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import time
import warnings
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from polyeps.engine import network
from polyeps.engine.kept_memory import keep_freed_memory
from polyeps.engine.layout import lay_out
from polyeps.engine.network import Network, add_gradients
from polyeps.models import Model, cross_entropy

CLIENTS, ROWS, CLIP, RATE = 8, 8, 1.0, 0.05


class Attention(nn.Module):
    """Causal or full self-attention, its projections in one linear layer."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, rows: Tensor) -> Tensor:
        q, k, v = (torch.unflatten(part, -1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(rows).chunk(3, -1))
        found = functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        mixed: Tensor = self.out(found.transpose(1, 2).flatten(2))
        return mixed


class Block(nn.Module):
    """A transformer block with normalisation first."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, causal)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, rows: Tensor) -> Tensor:
        rows = rows + self.attention(self.first(rows))
        found: Tensor = rows + self.down(functional.gelu(self.up(self.second(rows))))
        return found


class Positions(nn.Module):
    """Learned positions; a module of its own, since Opacus needs one for every parameter."""

    def __init__(self, length: int, width: int) -> None:
        super().__init__()
        self.table = nn.Embedding(length, width)

    def forward(self, rows: Tensor) -> Tensor:
        places = torch.arange(rows.shape[1], device=rows.device).expand(len(rows), -1)
        found: Tensor = rows + self.table(places)
        return found


class ViT(nn.Module):
    """A vision transformer on 32 x 32 images in patches of 4 x 4."""

    def __init__(self, width: int = 128, depth: int = 4) -> None:
        super().__init__()
        self.patch, self.place = nn.Conv2d(3, width, 4, 4), Positions(64, width)
        self.blocks = nn.ModuleList(Block(width, 4, causal=False) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        rows = self.place(self.patch(images).flatten(2).transpose(1, 2))
        for block in self.blocks:
            rows = block(rows)
        found: Tensor = self.head(self.norm(rows).mean(1))
        return found


class GPT(nn.Module):
    """A language model over 64 tokens of a vocabulary of 256, which classifies by its last state."""

    def __init__(self, width: int = 128, depth: int = 4) -> None:
        super().__init__()
        self.words, self.place = nn.Embedding(256, width), Positions(64, width)
        self.blocks = nn.ModuleList(Block(width, 4, causal=True) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, tokens: Tensor) -> Tensor:
        rows = self.place(self.words(tokens))
        for block in self.blocks:
            rows = block(rows)
        found: Tensor = self.head(self.norm(rows)[:, -1])
        return found


class Residual(nn.Module):
    """A basic block of ResNet with group normalisation."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.a = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.b = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.n, self.m = nn.GroupNorm(16, after), nn.GroupNorm(16, after)
        self.short = nn.Identity()
        if stride > 1:
            self.short = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.GroupNorm(16, after))  # type: ignore[assignment]

    def forward(self, rows: Tensor) -> Tensor:
        found = self.m(self.b(functional.relu(self.n(self.a(rows)))))
        return functional.relu(found + self.short(rows))


class ResNet18(nn.Module):
    """ResNet-18 for 32 x 32 images, with group normalisation: 11 million parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.GroupNorm(16, 64)
        widths = [64, 64, 128, 256, 512]
        self.blocks = nn.ModuleList(
            Residual(widths[i] if j == 0 else widths[i + 1], widths[i + 1], 2 if i and j == 0 else 1)
            for i in range(4)
            for j in range(2)
        )
        self.head = nn.Linear(512, 10)

    def forward(self, images: Tensor) -> Tensor:
        rows = functional.relu(self.norm(self.stem(images)))
        for block in self.blocks:
            rows = block(rows)
        found: Tensor = self.head(rows.mean((2, 3)))
        return found


class Mlp(nn.Module):
    """A class of linear layers; `layers` makes the same as an nn.Sequential."""

    def __init__(self, widths: tuple[int, ...]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))

    def forward(self, rows: Tensor) -> Tensor:
        for part in self.parts[:-1]:
            rows = functional.relu(part(rows))
        found: Tensor = self.parts[-1](rows)
        return found


def layers(widths: tuple[int, ...]) -> nn.Module:
    parts = [part for a, b in pairwise(widths) for part in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*parts[:-1])


SMALL, LARGE = (784, 64, 10), (784, 2048, 2048, 2048, 1024, 10)
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {
    "vit": (ViT, (3, 32, 32), 0),
    "gpt": (GPT, (64,), 256),
    "resnet18": (ResNet18, (3, 32, 32), 0),
    "mlp": (lambda: layers(SMALL), (784,), 0),
    "mlp_class": (lambda: Mlp(SMALL), (784,), 0),
    "large_mlp": (lambda: layers(LARGE), (784,), 0),
    "large_mlp_class": (lambda: Mlp(LARGE), (784,), 0),
}


def data(name: str, device: torch.device) -> tuple[Tensor, Tensor]:
    _, shape, tokens = MODELS[name]
    generator = torch.Generator().manual_seed(1)
    count = CLIENTS * ROWS
    rows = torch.randint(0, tokens, (count, *shape), generator=generator) if tokens else torch.rand(count, *shape)
    return rows.to(device), torch.randint(0, 10, (count,), generator=generator).to(device)


def ours(name: str, device: torch.device) -> Callable[[], None]:
    """Return one step of all clients in our engine."""
    build, shape, tokens = MODELS[name]
    torch.manual_seed(0)
    model = Model(build(), cross_entropy, shape, torch.int64 if tokens else torch.float32)
    start = model.start(torch.Generator()).to(device)
    models = start + 0.001 * torch.randn(CLIENTS, model.size, device=device)
    rows, labels = data(name, device)
    exact = model.size >= 200_000 and device.type == "cpu"
    cuts = list(range(CLIENTS + 1)) if exact else [0, CLIENTS]
    layout = lay_out(CLIENTS, cuts, np.full(len(cuts) - 1, ROWS), device)
    clip = torch.full((CLIENTS,), CLIP, device=device)
    keep_freed_memory()

    def step() -> None:
        gradient = torch.zeros_like(models)
        with torch.no_grad():
            add_gradients(model.network, model.loss, models, rows, labels, layout, None, clip, gradient)
        models.sub_(gradient, alpha=RATE / ROWS)

    return step


def captured(step: Callable[[], None]) -> Callable[[], None]:
    """Return a step replayed as a CUDA graph, after a few trial runs on a side stream, as torch requires."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call,unused-ignore]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()

    def replay() -> None:
        graph.replay()

    replay.__wrapped__ = step  # type: ignore[attr-defined]  # keeps the tensors that the graph reads and writes
    return replay


def stages(name: str, repeats: int) -> dict[str, float]:
    """Return the CPU milliseconds of each stage of our step, the best of some, and those of its products at best."""
    took: dict[str, float] = {}
    best: dict[str, float] = {}

    def timed(owner: Any, function: str, stage: str) -> None:
        inner = getattr(owner, function)

        def outer(*args: Any) -> Any:
            begin = time.thread_time()
            found = inner(*args)
            took[stage] = took.get(stage, 0.0) + time.thread_time() - begin
            return found

        setattr(owner, function, outer)

    kept = Network.forward, Network.contributions, network.clip_rows, network.add_rows
    timed(Network, "forward", "forward")
    timed(Network, "contributions", "backward")
    timed(network, "clip_rows", "norms")
    timed(network, "add_rows", "sums")
    try:
        step = ours(name, torch.device("cpu"))
        for _ in range(1 + repeats):
            took.clear()
            begin = time.thread_time()
            step()
            took["step"] = time.thread_time() - begin
            best = {stage: min(seconds, best.get(stage, seconds)) for stage, seconds in took.items()}
    finally:
        Network.forward, Network.contributions, network.clip_rows, network.add_rows = kept  # type: ignore[method-assign]
    build, shape, tokens = MODELS[name]
    row = torch.zeros(1, *shape, dtype=torch.int64 if tokens else torch.float32)
    with FlopCounterMode(display=False) as counter:
        build()(row)
    square, room = torch.randn(1024, 1024), torch.empty(1024, 1024)
    speed = 2 * 1024**3 / min(seconds(lambda: torch.mm(square, square, out=room), row.device, 0.1) for _ in range(5))
    best["one product of each weight"] = CLIENTS * ROWS * counter.get_total_flops() / speed
    return {stage: float(f"{1e3 * each:.3g}") for stage, each in best.items()}


def opacus(name: str, device: torch.device) -> Callable[[], None]:
    """Return one step of every client in turn with Opacus' per-example gradients."""
    from opacus import GradSampleModule

    torch.manual_seed(0)
    module = MODELS[name][0]().to(device)
    modules = [GradSampleModule(copy.deepcopy(module), loss_reduction="sum") for _ in range(CLIENTS)]
    rows, labels = data(name, device)

    def step() -> None:
        for client, mine in enumerate(modules):
            some = slice(client * ROWS, (client + 1) * ROWS)
            functional.cross_entropy(mine(rows[some]), labels[some], reduction="sum").backward()  # type: ignore[no-untyped-call,unused-ignore]
            trained = list(mine.parameters())
            with torch.no_grad():
                each: list[Any] = [getattr(parameter, "grad_sample") for parameter in trained]  # noqa: B009
                norms = torch.stack([sample.flatten(1).norm(dim=1) for sample in each]).norm(dim=0)
                factors = (CLIP / norms).clamp(max=1.0)
                for parameter, sample in zip(trained, each, strict=True):
                    parameter -= RATE / ROWS * torch.einsum("i,i...->...", factors, sample)
            mine.zero_grad(set_to_none=True)

    return step


def seconds(step: Callable[[], object], device: torch.device, least: float) -> float:
    """Return the seconds of a step: CPU time, or elapsed time on a device."""
    clock = time.process_time
    if device.type == "cuda":
        clock = time.perf_counter
        torch.cuda.synchronize()
    begin, count = clock(), 0
    while clock() - begin < least or not count:
        step()
        count += 1
        if device.type == "cuda":
            torch.cuda.synchronize()
    return (clock() - begin) / count


def measure(name: str, device: torch.device, repeats: int, least: float, eager: bool) -> dict[str, float]:
    mine = ours(name, device)
    if device.type == "cuda" and not eager:
        mine = captured(mine)
    contestants = {"polyeps": mine, "opacus_loop": opacus(name, device)}
    for step in contestants.values():
        step()
    best = dict.fromkeys(contestants, float("inf"))
    for _ in range(repeats):
        for who, step in contestants.items():
            best[who] = min(best[who], seconds(step, device, least))
    found = {who: float(f"{1 / each:.4g}") for who, each in best.items()}
    return {**found, "ratio": float(f"{best['opacus_loop'] / best['polyeps']:.3g}")}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print JSON only")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1.0, help="least time of a measurement")
    parser.add_argument("--eager", action="store_true", help="on a device, do not capture our step as a graph")
    parser.add_argument("--stages", action="store_true", help="print our step's CPU time by stage instead")
    options = parser.parse_args()
    torch.set_num_threads(1)  # as training does (`test_training.py`): further ones spin while they wait, which counts
    warnings.simplefilter("ignore")  # Opacus warns about its hooks
    table: dict[str, dict[str, float]] = {}
    for name in options.models.split(","):
        if options.stages:
            table[name] = stages(name, options.repeats)
        else:
            table[name] = measure(name, torch.device(options.device), options.repeats, options.seconds, options.eager)
        if not options.json:
            print(name, table[name], file=sys.stderr)
    print(json.dumps(table, indent=2))


if __name__ == "__main__":
    main()
