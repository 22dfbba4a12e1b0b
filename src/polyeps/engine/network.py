"""A module lowered to layers, and the gradients of a cohort: one forward and one backward pass."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from polyeps.engine.chains import chain_of
from polyeps.engine.contributions import SMALLEST, Contribution
from polyeps.engine.convolution import Convolution
from polyeps.engine.fallback_layers import VmapLayer
from polyeps.engine.known_modules import frozen_copy, has_parameters, is_row_wise, is_unmodified, is_unmodified_itself
from polyeps.engine.layers import Embedding, Layer, Linear, Norm, Parameterless
from polyeps.engine.layout import Layout, RowGroup
from polyeps.engine.losses import Loss, per_row_error
from polyeps.engine.pooling import relu_pool
from polyeps.engine.recurrent import LastState, Lstm
from polyeps.engine.row_draws import RowDraws
from polyeps.errors import InputError

# Share of the clip below which norms and sums of few rows stay after rounding in float32; on a device norms round more.
_AIM, AIM_ON_DEVICE = 1 - 2**-18, 1 - 2**-16
ROUNDING = 2.0**-25  # share of the clip by which each row of a sum may round it: longer sums aim lower
_FORMED = 1 << 25  # numbers of rows' gradients that are formed at once on the CPU, unless one client has more
SHORTEST_ROW_CLIP = 2.0**-100  # clips below it leave float32 too few digits; rows then contribute nothing


@dataclass(frozen=True)
class Network:
    """The layers of a model, in order; their parameters are neighbouring columns of the models (n, d)."""

    layers: tuple[Layer, ...]
    random: bool = False  # whether a layer draws random numbers, such as dropout

    @property
    def size(self) -> int:
        return sum(layer.size for layer in self.layers)

    def forward(self, models: Tensor, rows: Tensor, layout: Layout) -> tuple[Tensor, list[Any]]:
        """Return the outputs (T, ...), and what each layer saved for its backward pass."""
        saved = []
        for layer, weights in zip(self.layers, self.columns(models), strict=True):
            rows, kept = layer.forward(weights, rows, layout)
            saved.append(kept)
        return rows, saved

    def contributions(
        self, models: Tensor, saved: list[Any], gradients: Tensor, layout: Layout
    ) -> list[Contribution | None]:
        """Return what each layer contributes, given the gradients of the outputs."""
        # Layers below the first one with parameters need no gradient.
        first = next(
            (i for i, layer in enumerate(self.layers) if not isinstance(layer, Parameterless)), len(self.layers)
        )
        found: list[Contribution | None] = [None] * len(self.layers)
        columns = self.columns(models)
        onwards: Tensor | None = gradients
        for i in reversed(range(first, len(self.layers))):
            assert onwards is not None
            onwards, found[i] = self.layers[i].backward(columns[i], saved[i], onwards, layout, i > first)
            saved[i] = None  # frees the activations as early as possible
        return found

    def columns(self, models: Tensor) -> tuple[Tensor, ...]:
        return torch.split(models, [layer.size for layer in self.layers], dim=1)


def add_gradients(
    network: Network,
    loss: Loss,
    models: Tensor,
    rows: Tensor,
    labels: Tensor,
    layout: Layout,
    valid: Tensor | None,
    clip: Tensor | None,
    into: Tensor,
) -> None:
    """Add each client's sum of row gradients, each clipped to the client's clip (n,), to into (n, d)."""
    if not layout.rows:
        return
    found = row_gradients(network, loss, models, rows, labels, layout, valid)
    if clip is None:
        add_rows(network, found, None, into)
        return
    for some, its in _parts(found, layout):
        add_rows(network, some, clip_rows(some, clip.index_select(0, its.owner)), into)


def _parts(found: list[Contribution | None], layout: Layout) -> Iterator[tuple[list[Contribution | None], Layout]]:
    """Yield contributions of some clients at a time, so that gradients formed for norms take little memory."""
    formed = sum(contribution.formed for contribution in found if contribution is not None)
    most = max(1, _FORMED // max(1, formed))
    if most >= layout.rows or layout.owner.is_cuda:
        yield found, layout
        return
    for rows, its in layout.parts(most):
        yield [None if each is None else each.part(its, rows) for each in found], its


def record_gradients(
    network: Network, loss: Loss, model: Tensor, rows: Tensor, labels: Tensor, draws: RowDraws | None = None
) -> Tensor:
    """Return the gradient of every record on its own, (T, d), under one model (d,): each record is its own client."""
    count = len(rows)
    owner = torch.arange(count, device=rows.device)
    layout = Layout(count, (RowGroup(0, count, 1, 0),) if count else (), owner, draws)
    into = model.new_zeros(count, len(model))
    with torch.no_grad():
        add_gradients(network, loss, model.expand(count, -1), rows, labels, layout, None, None, into)
    return into


def row_gradients(
    network: Network, loss: Loss, models: Tensor, rows: Tensor, labels: Tensor, layout: Layout, weights: Tensor | None
) -> list[Contribution | None]:
    """Return what each layer contributes to every row's gradient, times the row's weight; models may change then."""
    outputs, saved = network.forward(models, rows, layout)
    return network.contributions(models, saved, output_gradients(loss, outputs, labels, weights), layout)


def add_rows(network: Network, found: list[Contribution | None], factors: Tensor | None, into: Tensor) -> None:
    """Add each client's sum of row gradients, times the rows' factors (T,), to its row of into (n, d)."""
    for contribution, columns in zip(found, network.columns(into), strict=True):
        if contribution is not None:
            contribution.add_to(columns, factors)


def output_gradients(loss: Loss, outputs: Tensor, labels: Tensor, weights: Tensor | None) -> Tensor:
    """Return the gradient of every row's loss by its outputs, times the row's weight (T,): zero for padding."""
    closed_form = getattr(loss, "gradients", None)
    if closed_form is not None:
        gradients: Tensor = closed_form(outputs, labels)
        # Not in place: a user's loss may return the outputs themselves, or any shape.
        return gradients if weights is None else gradients * weights.reshape(-1, *(1,) * (gradients.dim() - 1))
    with torch.enable_grad():
        leaf = outputs.detach().requires_grad_()
        losses = loss(leaf, labels)
        if losses.shape != labels.shape[:1]:
            raise InputError(per_row_error(losses, len(labels)))
        total = losses.sum() if weights is None else (losses * weights).sum()
    (differentiated,) = torch.autograd.grad(total, leaf)
    return differentiated


def clip_rows(found: list[Contribution | None], clip: Tensor) -> Tensor:
    """Return min(1, clip / norm) of each row in float64, over all its parameters; 0 where the norm is not finite.

    Such a row is dropped: a server that sends weights under which a record overflows must not learn of it, and no
    record may contribute more than its clip.
    """
    contributions = [contribution for contribution in found if contribution is not None]
    squares = sum(contribution.squared_norms() for contribution in contributions)
    assert isinstance(squares, Tensor)
    # NaN stays NaN, infinity becomes 0
    if not clip.is_cuda:  # on a device every operation counts, and `dp_sgd` refuses such clips
        clip = clip.double().masked_fill_(clip < SHORTEST_ROW_CLIP, 0.0)
    factors = (clip * (AIM_ON_DEVICE if clip.is_cuda else _AIM) / squares.sqrt_()).clamp_(max=1.0)
    broken = ~(factors >= SMALLEST)
    if squares.is_cuda:
        factors = factors.float()  # once, not in every layer
    if squares.is_cuda or bool(broken.any()):  # a captured graph cannot branch
        factors.masked_fill_(broken, 0.0)
        for contribution in contributions:
            contribution.drop(broken)
    return factors


def floats_per_row(network: Network, weights: Tensor, row: Tensor) -> int:
    """Estimate how many floats a row (1, ...) needs in a step under weights (1, d).

    These are saved activations, their gradients and the row's own gradient.
    """
    kept = formed = 0
    for layer, saved in zip(network.layers, _saved(network, weights, row), strict=True):
        if isinstance(layer, VmapLayer):
            activations, gradient = layer.floats_per_row(saved)
            kept, formed = kept + activations, formed + gradient
        else:
            kept += _floats(saved)
            formed += 0 if isinstance(layer, Linear | Embedding) else layer.size
    return 2 * kept + formed


def one_vector_a_row(network: Network, weights: Tensor, row: Tensor) -> frozenset[int]:
    """Return the layers that are linear maps of one vector per row, not of several."""
    saved = _saved(network, weights, row)
    return frozenset(i for i, layer in enumerate(network.layers) if isinstance(layer, Linear) and saved[i].dim() == 2)


def _saved(network: Network, weights: Tensor, row: Tensor) -> list[Any]:
    """Return what each layer saves of a row (1, ...)."""
    layout = Layout(1, (RowGroup(0, 1, 1, 0),), torch.zeros(1, dtype=torch.int64))
    return network.forward(weights, row, layout)[1]


def _floats(saved: Any) -> int:
    if isinstance(saved, Tensor):
        return saved.numel()
    if isinstance(saved, int):
        return 0
    parts = saved if isinstance(saved, list | tuple) else saved.__dict__.values()
    return sum(_floats(part) for part in parts)


def lower(module: nn.Module) -> Network:
    """Return the network of a module: batched rules where there are any, `vmap` elsewhere."""
    network = Network(tuple(_layers(module)))
    trainable = sum(p.numel() for p in module.parameters() if p.requires_grad)
    # Layers that share a parameter would count it twice, so the module runs as a whole.
    named = [parameter for _, parameter in module.named_parameters(remove_duplicate=False)]
    shared = len(set(map(id, named))) < len(named)
    if network.size != trainable or shared:
        network = Network((VmapLayer(module),))
    layers = list(network.layers)
    for i, layer in enumerate(layers):
        if not isinstance(layer, Parameterless):  # nothing below it needs a gradient
            layers[i] = VmapLayer(layer.module, inputs=False) if isinstance(layer, VmapLayer) else layer
            break
    return Network(tuple(layers))


def _layers(module: nn.Module) -> list[Layer]:
    if type(module) is nn.Sequential and is_unmodified_itself(module):
        return _merged([layer for child in module for layer in _layers(child)])
    if not any(p.requires_grad for p in module.parameters()):
        return [Parameterless(frozen_copy(module)) if is_row_wise(module) else VmapLayer(module)]
    if all(p.requires_grad for p in module.parameters()) and is_unmodified(module):
        rule = _rule(module)
        if rule is not None:
            return [rule]
    if not type(module).__module__.startswith("torch."):
        chain = chain_of(module)
        if chain is not None:
            return _merged([layer for part in chain for layer in _layers(part)])
    return [VmapLayer(module)]


def _merged(layers: list[Layer]) -> list[Layer]:
    """Merge every ReLU with the pooling after it."""
    merged: list[Layer] = []
    for layer in layers:
        before = merged[-1] if merged else None
        pair = None
        if isinstance(before, Parameterless) and isinstance(layer, Parameterless):
            pair = relu_pool(before.module, layer.module)
        merged[-1:] = [pair] if pair is not None else [*merged[-1:], layer]
    return merged


def _rule(module: nn.Module) -> Layer | None:
    """Return the batched rule of a module; None for a subclass, whose forward may differ, or for other parameters."""
    kind = type(module)
    if isinstance(module, nn.Linear) and kind is nn.Linear:
        bias = module.bias is not None
        shapes = {"weight": (module.out_features, module.in_features), "bias": (module.out_features,) if bias else None}
        return Linear(module.in_features, module.out_features, bias) if has_parameters(module, **shapes) else None
    if isinstance(module, nn.Conv2d) and kind is nn.Conv2d:
        return _convolution(module)
    if isinstance(module, nn.Embedding) and kind is nn.Embedding:
        plain = module.max_norm is None and not module.scale_grad_by_freq and not module.sparse
        plain = plain and has_parameters(module, weight=(module.num_embeddings, module.embedding_dim))
        return Embedding(module.num_embeddings, module.embedding_dim, module.padding_idx) if plain else None
    if isinstance(module, nn.LayerNorm | nn.GroupNorm) and kind in (nn.LayerNorm, nn.GroupNorm):
        shape = module.normalized_shape if isinstance(module, nn.LayerNorm) else (module.num_channels,)
        bias = module.bias is not None
        if not has_parameters(module, weight=tuple(shape), bias=tuple(shape) if bias else None):
            return None
        return Norm(module, module.weight.numel(), bias)
    if isinstance(module, LastState) and kind is LastState:
        return _lstm(module.lstm) if list(module._modules) == ["lstm"] and not module._parameters else None
    return None


def _lstm(lstm: nn.LSTM) -> Lstm | None:
    if type(lstm) is not nn.LSTM or lstm.bidirectional or lstm.dropout or lstm.proj_size or not lstm.batch_first:
        return None
    wide, shapes = 4 * lstm.hidden_size, dict[str, tuple[int, ...] | None]()
    for depth in range(lstm.num_layers):
        shapes[f"weight_ih_l{depth}"] = (wide, lstm.hidden_size if depth else lstm.input_size)
        shapes[f"weight_hh_l{depth}"] = (wide, lstm.hidden_size)
        for name in ("bias_ih", "bias_hh"):
            shapes[f"{name}_l{depth}"] = (wide,) if lstm.bias else None
    plain = has_parameters(lstm, **shapes)
    return Lstm(lstm.input_size, lstm.hidden_size, lstm.num_layers, lstm.bias) if plain else None


def _convolution(module: nn.Conv2d) -> Convolution | None:
    if module.groups != 1 or module.dilation != (1, 1) or module.padding_mode != "zeros":
        return None
    high, wide = module.kernel_size
    if module.padding == "same":  # torch pads the odd one at the right and the bottom
        padding = ((wide - 1) // 2, wide // 2, (high - 1) // 2, high // 2)
    elif module.padding == "valid":
        padding = (0, 0, 0, 0)
    else:
        rows, columns = (int(side) for side in module.padding)
        padding = (columns, columns, rows, rows)
    stride = (module.stride[0], module.stride[1])
    bias = module.bias is not None
    shape = (module.out_channels, module.in_channels, high, wide)
    if not has_parameters(module, weight=shape, bias=(module.out_channels,) if bias else None):
        return None
    return Convolution(module.in_channels, module.out_channels, (high, wide), stride, padding, bias)
