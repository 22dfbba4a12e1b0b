"""Families of layers: normalisation, convolution, embedding, recurrence, attention, dropout; and refused ones."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations, rnn

from support.model_families import Build, Case, Fn, frozen, headed, parameter


def norm_cases() -> dict[str, Case]:
    vectors: dict[str, Build] = {
        "LayerNorm": lambda: nn.LayerNorm(6),
        "LayerNorm plain": lambda: nn.LayerNorm(6, elementwise_affine=False),
        "LayerNorm no bias": lambda: nn.LayerNorm(6, bias=False),
        "RMSNorm": lambda: nn.RMSNorm(6),
        "RMSNorm plain": lambda: nn.RMSNorm(6, elementwise_affine=False),
        "GroupNorm": lambda: nn.GroupNorm(2, 6),
        "BatchNorm1d in eval": lambda: used(nn.BatchNorm1d(6)),
        "BatchNorm1d frozen": lambda: frozen(used(nn.BatchNorm1d(6))),
    }
    images: dict[str, Build] = {
        "GroupNorm": lambda: nn.GroupNorm(2, 4),
        "GroupNorm plain": lambda: nn.GroupNorm(4, 4, affine=False),
        "LayerNorm": lambda: nn.LayerNorm((4, 4, 4)),
        "InstanceNorm2d": lambda: nn.InstanceNorm2d(4),
        "InstanceNorm2d affine": lambda: nn.InstanceNorm2d(4, affine=True),
        "LocalResponseNorm": lambda: nn.LocalResponseNorm(2),
        "BatchNorm2d in eval": lambda: used(nn.BatchNorm2d(4)),
        "BatchNorm2d frozen": lambda: frozen(used(nn.BatchNorm2d(4))),
    }
    found: dict[str, Case] = {}
    for kind in ("class", "sequential"):
        for name, make in vectors.items():

            def vector(make: Build = make, kind: str = kind) -> nn.Module:
                parts = (nn.Linear(4, 6), make(), nn.Tanh(), nn.Linear(6, 3))
                return nn.Sequential(*parts) if kind == "sequential" else chain(*parts)

            found[f"norm {name} {kind}"] = Case(vector)
        for name, make in images.items():

            def image(make: Build = make, kind: str = kind) -> nn.Module:
                parts = (nn.Conv2d(2, 4, 3, padding=1), make(), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))
                return nn.Sequential(*parts) if kind == "sequential" else chain(*parts)

            found[f"norm of images {name} {kind}"] = Case(image, (2, 4, 4))
    found["norm InstanceNorm1d affine"] = headed(lambda: nn.InstanceNorm1d(3, affine=True), (3, 5))
    found["norm InstanceNorm3d affine"] = headed(lambda: nn.InstanceNorm3d(2, affine=True), (2, 3, 3, 2))
    found["norm of sequences LayerNorm"] = headed(lambda: nn.LayerNorm(4), (3, 4))
    found["norm of sequences LayerNorm 2"] = headed(lambda: chain(nn.Linear(4, 2), nn.LayerNorm(2)), (3, 4))
    return found


def used(module: nn.Module) -> nn.Module:
    """Return a normalisation in eval mode, with statistics."""
    assert isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d)
    module(torch.randn(8, module.num_features, *(3,) * (2 * isinstance(module, nn.BatchNorm2d))) + 1)
    return module.eval()


def chain(*parts: nn.Module) -> nn.Module:
    """Modules one after the other, by a class of the user's."""

    def forward(s: Any, x: Tensor) -> Tensor:
        for part in s.parts:
            x = part(x)
        return x

    return Fn(forward, parts=nn.ModuleList(parts))


