"""Modules as a stranger may bring them: branches, in-place work, checkpoints, own autograd, odd classes, randomness."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize, prune, rnn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from support.model_families import Build, Case, Fn, parameter, quiet

Act = Callable[[Any, Tensor], Any]


def ends(act: Act, width: int = 4, **parts: Callable[[], Any]) -> Build:
    """Rows (T, 4), `a` to a width, what `act` does, `b` to three classes; further parts by name."""

    def build() -> nn.Module:
        made: dict[str, Any] = {"a": nn.Linear(4, width), "b": nn.Linear(width, 3)}
        return Fn(act, **(made | {name: make() for name, make in parts.items()}))

    return quiet(build)


def head(act: Act, **parts: Callable[[], Any]) -> Build:
    """Rows (T, 4) and one layer `a` to three classes."""
    made: dict[str, Callable[[], Any]] = {"a": lambda: nn.Linear(4, 3)}
    return quiet(lambda: Fn(act, **{name: make() for name, make in (made | parts).items()}))


def weights(*shape: int) -> Callable[[], nn.Parameter]:
    return lambda: parameter(*shape)


# --- branches on values ---------------------------------------------------------------------------------------------


def until_short(s: Any, x: Tensor) -> Tensor:
    for _ in range(5):
        if x.norm() <= 1:
            break
        x = torch.tanh(s.a(x)) * 0.7
    found: Tensor = s.b(x)
    return found


def finite_only(s: Any, x: Tensor) -> Tensor:
    if not torch.isfinite(x).all():
        raise ValueError("a record holds no numbers")
    found: Tensor = s.a(x)
    return found


def as_many_steps(s: Any, x: Tensor) -> Tensor:
    for _ in range(int(x.abs().sum().item()) % 4):
        x = torch.tanh(s.a(x))
    rows: Tensor = s.b(x)
    return rows


def best_expert(s: Any, x: Tensor) -> Tensor:
    chance, which = s.gate(x).softmax(-1).topk(1, -1)
    found = x.new_zeros(len(x), 3)
    for number, expert in enumerate(s.experts):
        mine = (which == number).any(-1)
        if mine.any():
            found[mine] += expert(x[mine]) * chance[mine]
    return found


def two_experts(s: Any, x: Tensor) -> Tensor:
    chance, which = s.gate(x).softmax(-1).topk(2, -1)
    found = x.new_zeros(len(x), 3)
    for number, expert in enumerate(s.experts):
        row, place = torch.where(which == number)
        found.index_add_(0, row, expert(x[row]) * chance[row, place, None])
    return found


def experts() -> nn.ModuleList:
    return nn.ModuleList(nn.Linear(4, 3) for _ in range(3))


def branching() -> dict[str, Case]:
    routed = {"gate": lambda: nn.Linear(4, 3), "experts": experts}
    slow: dict[str, Build] = {
        "one branch for the batch": ends(lambda s, x: s.b(s.a(x)) if x.sum() > 0 else s.b(x)),
        "scaled if large": head(lambda s, x: s.a(x) / (x.abs().max() if x.abs().max() > 5 else 1)),
        "loop until short": ends(until_short),
        "finite rows only": head(finite_only),
        "a log line": head(lambda s, x: (str(x.mean().item()), s.a(x))[1]),
        "row by row": ends(lambda s, x: torch.stack([s.b(s.a(r) if r[0] > 0 else r) for r in x])),
        "count of non-zeros": head(lambda s, x: torch.cat([s.a(r[None]) * len(r.gt(0).nonzero()) for r in x])),
        "boolean index": head(lambda s, x: torch.stack([s.a(r) * r[r > 0].sum() for r in x])),
        "unique": head(lambda s, x: s.a(x) * x.new_tensor([len(torch.unique(r)) for r in x])[:, None]),
        "Python numbers": head(lambda s, x: s.a(x) * torch.tensor([float(v) for v in x[:, 0]])[:, None]),
        "steps counted by item()": ends(as_many_steps),
        "best expert": head(best_expert, **routed),
        "two experts": head(two_experts, **routed),
    }
    return {f"branch {name}": Case(build, slow=True) for name, build in slow.items()}


# --- in place, types, sizes -----------------------------------------------------------------------------------------


def one_more(_: Any, x: Tensor) -> Tensor:
    x += 1
    x[:, 0] = 0
    return x


def filled(s: Any, x: Tensor) -> Tensor:
    found = torch.zeros(len(x), 8)
    found[:, :4], found[:, 4:] = s.a(x), x
    rows: Tensor = s.b(found[:, 2:6])
    return rows


def row_for_row(s: Any, x: Tensor) -> Tensor:
    found = x.new_empty(x.shape)
    for place in range(len(x)):
        found[place] = s.a(x[place])
    rows: Tensor = s.b(found)
    return rows


def clamped(s: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        s.a.weight.clamp_(-0.1, 0.1)
    found: Tensor = s.a(x)
    return found


def clamped_data(s: Any, x: Tensor) -> Tensor:
    s.a.weight.data.clamp_(-0.1, 0.1)
    found: Tensor = s.a(x)
    return found


def matrix(s: Any, x: Tensor) -> Tensor:
    found = torch.zeros(4, 4)
    found[:, :3] = s.u
    found[0, 1:] += s.t
    return (x @ found)[:, 1:]


def decoded(s: Any, x: Tensor) -> Tensor:
    found, state = torch.zeros(len(x), 3, 4), x
    for place in range(3):
        state = torch.tanh(s.a(state))
        found[:, place] = state
    rows: Tensor = s.b(found.mean(1))
    return rows


def masked_away(s: Any, x: Tensor) -> Tensor:
    found = s.a(x)
    found[found < 0] = 0
    found[torch.isnan(x)] = 0.5
    rows: Tensor = s.b(found)
    return rows


def within_bounds(s: Any, x: Tensor) -> Tensor:
    s.a.weight.detach().clamp_(-50, 50)  # which changes nothing, until a weight is large
    rows: Tensor = s.a(x)
    return rows


def in_half(s: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found: Tensor = s.b(torch.tanh(s.a(x)))
    return found.float()


def in_place_and_types() -> dict[str, Case]:
    fast: dict[str, Build] = {
        "input added to": head(lambda s, x: s.a(x.add_(1))),
        "input set": head(lambda s, x: s.a(one_more(s, x))),
        "0-dim gain and shift": head(lambda s, x: s.a(x) * s.t.exp() + s.u, t=weights(), u=weights()),
        "0-dim alone": of_weights(lambda s, x: torch.stack([x[:, 0] * s.t, x[:, 1] * s.u, x[:, 2]], 1), t=(), u=()),
        "0-dim exponent": head(lambda s, x: s.a(x).abs().pow(s.t.abs() + 1), t=weights()),
        "0-dim slope": head(lambda s, x: torch.where(s.a(x) > 0, s.a(x), s.t * s.a(x)), t=weights()),
        "one number": head(lambda s, x: s.a(x) * s.t, t=weights(1)),
        "no numbers": head(lambda s, x: s.a(x) + s.t.sum(), t=weights(0)),
        "five dimensions": head(lambda s, x: s.a(x) + s.t.sum((0, 1, 2, 3)), t=weights(2, 1, 2, 1, 3)),
        "float64": lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double(),
        "float64 inside": head(lambda s, x: functional.linear(x.double(), s.a.weight.double()).float()),
        "float64 outputs": head(lambda s, x: s.a(x).double()),
        "complex inside": ends(lambda s, x: s.b(torch.complex(s.a(x), x).abs())),
        "Fourier": head(lambda s, x: s.a(torch.fft.fft(x).abs())),
        "lazy": quiet(lambda: nn.Sequential(nn.LazyLinear(5), nn.Tanh(), nn.LazyLinear(3))),
        "set row for row": ends(row_for_row),
        "set in zeros": ends(filled),
        "scattered": ends(lambda s, x: s.b(torch.zeros(len(x), 4).scatter_(1, x.argsort(1), s.a(x)))),
        "weights set in zeros": of_weights(matrix, t=(3,), u=(4, 3)),
        "decoded into zeros": ends(decoded),
        "where a mask says": ends(masked_away),
        "data of a record": ends(lambda s, x: s.b(s.a(x) * x.data.new_ones(x.shape) * x.data)),
        "activation after GroupNorm": quiet(
            lambda: nn.Sequential(nn.Linear(4, 4), nn.GroupNorm(2, 4), nn.ReLU(inplace=True), nn.Linear(4, 3))
        ),
        "squeeze and excite": quiet(
            lambda: Fn(
                lambda s, x: s.c(
                    (y := s.a(x[:, :, None, None].expand(-1, -1, 3, 3)))
                    * s.b(functional.relu(s.d(y.mean((2, 3), keepdim=True)), inplace=True)).sigmoid()
                ).mean((2, 3)),
                a=nn.Conv2d(4, 4, 2),
                d=nn.Conv2d(4, 2, 1),
                b=nn.Conv2d(2, 4, 1),
                c=nn.Conv2d(4, 3, 1),
            )
        ),
        "is it a parameter": head(lambda s, x: s.a(x) if isinstance(s.a.weight, nn.Parameter) else 1 / 0),
    }
    slow: dict[str, Build] = {
        "weight clamped": head(clamped),
        "weight within wide bounds": head(within_bounds),
        "data of weight clamped": head(clamped_data),
        "data of weight read": head(lambda s, x: s.a(x) + x @ s.a.weight.data.T),
        "autocast": ends(in_half),
        "bfloat16 inside": head(lambda s, x: functional.linear(x.bfloat16(), s.a.weight.bfloat16()).float()),
        "frozen bfloat16": ends(
            lambda s, x: s.b(s.a(x.bfloat16()).float()), a=lambda: nn.Linear(4, 4).bfloat16().requires_grad_(False)
        ),
    }
    found = {f"in place {name}": Case(build) for name, build in fast.items()}
    return found | {f"in place {name}": Case(build, slow=True) for name, build in slow.items()}


def of_weights(act: Act, **shapes: tuple[int, ...]) -> Build:
    return lambda: Fn(act, **{name: parameter(*shape) for name, shape in shapes.items()})


def tables() -> dict[str, Case]:
    bodies: dict[str, Build] = {
        "max_norm": lambda: nn.Sequential(nn.Embedding(9, 4, max_norm=1.0), nn.Flatten(), nn.Linear(24, 3)),
        "max_norm of order 1": lambda: nn.Sequential(
            nn.Embedding(9, 4, max_norm=0.5, norm_type=1.0), nn.Flatten(), nn.Linear(24, 3)
        ),
        "max_norm with padding": lambda: nn.Sequential(
            nn.Embedding(9, 4, padding_idx=0, max_norm=0.5), nn.Flatten(), nn.Linear(24, 3)
        ),
        "max_norm of a bag": lambda: nn.Sequential(nn.EmbeddingBag(9, 4, max_norm=0.5), nn.Linear(4, 3)),
        "max_norm frozen": lambda: nn.Sequential(
            nn.Embedding(9, 4, max_norm=0.5).requires_grad_(False), nn.Flatten(), nn.Linear(24, 3)
        ),
        "max_norm by function": lambda: Fn(
            lambda s, x: s.h(functional.embedding(x, s.w, max_norm=1.0).mean(1)), w=parameter(9, 4), h=nn.Linear(4, 3)
        ),
        "sparse": lambda: nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Flatten(), nn.Linear(24, 3)),
        "sparse bag": lambda: nn.Sequential(nn.EmbeddingBag(9, 4, sparse=True, mode="sum"), nn.Linear(4, 3)),
        "bag by offsets": lambda: Fn(
            lambda s, x: s.h(s.e(x.flatten(), torch.arange(len(x)) * 6)), e=nn.EmbeddingBag(9, 4), h=nn.Linear(4, 3)
        ),
        "part of a table": lambda: Fn(
            lambda s, x: s.h(functional.embedding(x, s.e.weight[:9]).mean(1)), e=nn.Embedding(12, 4), h=nn.Linear(4, 3)
        ),
        "hashed": lambda: Fn(lambda s, x: s.h(s.e((x * 7919) % 5).mean(1)), e=nn.Embedding(5, 4), h=nn.Linear(4, 3)),
        "last word": lambda: Fn(
            lambda s, x: s.h(s.r(s.e(x))[0][torch.arange(len(x)), (x > 0).sum(1) - 1]),
            e=nn.Embedding(9, 4),
            r=nn.GRU(4, 4, batch_first=True),
            h=nn.Linear(4, 3),
        ),
        "padding hidden": lambda: Fn(
            lambda s, x: s.h(s.t(s.e(x), src_key_padding_mask=x == 8).mean(1)),
            e=nn.Embedding(9, 4),
            t=nn.TransformerEncoderLayer(4, 2, 6, batch_first=True),
            h=nn.Linear(4, 3),
        ),
    }
    found = {f"table {name}": Case(quiet(build), (6,), 9) for name, build in bodies.items()}
    unequal = lambda s, x: s.h(s.r(packed(s.e(x), x))[1][-1])  # noqa: E731
    recurrent: dict[str, Any] = {"e": nn.Embedding(9, 4), "r": nn.GRU(4, 4, batch_first=True), "h": nn.Linear(4, 3)}
    found["table unequal lengths"] = Case(lambda: Fn(unequal, **recurrent), (6,), 9, slow=True)
    return found


def packed(rows: Tensor, tokens: Tensor) -> rnn.PackedSequence:
    lengths = (tokens > 0).sum(1).clamp(min=1)
    return rnn.pack_padded_sequence(rows, lengths, batch_first=True, enforce_sorted=False)


# --- checkpoints, own autograd, parametrisations ----------------------------------------------------------------------


class Rectified(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clamp(min=0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        rows: Tensor = gradient * (x > 0)
        return rows


class Sign(Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.sign()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:  # noqa: ARG004
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        rows: Tensor = gradient * (x.abs() <= 1)
        return rows


class Times(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w.T

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return gradient @ w, gradient.T @ x


class Reversed(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, by: float) -> Tensor:
        ctx.by = by
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return -ctx.by * gradient, None


class Symmetric(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.triu() + x.triu(1).transpose(-1, -2)


class Positive(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.exp()

    def right_inverse(self, x: Tensor) -> Tensor:
        return x.abs().log()


def made_of(module: nn.Module, name: str, part: nn.Module) -> nn.Module:
    parametrize.register_parametrization(module, name, part)
    return module


def twice_cached(s: Any, x: Tensor) -> Tensor:
    with parametrize.cached():
        found: Tensor = s.b(torch.tanh(s.a(torch.tanh(s.a(x)))))
    return found


def deep() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 4), nn.Tanh())


def hooked(**hooks: Any) -> Build:
    def build() -> nn.Module:
        made = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 3))
        for name, hook in hooks.items():
            getattr(made[1], name)(hook)
        return made

    return build


def watched(rows: Tensor) -> Tensor:
    if rows.requires_grad:
        rows.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))  # type: ignore[no-untyped-call]
    return rows


def keeping(s: Any, x: Tensor) -> Tensor:
    s.kept = s.a(x)
    found: Tensor = s.b(s.kept)
    return found


def differentiated() -> dict[str, Case]:
    slow: dict[str, Build] = {
        "checkpoint with dropout": ends(
            lambda s, x: s.b(checkpoint(s.a, x, use_reentrant=False)), a=lambda: nn.Sequential(deep(), nn.Dropout(0.3))
        ),
        "checkpoint first, reentrant": ends(lambda s, x: s.b(checkpoint(s.a, x, use_reentrant=True)), a=deep),
        "checkpoint second, reentrant": ends(lambda s, x: s.b(checkpoint(s.c, s.a(x), use_reentrant=True)), c=deep),
        "checkpoints in turn": ends(
            lambda s, x: s.b(checkpoint_sequential(s.c, 2, s.a(x), use_reentrant=False)),  # type: ignore[no-untyped-call]
            c=deep,
        ),
        "own function": ends(lambda s, x: s.b(Rectified.apply(s.a(x)))),  # type: ignore[no-untyped-call]
        "own function of a weight": of_weights(lambda s, x: Times.apply(x, s.w), w=(3, 4)),  # type: ignore[no-untyped-call]
        "gradient reversed": ends(lambda s, x: s.b(Reversed.apply(s.a(x), 0.5))),  # type: ignore[no-untyped-call]
        "backward hook": hooked(register_full_backward_hook=lambda _m, by, _of: (2 * by[0],)),
        "backward pre-hook": hooked(register_full_backward_pre_hook=lambda _m, of: (2 * of[0],)),
        "hook on activations": ends(lambda s, x: s.b(watched(s.a(x)))),
        "input asks for gradients": head(lambda s, x: s.a(x.requires_grad_())),
    }
    fast: dict[str, Build] = {
        "checkpoint": ends(lambda s, x: s.b(checkpoint(s.a, x, use_reentrant=False)), a=deep),
        "own function with a rule": ends(lambda s, x: s.b(Sign.apply(s.a(x)))),  # type: ignore[no-untyped-call]
        "binary weights": of_weights(lambda s, x: functional.linear(x, Sign.apply(s.w)), w=(3, 4)),  # type: ignore[no-untyped-call]
        "binary weights, detached": of_weights(
            lambda s, x: functional.linear(x, s.w + (s.w.sign() - s.w).detach()), w=(3, 4)
        ),
        "rounded activations": ends(lambda s, x: s.b(s.a(x) + (s.a(x).round() - s.a(x)).detach())),
        "weight norm without dim": lambda: nn.Sequential(
            parametrizations.weight_norm(nn.Linear(4, 5), dim=None),  # type: ignore[arg-type]
            nn.ReLU(),
            nn.Linear(5, 3),
        ),
        "orthogonal by Cayley": lambda: nn.Sequential(
            parametrizations.orthogonal(nn.Linear(4, 4), orthogonal_map="cayley"), nn.Linear(4, 3)
        ),
        "orthogonal by Householder": lambda: nn.Sequential(
            parametrizations.orthogonal(nn.Linear(4, 4), orthogonal_map="householder"), nn.Linear(4, 3)
        ),
        "symmetric": lambda: nn.Sequential(made_of(nn.Linear(4, 4), "weight", Symmetric()), nn.Linear(4, 3)),
        "symmetric and positive": lambda: nn.Sequential(
            made_of(made_of(nn.Linear(4, 4), "weight", Symmetric()), "weight", Positive()), nn.Linear(4, 3)
        ),
        "positive bias": lambda: nn.Sequential(made_of(nn.Linear(4, 4), "bias", Positive()), nn.Linear(4, 3)),
        "cached": ends(twice_cached, a=lambda: made_of(nn.Linear(4, 4), "weight", Symmetric())),
        "pruned by rows": lambda: nn.Sequential(
            prune.ln_structured(nn.Linear(4, 4), "weight", 0.5, n=2, dim=0),  # type: ignore[no-untyped-call]
            nn.Linear(4, 3),
        ),
        "vmap inside": head(lambda s, x: torch.func.vmap(lambda r: s.a(r))(x)),
        "keeps activations": ends(keeping),
    }
    found = {f"differentiated {name}": Case(quiet(build)) for name, build in fast.items()}
    return found | {f"differentiated {name}": Case(quiet(build), slow=True) for name, build in slow.items()}


# --- weights used in other ways -------------------------------------------------------------------------------------


def algebra() -> dict[str, Case]:
    shaped: dict[str, tuple[Act, dict[str, tuple[int, ...]]]] = {
        "einsum of three": (lambda s, x: torch.einsum("bi,ij,jk->bk", x, s.u, s.v), {"u": (4, 2), "v": (2, 3)}),
        "tensordot": (lambda s, x: torch.tensordot(x, s.u, dims=1), {"u": (4, 3)}),
        "weight on the left": (lambda s, x: (s.u @ x.T).T, {"u": (3, 4)}),
        "weight vectors": (lambda s, x: torch.stack([x @ s.u, x @ s.v, x @ s.w], 1), {"u": (4,), "v": (4,), "w": (4,)}),
        "Kronecker": (lambda s, x: x @ torch.kron(s.u, s.v), {"u": (2, 3), "v": (2, 1)}),
        "matrix exponential": (lambda s, x: x @ torch.matrix_exp(s.u)[:, :3], {"u": (4, 4)}),
        "inverse": (lambda s, x: x @ torch.linalg.inv(s.u + 3 * torch.eye(4))[:, :3], {"u": (4, 4)}),
        "Cholesky": (lambda s, x: x @ torch.linalg.cholesky(s.u @ s.u.T + torch.eye(4))[:, :3], {"u": (4, 4)}),
        "indexed by a record": (lambda s, x: s.w[(x[:, 0] > 0).long()] + x @ s.u, {"w": (2, 3), "u": (4, 3)}),
        "repeated": (lambda s, x: (s.c.repeat_interleave(2, 0) * x) @ s.u, {"c": (2,), "u": (4, 3)}),
        "viewed": (lambda s, x: x @ s.u.view(4, 3), {"u": (3, 4)}),
        "cloned": (lambda s, x: x @ s.u.clone(), {"u": (4, 3)}),
        "batched add": (
            lambda s, x: torch.baddbmm(s.b.expand(len(x), 1, 3), x[:, None], s.u.expand(len(x), 4, 3)).squeeze(1),
            {"b": (1, 3), "u": (4, 3)},
        ),
    }
    found = {f"algebra {name}": Case(of_weights(act, **shapes)) for name, (act, shapes) in shaped.items()}
    others: dict[str, Build] = {
        "sum of all weights": head(lambda s, x: s.a(x) * sum(p.pow(2).sum() for p in s.parameters())),
        "by name": head(lambda s, x: s.a(x) + dict(s.named_parameters())["a.weight"].sum(1)),
        "state dict": head(lambda s, x: s.a(x) + 0 * s.state_dict()["a.bias"].sum()),
        "own device": head(lambda s, x: s.a(x.to(next(s.parameters()).device, next(s.parameters()).dtype))),
        "new zeros of a weight": head(lambda s, x: s.a(x) + s.a.weight.new_zeros(3)),
        "largest singular value": head(lambda s, x: s.a(x) / torch.linalg.svdvals(s.a.weight)[0]),
        "functional call": head(
            lambda s, x: torch.func.functional_call(s.a, {"weight": s.w, "bias": s.a.bias}, (x,)), w=weights(3, 4)
        ),
        "weight in float64": head(
            lambda s, x: functional.linear(x.double(), s.a.weight.to(torch.float64), s.a.bias.double()).to(x.dtype)
        ),
        "cumulated": ends(lambda s, x: s.b(torch.logcumsumexp(s.a(x), 1))),
        "products along": ends(lambda s, x: s.b(torch.cumprod(torch.sigmoid(s.a(x)), 1))),
        "not a number for some": head(lambda s, x: s.a(x.clamp(min=0).sqrt())),
        "class tokens": ends(
            lambda s, x: s.b(torch.cat([s.c.expand(x.size(0), -1), s.a(x)], 1)[:, 1:5]), c=weights(1, 2)
        ),
    }
    found |= {f"algebra {name}": Case(build) for name, build in others.items()}
    images: dict[str, tuple[Act, dict[str, Callable[[], Any]]]] = {
        "spatial transformer": (
            lambda s, x: s.h(
                functional.grid_sample(
                    x,
                    functional.affine_grid(s.t(x.flatten(1)).view(-1, 2, 3), list(x.shape), align_corners=False),
                    align_corners=False,
                ).flatten(1)
            ),
            {"t": lambda: nn.Linear(16, 6), "h": lambda: nn.Linear(16, 3)},
        ),
        "normalised kernel": (
            lambda s, x: s.h(functional.conv2d(x, s.w / s.w.norm()).flatten(1)),
            {"w": weights(2, 1, 2, 2), "h": lambda: nn.Linear(18, 3)},
        ),
        "kernel of the record": (
            lambda s, x: s.h(
                torch.cat([functional.conv2d(r[None], s.k(r.flatten()).view(2, 1, 2, 2)) for r in x]).flatten(1)
            ),
            {"k": lambda: nn.Linear(16, 8), "h": lambda: nn.Linear(18, 3)},
        ),
    }
    return found | {
        f"algebra {name}": Case(partial(built, act, parts), (1, 4, 4)) for name, (act, parts) in images.items()
    }


def built(act: Act, parts: dict[str, Callable[[], Any]]) -> nn.Module:
    return Fn(act, **{name: make() for name, make in parts.items()})


# --- odd classes ----------------------------------------------------------------------------------------------------


class Locked(nn.Module):
    """Cannot be copied: it holds a lock."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.lock, self.numbers = nn.Linear(4, 3), threading.Lock(), (i for i in range(9))

    def forward(self, x: Tensor) -> Tensor:
        with self.lock:
            found: Tensor = self.a(x)
        return found


