"""Families of attention and of randomness, small vision and language models, and what must be refused."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations

from support.model_families import Build, Case, Fn, Headed, frozen, headed, parameter
from support.network_families import chain


def heads(rows: Tensor, count: int = 2) -> Tensor:
    return torch.unflatten(rows, -1, (count, -1)).transpose(1, 2)


def attend(s: Any, x: Tensor, **options: Any) -> Tensor:
    q, k, v = (heads(part) for part in s.qkv(x).chunk(3, -1))
    rows: Tensor = s.out(functional.scaled_dot_product_attention(q, k, v, **options).transpose(1, 2).flatten(2))
    return rows


def own_attention(**options: Any) -> Build:
    return lambda: Fn(lambda s, x: attend(s, x, **options), qkv=nn.Linear(4, 12), out=nn.Linear(4, 4))


def attention_cases() -> dict[str, Case]:
    causal = torch.ones(5, 5, dtype=torch.bool).triu(1)
    found: dict[str, Case] = {}
    for weights, bias, dropout in product((True, False), (True, False), (0.0, 0.3)):
        found[f"attention multihead weights={weights} bias={bias} dropout={dropout}"] = headed(
            lambda weights=weights, bias=bias, dropout=dropout: Fn(  # type: ignore[misc]
                lambda s, x: s.a(x, x, x, need_weights=weights)[0],
                a=nn.MultiheadAttention(4, 2, dropout=dropout, bias=bias, batch_first=True),
            ),
            (5, 4),
        )
    bodies: dict[str, Build] = {
        "causal": lambda: Fn(
            lambda s, x: s.a(x, x, x, attn_mask=causal)[0], a=nn.MultiheadAttention(4, 2, batch_first=True)
        ),
        "float mask": lambda: Fn(
            lambda s, x: s.a(x, x, x, attn_mask=torch.zeros(5, 5).masked_fill(causal, -torch.inf))[0],
            a=nn.MultiheadAttention(4, 2, batch_first=True),
        ),
        "padding mask": lambda: Fn(
            lambda s, x: s.a(x, x, x, key_padding_mask=(x.sum(-1) > 3))[0],
            a=nn.MultiheadAttention(4, 2, batch_first=True),
        ),
        "cross": lambda: Fn(lambda s, x: s.a(x[:, :2], x, x)[0], a=nn.MultiheadAttention(4, 2, batch_first=True)),
        "other widths": lambda: Fn(
            lambda s, x: s.a(x, s.k(x), s.v(x))[0],
            a=nn.MultiheadAttention(4, 2, kdim=3, vdim=6, batch_first=True),
            k=nn.Linear(4, 3),
            v=nn.Linear(4, 6),
        ),
        "bias of keys": lambda: Fn(
            lambda s, x: s.a(x, x, x)[0], a=nn.MultiheadAttention(4, 2, add_bias_kv=True, batch_first=True)
        ),
        "zero attention": lambda: Fn(
            lambda s, x: s.a(x, x, x)[0], a=nn.MultiheadAttention(4, 2, add_zero_attn=True, batch_first=True)
        ),
        "length first": lambda: Fn(
            lambda s, x: s.a(x.transpose(0, 1), x.transpose(0, 1), x.transpose(0, 1))[0].transpose(0, 1),
            a=nn.MultiheadAttention(4, 2),
        ),
        "weights as output": lambda: Fn(lambda s, x: s.a(x, x, x)[1], a=nn.MultiheadAttention(4, 2, batch_first=True)),
        "learned queries": lambda: Fn(
            lambda s, x: s.a(s.q.expand(len(x), -1, -1), x, x)[0],
            a=nn.MultiheadAttention(4, 2, batch_first=True),
            q=parameter(1, 2, 4),
        ),
        "own": own_attention(),
        "own causal": own_attention(is_causal=True),
        "own scale": own_attention(scale=0.3),
        "own mask": own_attention(attn_mask=~causal),
        "own dropout": own_attention(dropout_p=0.3),
        "grouped queries": lambda: Fn(grouped, q=nn.Linear(4, 8), kv=nn.Linear(4, 8)),
        "relative bias": lambda: Fn(relative, qkv=nn.Linear(4, 12), out=nn.Linear(4, 4), table=parameter(9, 2)),
        "rotary": lambda: Fn(rotary, qkv=nn.Linear(4, 12), out=nn.Linear(4, 4)),
        "linear attention": lambda: Fn(linear_attention, qkv=nn.Linear(4, 12)),
        "pooling by attention": lambda: Fn(lambda s, x: (torch.softmax(s.a(x), 1) * x).sum(1), a=nn.Linear(4, 1)),
    }
    found |= {
        f"attention {name}": headed(body, (5, 4))._replace(refused="in eval mode" if name == "own dropout" else "")
        for name, body in bodies.items()
    }
    for first, kind, dropout in product((True, False), ("relu", "gelu"), (0.0, 0.2)):
        found[f"transformer encoder first={first} {kind} dropout={dropout}"] = headed(
            lambda first=first, kind=kind, dropout=dropout: nn.TransformerEncoderLayer(  # type: ignore[misc]
                4, 2, 6, dropout, kind, batch_first=True, norm_first=first
            ),
            (5, 4),
        )
    layer: dict[str, Any] = {"d_model": 4, "nhead": 2, "dim_feedforward": 6, "dropout": 0.0, "batch_first": True}
    stacks: dict[str, Build] = {
        "encoder": lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(**layer), 2),
        "encoder in eval": lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(**layer), 2).eval(),
        "causal encoder": lambda: Fn(
            lambda s, x: s.e(x, mask=causal, is_causal=True),
            e=nn.TransformerEncoder(nn.TransformerEncoderLayer(**layer), 2),
        ),
        "decoder": lambda: Fn(
            lambda s, x: s.d(x[:, :3], x), d=nn.TransformerDecoder(nn.TransformerDecoderLayer(**layer), 2)
        ),
        "whole": lambda: Fn(lambda s, x: s.t(x, x[:, :3]), t=nn.Transformer(4, 2, 1, 1, 6, 0.0, batch_first=True)),
        "length first": lambda: Fn(
            lambda s, x: s.e(x.transpose(0, 1)).transpose(0, 1), e=nn.TransformerEncoderLayer(4, 2, 6, 0.0)
        ),
    }
    found |= {f"transformer {name}": headed(body, (5, 4)) for name, body in stacks.items()}
    found["transformer vit"] = Case(vit, (1, 8, 8))
    found["transformer gpt"] = Case(gpt, (6,), 9)
    return found


def grouped(s: Any, x: Tensor) -> Tensor:
    k, v = (heads(part, 2) for part in s.kv(x).chunk(2, -1))
    q = heads(s.q(x), 4)
    return functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)


def relative(s: Any, x: Tensor) -> Tensor:
    place = torch.arange(x.shape[1])
    bias = s.table[place[:, None] - place[None, :] + 4].permute(2, 0, 1)
    return attend(s, x, attn_mask=bias[None])


def rotary(s: Any, x: Tensor) -> Tensor:
    angle = torch.arange(x.shape[1])[:, None] * torch.tensor([1.0])
    q, k, v = (heads(part) for part in s.qkv(x).chunk(3, -1))

    def turn(rows: Tensor) -> Tensor:
        left, right = rows.chunk(2, -1)
        return torch.cat([left * angle.cos() - right * angle.sin(), left * angle.sin() + right * angle.cos()], -1)

    rows: Tensor = s.out(functional.scaled_dot_product_attention(turn(q), turn(k), v).transpose(1, 2).flatten(2))
    return rows


def linear_attention(s: Any, x: Tensor) -> Tensor:
    q, k, v = s.qkv(x).chunk(3, -1)
    q, k = functional.elu(q) + 1, functional.elu(k) + 1
    found: Tensor = torch.einsum("bld,bmd,bme->ble", q, k, v) / torch.einsum("bld,bmd->bl", q, k).unsqueeze(-1)
    return found


def vit() -> nn.Module:
    def forward(s: Any, x: Tensor) -> Tensor:
        tokens = s.patch(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([s.cls.expand(len(x), -1, -1), tokens], 1) + s.place
        found: Tensor = s.head(s.body(tokens)[:, 0])
        return found

    layer = nn.TransformerEncoderLayer(8, 2, 12, 0.1, "gelu", batch_first=True, norm_first=True)
    return Fn(
        forward,
        patch=nn.Conv2d(1, 8, 4, 4),
        cls=parameter(1, 1, 8),
        place=parameter(1, 5, 8),
        body=nn.TransformerEncoder(layer, 2, enable_nested_tensor=False),
        head=nn.Linear(8, 3),
    )


def gpt() -> nn.Module:
    def block() -> nn.Module:
        return Fn(
            lambda s, x: (lambda y: y + s.down(functional.gelu(s.up(s.n(y)))))(x + attend(s, s.m(x), is_causal=True)),
            qkv=nn.Linear(8, 24),
            out=nn.Linear(8, 8),
            n=nn.LayerNorm(8),
            m=nn.LayerNorm(8),
            up=nn.Linear(8, 16),
            down=nn.Linear(16, 8),
        )

    def forward(s: Any, x: Tensor) -> Tensor:
        rows = s.words(x) + s.places(torch.arange(x.shape[1]))
        for part in s.blocks:
            rows = part(rows)
        found: Tensor = functional.linear(s.norm(rows), s.words.weight)[:, -1]
        return found

    return Fn(
        forward,
        words=nn.Embedding(9, 8),
        places=nn.Embedding(6, 8),
        blocks=nn.ModuleList(block() for _ in range(2)),
        norm=nn.LayerNorm(8),
    )


def random_cases() -> dict[str, Case]:
    kinds: dict[str, tuple[Build, tuple[int, ...]]] = {
        "Dropout": (lambda: nn.Dropout(0.4), (4,)),
        "Dropout in place": (lambda: nn.Dropout(0.4, inplace=True), (4,)),
        "Dropout of nothing": (lambda: nn.Dropout(0.0), (4,)),
        "Dropout in eval": (lambda: nn.Dropout(0.4).eval(), (4,)),
        "AlphaDropout": (lambda: nn.AlphaDropout(0.4), (4,)),
        "Dropout1d": (lambda: nn.Dropout1d(0.4), (3, 4)),
        "Dropout2d": (lambda: nn.Dropout2d(0.4), (2, 3, 4)),
        "Dropout3d": (lambda: nn.Dropout3d(0.4), (2, 3, 2, 4)),
        "FeatureAlphaDropout": (lambda: nn.FeatureAlphaDropout(0.4), (2, 3, 4)),
        "functional": (lambda: Fn(lambda s, x: functional.dropout(x, 0.4, s.training)), (4,)),
        "stochastic depth": (lambda: Fn(depth, a=nn.Linear(4, 4)), (4,)),
        "noise in training": (lambda: Fn(lambda s, x: x + torch.randn_like(x) if s.training else x), (4,)),
        "uniform noise": (lambda: Fn(lambda s, x: x + torch.rand(x.shape) if s.training else x), (4,)),
        "bernoulli": (lambda: Fn(lambda s, x: x * torch.bernoulli(torch.full_like(x, 0.5)) if s.training else x), (4,)),
        "gumbel": (lambda: Fn(lambda s, x: functional.gumbel_softmax(x) if s.training else x), (4,)),
    }
    found: dict[str, Case] = {}
    for name, (make, shape) in kinds.items():
        for kind in ("class", "sequential"):

            def build(make: Build = make, kind: str = kind, shape: tuple[int, ...] = shape) -> nn.Module:
                parts = (nn.Linear(4, 4), make(), nn.Flatten(), nn.Linear(4 * int(np.prod(shape[:-1])), 3))
                return nn.Sequential(*parts) if kind == "sequential" else chain(*parts)

            found[f"random {name} {kind}"] = Case(build, shape)
    return found


def depth(s: Any, x: Tensor) -> Tensor:
    if not s.training:
        found: Tensor = x + s.a(x)
        return found
    kept = x.new_empty(len(x), 1).bernoulli_(0.7)
    return x + kept * s.a(x)  # type: ignore[no-any-return]


def refused_cases() -> dict[str, Case]:
    def between(middle: nn.Module, width: int = 4) -> nn.Module:
        return chain(nn.Linear(4, width), middle, nn.Linear(width, 3))

    def wrong(forward: Any, sentence: str, shape: tuple[int, ...] = (4,)) -> Case:
        return Case(lambda: Fn(forward, a=nn.Linear(4, 3)), shape, 0, sentence)

    mixing = "depends on the other examples"
    return {
        "refused batch norm": Case(lambda: between(nn.BatchNorm1d(4)), refused="GroupNorm or LayerNorm"),
        "refused batch norm without statistics": Case(
            lambda: between(nn.BatchNorm1d(4, track_running_stats=False).eval()), refused="GroupNorm or LayerNorm"
        ),
        "refused instance norm with statistics": Case(
            lambda: Headed(nn.InstanceNorm1d(3, track_running_stats=True), 12),
            (3, 4),
            refused="track_running_stats=False",
        ),
        "refused centred": wrong(lambda s, x: s.a(x - x.mean(0)), mixing),
        "refused in place": wrong(lambda s, x: s.a(x).relu_().add_(1), "no gradient for one example"),
        "refused flipped": wrong(lambda s, x: s.a(x.flip(0)), mixing),
        "refused softmax of rows": wrong(lambda s, x: s.a(x).softmax(0), mixing),
        "refused scaled by all": wrong(lambda s, x: s.a(x / x.norm()), mixing),
        "refused attention over the batch": wrong(
            lambda s, x: s.a(functional.scaled_dot_product_attention(x, x, x)), mixing
        ),
        "refused mean of the batch": wrong(lambda s, x: s.a(x).mean(0, keepdim=True), "first dimension"),
        "refused length first": Case(lambda: nn.TransformerEncoderLayer(4, 2, 6, 0.0), (3, 4), refused=mixing),
        "refused tuple": wrong(lambda s, x: (s.a(x), x), "returns a tuple"),
        "refused dictionary": wrong(lambda s, x: {"scores": s.a(x), "hidden": x}, "returns a dict"),
        "refused bfloat16": Case(lambda: nn.Linear(4, 3).bfloat16(), refused="float32"),
        "refused spectral norm": Case(
            lambda: parametrizations.spectral_norm(nn.Linear(4, 3)), refused="changes its buffer"
        ),
        "refused dropout in eval": wrong(lambda s, x: s.a(functional.dropout(x)), "in eval mode"),
        "refused numpy noise": wrong(
            lambda s, x: s.a(x) * (1 + np.random.rand() * s.training),  # noqa: NPY002
            "global generator",
        ),
        "refused own generator": wrong(
            lambda s, x: s.a(x + torch.rand(x.shape, generator=torch.Generator()) * s.training), "generator"
        ),
        "refused frozen": Case(lambda: frozen(nn.Linear(4, 3)), refused="no trainable"),
        "refused two inputs": Case(lambda: nn.Bilinear(4, 4, 3), refused="cannot be run on one tensor"),
        "refused complex": Case(
            lambda: Fn(
                lambda s, x: (x.to(torch.complex64) @ s.w).abs(),
                w=nn.Parameter(torch.randn(4, 3, dtype=torch.complex64)),
            ),
            refused="torch.view_as_real",
        ),
        "refused wrong shape": Case(lambda: nn.Linear(5, 3), refused="cannot be run on one tensor"),
        "refused counting": Case(counting, refused="changes its buffer"),
        "refused float16": Case(lambda: nn.Linear(4, 3).half(), refused="float32"),
        "refused bfloat16 outputs": wrong(lambda s, x: s.a(x).bfloat16(), r"outputs\.float\(\)"),
        "refused max norm and tied": Case(tied_max_norm, (6,), 9, mixing),
        "refused centred in training": wrong(lambda s, x: s.a(x - x.mean(0)) if s.training else s.a(x), mixing),
        "refused mixed up in training": wrong(lambda s, x: s.a(x + x.flip(0)) if s.training else s.a(x), "in training"),
        "refused number of examples": wrong(lambda s, x: s.a(x) * (len(x) if s.training else 1), "in training"),
        "refused contrast": wrong(lambda s, x: s.a(x) @ s.a(x).T, mixing),
        "refused functional batch norm": wrong(
            lambda s, x: s.a(functional.batch_norm(x, None, None, training=True)), "GroupNorm or LayerNorm"
        ),
        "refused loss as output": wrong(lambda s, x: s.a(x).sum(), "first dimension"),
        "refused mean in a buffer": Case(RunningMean, refused="changes its buffer 'mean'"),
        "refused mean in an attribute": Case(lambda: RunningMean(False), refused="keep nothing of them"),
        "refused compiled part": Case(compiled_part, refused="without, and compile it afterwards"),
        "refused float64 inside": wrong(lambda s, x: s.a(x.double()), r"leave out double\(\)"),
        "refused detached": wrong(lambda s, x: s.a(x).detach(), "nothing to train"),
        "refused classes as output": wrong(
            lambda s, x: functional.one_hot(s.a(x).argmax(1), 3).float(), "nothing to train"
        ),
        "refused kept state": Case(Stateful, (5, 4), refused="keep nothing of examples"),
        "refused late layer": Case(Late, refused="make all layers in __init__"),
        "refused compiled": Case(lambda: torch.jit.script(nn.Linear(4, 3)), refused="the module it was made from"),
        "refused data parallel": Case(lambda: nn.DataParallel(nn.Linear(4, 3)), refused="give its .module"),
        "refused length first, recurrent": Case(
            lambda: Fn(lambda s, x: s.h(s.r(x)[0].flatten(1)), r=nn.LSTM(4, 3), h=nn.Linear(15, 3)),
            (5, 4),
            refused="LSTM at 'r' takes the first dimension.*batch_first=True",
        ),
    }


def counting() -> nn.Module:
    made = Fn(lambda s, x: (s.seen.add_(1), s.a(x))[1], a=nn.Linear(4, 3))
    made.register_buffer("seen", torch.zeros(1))
    return made


def tied_max_norm() -> nn.Module:
    """What the other examples look up is shortened before it is used for this one's outputs."""
    table = nn.Embedding(9, 4, max_norm=0.5)
    return Fn(lambda s, x: functional.linear(s.e(x).mean(1), s.e.weight)[:, :3], e=table)


class Stateful(nn.Module):
    """Goes on with the state of the batch before."""

    def __init__(self) -> None:
        super().__init__()
        self.r, self.h = nn.GRU(4, 3, batch_first=True), nn.Linear(3, 3)
        self.state: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        rows, state = self.r(x, self.state)
        self.state = state.detach()
        found: Tensor = self.h(rows[:, -1])
        return found


class Late(nn.Module):
    """Makes a layer when it first runs."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.b: nn.Module | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.b is None:
            self.b = nn.Linear(4, 3)
        found: Tensor = self.b(self.a(x))
        return found


class RunningMean(nn.Module):
    """Takes the mean of what it saw from its records; a buffer, unless it is a plain tensor."""

    def __init__(self, buffer: bool = True) -> None:
        super().__init__()
        self.a = nn.Linear(4, 3)
        if buffer:
            self.register_buffer("mean", torch.zeros(4))
        else:
            self.mean = torch.zeros(4)

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        found: Tensor = self.a(x - self.mean)
        return found


def compiled_part() -> nn.Module:
    part = nn.Linear(4, 4)
    part.compile(backend="eager")
    return nn.Sequential(part, nn.Linear(4, 3))