def convolution_cases() -> dict[str, Case]:
    settings: dict[str, dict[str, Any]] = {
        "plain": {},
        "stride": {"stride": 2},
        "padding": {"padding": 1},
        "same": {"padding": "same", "kernel_size": 2},
        "dilation": {"dilation": 2},
        "groups": {"groups": 2},
        "depthwise": {"groups": 4, "out_channels": 8},
        "no bias": {"bias": False},
        "reflect": {"padding": 1, "padding_mode": "reflect"},
        "circular": {"padding": 1, "padding_mode": "circular"},
        "one": {"kernel_size": 1},
    }
    found: dict[str, Case] = {}
    for dims, (name, options) in product((1, 2, 3), settings.items()):
        if dims == 3 and name in ("reflect", "circular", "one"):
            continue
        kind: Any = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
        given = {"in_channels": 4, "out_channels": 4, "kernel_size": 3, **options}
        found[f"convolution {dims}d {name}"] = headed(
            lambda kind=kind, given=given: kind(**given),  # type: ignore[misc]
            (4, *(6, 6, 5)[:dims]),
        )
    turned: dict[str, dict[str, Any]] = {
        "plain": {},
        "stride": {"stride": 2, "output_padding": 1},
        "groups": {"groups": 2, "padding": 1, "dilation": 2},
    }
    for dims, (name, options) in product((1, 2, 3), turned.items()):
        kind = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)[dims - 1]
        found[f"convolution transposed {dims}d {name}"] = headed(
            lambda kind=kind, options=options: kind(4, 2, 3, **options),  # type: ignore[misc]
            (4, *(4, 3, 3)[:dims]),
        )
    bodies: dict[str, Build] = {
        "max pool": lambda: chain(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.MaxPool2d(2)),
        "average pool": lambda: chain(nn.Conv2d(2, 3, 3), nn.AvgPool2d(2)),
        "adaptive pool": lambda: chain(nn.Conv2d(2, 3, 3), nn.AdaptiveAvgPool2d(2)),
        "adaptive max pool": lambda: chain(nn.Conv2d(2, 3, 3), nn.AdaptiveMaxPool2d(2)),
        "LP pool": lambda: chain(nn.Conv2d(2, 3, 3), nn.Sigmoid(), nn.LPPool2d(2, 2)),
        "nearest": lambda: chain(nn.Conv2d(2, 3, 3), nn.Upsample(scale_factor=2)),
        "bilinear": lambda: chain(nn.Conv2d(2, 3, 3), nn.Upsample(scale_factor=2, mode="bilinear")),
        "pixel shuffle": lambda: chain(nn.Conv2d(2, 4, 3), nn.PixelShuffle(2)),
        "unfold": lambda: chain(nn.Unfold(2), nn.Linear(25, 3)),
        "zero pad": lambda: chain(nn.ZeroPad2d(1), nn.Conv2d(2, 3, 3)),
        "weight norm": lambda: chain(parametrizations.weight_norm(nn.Conv2d(2, 3, 3))),
        "separable": lambda: chain(nn.Conv2d(2, 4, 3, groups=2), nn.Conv2d(4, 3, 1)),
        "squeeze and excite": lambda: Fn(
            lambda s, x: s.a(x) * torch.sigmoid(s.b(s.a(x).mean((2, 3))))[:, :, None, None],
            a=nn.Conv2d(2, 3, 3),
            b=nn.Linear(3, 3),
        ),
        "residual": lambda: Fn(
            lambda s, x: torch.relu(s.b(torch.relu(s.n(s.a(x)))) + s.c(x)),
            a=nn.Conv2d(2, 4, 3, padding=1, bias=False),
            n=nn.GroupNorm(2, 4),
            b=nn.Conv2d(4, 4, 3, padding=1, bias=False),
            c=nn.Conv2d(2, 4, 1),
        ),
        "coder": lambda: Fn(
            lambda s, x: s.up(torch.relu(s.down(x))) + x, down=nn.Conv2d(2, 4, 2, 2), up=nn.ConvTranspose2d(4, 2, 2, 2)
        ),
        "one image, used twice": lambda: Fn(lambda s, x: s.a(s.a(x)), a=nn.Conv2d(2, 2, 3, padding=1)),
        "weight standardised": lambda: Fn(
            lambda s, x: functional.conv2d(x, s.a.weight - s.a.weight.mean((1, 2, 3), keepdim=True), s.a.bias),
            a=nn.Conv2d(2, 3, 3),
        ),
        "channels last": lambda: Fn(
            lambda s, x: s.b(s.a(x).permute(0, 2, 3, 1)), a=nn.Conv2d(2, 3, 3), b=nn.Linear(3, 2)
        ),
    }
    found |= {f"images {name}": headed(body, (2, 6, 6)) for name, body in bodies.items()}
    found["images frames"] = headed(
        lambda: Fn(lambda s, x: s.a(x.flatten(0, 1)).reshape(len(x), -1), a=nn.Conv2d(2, 3, 2)), (3, 2, 4, 4)
    )
    found["images large kernel"] = headed(lambda: nn.Conv2d(128, 256, 3), (128, 4, 4))
    return found