class Derived(nn.Module):
    """Cannot be copied: an attribute is computed from a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 3)
        self.doubled = self.a.weight * 2

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.a(x) + x @ self.doubled.detach().T
        return found


class Hidden(nn.Module):
    """Has layers that torch does not know of; they are constants."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.layers = nn.Linear(4, 4), [nn.Linear(4, 4), nn.Linear(4, 3)]

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        for layer in self.layers:
            x = layer(x)
        return x


class Masked(nn.Module):
    """Keeps what it computes once."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.mask = nn.Linear(4, 3), dict[int, Tensor]()

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] not in self.mask:
            self.mask[x.shape[1]] = torch.arange(x.shape[1]).float()
        found: Tensor = self.a(x * self.mask[x.shape[1]])
        return found


class Delegating(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 3)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.inner(x)
        return found


class Selective(nn.Module):
    """Lists some of its parameters only."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 3)

    def parameters(self, recurse: bool = True) -> Any:
        return self.b.parameters(recurse)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.b(torch.tanh(self.a(x)))
        return found


class Computed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.own = parameter(3, 4)

    @property
    def weight(self) -> Tensor:
        return self.own * 2

    def forward(self, x: Tensor, scale: float = 1.0, *, shift: float = 0.0) -> Tensor:
        return functional.linear(x, self.weight) * scale + shift


