"""Users' modules of every family, small: what the engine must get right, run slowly or refuse."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations, prune

Build = Callable[[], nn.Module]


class Case(NamedTuple):
    """A module, the shape of its records and, if it must be refused, a part of the sentence."""

    build: Build
    shape: tuple[int, ...] = (4,)
    tokens: int = 0  # records are whole numbers below it; 0: floats
    refused: str = ""
    slow: bool = False  # whether it runs one row after the other


class Fn(nn.Module):
    """Modules by name, and what to do with them."""

    def __init__(self, forward: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.forward_of = forward
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, rows: Tensor) -> Any:
        return self.forward_of(self, rows)


class Headed(nn.Module):
    """A body, its outputs flattened, and a linear head."""

    def __init__(self, body: nn.Module, width: int) -> None:
        super().__init__()
        self.body, self.head = body, nn.Linear(width, 3)

    def forward(self, rows: Tensor) -> Tensor:
        found: Tensor = self.head(self.body(rows).flatten(1))
        return found


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape) / 2)


def quiet(build: Build) -> Build:
    def made() -> nn.Module:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return build()

    return made


def width_of(body: nn.Module, shape: tuple[int, ...], tokens: int) -> int:
    rows = torch.zeros(2, *shape, dtype=torch.int64) if tokens else torch.rand(2, *shape)
    with torch.no_grad():
        return int(body(rows).flatten(1).shape[1])


def headed(body: Build, shape: tuple[int, ...], tokens: int = 0) -> Case:
    """A body under a linear head, in a class."""

    def build() -> nn.Module:
        made = body()
        return Headed(made, width_of(made, shape, tokens))

    return Case(quiet(build), shape, tokens)


def linear_cases() -> dict[str, Case]:
    found: dict[str, Case] = {}
    for bias, length, kind in product((True, False), (0, 3), ("class", "sequential", "functional", "matmul")):
        shape = (length, 4) if length else (4,)

        def build(bias: bool = bias, kind: str = kind, shape: tuple[int, ...] = shape) -> nn.Module:
            first, last = nn.Linear(4, 5, bias=bias), nn.Linear(5 * math.prod(shape[:-1]), 3, bias=bias)
            if kind == "sequential":
                return nn.Sequential(first, nn.Tanh(), nn.Flatten(), last)
            if kind == "class":
                return Fn(lambda s, x: s.last(torch.tanh(s.first(x)).flatten(1)), first=first, last=last)
            if kind == "functional":
                return Fn(
                    lambda s, x: s.last(torch.tanh(functional.linear(x, s.w, s.b)).flatten(1)),
                    w=parameter(5, 4),
                    b=parameter(5) if bias else None,
                    last=last,
                )
            return Fn(lambda s, x: s.last(torch.tanh(x @ s.w).flatten(1)), w=parameter(4, 5), last=last)

        found[f"linear {kind} bias={bias} length={length}"] = Case(build, shape)
    return found


def lora() -> nn.Module:
    base = nn.Linear(4, 5)
    base.requires_grad_(False)
    return Fn(
        lambda s, x: s.head(torch.tanh(s.base(x) + 2 * s.up(s.down(x)))),
        base=base,
        down=nn.Linear(4, 2, bias=False),
        up=nn.Linear(2, 5, bias=False),
        head=nn.Linear(5, 3),
    )


def tied_transposed() -> nn.Module:
    return Fn(lambda s, x: s.head(torch.tanh(functional.linear(x, s.w)) @ s.w), w=parameter(6, 4), head=nn.Linear(4, 3))


def tied() -> nn.Module:
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.weight = first.weight
    return Fn(lambda s, x: s.c(s.b(torch.tanh(s.a(x)))), a=first, b=second, c=nn.Linear(4, 3))


def pruned() -> nn.Module:
    made = nn.Linear(4, 3)
    prune.l1_unstructured(made, "weight", 0.5)  # type: ignore[no-untyped-call]
    return made


def normed(build: Callable[[nn.Module], nn.Module], eval_mode: bool = False) -> Build:
    def made() -> nn.Module:
        module = nn.Sequential(build(nn.Linear(4, 5)), nn.Tanh(), nn.Linear(5, 3))
        return module.eval() if eval_mode else module

    return quiet(made)


def experts(hard: bool) -> Build:
    def forward(s: Any, x: Tensor) -> Tensor:
        gates = torch.softmax(s.gate(x), -1)
        if hard:
            best, which = gates.topk(2, -1)
            gates = torch.zeros_like(gates).scatter(-1, which, best)
        each = torch.stack([expert(x) for expert in s.experts], -1)
        found: Tensor = (each * gates.unsqueeze(-2)).sum(-1)
        return found

    return lambda: Fn(forward, gate=nn.Linear(4, 3), experts=nn.ModuleList(nn.Linear(4, 3) for _ in range(3)))


def own_cases() -> dict[str, Case]:
    def scaled(s: Any, x: Tensor) -> Tensor:
        found: Tensor = s.a(x) * s.gain + s.shift
        return found

    def branch(s: Any, x: Tensor) -> Tensor:
        return torch.stack([s.a(row) if row.sum() > 0 else s.b(row) for row in x])

    def routed(s: Any, x: Tensor) -> Tensor:
        mask = x.sum(1) > 0
        found = x.new_zeros(len(x), 3)
        found[mask], found[~mask] = s.a(x[mask]), s.b(x[~mask])
        return found

    def until(s: Any, x: Tensor) -> Tensor:
        found = []
        for row in x:
            for _ in range(4):
                row = torch.tanh(s.a(row))
                if row.abs().mean() < 0.4:
                    break
            found.append(s.b(row))
        return torch.stack(found)

    def a() -> nn.Module:
        return nn.Linear(4, 3)

    b = a
    simple: dict[str, Build] = {
        "0-dim": lambda: Fn(scaled, a=a(), gain=nn.Parameter(torch.tensor(1.5)), shift=parameter(3)),
        "residual": lambda: Fn(lambda s, x: s.b(x + torch.relu(s.a(x))), a=nn.Linear(4, 4), b=b()),
        "shared module": lambda: Fn(lambda s, x: s.b(s.a(torch.tanh(s.a(x)))), a=nn.Linear(4, 4), b=b()),
        "two branches": lambda: Fn(lambda s, x: s.a(x) * torch.sigmoid(s.b(x)), a=a(), b=b()),
        "tied": tied,
        "tied transposed": tied_transposed,
        "lora": lora,
        "unused parameter": lambda: Fn(lambda s, x: s.a(x), a=a(), b=b()),
        "unused output": lambda: Fn(lambda s, x: (s.b(x), s.a(x))[1], a=a(), b=b()),
        "detached": lambda: Fn(lambda s, x: s.a(x) + s.b(x).detach(), a=a(), b=b()),
        "no grad": lambda: Fn(lambda s, x: s.a(x) * no_grad(s.b, x), a=a(), b=b()),
        "frozen first": lambda: Fn(lambda s, x: s.b(torch.tanh(s.a(x))), a=frozen(nn.Linear(4, 4)), b=b()),
        "frozen bias": lambda: Fn(lambda s, x: s.a(x), a=frozen_bias()),
        "frozen weight": lambda: Fn(lambda s, x: s.a(x), a=frozen_weight()),
        "bilinear": lambda: Fn(lambda s, x: s.a(x, torch.tanh(x)), a=nn.Bilinear(4, 4, 3)),
        "parameter list": lambda: Fn(
            lambda s, x: sum((x * p) @ q for p, q in zip(s.p, s.q, strict=True)),
            p=nn.ParameterList(parameter(4) for _ in range(2)),
            q=nn.ParameterList(parameter(4, 3) for _ in range(2)),
        ),
        "parameter dict": lambda: Fn(lambda s, x: x @ s.p["w"] + s.p["b"], p=parameters(w=(4, 3), b=(3,))),
        "module dict": lambda: Fn(
            lambda s, x: s.p["b"](s.p["a"](x)), p=nn.ModuleDict({"a": nn.Linear(4, 4), "b": b()})
        ),
        "einsum": lambda: Fn(lambda s, x: torch.einsum("bi,oi->bo", x, s.w), w=parameter(3, 4)),
        "addmm": lambda: Fn(lambda s, x: torch.addmm(s.b, x, s.w), w=parameter(4, 3), b=parameter(3)),
        "bmm": lambda: Fn(
            lambda s, x: torch.bmm(x.reshape(-1, 2, 2), s.w.expand(len(x), -1, -1)).flatten(1), w=parameter(2, 2)
        ),
        "hypernetwork": lambda: Fn(
            lambda s, x: torch.bmm(s.a(x).reshape(len(x), 3, 4), x.unsqueeze(2)).squeeze(2), a=nn.Linear(4, 12)
        ),
        "weight of weights": lambda: Fn(
            lambda s, x: functional.linear(x, s.a.weight * torch.sigmoid(s.m)), a=a(), m=parameter(3, 4)
        ),
        "weight standardised": lambda: Fn(
            lambda s, x: functional.linear(x, (s.a.weight - s.a.weight.mean(1, keepdim=True)) / s.a.weight.std()), a=a()
        ),
        "part of a weight": lambda: Fn(
            lambda s, x: functional.linear(x, s.w[2:5], s.b[2:5]), w=parameter(7, 4), b=parameter(7)
        ),
        "overlapping parts": lambda: Fn(
            lambda s, x: functional.linear(x, s.w[0:3]) + functional.linear(x, s.w[2:5]), w=parameter(7, 4)
        ),
        "cosine head": lambda: Fn(
            lambda s, x: 5 * functional.normalize(x) @ functional.normalize(s.w, dim=1).T, w=parameter(3, 4)
        ),
        "prototypes": lambda: Fn(lambda s, x: -torch.cdist(x, s.w), w=parameter(3, 4)),
        "gated linear unit": lambda: Fn(lambda s, x: functional.glu(s.a(x)), a=nn.Linear(4, 6)),
        "maxout": lambda: Fn(lambda s, x: s.a(x).reshape(len(x), 3, 2).amax(2), a=nn.Linear(4, 6)),
        "soft experts": experts(hard=False),
        "top-2 experts": experts(hard=True),
        "in place on rows": lambda: Fn(lambda s, x: s.a(x.mul_(2)), a=a()),
        "in place inside": lambda: Fn(lambda s, x: s.b(s.a(x).add_(1).relu_()), a=nn.Linear(4, 4), b=b()),
        "in place on a slice": lambda: Fn(lambda s, x: s.b(zeroed(s.a(x))), a=nn.Linear(4, 4), b=b()),
        "written into zeros": lambda: Fn(lambda s, x: s.b(torch.zeros_like(x).copy_(s.a(x))), a=nn.Linear(4, 4), b=b()),
        "concatenation": lambda: Fn(lambda s, x: s.b(torch.cat([x, s.a(x)], 1)), a=nn.Linear(4, 2), b=nn.Linear(6, 3)),
        "buffer": lambda: with_buffer(),
        "size of the batch": lambda: Fn(lambda s, x: s.a(x.view(x.size(0), -1)), a=a()),
        "sorted": lambda: Fn(lambda s, x: s.a(x.sort(1).values), a=a()),
        "cumulated": lambda: Fn(lambda s, x: s.b(s.a(x).cumsum(1)), a=nn.Linear(4, 4), b=b()),
        "where": lambda: Fn(lambda s, x: torch.where(x[:, :3] > 0, s.a(x), s.b(x)), a=a(), b=b()),
        "softmax head": lambda: Fn(lambda s, x: s.a(x).log_softmax(1), a=a()),
        "pruned": pruned,
        "weight norm": normed(parametrizations.weight_norm),
        "old weight norm": normed(nn.utils.weight_norm),
        "orthogonal": normed(parametrizations.orthogonal),
        "spectral norm in eval": normed(parametrizations.spectral_norm, eval_mode=True),
    }
    found = {f"own {name}": Case(build) for name, build in simple.items()}
    slow: dict[str, Build] = {
        "branch": lambda: Fn(branch, a=a(), b=b()),
        "routed": lambda: Fn(routed, a=a(), b=b()),
        "until": lambda: Fn(until, a=nn.Linear(4, 4), b=b()),
        "item": lambda: Fn(lambda s, x: torch.stack([s.a(row) * row.max().item() for row in x]), a=a()),
        "nonzero": lambda: Fn(
            lambda s, x: s.a(x).index_add(0, x[:, 0].gt(0).nonzero()[:, 0], s.b(x[x[:, 0] > 0])), a=a(), b=b()
        ),
        "numpy": lambda: Fn(lambda s, x: s.a(x) * torch.from_numpy(x.detach().numpy().sum(1, keepdims=True)), a=a()),
        "checkpoint": lambda: Fn(
            lambda s, x: x[:, :3] + s.b(torch.utils.checkpoint.checkpoint(s.a, x, use_reentrant=False)),
            a=nn.Linear(4, 4),
            b=b(),
        ),
        "gradient of inputs": lambda: Fn(slope, a=nn.Linear(4, 3), b=b()),
    }
    found |= {f"own {name}": Case(build, slow=True) for name, build in slow.items()}
    return found


def no_grad(part: nn.Module, rows: Tensor) -> Tensor:
    with torch.no_grad():
        found: Tensor = part(rows)
    return found


def slope(s: Any, x: Tensor) -> Tensor:
    with torch.enable_grad():
        y = x.detach().requires_grad_()
        (by,) = torch.autograd.grad(torch.tanh(s.a(y)).sum(), y, create_graph=True)
    found: Tensor = s.b(by)
    return found


def zeroed(rows: Tensor) -> Tensor:
    rows[:, :2] = 0
    return rows


def with_buffer() -> nn.Module:
    made = Fn(lambda s, x: s.a(x * s.mask), a=nn.Linear(4, 3))
    made.register_buffer("mask", torch.tensor([1.0, 0.0, 2.0, 1.0]))
    return made


def parameters(**shapes: tuple[int, ...]) -> nn.ParameterDict:
    return nn.ParameterDict({name: parameter(*shape) for name, shape in shapes.items()})


def frozen(module: nn.Module) -> nn.Module:
    return module.requires_grad_(False)


def frozen_bias() -> nn.Module:
    made = nn.Linear(4, 3)
    made.bias.requires_grad_(False)
    return made


def frozen_weight() -> nn.Module:
    made = nn.Linear(4, 3)
    made.weight.requires_grad_(False)
    return made


ACTIVATIONS = (
    "CELU ELU GELU Hardshrink Hardsigmoid Hardswish Hardtanh Identity LeakyReLU LogSigmoid Mish PReLU ReLU ReLU6 SELU "
    "SiLU Sigmoid Softplus Softshrink Softsign Tanh Tanhshrink"
)


def activation_cases() -> dict[str, Case]:
    def between(make: Build) -> Build:
        return lambda: Fn(lambda s, x: s.b(s.act(s.a(x))), a=nn.Linear(4, 6), act=make(), b=nn.Linear(6, 3))

    kinds: dict[str, Build] = {name: getattr(nn, name) for name in ACTIVATIONS.split()}
    kinds |= {
        "PReLU of channels": lambda: nn.PReLU(6),
        "Threshold": lambda: nn.Threshold(0.1, 0.0),
        "RReLU in eval": lambda: nn.RReLU().eval(),
        "Softmax": lambda: nn.Softmax(1),
        "Softmin": lambda: nn.Softmin(1),
        "LogSoftmax": lambda: nn.LogSoftmax(-1),
        "ReLU in place": lambda: nn.ReLU(inplace=True),
        "SiLU in place": lambda: nn.SiLU(inplace=True),
    }
    return {f"activation {name}": Case(between(make)) for name, make in kinds.items()}