def token_cases() -> dict[str, Case]:
    def transformer(s: Any, x: Tensor) -> Tensor:
        found: Tensor = s.t(x) + s.p(torch.arange(x.shape[1]))
        return found

    bodies: dict[str, Build] = {
        "embedding": lambda: nn.Embedding(9, 4),
        "padding": lambda: nn.Embedding(9, 4, padding_idx=0),
        "mean": lambda: Fn(lambda s, x: s.e(x).mean(1), e=nn.Embedding(9, 4)),
        "positions": lambda: Fn(transformer, t=nn.Embedding(9, 4), p=nn.Embedding(6, 4)),
        "learned positions": lambda: Fn(lambda s, x: s.t(x) + s.p, t=nn.Embedding(9, 4), p=parameter(1, 6, 4)),
        "tied output": lambda: Fn(lambda s, x: functional.linear(s.e(x).mean(1), s.e.weight), e=nn.Embedding(9, 4)),
        "scaled by frequency": lambda: nn.Embedding(9, 4, scale_grad_by_freq=True),
        "one-hot": lambda: Fn(lambda s, x: s.a(functional.one_hot(x, 9).float()), a=nn.Linear(9, 2)),
        "indexed": lambda: Fn(lambda s, x: s.w[x], w=parameter(9, 4)),
    }
    found = {f"tokens {name}": headed(body, (6,), 9) for name, body in bodies.items()}
    for mode, padding in product(("sum", "mean", "max"), (None, 0)):
        found[f"tokens bag {mode} padding={padding}"] = headed(
            lambda mode=mode, padding=padding: nn.EmbeddingBag(9, 4, mode=mode, padding_idx=padding),  # type: ignore[misc]
            (6,),
            9,
        )
    return found


def recurrent_cases() -> dict[str, Case]:
    found: dict[str, Case] = {}
    kinds: dict[str, Callable[..., nn.Module]] = {
        "tanh": nn.RNN,
        "relu": lambda *a, **k: nn.RNN(*a, nonlinearity="relu", **k),
        "gru": nn.GRU,
        "lstm": nn.LSTM,
    }
    options: list[dict[str, Any]] = [
        {},
        {"num_layers": 2},
        {"bidirectional": True},
        {"bias": False},
        {"batch_first": False},
        {"num_layers": 2, "bidirectional": True, "dropout": 0.4},
    ]

    def run(s: Any, x: Tensor) -> Tensor:
        rows: Tensor = s.r(x)[0] if s.first else s.r(x.transpose(0, 1))[0].transpose(0, 1)
        return rows

    for (name, kind), given in product(kinds.items(), options):
        label = " ".join(f"{key}={value}" for key, value in given.items()) or "plain"

        def body(kind: Any = kind, given: dict[str, Any] = given) -> nn.Module:
            settings = {"batch_first": True, **given}
            return Fn(run, r=kind(3, 4, **settings), first=settings["batch_first"])

        found[f"recurrent {name} {label}"] = headed(body, (4, 3))
    found["recurrent lstm projected"] = headed(
        lambda: Fn(lambda s, x: s.r(x)[0], r=nn.LSTM(3, 4, proj_size=2, batch_first=True)), (4, 3)
    )
    found["recurrent lstm last state"] = headed(
        lambda: Fn(lambda s, x: s.r(x)[1][0][-1], r=nn.LSTM(3, 4, 2, batch_first=True)), (4, 3)
    )
    found["recurrent gru learned start"] = headed(
        lambda: Fn(
            lambda s, x: s.r(x, s.h.expand(-1, len(x), -1).contiguous())[0],
            r=nn.GRU(3, 4, batch_first=True),
            h=parameter(1, 1, 4),
        ),
        (4, 3),
    )
    found["recurrent frozen lstm"] = headed(
        lambda: Fn(lambda s, x: s.r(x)[0], r=frozen(nn.LSTM(3, 4, batch_first=True))), (4, 3)
    )
    found["recurrent attention over states"] = headed(
        lambda: Fn(
            lambda s, x: (torch.softmax(s.a(s.r(x)[0]), 1) * s.r(x)[0]).sum(1),
            r=nn.GRU(3, 4, batch_first=True),
            a=nn.Linear(4, 1),
        ),
        (4, 3),
    )
    cells: dict[str, Callable[..., nn.Module]] = {
        "tanh": nn.RNNCell,
        "relu": partial(nn.RNNCell, nonlinearity="relu"),
        "gru": nn.GRUCell,
        "lstm": nn.LSTMCell,
        "gru bias=False": partial(nn.GRUCell, bias=False),
        "lstm bias=False": partial(nn.LSTMCell, bias=False),
    }
    for name, cell in cells.items():

        def loop(s: Any, x: Tensor) -> Tensor:
            state: Any = None
            for step in x.unbind(1):
                state = s.r(step, state)
            last: Tensor = state[0] if isinstance(state, tuple) else state
            return last

        found[f"recurrent cell {name}"] = headed(lambda cell=cell, loop=loop: Fn(loop, r=cell(3, 4)), (4, 3))  # type: ignore[misc]
    found["recurrent packed"] = headed(lambda: Fn(packed, r=nn.GRU(3, 4, batch_first=True)), (4, 3))._replace(slow=True)
    return found


def packed(s: Any, x: Tensor) -> Tensor:
    rows = rnn.pack_padded_sequence(x, torch.full((len(x),), x.shape[1]), batch_first=True)
    found: Tensor = s.r(rows)[1][-1]
    return found