class Called(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 3)

    def __call__(self, x: Tensor) -> Any:
        return self.a(x)


class AlwaysTraining(nn.Sequential):
    def train(self, mode: bool = True) -> AlwaysTraining:  # noqa: ARG002
        return self


def odd_classes() -> dict[str, Case]:
    classes = (Locked, Derived, Hidden, Masked, Delegating, Selective, Computed, Called)
    found = {f"odd {kind.__name__}": Case(kind) for kind in classes}
    found["odd AlwaysTraining"] = Case(lambda: AlwaysTraining(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 3)))
    found["odd symbolic"] = Case(
        lambda: torch.fx.symbolic_trace(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 3)))
    )
    found["odd squeezed"] = Case(head(lambda s, x: s.a(x).squeeze()))
    found["odd takes one record"] = Case(head(lambda s, x: s.a(torch.cat([x[:, :2], torch.zeros(1, 2)], 1))))
    found["odd compiled"] = Case(lambda: torch.compile(nn.Linear(4, 3), backend="eager"))  # type: ignore[arg-type,return-value]
    found["odd averaged"] = Case(lambda: torch.optim.swa_utils.AveragedModel(nn.Linear(4, 3)))
    return found


# --- randomness -----------------------------------------------------------------------------------------------------


def drawing() -> dict[str, Case]:
    fast: dict[str, Act] = {
        "permutation": lambda s, x: s.a(x[:, torch.randperm(4)]) if s.training else s.a(x),
        "whole numbers": lambda s, x: s.a(x * torch.randint(0, 2, (4,))) if s.training else s.a(x),
        "normal": lambda s, x: s.a(x + torch.normal(0.0, 1.0, x.shape)) if s.training else s.a(x),
        "normal of means": lambda s, x: s.a(torch.normal(x, 0.5)) if s.training else s.a(x),
        "multinomial": lambda s, x: (
            s.a(x) * torch.multinomial(torch.ones(len(x), 3), 2)[:, :1] if s.training else s.a(x)
        ),
        "multinomial with replacement": lambda s, x: (
            s.a(x) * torch.multinomial(torch.ones(len(x), 3), 2, True)[:, :1] if s.training else s.a(x)
        ),
        "reparametrised": lambda s, x: (
            s.a(x) + torch.exp(0.5 * s.a(x)) * torch.randn(len(x), 3) * 0.1 if s.training else s.a(x)
        ),
        "path dropped": lambda s, x: s.a(x) * (x.new_empty(len(x), 1).bernoulli_(0.8) / 0.8 if s.training else 1),
        "uniform into zeros": lambda s, x: s.a(x + torch.empty(x.shape).uniform_(-1, 1)) if s.training else s.a(x),
        "normal of torch.distributions": lambda s, x: (
            s.a(torch.distributions.Normal(x, 0.1).rsample()) if s.training else s.a(x)
        ),
        "logarithmically normal": lambda s, x: (
            s.a(x * torch.empty_like(x).log_normal_(0, 0.1)) if s.training else s.a(x)
        ),
        "whole numbers alike": lambda s, x: s.a(x * torch.randint_like(x, 1, 4)) if s.training else s.a(x),
        "leaky at random": lambda s, x: functional.rrelu(s.a(x), training=s.training),
    }
    slow: dict[str, Act] = {
        "branch": lambda s, x: s.a(x) if not s.training or torch.rand(()).item() > 0.3 else s.a(2 * x),
    }
    found = {f"drawing {name}": Case(head(act)) for name, act in fast.items()}
    return found | {f"drawing {name}": Case(head(act), slow=True) for name, act in slow.items()}


def stranger_cases() -> dict[str, Case]:
    """Return cases that are right."""
    kinds = (branching, in_place_and_types, tables, differentiated, algebra, odd_classes, drawing)
    return {name: case for kind in kinds for name, case in kind().items()}
